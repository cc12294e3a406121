"""What the modules of a package import when they are imported: read from their sources, nothing is
executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = REPOSITORY / "packages/core/src/verifiers"
AGENTS = REPOSITORY / "packages/agents/src/verifiers_agents"
INTEGRATIONS = REPOSITORY / "packages/integrations/src/verifiers_integrations"
TRAINER = REPOSITORY / "packages/trainer/src/verifiers_trainer"
SANDBOXES = REPOSITORY / "packages/sandboxes/src/verifiers_sandboxes"


def modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module of a package."""
    paths = {}
    for path in sorted(package.rglob("*.py")):
        if "templates" in path.parts:
            continue
        parts = path.relative_to(package.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(package: Path) -> dict[str, set[str]]:
    """Module -> what it imports at module level; ``from package import module`` counts as that
    module.

    Imports inside functions and under ``TYPE_CHECKING`` are left out: they do not run when the
    module is imported.
    """
    paths = modules(package)
    return {
        name: {
            target
            for target in _targets(ast.parse(path.read_text(encoding="utf-8")).body, paths)
            if target != name
        }
        for name, path in paths.items()
    }


def _targets(body: list[ast.stmt], paths: dict[str, Path]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in paths else node.module or ""
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _targets(node.orelse, paths)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _targets(getattr(node, part, []), paths)
            for handler in getattr(node, "handlers", []):
                yield from _targets(handler.body, paths)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring, the first found; empty when there is none."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack = [(start, iter(sorted(graph[start])))]
        while stack:
            name, targets = stack[-1]
            if len(path) < len(stack):
                path.append(name)
            target = next((t for t in targets if t in graph and t not in done), None)
            if target is None:
                done.add(name)
                stack.pop()
                path.pop()
            elif target in path:
                return [*path[path.index(target) :], target]
            else:
                stack.append((target, iter(sorted(graph[target]))))
    return []
