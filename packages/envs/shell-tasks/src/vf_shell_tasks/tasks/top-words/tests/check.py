from pathlib import Path

APP = Path("/app")

EXPECTED = ["17 river", "13 stone", "11 moss"]

lines = (APP / "top.txt").read_text().splitlines()
assert lines == EXPECTED, lines
