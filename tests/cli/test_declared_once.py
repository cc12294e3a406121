"""An option is declared on one line: flags, files, help, schema, suggestions, calls and what is
recorded all have it from there."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.cli.common.reader import Fields
from verifiers.cli.evaluate.arguments import click_command, parse
from verifiers.cli.evaluate.options import CommandSettings, EvalSettings
from verifiers.cli.evaluate.planning import load
from verifiers.cli.evaluate.schema import eval_schema
from verifiers.cli.evaluate.sets import _compared
from verifiers.cli.evaluate.toml_args import dump, read_files
from verifiers.environments import keywords
from verifiers.runs.options import RunOptions, SharedOptions
from verifiers.runtime.values import options_of

FIELDS = Fields.of(EvalSettings)
SCHEMA = json.loads(eval_schema())["properties"]


@pytest.mark.parametrize("key", FIELDS.attributes)
def test_what_a_line_says_is_in_help_flags_schema_and_suggestions(key, tmp_path):
    line = FIELDS.options[key]
    options = {option.name: option for option in click_command().params}
    assert options[key].help.startswith(line.help.rstrip("."))
    assert set(line.long(key).replace("/", " ").split()) == {
        *options[key].opts,
        *options[key].secondary_opts,
    }
    assert SCHEMA[key]["description"] == line.help
    file = tmp_path / "x.toml"
    file.write_text(f"{key}q = 1")
    (problem,) = read_files([str(file)]).problems
    assert f"unknown key '{key}q'" in problem
    assert f'did you mean "{key}"?' in problem


@pytest.mark.parametrize("key", Fields.of(CommandSettings).attributes)
def test_a_setting_of_the_command_itself_is_a_flag_and_no_key_of_files(key):
    assert key in {option.name for option in click_command().params}
    assert key not in SCHEMA


def test_every_option_that_a_command_has_too_reaches_the_run():
    names = {line.name for line in dataclasses.fields(SharedOptions)}
    assert names <= {line.name for line in dataclasses.fields(RunOptions)}
    assert names <= set(FIELDS.attributes.values())
    assert all(line.help for line in options_of(SharedOptions).values())


def test_every_setting_is_written_by_dump_config_and_read_again(tmp_path):
    values = {
        "timeout": 9.0,
        "max_cost": 2.0,
        "cache": "c",
        "save_to_hf_hub": True,
        "shuffle": True,
    }
    settings = EvalSettings(**FIELDS.by_name(values))
    file = tmp_path / "x.toml"
    file.write_text(dump([("toy", settings)]))
    (entry,) = read_files([str(file)]).entries
    assert EvalSettings(**FIELDS.by_name(entry.settings)) == settings


def test_a_run_stores_the_options_that_are_not_free():
    stored = RunOptions().identity()
    assert stored == {"seed": None, "independent_scoring": False}
    changed = {"seed": 1, "shuffle_seed": 2, "independent_scoring": True, "max_retries": 3}
    identity = RunOptions(**changed).identity()
    assert identity == {name: changed[name] for name in changed if name != "max_retries"}


ADDED = """
import importlib.util, json, sys
from pathlib import Path
name = "verifiers.runs.options"
spec = importlib.util.find_spec(name)
before, after = Path(spec.origin).read_text().split("    max_retries: Number = option(", 1)
line = '''    num_widgets: Annotated[Count, Also("widget_count")] = option(1, "Widgets of a rollout.", "-W")
    "Widgets."
'''
module = sys.modules[name] = importlib.util.module_from_spec(spec)
exec(compile(before + line + "    max_retries: Number = option(" + after, spec.origin, "exec"),
     module.__dict__)

from verifiers.cli.evaluate import arguments, options, schema, toml_args
from verifiers.cli.common.reader import Fields
from verifiers.cli.evaluate.sets import _compared
import verifiers as vf

def refusal(call, *words):
    try:
        call(*words)
    except vf.ConfigError as error:
        return str(error)

def file(text):
    Path("x.toml").write_text(text)
    read = toml_args.read_files(["x.toml"])
    return read.problems or read.common

