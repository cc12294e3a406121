from pathlib import Path

APP = Path("/app")

EXPECTED = ['EMPTY=now set', 'NAME="two words"', "PORT=9090", "TOKEN=a#b", "URL=http://localhost/?a=1&b=2", "ZONE=eu=west"]

lines = (APP / "merged.env").read_text().splitlines()
assert lines == EXPECTED, lines
