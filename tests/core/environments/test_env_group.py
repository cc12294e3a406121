"""``EnvGroup``: concatenated data, and every row played and scored by the environment
it came from."""

import copy
import logging
import math

import pytest

import verifiers.rollouts.author_code as mark
from verifiers.environments import MultiTurnEnv, SingleTurnEnv
from verifiers.environments.group import EnvGroup, route_of
from verifiers.environments.tool import ToolEnv
from verifiers.errors import ConfigError, DatasetError, EnvironmentFault
from verifiers.parsers import XMLParser
from verifiers.rollouts.branching import Branching
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric, RubricGroup
from verifiers.testing import ScriptedClient
from verifiers.types import ToolCall


def exact(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def polite(completion) -> float:
    return float("please" in completion[-1]["content"])


def rank(completions) -> list[float]:
    return [float(n) for n in range(len(completions))]


def single(count=2, rubric=None, **parameters):
    rows = [{"question": f"q{n}", "answer": f"a{n}"} for n in range(count)]
    return SingleTurnEnv(dataset=rows, rubric=rubric or Rubric([exact]), **parameters)


def square(n: int) -> int:
    return n * n


def tools(**parameters):
    return ToolEnv(
        tools=[square],
        dataset=[{"question": "3 squared?", "answer": "9", "level": 1}],
        **parameters,
    )


def rows(env):
    return [example.row for example in env.train_table]


def answering(request):
    """Right answers to both kinds of rows, with a tool call where tools are offered."""
    if request.prompt[-1]["role"] == "tool":
        return request.prompt[-1]["content"]
    if request.tools:
        return [ToolCall("c1", "square", {"n": 3})]
    return request.prompt[-1]["content"].replace("q", "a")


# --- data


def test_sets_are_concatenated_and_numbered_anew():
    group = EnvGroup([single(2), single(1)])
    assert [
        (r["example_id"], r["src_id"], r["task"], r["info"]["env_id"]) for r in rows(group)
    ] == [(0, 0, "env_0", "env_0"), (1, 1, "env_0", "env_0"), (2, 0, "env_1", "env_1")]
    assert group.get_dataset()["answer"] == ["a0", "a1", "a0"]
    assert group.get_dataset(n=2, seed=1).to_list() == group.get_dataset(n=2, seed=1).to_list()


def test_evaluation_sets_are_the_members_own_or_their_training_sets():
    with_eval_set = SingleTurnEnv(dataset=[{"question": "t"}], eval_dataset=[{"question": "e"}])
    group = EnvGroup([with_eval_set, single(1)])
    assert [e.row["question"] for e in group.train_table] == ["t", "q0"]
    assert [e.row["question"] for e in group.eval_table] == ["e", "q0"]
    only_eval = EnvGroup([SingleTurnEnv(eval_dataset=[{"question": "e"}])])
    assert len(only_eval.eval_table) == 1
    with pytest.raises(DatasetError, match="no training set"):
        only_eval.get_dataset()


def test_rows_keep_the_members_prompt_and_what_their_new_names_replace():
    member = SingleTurnEnv(
        dataset=[{"question": "q", "task": "algebra", "example_id": "row-7", "info": {"level": 2}}],
        system_prompt="Think.",
    )
    (row,) = rows(EnvGroup([member], env_names=["math"]))
    assert row["prompt"] == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "q"},
    ]
    assert row["info"] == {"level": 2, "env_id": "math", "src_task": "algebra"}
    assert (row["task"], row["src_id"]) == ("math", "row-7")
    (same,) = rows(
        EnvGroup([SingleTurnEnv(dataset=[{"question": "q", "task": "math"}])], env_names=["math"])
    )
    assert same["info"] == {"env_id": "math"}


def test_the_members_own_rows_are_not_touched():
    member = single(1)
    before = member.get_dataset().to_list()
    rows(EnvGroup([member]))
    assert member.get_dataset().to_list() == before
    assert "env_id" not in rows(member)[0]["info"]


