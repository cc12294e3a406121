#!/bin/bash
set -euo pipefail
cd /app
find src -name '*.py' | while read -r file; do
  line=1
  head -n 1 "$file" | grep -q '^#!' && line=2
  sed -i "${line}s/^\(# Copyright (c) [0-9]* \)Old Name\$/\1New Name/" "$file"
done
