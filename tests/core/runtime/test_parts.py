"""Names that other distributions provide: found by entry points; one that is missing says what to
install."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import verifiers as vf
from support.partial_install import without
from verifiers.cli.evaluate.exporting import check_formats
from verifiers.runtime import distributions
from verifiers.runtime.distributions import PARTS, provided
from verifiers.runtime.install_lines import install_line
from verifiers.runtime.installed import part

NAMES = ("Agent", "AgentEnv", "HarborEnv", "TasksetEnv", "model_gateway")
READ = """
import sys
import verifiers as vf
try:
    print(getattr(vf, sys.argv[1]).__name__)
except AttributeError as error:
    print(error)
"""
IMPORT = """
import importlib, sys
try:
    print(importlib.import_module(sys.argv[1]).__name__)
except ModuleNotFoundError as error:
    print(error.name, error)
"""


def test_every_part_is_what_its_entry_point_names():
    points = {point.name: point for point in entry_points(group=PARTS)}
    assert {"install_agent", "EnvServer", "ZmqServer", "to_inspect"} <= set(points)
    for name, point in points.items():
        assert part(name) is point.load()
    assert {*NAMES} == set(provided(distributions.NAMES))
    assert [getattr(vf, name) for name in NAMES] == [
        part(name, group=distributions.NAMES) for name in NAMES
    ]


@pytest.fixture
def core_only(tmp_path):
    return without(tmp_path, "verifiers_agents", "verifiers_integrations")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_missing_package_says_what_to_install(name, core_only):
    expected = (
        f"vf.{name} is in verifiers-agents, which is not installed:"
        f" {install_line('verifiers-agents')}"
    )
    assert core_only(READ, name) == expected


def test_without_a_package_the_names_of_the_others_are_all_there(core_only):
    code = (
        "from verifiers import *\nimport verifiers as vf\nprint('AgentEnv' in vf.__all__,"
        " SingleTurnEnv.__name__)"
    )
    assert core_only(code) == "False SingleTurnEnv"
    assert "AgentEnv" in vf.__all__, "the control: with it, the names are there"


@pytest.mark.parametrize(
    ("path", "distribution"),
    [
        ("verifiers.environments.agents", "verifiers-agents"),
        ("verifiers.environments.harbor", "verifiers-agents"),
        ("verifiers.integrations", "verifiers-integrations"),
    ],
)
def test_an_older_path_of_a_missing_package_says_what_to_install(path, distribution, core_only):
    assert core_only(IMPORT, path).endswith(f"install with: {install_line(distribution)}")
    assert core_only(IMPORT, path).startswith(path)
    assert importlib.import_module(path).__name__.startswith(distribution.replace("-", "_"))


@pytest.mark.parametrize(
    ("call", "distribution"),
    [
        ("verifiers.cli.install.command vf-install --agent codex", "verifiers-agents"),
        ("verifiers.cli.serve_env vf-serve-env reverse-text", "verifiers-integrations"),
    ],
)
def test_a_command_of_a_missing_package_says_what_to_install(call, distribution, core_only):
    module, *words = call.split()
    code = (
        f"import sys\nfrom {module} import main\nsys.argv = {words!r}\nsys.stderr = sys.stdout\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    print(ended.code)\n    sys.exit(0)"
    )
    printed = core_only(code)
    assert f"is in {distribution}, which is not installed: {install_line(distribution)}" in printed
    assert printed.splitlines()[-1] == "2"


def test_a_format_of_a_missing_package_is_refused_before_the_run(core_only):
    code = (
        "from verifiers.cli.evaluate.exporting import check_formats\n"
        "try:\n    check_formats(['inspect'])\nexcept Exception as error:\n    print(error)"
    )
    assert core_only(code).startswith(
        "--export inspect is in verifiers-integrations, which is not installed: "
    )
    check_formats(["parquet"])


@pytest.mark.parametrize("name", ["prime_rl", "tinker", "verl"])
def test_an_older_path_runs_as_a_program(name):
    command = [sys.executable, "-m", f"verifiers_trainer.integrations.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().startswith("usage: python -m verifiers_")