def test_nested_groups_carry_the_names_along_the_way():
    leaf = SingleTurnEnv(dataset=[{"question": "q", "task": "algebra"}], rubric=Rubric([exact]))
    group = EnvGroup(
        [EnvGroup([single(1), leaf], env_names=["a", "b"]), single(1)], env_names=["x", "y"]
    )
    assert [(r["task"], r["info"]["env_id"]) for r in rows(group)] == [
        ("x", ["x", "a"]),
        ("x", ["x", "b"]),
        ("y", "y"),
    ]
    assert rows(group)[1]["info"]["src_task"] == "algebra"
    assert group.for_row(rows(group)[1]) is leaf
    client = ScriptedClient(lambda request: request.prompt[-1]["content"].replace("q", "a"))
    results = group.evaluate(client, "m")
    assert results["rewards"] == [1.0, 0.0, 1.0]
    assert results["errors"] == [None] * 3


# --- routing


def test_a_row_says_who_plays_it_by_info_then_by_task():
    first, second = single(), single()
    group = EnvGroup([first, second], env_names=["a", "b"])
    assert group.for_row({"info": {"env_id": "b"}, "task": "a"}) is second
    assert group.for_row({"info": {}, "task": "a"}) is first
    assert group.for_row({"info": '{"env_id": "b"}', "task": "a"}) is second
    assert group.for_row({"task": "nobody"}) is group
    assert group.for_row({}) is group
    assert route_of({"info": {"env_id": ["a", 3]}, "task": "b"}) == ["a"]
    assert group.get_env_for_task("b") is second
    assert group.get_env_for_name("a") is first
    with pytest.raises(EnvironmentFault, match="which the group does not have"):
        group.get_env_for_task("nobody")
    with pytest.raises(ConfigError, match=r"no environment 'c' \(it has: a, b\)"):
        group.get_env_for_name("c")


def test_an_unknown_route_is_that_rollouts_fault():
    group = EnvGroup([single(1)], env_names=["a"])
    client = ScriptedClient(["a0"])
    inputs = [
        {"prompt": "q", "answer": "a0", "task": "a"},
        {"prompt": "q", "answer": "a0", "task": "nobody"},
    ]
    results = group.generate(inputs, client, "m")
    assert results["errors"][0] is None
    assert results["errors"][1]["error"] == "EnvironmentFault"
    assert "'nobody', which the group does not have (it has: a)" in results["errors"][1]["message"]
    assert results["rewards"][0] == 1.0
    assert math.isnan(results["rewards"][1])
    assert len(client.requests) == 1


# --- playing


def test_every_member_plays_with_its_own_prompt_tools_limits_and_rubric():
    group = EnvGroup(
        [tools(rubric=Rubric([exact])), single(1, Rubric([polite]), system_prompt="Be polite.")]
    )
    client = ScriptedClient(answering)
    results = group.evaluate(client, "m")
    by_question = {request.prompt[-1]["content"]: request for request in client.requests}
    assert [bool(by_question[q].tools) for q in ("3 squared?", "q0")] == [True, False]
    assert [by_question[q].prompt[0]["role"] for q in ("3 squared?", "q0")] == ["user", "system"]
    assert results["stop_conditions"] == ["no_tools_called", "max_turns_reached"]
    assert results["rewards"] == [1.0, 0.0]
    assert results["tasks"] == ["env_0", "env_1"]


def test_rows_from_elsewhere_get_the_system_prompt_of_their_member():
    group = EnvGroup([single(1, system_prompt="Be short."), single(1)], env_names=["a", "b"])
    client = ScriptedClient(["a0"])
    group.generate(
        [{"question": "q", "task": name} for name in ("a", "b")], client, "m", max_concurrent=1
    )
    assert [request.prompt[0]["content"] for request in client.requests] == ["Be short.", "q"]


def test_metrics_of_other_members_are_absent_and_not_zero():
    results = EnvGroup([tools(rubric=Rubric([exact])), single(1, Rubric([polite]))]).evaluate(
        ScriptedClient(answering), "m"
    )
    assert results.outputs[0]["metrics"] == {
        "exact": 1.0,
        "num_turns": 2.0,
        "total_tool_calls": 1.0,
        "square_calls": 1.0,
    }
    assert results.outputs[1]["metrics"] == {"polite": 0.0, "num_turns": 1.0}
    assert [str(value) for value in results["metrics"]["square_calls"]] == ["1.0", "nan"]
    assert [str(value) for value in results["metrics"]["polite"]] == ["nan", "0.0"]
    assert results.metadata["avg_metrics"]["square_calls"] == 1.0


