"""Every block of the README is executed or parsed: what it shows is what works."""

import re
import tomllib
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.testing import FakeServer

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PYTHON = [code for language, options, code in BLOCKS if language == "python" and "no-run" not in options]
TOML = [code for language, _, code in BLOCKS if language == "toml"]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_block_runs(code):
    with FakeServer("<reversed_text>olleh</reversed_text>") as server:
        names = {}
        exec(compile(code.replace("http://127.0.0.1:8000/v1", server.url), README.name, "exec"), names)
    if "load_environment" in names:
        assert isinstance(names["load_environment"](), vf.Environment)
    if "results" in names:
        assert len(names["results"]) > 0


def test_the_number_game_of_the_readme_can_be_won():
    names = {}
    exec(next(code for code in PYTHON if "GuessTheNumber" in code), names)
    guesses = iter(["50", "25", "42"])
    results = names["env"].evaluate(vf.testing.ScriptedClient(lambda _: next(guesses)), model="m")
    assert results["rewards"] == [1.0]
    assert results["stop_conditions"] == ["solved"]


@pytest.mark.parametrize("code", TOML, ids=range(len(TOML)))
def test_toml_block_is_a_training_file(code):
    settings = tomllib.loads(code)
    assert vf.RLConfig(**settings["trainer"]["args"]).batch_size == 128


def test_every_linked_file_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
