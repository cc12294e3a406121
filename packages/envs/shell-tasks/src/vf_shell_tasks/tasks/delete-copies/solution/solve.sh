#!/bin/bash
set -euo pipefail
cd /app
cd pool
find . -type f -size +0 -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | awk 'seen[$1]++' | cut -c67- | LC_ALL=C sort > ../deleted.txt
while IFS= read -r file; do rm -- "$file"; done < ../deleted.txt