command = arguments.click_command()
settings = options.EvalSettings(**Fields.of(options.EvalSettings).by_name({"num_widgets": 4}))
env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": "a"}])
print(json.dumps({
    "help": "-W, --num-widgets N" in command.get_help(command.make_context("vf-eval", ["x"])),
    "flag": arguments.parse(["toy", "-W", "4"]).flags,
    "wrong flag": arguments.parse(["toy", "-W", "0"]).problems,
    "near": arguments.parse(["toy", "--num-widget", "4"]).problems,
    "file": file("widget_count = 4"),
    "wrong file": file("num_widgets = 0"),
    "schema": json.loads(schema.eval_schema())["properties"]["num_widgets"],
    "dumped": "num_widgets = 4" in toml_args.dump([("toy", settings)]),
    "call": module.parse(env, {"num_widgets": 4})[0].num_widgets,
    "wrong call": refusal(module.parse, env, {"num_widgets": 0}),
    "recorded": module.RunOptions(num_widgets=4).described()["num_widgets"],
    "identity": module.RunOptions(num_widgets=4).identity().get("num_widgets"),
    "set": "num_widgets" in _compared(),
}))
"""


def test_a_new_line_is_a_new_option_everywhere(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", ADDED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    wrong = "must be a whole number of at least 1, not 0"
    assert json.loads(ran.stdout) == {
        "help": True,
        "flag": {"num_widgets": 4},
        "wrong flag": [f"--num-widgets {wrong}"],
        "near": ["--num-widget: no such option, did you mean --num-widgets?"],
        "file": {"num_widgets": 4},
        "wrong file": [f"x.toml:1: num_widgets in the top level {wrong}"],
        "schema": {
            "type": "integer",
            "minimum": 1,
            "description": "Widgets of a rollout.",
            "default": 1,
        },
        "dumped": True,
        "call": 4,
        "wrong call": f"num_widgets {wrong}",
        "recorded": 4,
        "identity": 4,
        "set": True,
    }


def test_without_the_line_there_is_no_such_option():
    """Negative control."""
    (problem,) = parse(["toy", "--num-widgets", "4"]).problems
    assert problem.startswith("--num-widgets: no such option")
    assert not hasattr(RunOptions(), "num_widgets")


def test_the_generated_keywords_are_those_of_the_lines():
    source = Path(__file__).parents[2] / "packages/core/src/verifiers/runs/keywords.py"
    text = source.read_text()
    assert all(f"    {line.name}: " in text for line in dataclasses.fields(RunOptions))


# --- parameters of environments -------------------------------------------------------------------


def generator():
    path = Path(__file__).parents[2] / "docs/reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_parameter_of_a_constructor_that_is_marked_is_a_flag(monkeypatch):
    marked = 'Annotated[int, Free("x"), Flag("Widgets of a rollout.")]'
    monkeypatch.setitem(vf.MultiTurnEnv.__init__.__annotations__, "num_widgets", marked)
    monkeypatch.setitem(vf.MultiTurnEnv.__init__.__annotations__, "num_plain", "float | None")
    text = generator().environment_keywords()
    assert "    num_widgets: int\n" in text.split("class ConversationOptions")[1]
    assert '    num_widgets: int | None = option(None, "Widgets of a rollout.")\n' in text
    assert "    num_plain: float | None\n" in text  # negative control: a parameter, and no flag
    assert "num_plain: float | None = option" not in text


def test_the_parameters_of_environments_are_those_of_their_constructors():
    parameters = inspect.signature(vf.MultiTurnEnv).parameters
    assert keywords.MultiTurnOptions.__annotations__.keys() == parameters.keys()
    assert keywords.EnvironmentOptions.__annotations__.keys() == parameters.keys() - {
        *("max_turns", "timeout_seconds", "max_total_completion_tokens")
    }


def test_flags_of_environments_change_the_environment():
    assert load("reverse-text", EvalSettings(max_seq_len=9)).max_seq_len == 9
    assert load("tool-test", EvalSettings(max_turns=5)).max_turns == 5
    assert load("tool-test", EvalSettings()).max_turns != 5  # negative control
    with pytest.raises(vf.ConfigError, match=r"^--max-turns: max_turns is 3, but a SingleTurnEnv"):
        load("reverse-text", EvalSettings(max_turns=3))


@pytest.mark.parametrize("name", options_of(keywords.EnvironmentFlags))
def test_flags_of_environments_are_settings_like_others(name):
    assert name in FIELDS.attributes
    assert name in _compared()
    flag = f"--{name.replace('_', '-')}"
    assert parse(["toy", flag, "7"]).flags == {name: 7}
    assert parse(["toy", flag, "x"]).problems == [f"{flag} must be a whole number, not 'x'"]
