"""``vf-train --schema``: valid by the standard, and of the same mind as the reader about every key
and many values."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from verifiers.cli.common.reader import Assignment
from verifiers_trainer.cli.schema import train_schema
from verifiers_trainer.cli.settings import fields_of_args, read_settings
from verifiers_trainer.cli.sources import read_toml
from verifiers_trainer.cli.train import train_command
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.fields import problem_of

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "packages/core/src/verifiers/templates/configs"
FILES = sorted(
    [
        *(ROOT / "configs/vf-train").glob("*.toml"),
        *(TEMPLATES / "vf-rl").glob("*.toml"),
        *(TEMPLATES / "lab").glob("*.toml"),
    ]
)
VALUES = (0, 1, -1, 7, 0.5, -0.5, 2.5, 10**13, True, "", "x", "auto", "no", [1], ["a"], {"a": 1})
SCHEMA = json.loads(train_schema())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def refusals(assignments):
    """What the reader, and the checks of single values, say of them; ``model`` and ``env.id`` may
    be in another file."""
    settings, problems = read_settings(assignments)
    values = settings.config.items() if settings.algorithm == "rl" else ()
    problems += [problem for name, value in values if (problem := problem_of(name, value))]
    elsewhere = (" is missing: write ", "saved_runs: there is no folder ")
    return [problem for problem in problems if not any(part in problem for part in elsewhere)]


def test_the_schema_is_one_of_the_standard():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.SchemaError):  # negative control
        jsonschema.Draft202012Validator.check_schema({"type": "number of things"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_shipped_file_is_valid(file):
    assert refusals(read_toml(str(file))) == []
    assert list(VALIDATOR.iter_errors(tomllib.loads(file.read_text()))) == []


@pytest.mark.parametrize("name", sorted({*fields_of_args().hints, *compat.RENAMED}))
def test_a_value_is_valid_where_the_reader_takes_it(name):
    args = SCHEMA["properties"]["trainer"]["properties"]["args"]["properties"]
    validator = VALIDATOR.evolve(schema=args[name])
    for value in VALUES:
        accepted = not refusals([Assignment(("trainer", "args", name), value, "x.toml:1")])
        assert validator.is_valid(value) == accepted, value


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("model = 'm'\n[env]\nid = 'e'\n[trainer.args]\nlr = 1e-4", True),
        ("max_steps = 3\n[sampling]\nmax_tokens = 9\n[[env]]\nid = 'e'", True),
        ("[[env]]\nid = 'a'\nweight = 2\n[[env]]\nid = 'b'", True),
        (
            "[inference.args]\ntensor_parallel_size = 2\n[eval]\nsteps = 5\n[wandb]\nname = 'w'",
            True,
        ),
        ("trainer.algorithm = 'grpo'\ntrainer.gpus = 2", True),
        ("[trainer.args]\nrecipe = 'trl'\nuse_adaptive_entropy = false", True),
        ("modle = 'm'", False),
        ("model = 3", False),
        ("trainer.algorithm = 'ppo'", False),
        ("trainer.gpus = -1", False),
        ("[trainer.args]\nuse_vllm = true", False),
        ("[trainer.args]\nlabel_smoothing_factor = 0.5", False),
        ("[inference.args]\ntensor_parallel = 2", False),
        ("max_steps = 3\n[trainer]\ngpus = 1", False),
        ("[eval]\nstep = 5", False),
        ("[wandb]\nprojct = 'p'", False),
        ("[[env]]\nid = 'a'\n[[env]]\nwait = 3", False),
        ("[sampling]\ntemperatur = 1", False),
    ],
)
def test_a_file_is_valid_where_the_reader_takes_it(text, accepted, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(text)
    assert (not refusals(read_toml(str(file)))) == accepted
    assert VALIDATOR.is_valid(tomllib.loads(text)) == accepted


def test_a_setting_has_its_meaning_and_its_default():
    args = SCHEMA["properties"]["trainer"]["properties"]["args"]["properties"]
    assert args["lora_rank"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 10**6,
        "default": 8,
        "description": "Rank of the adapter's matrices: more is more parameters to train.",
    }
    assert args["num_generations"]["description"] == "Another name of rollouts_per_example."
    assert args["overlong"]["enum"] == ["mask", "drop"]


def test_the_command_prints_it_and_takes_no_settings():
    printed = CliRunner().invoke(train_command, ["--schema"])
    assert (printed.exit_code, json.loads(printed.stdout)) == (0, SCHEMA)
    answer = json.loads(CliRunner().invoke(train_command, ["--schema", "--json"]).stdout)
    assert json.loads(answer["file_schema"]) == SCHEMA
    refused = CliRunner().invoke(train_command, ["--schema", "x.toml"])
    assert refused.exit_code == 2
    assert "--schema takes no settings: x.toml" in refused.stderr
