print(1)
# Copyright (c) 2019 Old Name
