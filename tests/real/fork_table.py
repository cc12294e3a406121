"""Print how each installed agent program gives its history back, by case: ``python
tests/real/fork_table.py [NAME …]``.

A cell is "samples by our capture / samples by comparing histories word for word", of the main
conversation.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.real_agents import CASES, SHELLS, play

if __name__ == "__main__":
    print("| agent |", " | ".join(CASES), "|")
    print("|---|" + "---|" * len(CASES))
    for name in sys.argv[1:] or list(SHELLS):
        print(f"| `{name}` |", end="", flush=True)
        for case in CASES:
            measured = play(name, case)
            print(f" {1 + measured.rewrites} / {1 + measured.differ}", end=" |", flush=True)
            if measured.error:
                print(
                    f"{name}, {case}, {measured.turns} turns: {measured.error[:300]}",
                    file=sys.stderr,
                )
        print(flush=True)
