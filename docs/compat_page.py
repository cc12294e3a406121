"""Generate ``docs/reference/compat.md`` from the tables of older spellings.

    python docs/compat_page.py            write the page
    python docs/compat_page.py --check    exit 1 when the page differs from the tables

The tables are ``PAGE`` of each package's module ``compat``: (title, table of older -> present), in
the order shown.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

PAGE = Path(__file__).parent / "reference" / "compat.md"
PACKAGES = ("verifiers", "verifiers_trainer")
INTRODUCTION = """\
# Older spellings

Code written for older versions runs as it is. The left column has the older spelling, the right one the present
spelling, which new code uses. Using an older spelling logs one debug line per process (logger `verifiers.compat`).
Using both spellings of one thing raises `ConfigError`.

This page is generated from the tables of `compat.py` by `python docs/compat_page.py`.
"""


def tables(packages: Sequence[str] = PACKAGES) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield (title, table) of every installed package."""
    for package in packages:
        try:
            module = importlib.import_module(f"{package}.compat")
        except ModuleNotFoundError as error:
            if error.name not in (package, f"{package}.compat"):
                raise
            continue
        yield from getattr(module, "PAGE", ())


def page(shown: Iterable[tuple[str, Mapping[str, str]]]) -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION]
    for title, table in shown:
        rows = [f"| {_code(old)} | {_meaning(new)} |" for old, new in table.items()]
        parts.append("\n".join([f"## {title}\n", "| older | now |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def _meaning(text: str) -> str:
    """Format names as code and leave sentences unchanged; ``module:name`` becomes a dotted path."""
    if not text:
        return "the names below"
    words = text.split()
    if re.fullmatch(r"\w+", text) or all(re.fullmatch(r"\w+([.:]\w+)+", word) for word in words):
        return ", ".join(_code(word.replace(":", ".")) for word in words)
    shown = text.replace("|", "\\|")
    return shown if "`" in shown else re.sub(r"\bvf\.\w+", r"`\g<0>`", shown)


def main(arguments: Sequence[str]) -> int:
    """Write or check the page. Return the exit code."""
    text = page(tables())
    if "--check" in arguments:
        is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        outcome = (
            "is up to date"
            if is_current
            else f"is not what the tables say; run python {Path(__file__).name}"
        )
        sys.stdout.write(f"{PAGE} {outcome}\n")
        return 0 if is_current else 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
