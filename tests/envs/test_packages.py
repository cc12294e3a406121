"""Every environment package below packages/envs keeps to the common shape: metadata, entry point,
README, defaults.

And to the common promise: it plays offline, an oracle reaches the maximum, ``vf.check_environment``
is clean.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import verifiers as vf
from support.isolated import needs_sandbox
from support.oracles import MAXIMUM, oracle
from verifiers.testing import run_rollout_sync

ENVS = Path(__file__).resolve().parents[2] / "packages" / "envs"
IDS = sorted(folder.name for folder in ENVS.iterdir() if (folder / "pyproject.toml").is_file())
EVAL_KEYS = {"num_examples", "rollouts_per_example", "max_tokens", "temperature", "env_args"}
README_SECTIONS = ["Task", "Dataset", "Rewards and metrics", "Arguments", "Try it", "Baseline"]

OPTIONAL = {"reasoning-gym": "reasoning_gym", "textarena": "textarena"}
"""Packages that the workspace's default set leaves out, and the library that each stands on."""

EVALUATION_ONLY = {"shell-tasks"}
"""Packages without training rows."""

EXPECTED_WARNINGS = {
    "kuhn-poker": {
        "reward-outside-range",
        "constant-reward",
    },  # chips; no script of the check writes a move
    "wordle": {"reward-outside-range"},  # the game's customary weights add up to 2.2
    "shell-tasks": {"constant-reward"},  # no script of the check solves a task
}

pytestmark = pytest.mark.parametrize("env_id", IDS)


def module_of(env_id):
    return "vf_" + env_id.replace("-", "_")


def pyproject_of(env_id):
    return tomllib.loads((ENVS / env_id / "pyproject.toml").read_text(encoding="utf-8"))


def needs_installed(env_id):
    """Skip a test of an optional package, or of its library, where it is not installed."""
    if env_id not in OPTIONAL:
        return
    if importlib.util.find_spec(module_of(env_id)) is None:
        pytest.skip(f"vf-{env_id} is not installed; the workspace's default set leaves it out")


def needs_library(env_id):
    needs_installed(env_id)
    if env_id in OPTIONAL and importlib.util.find_spec(OPTIONAL[env_id]) is None:
        pytest.skip(f"{OPTIONAL[env_id]}, on which vf-{env_id} stands, is not installed")


def skip_without_sandbox(env_id):
    if env_id == "shell-tasks":
        needs_sandbox()


def load_function(env_id):
    needs_installed(env_id)
    (entry_point,) = importlib.metadata.entry_points(group="verifiers.environments", name=env_id)
    return entry_point.load()


def test_metadata_names_the_package_after_its_folder(env_id):
    project = pyproject_of(env_id)["project"]
    assert project["name"] == f"vf-{env_id}"
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert project["description"]
    assert any(
        re.match(r"verifiers\b(?!-)", requirement) for requirement in project["dependencies"]
    )
    assert project["entry-points"] == {
        "verifiers.environments": {env_id: f"{module_of(env_id)}:load_environment"}
    }
    assert pyproject_of(env_id)["tool"]["uv"]["sources"]["verifiers"] == {"workspace": True}


def test_the_installed_distribution_offers_its_id(env_id):
    needs_installed(env_id)
    distribution = importlib.metadata.distribution(f"vf-{env_id}")
    assert distribution.version == pyproject_of(env_id)["project"]["version"]
    offered = [
        point for point in distribution.entry_points if point.group == "verifiers.environments"
    ]
    assert [(point.name, point.value) for point in offered] == [
        (env_id, f"{module_of(env_id)}:load_environment")
    ]


def test_the_wheel_takes_along_types_data_and_eval_defaults(env_id):
    setuptools = pyproject_of(env_id)["tool"]["setuptools"]
    source = ENVS / env_id / "src" / module_of(env_id)
    assert (source / "py.typed").is_file()
    packed = {
        path
        for pattern in setuptools["package-data"][module_of(env_id)]
        for path in source.glob(pattern)
    }
    missing = {
        path for path in source.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    } - packed
    assert not missing
    assert setuptools["data-files"] == {f"share/verifiers/{env_id}": ["pyproject.toml"]}


