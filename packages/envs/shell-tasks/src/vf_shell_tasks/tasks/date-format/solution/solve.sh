#!/bin/bash
set -euo pipefail
cd /app
awk -F'\t' '{split($1, d, "."); rest = substr($0, length($1) + 1); printf "%04d-%02d-%02d%s\n", d[3], d[2], d[1], rest}' dates.txt | LC_ALL=C sort -s -k1,1 > sorted.txt
