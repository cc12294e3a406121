#!/bin/bash
set -euo pipefail
cd /app
cd shop
git merge -q prices || true
printf 'apple 3\nbread 5\ncheese 9\nhoney 7\n' > list.txt
git add list.txt
git -c user.name=a -c user.email=a@example.org commit -qm 'Merge prices'
