"""Whether the suite notices a fault: ``python3 run.py mutate [NUMBER] [--seed N] [--only WORD]``.

Flips a condition, a comparison, an operator or a constant of the kernel, one at a time, and runs the
tests that ``run.py test --changed`` chooses for its module, those that mirror it first, until one
fails. A mutant that all of them pass is printed as SURVIVED: either it means the same, or a test is
missing. The file is restored after each; do not edit meanwhile. Minutes per mutant, so no part of
CI.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import changed

ROOT = Path(__file__).resolve().parents[1]
CORE, TRAINER = (
    ROOT / "packages/core/src/verifiers",
    ROOT / "packages/trainer/src/verifiers_trainer",
)
KERNEL = (
    *(CORE / name for name in ("rollouts", "rubrics", "storage")),
    *(CORE / "clients" / name for name in ("retry.py", "failures.py", "http.py", "limiter.py")),
    *(TRAINER / name for name in ("algorithm", "pipeline")),
)
HANGS_END = ("-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true")
"""A test that hangs has noticed the fault; a wait for the machine has not."""
OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One expression of a file and what it becomes."""

    path: Path
    line: int
    start: int
    """Offset in the file's bytes, as ``end``."""
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT)
        return f"{path}:{self.line}: {' '.join(self.before.split())}  ->  {self.after}"

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The file with the fault, restored afterwards."""
        source = self.path.read_bytes()
        mutated = source[: self.start] + f"({self.after})".encode() + source[self.end :]
        compile(mutated, self.path, "exec")
        self.path.write_bytes(mutated)
        try:
            yield
        finally:
            self.path.write_bytes(source)


def flipped(node: ast.AST) -> ast.AST | None:
    """The expression with one thing the other way round, or None where there is nothing to flip."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator, *_]) if type(operator) in OPPOSITE:
            new.ops[0] = OPPOSITE[type(operator)]()  # type: ignore[call-overload]
        case ast.BoolOp() | ast.BinOp() if type(new.op) in OPPOSITE:
            new.op = OPPOSITE[type(new.op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1  # type: ignore[operator]
        case _:
            return None
    return new


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """All of them that run: no annotation, no branch for type checkers."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from expressions(child)


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file, in its order."""
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found = []
    for node in expressions(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AnnAssign) or (new := flipped(node)) is None:
            continue
        assert isinstance(node, ast.expr)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        found.append(Mutant(path, node.lineno, start, end, before, ast.unparse(new)))
    return found


class Tests:
    """Which tests a module has, and whether they pass."""

    def __init__(self) -> None:
        self._files = changed.files_by_module()
        self._importers = changed.importers_of(self._files)

    def stages(self, path: Path) -> list[list[str]]:
        """The tests that name the module or stand in the mirrored folder, then all that a change of
        it touches."""
        chosen = changed.tests_of([path], self._files, self._importers)
        chosen = {test for test in chosen if test.parent.name != "architecture"}
        near = {
            test
            for test in chosen
            if path.parent.name in test.parent.parts or path.stem in test.stem
        }
        words = [
            sorted(str(test.relative_to(ROOT)) for test in tests) for tests in (near, chosen - near)
        ]
        return [stage for stage in words if stage]

    @staticmethod
    def noticed_by(stage: list[str]) -> str | None:
        """The test that fails first, or None."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--no-header"]
        command += ["-m", "not slow and not gpu", *HANGS_END, *stage]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode in (0, 5):  # 5: all of them are skipped on this machine
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (.*)", out, re.MULTILINE)
        return failed[1] if failed else f"exit code {process.returncode}"


def main() -> int:
    """Make the mutants that are asked for, and say which survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("number", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the paths of the modules")
    options = parser.parse_args()
    files = [path for base in KERNEL for path in ([base] if base.is_file() else base.rglob("*.py"))]
    mutants = [
        mutant for path in sorted(files) if options.only in str(path) for mutant in mutants_of(path)
    ]
    chosen = random.Random(options.seed).sample(mutants, min(options.number, len(mutants)))
    touched = [str(path.relative_to(ROOT)) for path in {mutant.path for mutant in chosen}]
    if touched and subprocess.run(["git", "diff", "--quiet", "--", *touched], cwd=ROOT).returncode:
        print("commit your changes of these modules first: they are mutated in place")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which restores the file
    tests = Tests()
    survived = 0
    for number, mutant in enumerate(chosen, 1):
        started = time.monotonic()
        with mutant.applied():
            by = next(filter(None, map(tests.noticed_by, tests.stages(mutant.path))), None)
        survived += by is None
        verdict = "SURVIVED" if by is None else f"noticed by {by}"
        print(f"{number}. {mutant}\n   {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} of {len(mutants)} mutants noticed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