def test_hooks_of_a_member_run_on_the_member():
    class Counting(MultiTurnEnv):
        def __init__(self, **parameters):
            self.seen = []
            super().__init__(dataset=[{"question": "count"}], **parameters)

        @mark.setup
        def begin(self, state):
            self.seen.append("setup")

        @mark.cleanup
        def end(self, state):
            self.seen.append("cleanup")

        @mark.stop
        def enough(self, state):
            return len(state["trajectory"]) == 2

        def env_response(self, messages, state):
            return "go on"

    counting = Counting()
    results = EnvGroup([single(1), counting]).evaluate(ScriptedClient(["a0"]), "m")
    assert results["stop_conditions"] == ["max_turns_reached", "enough"]
    assert counting.seen == ["setup", "cleanup"]


def test_a_member_with_a_loop_of_its_own_plays_it():
    class OwnLoop(SingleTurnEnv):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input, client, model, sampling_args)
            state["completion"] = [{"role": "assistant", "content": "mine"}]
            return state

    member = OwnLoop(dataset=[{"question": "q", "answer": "mine"}], rubric=Rubric([exact]))
    assert EnvGroup([single(1), member]).evaluate(ScriptedClient(["a0"]), "m")["rewards"] == [
        1.0,
        1.0,
    ]


async def test_one_rollout_and_one_group_are_routed_too():
    group = EnvGroup([tools(), single(1)])
    client = ScriptedClient(answering)
    state = await group.rollout(rows(group)[0], client, "m")
    assert state["stop_condition"] == "no_tools_called"
    assert state["reward"] is None
    first, second = await group.run_group([rows(group)[1]] * 2, client, "m", score=True)
    assert (first["reward"], second["advantage"]) == (1.0, 0.0)


async def test_a_state_is_made_by_the_member():
    group = EnvGroup([tools(), single(1)])
    state = await group.init_state(rows(group)[0], None, "m")
    assert [tool["name"] for tool in state["tool_defs"]] == ["square"]


# --- scoring


def test_group_rewards_and_advantages_of_members_are_their_own():
    class Mine(Rubric):
        @mark.advantage
        def ten(self, states):
            return [10.0] * len(states)

    group = EnvGroup([single(1, Rubric([rank])), single(1), single(1, Mine([exact]))])
    results = group.evaluate(ScriptedClient(["a0"]), "m", rollouts_per_example=3)
    assert results["rewards"] == [0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert results["advantages"] == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 10.0, 10.0, 10.0]
    assert "rank" not in results.outputs[3]["metrics"]
    assert group.requires_group_rollouts
    assert group.provides_advantages


async def test_the_rubric_of_the_group_scores_states_by_hand():
    group = EnvGroup([single(1, Rubric([rank])), single(1)], env_names=["a", "b"])

    def state(task, text="a0"):
        return State(
            prompt="q", answer="a0", task=task, completion=[{"role": "assistant", "content": text}]
        )

    score = await group.rubric.score_rollout(state("b"))
    assert (score["reward"], score["metrics"]) == (1.0, {"exact": 1.0})
    scores = await group.rubric.score_group([state("a"), state("b"), state("a")])
    assert scores["reward"] == [0.0, 1.0, 1.0]
    with pytest.raises(EnvironmentFault, match="belongs to no environment of the group"):
        await group.rubric.score_rollout(state("c"))
    with pytest.raises(ConfigError, match="scores whole groups"):
        await group.rubric.score_rollout(state("a"))


def test_the_rubric_lists_what_the_members_hold():
    shared = Rubric([polite], [0.5])
    group = EnvGroup(
        [
            single(1, RubricGroup([Rubric([exact]), Rubric([polite])], [1.0, 2.0])),
            single(1, shared),
            single(1, shared),
        ]
    )
    assert group.rubric.get_reward_func_names() == ["exact", "polite", "polite"]
    assert group.get_reward_weights() == [1.0, 1.0, 0.5]
    before = group.rubric.get_group_weights()
    assert before == [1.0, 2.0, 1.0]
    group.rubric.set_group_weights([0.0, 1.0, 3.0])
    assert group.envs[0].rubric.get_group_weights() == [0.0, 1.0]
    group.rubric.set_group_weights(before)
    assert group.rubric.get_group_weights() == before
    with pytest.raises(ConfigError, match="3 group weights"):
        group.rubric.set_group_weights([1.0])


