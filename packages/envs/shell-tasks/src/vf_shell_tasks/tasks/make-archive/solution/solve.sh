#!/bin/bash
set -euo pipefail
cd /app
cd docs && find . -name '*.md' -type f -printf '%P\0' | tar --null -czf ../docs.tar.gz -T -
