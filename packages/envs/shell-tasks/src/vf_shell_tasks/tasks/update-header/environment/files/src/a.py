# Copyright (c) 2019 Old Name
AUTHOR = 'Old Name'