def test_what_is_added_to_the_group_is_added_to_every_member():
    group = EnvGroup([single(1), single(1)])
    group.rubric.add_metric(polite)
    group.add_rubric(Rubric([lambda completion: 1.0]))
    results = group.evaluate(ScriptedClient(["a0 please"]), "m")
    assert results["metrics"]["polite"] == [1.0, 1.0]
    assert results["rewards"] == [1.0, 1.0]
    with pytest.raises(ConfigError, match="cannot be part of a RubricGroup"):
        RubricGroup([group.rubric, Rubric([polite])]).plan()


def test_reward_arguments_are_checked_against_the_members_own_columns():
    def by_level(level) -> float:
        return float(level)

    # its rows have a column 'level', those of the other do not
    wanting = tools(rubric=Rubric([by_level]))
    client = ScriptedClient(answering)
    assert EnvGroup([single(1), wanting]).evaluate(client, "m")["rewards"] == [1.0, 1.0]
    client.requests.clear()
    with pytest.raises(ConfigError, match="'by_level' needs an argument 'level'"):
        EnvGroup([wanting, single(1, Rubric([by_level]))]).evaluate(client, "m")
    assert client.requests == []


def test_cleanup_handlers_of_members_see_their_own_rollouts():
    seen = []
    rubric = Rubric([exact])
    rubric.add_cleanup_handler(lambda state: seen.append(state["task"]))
    EnvGroup([single(1), single(1, rubric)]).evaluate(
        ScriptedClient(["a0"]), "m", rollouts_per_example=2
    )
    assert seen == ["env_1", "env_1"]


# --- settings


def test_setters_and_settings_reach_every_member():
    group = EnvGroup([tools(), EnvGroup([single(1)])])
    group.set_max_seq_len(100)
    group.set_kwargs(max_turns=3, score_rollouts=False, difficulty="hard")
    group.set_max_total_completion_tokens(7)
    group.set_concurrency(4)
    group.set_interleaved_rollouts(True)
    for env in [group, group.envs[0], group.envs[1], group.envs[1].envs[0]]:
        assert (env.max_seq_len, env.max_turns, env.score_rollouts, env.difficulty) == (
            100,
            3,
            False,
            "hard",
        )
        assert (env.max_total_completion_tokens, env.max_concurrent, env.interleaved_rollouts) == (
            7,
            4,
            True,
        )


SETTERS = [name for name in dir(SingleTurnEnv) if name.startswith("set_")]


@pytest.mark.parametrize("name", [*SETTERS, "set_difficulty"])
def test_every_setter_reaches_every_member_or_says_in_one_sentence_why_not(name):
    """Also one that the group does not know; ``set_keep_rows`` is of the rows of the group."""
    calls = []

    class Member(SingleTurnEnv):
        def set_difficulty(self, difficulty):
            self.difficulty = difficulty

    def spy(self, *args, **kwargs):
        calls.append((self, args, kwargs))

    setattr(Member, name, spy)
    members = [Member(dataset=[{"question": "q", "answer": "a"}]) for _ in range(3)]
    group = EnvGroup([members[0], EnvGroup(members[1:])])
    calls.clear()
    if name == "set_kwargs":
        group.set_kwargs(difficulty=3)
        assert calls == [(member, (), {"difficulty": 3}) for member in members]
    elif name.startswith("set_keep"):
        with pytest.raises(ConfigError, match=f"{name.removeprefix('set_')}.*no_such_file"):
            getattr(group, name)("no_such_file.json")
    else:
        # branching is no number
        first, second = (
            [Branching(at=1, branches=n) for n in (3, 4)] if name == "set_branching" else (3, 4)
        )
        getattr(group, name)(first)
        assert calls == [(member, (first,), {}) for member in members]
        group.set_kwargs(**{name.removeprefix("set_"): second})
        assert calls[3:] == [(member, (second,), {}) for member in members]


def test_a_setter_that_one_member_lacks_sets_none():
    class Graded(SingleTurnEnv):
        level = 0

        def set_level(self, level):
            self.level = level

    graded = Graded(dataset=[{"question": "q", "answer": "a"}])
    group = EnvGroup([graded, EnvGroup([single(1), single(1)])], env_names=["graded", "plain"])
    with pytest.raises(
        AttributeError, match=r"set_level is not a method of every member.*plain has"
    ):
        group.set_level(2)
    assert graded.level == 0
    assert not hasattr(group, "set_level")
    with pytest.raises(AttributeError, match="'EnvGroup' object has no attribute 'set_speed'"):
        group.set_speed(1)
    group.set_kwargs(level=2)  # of each member, with its setter or without one
    assert [graded.level, group.level, group.envs[1].envs[0].level] == [2, 2, 2]
    assert not hasattr(copy.copy(group), "set_speed")  # asked before it has members, too


