from pathlib import Path

APP = Path("/app")

EXPECTED = ["IV", "MCMXCIV", "III", "MMMCMXCIX", "DCCCXC", "?", "?", "?", "?", "XLIX", "XC", "CCCXXXIII"]

printed = (APP / "printed.txt").read_text().splitlines()
assert printed == EXPECTED, printed
