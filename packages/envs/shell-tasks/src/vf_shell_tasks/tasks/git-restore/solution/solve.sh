#!/bin/bash
set -euo pipefail
cd /app
cd notes
git checkout -q HEAD~2 -- recipe.txt
git -c user.name=a -c user.email=a@example.org commit -qm 'Restore recipe'
