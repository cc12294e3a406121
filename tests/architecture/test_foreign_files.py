"""Files that others may have made are read by ``runtime.bounded``, which refuses pipes and devices
and limits what it reads; models are loaded without code and pickles of their folder; and modules
that data name are imported where the user named them."""

import ast
from collections.abc import Callable

import pytest

from architecture.test_native_code import name_of, product_files
from support.sources import calls_in, calls_of, nodes_in

READERS = {
    "verifiers/runtime/decoding.py",
    # what runs in a sandbox, and has this package's files or /proc alone
    "verifiers/sandbox/host/mounts.py",
    "verifiers/sandbox/host/zygotes.py",
    "verifiers/sandbox/probe/__init__.py",
    "verifiers_agents/inside.py",
    # /proc, and files of this package
    "verifiers/cli/install/setup.py",
    "verifiers/cli/scaffold.py",
    "verifiers/runtime/distributions.py",
    "verifiers/rubrics/math_verification.py",
    "verifiers/view/app.py",
    "verifiers_agents/tasksets/process.py",
    # a file that the user names in code
    "verifiers/types/messages.py",
    "verifiers/testing/scripted.py",
}
"""Open files by themselves."""
IMPORTERS = {
    "verifiers/__init__.py",  # modules of this project
    "verifiers/compat.py",
    "verifiers/legacy/modules.py",
    "verifiers/legacy/moved.py",
    "verifiers/sandbox/choice.py",
    "verifiers/environments/integrations/extras.py",  # a package of an extra
    "verifiers/environments/registry.py",  # an environment that the user named
    "verifiers/rubrics/math_verification.py",  # an argument of the author
    "verifiers_trainer/algorithm/registry.py",  # a function of the settings of a training
    "verifiers_trainer/pipeline/curriculum.py",
}
"""Import a module by a name that is no literal of this project."""


def opens(call: ast.Call) -> bool:
    """Whether a file is opened for reading, or the text of one is decoded as TOML."""
    function = call.func
    if isinstance(function, ast.Name):
        is_descriptor = ast.unparse(call.args[0]).startswith("os.dup(") if call.args else False
        return function.id == "open" and not is_descriptor and _reads(call.args[1:2])
    if not isinstance(function, ast.Attribute):
        return False
    if ast.unparse(function) in ("tomllib.loads", "tomllib.load", "io.open"):
        return True
    if function.attr in ("read_text", "read_bytes"):
        # of the metadata of an installed package
        is_metadata = len(call.args) == 1 and isinstance(function.value, ast.Name)
        return not is_metadata
    return function.attr == "open" and bool(call.args) and _reads(call.args[:1], default=False)


def _reads(mode: list[ast.expr], default: bool = True) -> bool:
    if not mode:
        return default
    value = mode[0].value if isinstance(mode[0], ast.Constant) else None
    return isinstance(value, str) and value.startswith("r") and len(value) <= 3


def loads_a_model_with_its_code(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    if not function.startswith("Auto") or not function.endswith(".from_pretrained"):
        return False
    text = ast.unparse(call)
    return "trust_remote_code=False" not in text and "SAFE" not in text


def imports_by_name(call: ast.Call) -> bool:
    if ast.unparse(call.func) not in ("importlib.import_module", "import_module", "__import__"):
        return False
    return isinstance(call.args[0], ast.Name | ast.Attribute)


def unpickles(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads", "yaml.load")


PICKLES = {
    # between processes of one run
    "verifiers/runs/workers/channels.py",
    "verifiers/runs/workers/messages.py",
    "verifiers/runs/workers/packing.py",
    "verifiers/runs/workers/ray.py",
    "verifiers/runtime/process_main.py",
    "verifiers/testing/server.py",
}
RULES: dict[str, tuple[Callable[[ast.Call], bool], set[str], str, tuple[str, ...]]] = {
    "files": (
        opens,
        READERS,
        "read it with verifiers.runtime.bounded or verifiers.runtime.decoding",
        ('open(p, "rb")', "open(p)", 'p.open("rb")', "(a / b).read_text()", "tomllib.loads(t)"),
    ),
    "models": (
        loads_a_model_with_its_code,
        set(),
        "pass trust_remote_code=False, and use_safetensors=True for weights",
        ("AutoTokenizer.from_pretrained(name)", "AutoModelForCausalLM.from_pretrained(name, **k)"),
    ),
    "imports": (
        imports_by_name,
        IMPORTERS,
        "import what the user names, not what data name",
        ("importlib.import_module(name)", "import_module(run.module)"),
    ),
    "pickles": (
        unpickles,
        PICKLES,
        "write JSON or safetensors",
        ("torch.load(p)", "pickle.loads(b)"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_other_file_does_it(rule):
    breaks, allowed, way_out, _ = RULES[rule]
    broken: dict[str, list[str]] = {}
    for path in product_files():
        name = name_of(path)
        if "envs" in path.parts or "guest" in path.parts or name in allowed:
            continue
        if readers_found := [ast.unparse(c) for c in calls_of(path) if breaks(c)]:
            broken[name] = readers_found
    assert broken == {}, way_out


@pytest.mark.parametrize("rule", RULES)
def test_every_exception_is_used(rule):
    breaks, allowed, _, _ = RULES[rule]
    files = {name_of(path): path for path in product_files()}
    unused = {n for n in allowed if n not in files or not any(map(breaks, calls_of(files[n])))}
    assert unused == set()


@pytest.mark.parametrize("rule", RULES)
def test_negative_control_it_is_found(rule):
    breaks, _, _, examples = RULES[rule]
    for example in examples:
        assert breaks(calls_in(nodes_in(example))[0]), example
