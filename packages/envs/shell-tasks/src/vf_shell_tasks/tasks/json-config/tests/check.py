import json
from pathlib import Path

APP = Path("/app")

EXPECTED = {
    "name": "gate",
    "server": {"port": 8443, "host": "::1"},
    "features": ["login", "export", "audit"],
    "limits": [{"path": "/a", "rate": 1.5}, {"path": "/debug", "rate": 2}],
    "note": "debug: off",
}

read = json.loads((APP / "config.json").read_text())
assert json.dumps(read, sort_keys=True) == json.dumps(EXPECTED, sort_keys=True), read
