"""``vf-eval --schema``: valid by the standard, and of the same mind as the reader about every key
and many values."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
import tomli_w

from verifiers.cli.common.reader import Fields
from verifiers.cli.evaluate.command import run_command
from verifiers.cli.evaluate.options import EvalSettings
from verifiers.cli.evaluate.schema import eval_schema
from verifiers.cli.evaluate.toml_args import read_files

FILES = sorted((Path(__file__).parents[2] / "configs/eval").glob("*.toml"))
FIELDS = Fields.of(EvalSettings)
SCHEMA = json.loads(eval_schema())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
VALUES = (
    *(0, 1, -1, 7, 0.5, -0.5, 2.5, True, False, [1], [0, 1.5], [], ["a"], ["a: b"], ["a=b"], {}),
    *("", "x", "auto", "none", "chat", "parquet", "0,1", "a=1", "Name: value", '{"a": 1}', "ray"),
    {"a": "1"},
)


def accepts(text, folder):
    """Whether the reader takes a file with this text."""
    file = folder / "x.toml"
    file.write_text(text)
    return not read_files([str(file)]).problems


def test_the_schema_is_one_of_the_standard():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_file_is_valid(file):
    assert list(VALIDATOR.iter_errors(tomllib.loads(file.read_text()))) == []


@pytest.mark.parametrize("name", sorted({*FIELDS.hints, *FIELDS.aliases}))
def test_a_value_is_valid_where_the_reader_takes_it(name, tmp_path):
    validator = VALIDATOR.evolve(schema=SCHEMA["properties"][name])
    for value in VALUES:
        assert validator.is_valid(value) == accepts(tomli_w.dumps({name: value}), tmp_path), value


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("temperature = 0\n[[eval]]\nenv_ids = ['a', 'b']", True),
        ("[[ablation]]\nid = 'a'\n[ablation.sweep]\nseed = [1, 2]\nargs.n = [1]", True),
        ("[[ablation]]\nid = 'a'\n[ablation.sweep]\nargs = [{n = 1}, {n = 2}]", True),
        ("[eval]\nid = 'a'", False),
        ("[[eval]]\nid = 'a'\nenv_id = 'a'", False),
        ("[[eval]]\nseed = 3", False),
        ("[[eval]]\nid = 'a'\nsede = 3", False),
        ("[[ablation]]\nid = 'a'", False),
        ("[[ablation]]\nid = 'a'\n[ablation.sweep]\nseed = 3", False),
        ("[[ablation]]\nid = 'a'\n[ablation.sweep]\nseed = ['x']", False),
        ("[[ablation]]\nid = 'a'\n[ablation.sweep]\nargs.n = []", False),
        ("dry_run = true", False),
    ],
)
def test_a_file_is_valid_where_the_reader_takes_it(text, accepted, tmp_path):
    assert accepts(text, tmp_path) == accepted
    assert VALIDATOR.is_valid(tomllib.loads(text)) == accepted


def test_the_command_prints_it_and_names_what_it_does_not_know(capsys):
    assert run_command(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert run_command(["--schema", "--shema"]) == 2
    assert "--shema: no such option, did you mean --schema?" in capsys.readouterr().err
