"""How much the product says: statements per layer, beside the last release.

``python3 run.py check`` prints it; ``python tests/statements.py COMMIT`` compares with another
commit. It is a report: nothing fails by it. A statement is a node of Python's syntax tree, so the
width of lines and comments change nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def last_release() -> str:
    """The last tag; before the first, what is published: ``origin``'s branch."""
    tags = git("tag", "--merged", "HEAD", "--sort=-creatordate").split()
    return tags[0] if tags else git("rev-parse", "--short", "origin/HEAD").strip()


def layer_of(path: str) -> str:
    """``packages/core/src/verifiers/runs/run.py`` -> ``core/runs``; environments count together."""
    distribution, *folders = [part for part in path.split("/")[1:-1] if part != "src"]
    if distribution == "envs":
        return "envs"
    return "/".join([distribution, *folders[1:2]])


def is_product(path: str) -> bool:
    parts = path.split("/")
    return path.endswith(".py") and "src" in parts and "templates" not in parts


def num_statements(source: str) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source)))


def num_any(source: str) -> int:
    """How often a module says ``Any``, which tells a reader nothing."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(source))
    )


def statements_now() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in ROOT.glob("packages/**/src/**/*.py"):
        name = path.relative_to(ROOT).as_posix()
        if is_product(name):
            counts[layer_of(name)] += num_statements(path.read_text(encoding="utf-8"))
    return counts


def statements_at(commit: str) -> Counter[str]:
    names = [
        name
        for name in git("ls-tree", "-r", "--name-only", commit, "packages").splitlines()
        if is_product(name)
    ]
    ran = subprocess.run(
        ["git", "cat-file", "--batch"],
        cwd=ROOT,
        input="".join(f"{commit}:{name}\n" for name in names).encode(),
        capture_output=True,
        check=True,
    )
    counts: Counter[str] = Counter()
    output = ran.stdout
    for name in names:
        head, _, output = output.partition(b"\n")
        size = int(head.split()[-1])
        counts[layer_of(name)] += num_statements(output[:size].decode())
        output = output[size + 1 :]
    return counts


def report(now: Counter[str], before: Counter[str], commit: str) -> str:
    """A line per layer, biggest growth first, and the sums."""
    layers = sorted(now | before, key=lambda layer: (before[layer] - now[layer], layer))
    width = max(map(len, layers), default=0)
    rows = [f"{layer:{width}} {now[layer]:7,} {now[layer] - before[layer]:+7,}" for layer in layers]
    rows.append(f"{'sum':{width}} {now.total():7,} {now.total() - before.total():+7,}")
    return "\n".join([f"statements per layer, and the change since {commit}", *rows])


def main() -> int:
    commit = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        commit = commit or last_release()
        before = statements_at(commit)
    except (OSError, subprocess.CalledProcessError, ValueError):
        now = statements_now()
        print(f"{now.total():,} statements; no {commit or 'release'} is here to compare with")
        return 0
    now = statements_now()
    print(report(now, before, commit))
    sources = (path for path in ROOT.glob("packages/**/src/**/*.py") if is_product(str(path)))
    count = sum(num_any(path.read_text(encoding="utf-8")) for path in sources)
    print(f"Any: {1000 * count / now.total():.1f} per 1,000 statements")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
