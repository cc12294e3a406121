#!/bin/bash
set -euo pipefail
cd /app
cd wiki
find . -name '*.md' -printf '%P\n' | while read -r file; do
  grep -oP '\]\(\K[^)]*' "$file" | grep -vE '^https?://' | sed 's/#.*//' | grep . | while read -r path; do
    [ -e "$(dirname "$file")/$path" ] || echo "$file: $path"
  done || true
done | LC_ALL=C sort -u > ../dead.txt
