#!/usr/bin/env python3
# Copyright (c) 2021 Old Name
# Copyright (c) 2021 Old Name
