from pathlib import Path

APP = Path("/app")

EXPECTED = [
    "0",
    "0 0",
    "2 2",
    "-n.txt",
    "a b.txt",
    "plain",
    "absent",
]

printed = (APP / "printed.txt").read_text().splitlines()
assert printed == EXPECTED, printed
