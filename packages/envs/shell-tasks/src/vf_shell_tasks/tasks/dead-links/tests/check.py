from pathlib import Path

APP = Path("/app")

EXPECTED = ["guide/deep/a.md: ../index.md", "guide/deep/b.md: a%20b.md", "guide/start.md: next.md", "index.md: old.md"]

lines = (APP / "dead.txt").read_text().splitlines()
assert lines == EXPECTED, lines
