#!/bin/bash
# 1 when every check holds, else 0. No file of the work folder is executed here.
cd /
python3 -I /tests/check.py && reward=1 || reward=0
echo "$reward" > /logs/verifier/reward.txt
