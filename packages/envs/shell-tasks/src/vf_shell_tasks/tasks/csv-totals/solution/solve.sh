#!/bin/bash
set -euo pipefail
cd /app
python3 - <<'END'
import csv
totals = {}
with open("sales.csv", newline="") as file:
    for row in csv.DictReader(file):
        totals[row["region"]] = totals.get(row["region"], 0) + int(row["amount"])
with open("totals.csv", "w", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["region", "total"])
    writer.writerows(sorted(totals.items(), key=lambda item: -item[1]))
END
