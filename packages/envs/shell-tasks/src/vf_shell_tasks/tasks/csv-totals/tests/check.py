import csv
from pathlib import Path

APP = Path("/app")

EXPECTED = [["north, upper", "688"], ["the \"old\" east", "637"], ["south", "332"]]

with open(APP / "totals.csv", newline="") as file:
    rows = list(csv.reader(file))
assert rows == [["region", "total"], *EXPECTED], rows
