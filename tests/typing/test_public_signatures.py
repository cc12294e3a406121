"""One source of truth for names and parameters: the stubs list what the packages import lazily, the
TypedDicts what the functions take, and ``help()`` and editors that ask ``inspect`` or ``dir`` see
all of it."""

import ast
import inspect
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import verifiers as vf
import verifiers_trainer
from verifiers.clients.protocol import ClientConfig, ClientOptions
from verifiers.environments.keywords import EnvironmentOptions
from verifiers.rubrics.rubric import RubricOptions
from verifiers.runs.keywords import EvaluateOptions, GenerateOptions
from verifiers.runs.options import COUNTS, RunOptions, SamplingOptions
from verifiers.runs.rollout import Progress
from verifiers.runtime.distributions import HEAVY_NAMES, NAMES, provided


def stub_of(package):
    """(module -> names imported from it, ``__all__``) of a package's stub."""
    tree = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported: dict[str, set[str]] = {}
    listed: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname in (None, alias.name) for alias in node.names)
            imported.setdefault(node.module, set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    return imported, listed


def test_the_stub_of_the_core_lists_what_it_imports_lazily():
    imported, listed = stub_of(vf)
    expected = {f"verifiers.{module}": set(names.split()) for module, names in vf._MODULES.items()}
    expected["verifiers"] = set(vf._SUBMODULES)
    expected["verifiers.environments.integrations"] = set(vf._INTEGRATIONS)
    expected["verifiers_trainer"] = set(provided(HEAVY_NAMES))
    expected["verifiers_agents"] = set(provided(NAMES)) - {"HarborEnv", "TasksetEnv"}
    expected["verifiers_agents.harbor.env"] = {"HarborEnv"}
    expected["verifiers_agents.tasksets.env"] = {"TasksetEnv"}
    assert imported == expected
    assert sorted(listed) == vf.__all__


def test_the_stub_of_the_trainer_lists_what_it_imports_lazily():
    imported, listed = stub_of(verifiers_trainer)
    expected: dict[str, set[str]] = {}
    for name, module in verifiers_trainer._HOME.items():
        expected.setdefault(f"verifiers_trainer.{module}", set()).add(name)
    assert imported == expected
    assert sorted(listed) == verifiers_trainer.__all__
    assert set(listed) == set(provided(HEAVY_NAMES))


def test_dir_lists_every_name():
    assert {*vf.__all__, *vf._names_of_others(), *vf._INTEGRATIONS} <= set(dir(vf))
    assert set(verifiers_trainer.__all__) <= set(dir(verifiers_trainer))


def keys(typed_dict):
    return list(typed_dict.__annotations__)


def test_the_keywords_of_evaluate_are_the_run_options_and_the_sampling_arguments():
    options = [field.name for field in fields(RunOptions)]
    assert keys(EvaluateOptions) == keys(SamplingOptions) + options
    assert (
        set(keys(GenerateOptions)) - set(keys(EvaluateOptions))
        == {"rollouts_per_example"}
        < set(COUNTS)
    )
    types, keywords = (
        typing.get_type_hints(
            kind, localns={"Progress": Progress, "GenerateOutputs": vf.GenerateOutputs}
        )
        for kind in (RunOptions, EvaluateOptions)
    )
    for name in options:
        assert keywords[name] in (types[name], types[name] | None), name


@pytest.mark.parametrize(
    "name", ["evaluate", "evaluate_sync", "a_evaluate", "generate", "generate_sync", "a_generate"]
)
def test_help_shows_every_option_of_a_run(name):
    parameters = inspect.signature(getattr(vf.Environment, name)).parameters
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    for field in fields(RunOptions):
        assert parameters[field.name].default == field.default
    assert parameters["temperature"].default is None


ENVIRONMENTS = [
    *("SingleTurnEnv", "MultiTurnEnv", "ToolEnv", "StatefulToolEnv", "SandboxEnv", "PythonEnv"),
    *("GymEnv", "TextArenaEnv", "MCPEnv"),
]
RUBRICS = ["RubricGroup", "JudgeRubric", "MathRubric", "ToolRubric"]


def named_parameters(cls):
    parameters = inspect.signature(cls).parameters
    assert all(p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()), cls
    return parameters


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_takes_every_parameter_of_its_base(name):
    cls = getattr(vf, name)
    parameters, inherited = named_parameters(cls), named_parameters(cls.__base__)
    assert inherited.keys() <= parameters.keys()
    assert named_parameters(vf.Environment).keys() <= parameters.keys()


def test_the_options_of_subclasses_are_the_parameters_of_the_base():
    assert set(keys(EnvironmentOptions)) == named_parameters(vf.Environment).keys() - {
        "timeout_seconds"
    }
    assert set(keys(RubricOptions)) == named_parameters(vf.Rubric).keys()
    assert keys(ClientOptions) == [field.name for field in fields(ClientConfig)]


@pytest.mark.parametrize("name", RUBRICS)
def test_a_rubric_takes_the_scoring_parameters_of_its_base(name):
    parameters = named_parameters(getattr(vf, name))
    for parameter in ("parallelize_scoring", "timeout_s"):
        assert parameters[parameter].default == named_parameters(vf.Rubric)[parameter].default


def test_other_constructors_show_their_parameters():
    assert {"base_url", "max_retries", "timeout"} <= named_parameters(
        vf.OpenAIChatCompletionsClient
    ).keys()
    assert {"batch_size", "learning_rate", "weight_decay"} <= inspect.signature(
        vf.RLConfig
    ).parameters.keys()
    assert {"envs", "env_names", "score_rollouts"} <= named_parameters(vf.EnvGroup).keys()
    assert list(inspect.signature(vf.load_environment).parameters) == ["env_id", "env_args"]
