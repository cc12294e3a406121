#!/bin/bash
set -euo pipefail
cd /app
sed -i 's/middle + 1/middle - 1/; s/median(sys.argv\[1:\])/median([int(word) for word in sys.argv[1:]])/' stats.py
