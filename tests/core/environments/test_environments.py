"""Building an environment: parameters, refusals, data, setters, teardown. Nothing here calls a
model."""

import asyncio
import copy
import logging
import random
import signal
import subprocess
import sys
import threading

import pytest

import verifiers as vf
from support.small_envs import Talk, exact, single_turn, sums
from verifiers.testing import ScriptedClient


def test_an_environment_needs_data():
    with pytest.raises(vf.ConfigError, match="dataset"):
        vf.SingleTurnEnv()
    assert isinstance(vf.ConfigError("x"), ValueError)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"message_type": "text"}, "message_type is 'text'"),
        ({"message_type": "completion", "system_prompt": "s"}, "write them into the prompt"),
        (
            {"message_type": "completion", "few_shot": [{"role": "user", "content": "x"}]},
            "few_shot",
        ),
        ({"sampling_args": {"n": 2}}, "rollouts_per_example"),
        ({"rubrik": None}, "did you mean 'rubric'"),
        ({"sytem_prompt": "s"}, "did you mean 'system_prompt'"),
        ({"evaluate": 3}, "is a method"),
        ({"dataset_": []}, "did you mean 'dataset'"),
        ({"tool_defs": [], "oai_tools": []}, "older name"),
        ({"max_turns": 5}, "one turn"),
    ],
)
def test_what_cannot_be_meant_is_refused(parameters, told):
    with pytest.raises(vf.ConfigError, match=told):
        vf.SingleTurnEnv(dataset=sums(1), **parameters)


@pytest.mark.parametrize("how", ["patch", "override"])
def test_what_the_parts_of_an_environment_define_is_replaced_as_its_own(how, monkeypatch):
    """A patch of ``Environment``, or an override with ``super()``, of a model call, a step, usage,
    rows, teardown."""
    calls = []

    def traced(name, native):
        def call(env, *args, **kwargs):
            calls.append(name)
            return native(env, *args, **kwargs)

        return call

    names = (
        "init_state get_model_response add_model_response add_trajectory_step as_prompt client_of"
        " continued_step increment_state_usage get_dataset set_max_seq_len aclose run_rollout"
    ).split()
    owner = vf.Environment if how == "patch" else type("Traced", (vf.SingleTurnEnv,), {})
    for name in names:
        monkeypatch.setattr(owner, name, traced(name, getattr(owner, name)), raising=False)
    env = (vf.SingleTurnEnv if how == "patch" else owner)(dataset=sums(1))
    env.set_kwargs(max_seq_len=50)
    asyncio.run(env.run_rollout(env.get_dataset()[0], ScriptedClient("1"), "m"))
    env.close()
    assert set(calls) == set(names)


def test_other_keywords_become_attributes():
    env = vf.SingleTurnEnv(
        dataset=sums(1), difficulty="hard", rollouts_per_example=4, max_concurrent=8
    )
    assert (env.difficulty, env.rollouts_per_example, env.max_concurrent) == ("hard", 4, 8)


def test_misspelt_turns_are_refused_and_right_ones_kept():
    with pytest.raises(vf.ConfigError, match="max_turns"):
        Talk(max_turn=3, max_turns=2)
    assert Talk(max_turns=5).max_turns == 5
    assert Talk().max_total_completion_tokens == -1


def test_defaults_for_readers():
    env = vf.SingleTurnEnv(dataset=sums(1))
    assert type(env.rubric) is vf.Rubric
    assert env.rubric.parser is env.parser
    assert env.sampling_args == {"n": 1, "extra_body": {}}
    assert (env.max_turns, env.timeout_seconds, env.env_id, env.env_args) == (1, None, "", {})
    assert env.monitor_rubric.get_reward_func_names() == ["num_turns"]


def test_the_rubric_is_exactly_the_object_given_and_lends_its_parser():
    parser = vf.ThinkParser()
    rubric = vf.Rubric(funcs=[exact], parser=parser)
    env = vf.SingleTurnEnv(dataset=sums(1), rubric=rubric)
    assert env.rubric is rubric
    assert env.parser is parser


def test_two_kinds_of_parser_are_warned_about(caplog):
    vf.SingleTurnEnv(
        dataset=sums(1), parser=vf.ThinkParser(), rubric=vf.Rubric(parser=vf.XMLParser(["a"]))
    )
    assert "ThinkParser" in caplog.text
    caplog.clear()
    vf.SingleTurnEnv(dataset=sums(1), parser=vf.ThinkParser(), rubric=vf.Rubric(funcs=[exact]))
    assert caplog.text == ""