def test_threads_of_the_group_are_those_of_its_members():
    group = EnvGroup([single(1), single(1)])
    group.set_max_workers(2)
    assert [env.max_workers for env in (group, *group.envs)] == [2, 2, 2]
    with pytest.raises(ConfigError, match="max_workers is 0"):
        group.set_max_workers(0)
    assert [env.max_workers for env in (group, *group.envs)] == [2, 2, 2]


def test_the_success_of_the_groups_rubric_is_that_of_every_member():
    group = EnvGroup([single(1), single(1)])
    group.rubric.success = "exact"
    assert [env.rubric.success for env in (group, *group.envs)] == ["exact"] * 3
    results = group.evaluate(ScriptedClient(["a0", "no"]), "m")
    assert results["metrics"]["success"] == results["metrics"]["exact"] == [1.0, 0.0]
    group.rubric.success = "exakt"
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        group.evaluate(ScriptedClient("a0"), "m")


def test_closing_the_group_closes_every_member():
    closed = []

    class Closing(SingleTurnEnv):
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails
            super().__init__(dataset=[{"question": "q"}])

        @mark.teardown
        def close_it(self):
            closed.append(self.name)
            if self.fails:
                raise OSError("stuck")

    group = EnvGroup([Closing("a", fails=True), Closing("b")])
    with pytest.raises(OSError, match="stuck"):
        group.close()
    group.close()
    assert closed == ["a", "b"]


def test_every_kind_of_member_is_served_and_the_group_takes_no_settings_of_theirs(caplog):
    parsed = single(1, parser=XMLParser(["answer"]), rubric=None)
    with caplog.at_level(logging.WARNING):
        group = EnvGroup(
            [parsed, single(1)], env_names=["a", "b"], map_kwargs={"num_proc": 2}, env_id="both"
        )
    assert caplog.text == ""
    assert group.envs[0].parser is parsed.parser
    assert group.env_id == "both"


@pytest.mark.parametrize(
    ("envs", "parameters", "said"),
    [
        (0, {}, "at least one environment"),
        (2, {"env_names": ["a"]}, "2 environments and 1 env_names"),
        (2, {"env_names": ["a", "a"]}, "two environments are called 'a'"),
        (1, {"env_names": [""]}, "env_names takes text"),
        (1, {"system_prompt": "x"}, "EnvGroup takes no system_prompt"),
        (1, {"rubric": Rubric()}, "EnvGroup takes no rubric"),
        (1, {"timeout_seconds": 3}, "EnvGroup takes no timeout_seconds"),
        (1, {"env_name": ["a"]}, "did you mean 'env_names'"),
    ],
)
def test_a_group_that_cannot_work_is_refused(envs, parameters, said):
    with pytest.raises(ConfigError, match=said):
        EnvGroup([single(1) for _ in range(envs)], **parameters)


def test_members_must_be_environments_of_one_message_type():
    with pytest.raises(ConfigError, match="takes environments, not str"):
        EnvGroup(["math"])
    completing = SingleTurnEnv(dataset=[{"prompt": "2 + 2 ="}], message_type="completion")
    with pytest.raises(ConfigError, match="one message_type, not chat and completion"):
        EnvGroup([single(1), completing])
    assert EnvGroup([completing]).evaluate(ScriptedClient([" 4"]), "m")["completions"] == [" 4"]


RECORDED = sorted({*SETTERS} - {"set_kwargs"})


def test_every_setter_is_recorded():
    assert [n for n in RECORDED if not hasattr(getattr(SingleTurnEnv, n), "__wrapped__")] == []


@pytest.mark.parametrize("name", [name for name in RECORDED if "keep" not in name])
def test_a_setter_is_in_the_changes_that_workers_get(name):
    env, setting = single(1), name.removeprefix("set_")
    value = {"at": 1, "branches": 2} if setting == "branching" else 3
    getattr(env, name)(value)
    assert env.changes == {setting: value}
