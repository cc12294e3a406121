#!/bin/bash
set -euo pipefail
cd /app
awk '$2 == "ERROR" {n[$3]++} END {for (s in n) print s, n[s]}' server-log.txt | sort > errors.txt
