"""Layers go one way: a module imports what stands below it or beside it, never above; no two import each other.

Only imports that run at import time count. What a facade imports inside a function (``Environment.evaluate`` imports
``generate``) is how a lower layer offers a higher one under its name.
"""

import pytest

from support.import_graph import CORE, TRAINER, cycle, imports

LAYERS = [
    "types errors",
    "dual encoding redaction statistics suggest compat older_modules decorators failpoints garbage deadlines logs text "
    "durable run_identity",
    "messages parsers dataset dataset_arrow dataset_sources example_datasets steps state trajectories hooks "
    "tool_examples context_check",
    "tools rubrics clients sandbox journal rows run_directory results registry",
    "environments testing",
    "rollout",
    "runner two_stages plan options run_client run_description run_results workers single generate",
    "checks cli view tui historical integrations",
]
"""Names below ``verifiers``, lowest first; a package stands for all of its modules."""
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names.split()}

PURE = "advantages aggregation anchors losses logprobs objective packing samples rules config registry".split()
"""Modules of the trainer that are maths and settings; they know no engine, no loop and no command."""
MACHINERY = "engines orchestrator trainer loop cli sinks loggers checkpoint".split()


def top(module, package):
    return module.removeprefix(f"{package}.").split(".")[0]


def test_every_module_of_core_has_its_layer():
    unknown = {top(module, "verifiers") for module in imports(CORE)} - {"verifiers"} - HEIGHT.keys()
    assert not unknown, f"say in LAYERS of tests/architecture/test_layers.py where {sorted(unknown)} stand"


def test_core_imports_downwards_only():
    wrong = [
        f"{module} -> {target}"
        for module, targets in imports(CORE).items()
        for target in targets
        if target.startswith("verifiers.")
        and module != "verifiers"
        and HEIGHT.get(top(target, "verifiers"), 0) > HEIGHT.get(top(module, "verifiers"), 99)
    ]
    assert not wrong, f"these imports go up a layer: {wrong}"


@pytest.mark.parametrize("package", [CORE, TRAINER], ids=lambda path: path.name)
def test_no_modules_import_each_other(package):
    graph = {module: targets for module, targets in imports(package).items() if module != package.name}
    assert cycle(graph) == []


def test_a_ring_would_be_found():
    """The twin."""
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def test_core_knows_nothing_of_the_trainer():
    leaning = [
        m for m, targets in imports(CORE).items() if any(t.split(".")[0] == "verifiers_trainer" for t in targets)
    ]
    assert leaning == []


def test_the_trainers_maths_knows_no_machinery():
    wrong = [
        f"{module} -> {target}"
        for module, targets in imports(TRAINER).items()
        for target in targets
        if top(module, "verifiers_trainer") in PURE and top(target, "verifiers_trainer") in MACHINERY
    ]
    assert not wrong


def test_the_root_module_imports_the_names_of_older_modules_and_nothing_else_of_its_package():
    assert [t for t in imports(CORE)["verifiers"] if t.startswith("verifiers")] == ["verifiers.older_modules"]
