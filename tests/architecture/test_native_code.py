"""Native code imports what it uses by an import statement.

The list of exceptions shrinks: an entry that is no longer needed fails until it is taken out.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.import_graph import AGENTS, CORE, INTEGRATIONS, SANDBOXES, TRAINER
from support.sources import nodes_in, nodes_of

LOADERS = {"import_module", "load"}
"""Functions of ``importlib`` and ``compat`` that take names of modules, or tables of them."""

NAMED_BY_DATA = {
    "verifiers/__init__.py": 4,  # names that are imported on first use
    "verifiers/cli/install/__init__.py": 1,
    "verifiers/clients/__init__.py": 1,
    "verifiers/environments/__init__.py": 1,
    "verifiers/environments/integrations/__init__.py": 1,
    "verifiers/environments/integrations/extras.py": 1,  # the package of an extra
    "verifiers/environments/registry.py": 1,  # the environment that the user names
    "verifiers/rubrics/__init__.py": 1,
    "verifiers/rubrics/math_verification.py": 2,  # the engine that is installed
    "verifiers/runs/notebook.py": 1,  # an extra
    "verifiers/runtime/importing.py": 1,  # what another process sent
    "verifiers/sandbox/choice.py": 1,  # the backend that was chosen
    "verifiers/sandbox/guest/zygote.py": 1,
    "verifiers/testing/__init__.py": 1,
    "verifiers_agents/tasksets/bridge.py": 1,  # the library of another Python
    "verifiers_trainer/__init__.py": 1,
    "verifiers_trainer/algorithm/registry.py": 1,  # the user's objective
    "verifiers_trainer/engines/__init__.py": 1,
    "verifiers_trainer/engines/embedded/__init__.py": 1,
    "verifiers_integrations/peers.py": 1,  # the peer that is installed
    "verifiers_integrations/tinker/__init__.py": 1,
    "verifiers_trainer/pipeline/curriculum.py": 1,  # the user's curriculum
    "verifiers_trainer/policy/__init__.py": 1,
}
"""File -> calls whose module is known only while it runs, or on first use of a lazy name."""
OFFENDERS: dict[str, int] = {}
"""File -> calls that hide which module of the project is meant. None may be added."""


def product_files() -> list[Path]:
    packages = (CORE, AGENTS, INTEGRATIONS, SANDBOXES, TRAINER)
    return [
        path
        for package in packages
        for path in package.rglob("*.py")
        if "templates" not in path.parts
    ]


def native_files() -> list[Path]:
    """The product without its older forms."""
    return [
        path
        for path in product_files()
        if "legacy" not in (*path.parts, path.stem) and path != CORE / "compat.py"
    ]


def name_of(path: Path) -> str:
    return path.as_posix().rpartition("/src/")[2]


def imports_by_string(nodes: Sequence[ast.AST]) -> list[int]:
    """Lines that call one of ``LOADERS``, as ``importlib.…``, as ``compat.…`` or by an imported
    name."""
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in ("importlib", "verifiers.compat")
        for alias in node.names
        if alias.name in LOADERS
    }
    lines = []
    for node in nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="importlib" | "compat"), attr=attribute)
            ):
                lines += [node.lineno] * (attribute in LOADERS)
            case ast.Call(func=ast.Name(id=name)) if name in imported or name == "__import__":
                lines.append(node.lineno)
    return lines


def test_native_code_imports_nothing_by_string():
    counts = {name_of(path): len(imports_by_string(nodes_of(path))) for path in native_files()}
    allowed = NAMED_BY_DATA | OFFENDERS
    wrong = [
        f"{name} has {counts.get(name, 0)} imports by string, and {allowed.get(name, 0)} in the list"
        f" of {Path(__file__).name}: write an import statement, or lower the number"
        for name in counts.keys() | allowed
        if counts.get(name, 0) != allowed.get(name, 0)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        (
            "import importlib\ndef call():\n    return"
            " importlib.import_module('verifiers.legacy.scoring')"
        ),
        "from importlib import import_module as load_it\nload_it('verifiers.runs')",
        "from verifiers import compat\ncompat.load('verifiers.legacy.scoring:score_fields')",
        "from verifiers.compat import load\nload('verifiers.legacy.scoring:score_fields')",
        "__import__('verifiers.legacy')",
    ],
)
def test_an_import_by_string_would_be_found(source):
    """Negative control."""
    assert len(imports_by_string(nodes_in(source))) == 1


def test_a_method_of_the_same_name_is_no_import():
    nodes = nodes_in("import json\njson.load(open('f'))\nsource.local.load()")
    assert imports_by_string(nodes) == []
