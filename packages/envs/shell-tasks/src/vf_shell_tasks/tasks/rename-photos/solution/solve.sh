#!/bin/bash
set -euo pipefail
cd /app
find photos -type f \( -iname '*.jpg' -o -iname '*.jpeg' \) -print0 | while IFS= read -r -d '' file; do
  name=$(basename "$file" | tr 'A-Z ' 'a-z_')
  mv "$file" "$(dirname "$file")/${name%.*}.jpg"
done
