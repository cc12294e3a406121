"""Layers go one way: a module imports what stands below it or beside it, never above; no two import each other.

The layers are a contract of import-linter in ``pyproject.toml``; ``lint-imports`` checks it.
"""

import pytest

from support.import_graph import CORE, SANDBOXES, TRAINER, cycle, imports


@pytest.mark.parametrize("package", [CORE, SANDBOXES, TRAINER], ids=lambda path: path.name)
def test_no_modules_import_each_other(package):
    graph = {module: targets for module, targets in imports(package).items() if module != package.name}
    assert cycle(graph) == []


def test_a_ring_would_be_found():
    """Negative control."""
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def test_the_root_module_imports_old_names_and_nothing_else_of_its_package():
    found = [t for t in imports(CORE)["verifiers"] if t.startswith("verifiers")]
    assert sorted(found) == ["verifiers.legacy.modules", "verifiers.legacy.moved"]