def test_eval_defaults_are_known_keys(env_id):
    defaults = pyproject_of(env_id)["tool"]["verifiers"]["eval"]
    assert {"num_examples", "rollouts_per_example"} <= defaults.keys() <= EVAL_KEYS


def test_shipped_data_comes_with_source_and_licence(env_id):
    folder = ENVS / env_id
    shipped = [
        p
        for p in (folder / "src").rglob("*")
        if p.suffix in (".txt", ".json", ".jsonl", ".csv", ".parquet")
    ]
    shipped = [
        path for path in shipped if not any(part.endswith(".egg-info") for part in path.parts)
    ]
    # a report of vf-audit, no data
    shipped = [path for path in shipped if path.name != "audit.json"]
    if shipped:
        about = (folder / "DATA.md").read_text(encoding="utf-8")
        assert not [path.name for path in shipped if path.name not in about]
        assert "Licence" in about
        assert list((folder / "scripts").glob("*.py")) or "written for this package" in about
        assert pyproject_of(env_id)["project"]["license-files"] == ["DATA.md"]


def test_the_readme_has_every_section_and_every_argument(env_id):
    readme = (ENVS / env_id / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", readme, re.MULTILINE) == README_SECTIONS
    arguments = readme[readme.index("## Arguments") : readme.index("## Try it")]
    assert not [
        name
        for name in inspect.signature(load_function(env_id)).parameters
        if f"`{name}`" not in arguments
    ]
    tried = readme[readme.index("## Try it") : readme.index("## Baseline")]
    assert len(re.findall(r"^vf-\S+ ", tried, re.MULTILINE)) == 3


def test_load_environment_has_typed_documented_keywords_with_defaults(env_id):
    function = load_function(env_id)
    documented = re.findall(r"^ +(\w+): ", inspect.getdoc(function) or "", re.MULTILINE)
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.default is not inspect.Parameter.empty, parameter.name
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name
        assert parameter.name in documented


def test_the_package_has_tests_of_its_own(env_id):
    assert list((ENVS / env_id / "tests").glob("test_*.py"))


def test_the_readme_names_every_reward_and_metric_and_the_baselines(env_id):
    needs_library(env_id)
    readme = (ENVS / env_id / "README.md").read_text(encoding="utf-8")
    rewards = readme[readme.index("## Rewards and metrics") : readme.index("## Arguments")]
    with vf.load_environment(env_id) as env:
        assert not [
            name for name in env.rubric.get_reward_func_names() if f"`{name}`" not in rewards
        ]
    baseline = readme[readme.index("## Baseline") :]
    assert "script" in baseline
    assert "SmolLM2-135M-Instruct" in baseline
    assert not re.findall(r"\| [A-Z]{3,}[A-Z ]* \|", readme)  # a number that was never filled in


def test_an_oracle_reaches_the_maximum(env_id):
    needs_library(env_id)
    skip_without_sandbox(env_id)
    with vf.load_environment(env_id) as env:
        for example in [env.eval_table[i] for i in range(3)]:
            state = run_rollout_sync(env, oracle(env_id, env, example), example.row)
            assert state["error"] is None
            assert state["reward"] == pytest.approx(MAXIMUM.get(env_id, 1.0)), state["completion"]


def test_train_and_eval_rows_differ_and_are_the_same_when_loaded_again(env_id):
    needs_library(env_id)
    with vf.load_environment(env_id) as env, vf.load_environment(env_id) as again:
        train, held_out = (
            {example.hash for example in table or ()} for table in (env.train_table, env.eval_table)
        )
        assert bool(train) is (env_id not in EVALUATION_ONLY)
        assert held_out
        assert not train & held_out
        assert train == {example.hash for example in again.train_table or ()}
        assert held_out == {example.hash for example in again.eval_table}


def test_the_check_of_environments_is_clean(env_id):
    needs_library(env_id)
    if env_id == "self-judge":
        pytest.skip("its check needs a model that can judge: see its own tests")
    skip_without_sandbox(env_id)
    report = vf.check_environment(env_id, n=1)
    assert report.ok, report
    assert {warning.code for warning in report.warnings} <= EXPECTED_WARNINGS.get(env_id, set()), (
        report
    )
