#!/bin/bash
set -euo pipefail
cd /app
grep -oE '[A-Za-z]+' poem.txt | tr A-Z a-z | sort | uniq -c | sort -k1,1nr -k2,2 | head -n 3 | awk '{print $1, $2}' > top.txt