def test_tools_are_one_list_under_two_names():
    tool = vf.Tool("add")
    env = vf.SingleTurnEnv(dataset=sums(1), tool_defs=[tool])
    assert env.oai_tools is env.tool_defs
    assert env.tool_defs == [tool]


def test_set_kwargs_uses_setters_and_checks_names():
    env = Talk()
    env.set_kwargs(
        max_seq_len=100,
        interleaved_rollouts=True,
        score_rollouts=False,
        max_turns=9,
        difficulty="easy",
    )
    assert (env.max_seq_len, env.interleaved_rollouts, env.score_rollouts) == (100, True, False)
    assert (env.max_turns, env.difficulty) == (9, "easy")
    env.set_concurrency(4)
    env.set_max_total_completion_tokens(50)
    assert (env.max_concurrent, env.max_total_completion_tokens) == (4, 50)
    with pytest.raises(vf.ConfigError, match="did you mean"):
        env.set_kwargs(max_sequence_lenn=3, max_seq_lem=1)


def test_a_second_rubric_is_added_to_the_first():
    def extra(completion):
        return 1.0

    env = single_turn()
    env.add_rubric(vf.Rubric(funcs=[extra], weights=[0.5]))
    assert env.get_reward_weights() == [1.0, 0.5]
    assert [f.__name__ for f in env.get_reward_funcs()] == ["exact", "extra"]
    assert not env.requires_group_rollouts
    assert not env.provides_advantages


# --- data


def test_the_evaluation_set_falls_back_to_the_training_set_with_one_warning(caplog):
    env = single_turn(2)
    with caplog.at_level(logging.WARNING):
        assert len(env.eval_table) == len(env.eval_table) == 2
    assert caplog.text.count("no evaluation set") == 1


def test_an_environment_may_have_only_an_evaluation_set():
    env = vf.SingleTurnEnv(eval_dataset=sums(2))
    assert len(env.eval_table) == 2
    with pytest.raises(ValueError, match="no training set"):
        env.get_dataset()


def test_the_dataset_is_read_on_first_use():
    built = []

    def build():
        built.append(1)
        return sums(2)

    env = vf.SingleTurnEnv(dataset=build)
    assert built == []
    assert len(env.train_table) == len(env.train_table) == 2
    assert built == [1]


def test_get_dataset_is_pure():
    env = single_turn(20)
    first, again = env.get_dataset(5, seed=1), env.get_dataset(5, seed=1)
    assert first.to_list() == again.to_list()
    assert env.get_dataset(5)["answer"][:5] == ["1", "2", "3", "4", "5"]
    assert {"prompt", "example_id", "task", "answer", "info"} <= set(first.column_names)
    assert len(env.get_eval_dataset(100)) == 20
    assert env.dataset.to_list() == env.get_eval_dataset().to_list()
    assert env.eval_dataset is None


def test_sampled_prompts_leave_the_global_generator_alone():
    env = single_turn(4)
    before = random.getstate()
    rows = env.sample_prompts(6)
    assert random.getstate() == before
    assert {row["answer"] for row in rows[:4]} == {"1", "2", "3", "4"}
    rows[0]["prompt"].clear()
    assert all(example.row["prompt"] for example in env.train_table)


# --- no side effects, teardown


def test_construction_starts_no_thread_and_touches_no_signal():
    threads = threading.active_count()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    Talk(rubric=vf.Rubric(funcs=[exact]), timeout_seconds=1.0)
    assert threading.active_count() == threads
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_an_environment_can_be_built_in_a_thread():
    made = []
    thread = threading.Thread(target=lambda: made.append(single_turn()))
    thread.start()
    thread.join()
    assert len(made) == 1


class Closing(Talk):
    def __init__(self, **parameters):
        self.closed = []
        super().__init__(**parameters)

    @vf.teardown(priority=1)
    async def first(self):
        self.closed.append("first")
        raise OSError("gone already")

    @vf.teardown
    def second(self):
        self.closed.append("second")


def test_teardown_runs_every_handler_once_and_tells_the_first_failure():
    env = Closing()
    with pytest.raises(OSError, match="gone already"):
        env.close()
    env.close()
    assert env.closed == ["first", "second"]


