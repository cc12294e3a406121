"""Run every script for the installed release and write the values: ``python play.py FILE``."""

import importlib
import importlib.metadata
import json
import logging
import sys
import warnings
from pathlib import Path


def outcome(script):
    """What a script returned as plain JSON, or the name of the exception that it raised."""
    try:
        return json.loads(json.dumps(script()))
    except Exception as error:  # noqa: BLE001 - what a script raises is what it gives
        return {"raises": type(error).__name__}


def main(target: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent))
    scripts = importlib.import_module("scripts")
    release = importlib.metadata.version("verifiers")
    values = {
        name: outcome(row.script)
        for name, row in scripts.ROWS.items()
        if any(map(release.startswith, row.releases))
    }
    Path(target).write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
