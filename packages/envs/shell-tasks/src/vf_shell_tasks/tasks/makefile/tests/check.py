from pathlib import Path

APP = Path("/app")

EXPECTED = [
    "built: Report one two three",
    "same",
    "changed: Report one 2 three",
    "new: Report one 2 three four",
    "clean: Makefile part-1.txt part-2.txt part-3.txt part-4.txt title.txt",
]

printed = (APP / "made" / "printed.txt").read_text().splitlines()
assert printed == EXPECTED, printed