async def test_closing_inside_a_loop_and_by_context_managers():
    async def by_block(env):
        async with env:
            pass

    for leave in (by_block, Closing.aclose, lambda env: asyncio.to_thread(env.__exit__)):
        env = Closing()
        with pytest.raises(OSError):
            await leave(env)
        assert env.closed == ["first", "second"]


def test_the_rubrics_teardown_belongs_to_it():
    done = []

    class Judge(vf.Rubric):
        @vf.teardown
        def disconnect(self):
            done.append(1)

    vf.SingleTurnEnv(dataset=sums(1), rubric=Judge(funcs=[exact])).close()
    assert done == [1]


AT_EXIT = """
import verifiers as vf
from verifiers.testing import ScriptedClient
class Env(vf.SingleTurnEnv):
    @vf.teardown
    async def stop(self):
        print("torn down")
env = Env(dataset=[{{"question": "q"}}])
{use}
print("end")
"""


@pytest.mark.parametrize(
    ("use", "printed"),
    [
        ('env.evaluate(ScriptedClient("x"), "m")', ["end", "torn down"]),
        ('env.evaluate(ScriptedClient("x"), "m"); env.close()', ["torn down", "end"]),
        ("", ["end"]),
    ],
)
def test_what_has_started_a_rollout_is_torn_down_at_exit(use, printed):
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(use=use)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[:-1] == printed, done.stderr


# --- single model calls


async def test_authors_may_make_model_calls_of_their_own():
    env = single_turn(1)
    client = ScriptedClient("four", tokens=True)
    state = await env.init_state(
        copy.deepcopy(env.train_table[0].row), client, "m", {"temperature": 0.5}
    )
    response = await env.get_model_response(
        state, "hello", sampling_args={"top_p": 0.1}, model="other"
    )
    assert response.text == "four"
    request = client.requests[0]
    assert request.prompt == [{"role": "user", "content": "hello"}]
    assert request.model == "other"
    assert request.sampling_args == {"n": 1, "extra_body": {}, "temperature": 0.5, "top_p": 0.1}
    usage = response.usage
    assert env.get_state_usage(state) == {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
    }
    env.increment_state_usage(state, 10, 2)
    assert env.get_state_usage(state)["input_tokens"] == usage.prompt_tokens + 10
    assert state["trajectory"] == []


async def test_headers_taken_from_the_state():
    class WithSettings(ScriptedClient):
        config = vf.ClientConfig(extra_headers_from_state={"X-Game": "game", "X-Absent": "absent"})

    env, client = single_turn(1), WithSettings("x")
    state = await env.init_state({"prompt": [], "game": 7}, client, "m")
    await env.get_model_response(state, [])
    assert client.requests[0].headers == {"X-Game": "7"}


async def test_init_state_parses_info_and_leaves_the_environments_settings_alone():
    tool = vf.Tool("add")
    env = single_turn(1, tool_defs=[tool])
    sampling = {"extra_body": {"k": 1}}
    state = await env.init_state(
        {"prompt": "hi", "info": '{"a": 1}'}, ScriptedClient("x"), "m", sampling
    )
    assert state["info"] == {"a": 1}
    assert state["prompt"] == [{"role": "user", "content": "hi"}]
    state["tool_defs"].append("mine")
    state["sampling_args"]["extra_body"]["k"] = 2
    assert env.tool_defs == [tool]
    assert sampling == {"extra_body": {"k": 1}}


@pytest.mark.parametrize(
    "few_shot",
    [
        "2 + 2 = 4",
        {"role": "user", "content": "2 + 2"},
        [{"content": "2 + 2"}],
        [3],
        [{"role": "user", "content": [{}]}],
    ],
)
def test_few_shot_examples_that_cannot_be_read_are_refused_at_once(few_shot):
    with pytest.raises(vf.ConfigError, match="few_shot cannot be read"):
        vf.SingleTurnEnv(dataset=sums(1), few_shot=few_shot)


def test_few_shot_examples_in_every_form_of_messages():
    shots = [vf.UserMessage("1 + 1"), {"role": "assistant", "content": "2"}]
    env = vf.SingleTurnEnv(dataset=sums(1), few_shot=shots, system_prompt="Add.")
    assert [m["content"] for m in env.sample_prompts(1)[0]["prompt"]] == [
        "Add.",
        "1 + 1",
        "2",
        "0 + 1",
    ]
