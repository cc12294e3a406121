#!/bin/bash
set -euo pipefail
cd /app
mkdir /tmp/open && cd /tmp/open
tar -xzf /app/box.bin
tar -xzf a/inner.data
cat a/key.part1 c/key.part2 b/key.part3 > /app/key.txt
