# Copyright (c) 2024 Old Name
