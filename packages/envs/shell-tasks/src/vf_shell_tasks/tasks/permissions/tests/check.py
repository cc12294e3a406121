from pathlib import Path

APP = Path("/app")

EXPECTED = {
    ".": "755",
    "css": "755",
    "css/main.css": "644",
    "index.html": "644",
    "private": "700",
    "private/key.txt": "600",
    "private/old": "700",
    "private/old/key.txt": "600",
    "private/rotate.sh": "700",
    "run.sh": "750",
}

found = dict(line.split(" ", 1)[::-1] for line in (APP / "modes.txt").read_text().splitlines())
assert found == {("site/" + name).removesuffix("/."): mode for name, mode in EXPECTED.items()}, found
contents = (APP / "contents.txt").read_text().splitlines()
assert sorted(contents) == sorted(["<p>hi</p>", "p {}", "secret", "older", *["#!/bin/sh", "true"] * 2]), contents
