from pathlib import Path

APP = Path("/app")

EXPECTED = [
    "1999-09-09\tParty like 9.9.1999",
    "2025-11-12\tzeta",
    "2025-11-12\talpha",
    "2025-12-31\tlast\t1.1.1999",
    "2026-01-03\tnew plan",
    "2026-02-01\tbeta",
]

lines = (APP / "sorted.txt").read_text().splitlines()
assert lines == EXPECTED, lines
