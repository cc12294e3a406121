"""Every row of the tables of older spellings leads to the canonical one."""

import logging

import pytest

import verifiers as vf
from support.small_envs import row, single_turn
from verifiers import compat
from verifiers.options import COUNTS, SAMPLING_NAMES, RunOptions


@pytest.mark.parametrize(("old", "new"), compat.NAMES.items())
def test_older_names_of_the_package(old, new):
    assert getattr(vf, old) is getattr(vf, new)
    assert old not in vf.__all__


@pytest.mark.parametrize(("old", "new"), compat.RUN_OPTIONS.items())
def test_older_options(old, new):
    assert new in COUNTS or hasattr(RunOptions(), new)
    assert compat.rename({old: 3}, compat.RUN_OPTIONS) == {new: 3}


@pytest.mark.parametrize(("old", "new"), compat.SAMPLING_ARGS.items())
def test_older_sampling_arguments(old, new):
    assert {old, new} <= SAMPLING_NAMES
    assert compat.rename({old: 3}, compat.SAMPLING_ARGS) == {new: 3}


def test_tools_by_their_older_name():
    tool = vf.Tool("add")
    env = single_turn(oai_tools=[tool])
    assert env.oai_tools is env.tool_defs
    env.oai_tools = [tool, tool]
    assert len(env.tool_defs) == 2
    assert vf.State(row(), oai_tools=[tool])["tool_defs"] == [tool]


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ({"max_tokens": 1, "max_new_tokens": 1}, compat.SAMPLING_ARGS),
        ({"group_size": 1, "num_generations": 1}, compat.RUN_OPTIONS),
    ],
)
def test_both_spellings_of_one_thing_are_refused(given, table):
    with pytest.raises(vf.ConfigError, match="older name"):
        compat.rename(given, table, "here")


def test_an_older_spelling_is_noted_once_per_process(caplog):
    compat.note.cache_clear()
    with caplog.at_level(logging.DEBUG, "verifiers.compat"):
        for _ in range(3):
            compat.rename({"group_size": 1}, compat.RUN_OPTIONS)
    assert [r.getMessage() for r in caplog.records] == ["group_size is the older spelling of rollouts_per_example"]


def test_constructor_parameters_of_a_class_and_its_bases():
    class Mine(vf.MultiTurnEnv):
        def __init__(self, board_size=3, **kwargs):
            super().__init__(**kwargs)

    names = compat.parameters_of(Mine)
    assert {"board_size", "max_turns", "dataset", "rubric"} <= set(names)
    assert "kwargs" not in names
