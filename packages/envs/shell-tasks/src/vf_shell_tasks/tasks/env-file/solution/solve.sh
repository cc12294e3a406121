#!/bin/bash
set -euo pipefail
cd /app
cat base.env override.env | grep -v '^#' | grep . | awk '{i = index($0, "="); v[substr($0, 1, i - 1)] = $0} END {for (n in v) print v[n]}' | LC_ALL=C sort > merged.env
