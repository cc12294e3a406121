from pathlib import Path

APP = Path("/app")

EXPECTED = ["+49 301 448120", "+49 301 448121", "+33 142 680053", "+41 446 681800", "+44 207 946012"]

lines = (APP / "phones.txt").read_text().splitlines()
assert lines == EXPECTED, lines
