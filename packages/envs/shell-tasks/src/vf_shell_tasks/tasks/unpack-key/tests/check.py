from pathlib import Path

APP = Path("/app")

assert (APP / "key.txt").read_text().strip() == "silver-moon-harbour", (APP / "key.txt").read_text()
