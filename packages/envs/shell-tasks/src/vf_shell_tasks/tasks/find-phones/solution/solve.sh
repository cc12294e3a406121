#!/bin/bash
set -euo pipefail
cd /app
grep -oP '(?<!\d)\+\d{2} \d{3} \d{6}(?!\d)' letters.txt | awk '!seen[$0]++' > phones.txt
