from pathlib import Path

APP = Path("/app")

EXPECTED = ["2", "2.5", "10", "-3", "7.0", "100"]

printed = (APP / "printed.txt").read_text().splitlines()
assert printed == EXPECTED, printed
