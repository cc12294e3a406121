from pathlib import Path

APP = Path("/app")

EXPECTED = {"auth": 11, "cart": 11, "mail": 12, "search": 12}

lines = (APP / "errors.txt").read_text().splitlines()
assert lines == [f"{service} {count}" for service, count in EXPECTED.items()], lines
