"""What is missing is said before the first rollout: a method, a reward, an answer, a docstring, a
correct name."""

import asyncio

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.testing import ScriptedClient

ROWS = [{"question": "2 + 2?", "answer": "4"}]


def exact(completion, answer) -> float:
    return float(completion[-1].content == answer)


RUBRIC = vf.Rubric([exact])


class Silent(vf.MultiTurnEnv):
    pass


class Answers(vf.MultiTurnEnv):
    def env_response(self, messages, state):
        return "again"


class Prompts(vf.MultiTurnEnv):
    async def get_prompt_messages(self, state):
        return [*state["prompt"], vf.UserMessage("again")]


@pytest.mark.parametrize("group", [False, True])
def test_a_missing_env_response_is_refused_before_the_first_request(group):
    env = Silent(dataset=ROWS, rubric=RUBRIC, max_turns=2)
    client = ScriptedClient("4")
    with pytest.raises(ConfigError, match=r"Silent has no env_response.*max_turns=1"):
        (vf.EnvGroup([env], ["one"]) if group else env).evaluate(client, "m")
    assert client.requests == []


@pytest.mark.parametrize(
    "env",
    [
        lambda: Silent(dataset=ROWS, rubric=RUBRIC, max_turns=1),
        lambda: Answers(dataset=ROWS, rubric=RUBRIC, max_turns=2),
        lambda: Prompts(dataset=ROWS, rubric=RUBRIC, max_turns=2),
    ],
)
def test_an_environment_that_needs_no_env_response_runs(env):
    assert env().evaluate(ScriptedClient("4"), "m")["errors"] == [None]


# --- rewards --------------------------------------------------------------------------------------


def metric(completion) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("rubric", "warning"),
    [
        (None, "no reward function has a weight, so every reward is unknown"),
        (vf.Rubric([metric], [0.0]), "no reward function has a weight, so every reward is unknown"),
        (
            vf.RubricGroup([vf.Rubric()]),
            "no reward function has a weight, so every reward is unknown",
        ),
    ],
    ids=["none", "a metric", "a group"],
)
def test_without_a_reward_function_a_warning_says_what_the_reward_is(rubric, warning, caplog):
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
    results = env.evaluate(ScriptedClient("4"), "m", rollouts_per_example=2)
    unknown = [reward != reward for reward in results["rewards"]]  # NaN
    assert unknown == ["unknown" in warning] * len(unknown)
    assert caplog.text.count(warning) == 1


def test_a_reward_of_zero_is_known(caplog):  # the control
    results = vf.SingleTurnEnv(dataset=ROWS, rubric=RUBRIC).evaluate(ScriptedClient("5"), "m")
    assert results["rewards"] == [0.0]
    assert "reward" not in caplog.text


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"question": "q", "solution": "4"}] * 2, True),
        ([{"question": "q", "solution": "4"}, {"question": "r", "answer": "4"}], False),
        (ROWS, False),
    ],
)
def test_an_answer_that_a_reward_reads_and_the_data_lack_is_said(rows, said, caplog):
    vf.SingleTurnEnv(dataset=rows, rubric=RUBRIC).evaluate(ScriptedClient("4"), "m")
    assert ("exact reads `answer`, which is empty" in caplog.text) is said
    assert not said or "solution" in caplog.text


def test_an_answer_that_the_environment_fills_is_not_missed(caplog):
    class Fills(vf.SingleTurnEnv):
        async def setup_state(self, state):
            state["answer"] = "4"
            return state

    Fills(dataset=[{"question": "q"}], rubric=RUBRIC).evaluate(ScriptedClient("4"), "m")
    assert "reads `answer`" not in caplog.text


# --- tools ----------------------------------------------------------------------------------------


def bare(query, limit: int = 3):
    return query


def typed(query: str) -> str:
    """Search the pages."""
    return query


@pytest.mark.parametrize(
    ("tool", "said"), [(bare, "no docstring, no type of `query`"), (typed, "")]
)
def test_a_tool_that_tells_the_model_too_little_is_named(tool, said, caplog):
    vf.ToolEnv(tools=[tool], dataset=ROWS, rubric=RUBRIC)
    assert (f"tool '{tool.__name__}': it has {said}" in caplog.text) is bool(said)
    assert bool(caplog.text) is bool(said)


# --- what is asked of a run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("top-p", "top_p"),
        ("max_token", "max_tokens"),
        ("repitition_penalty", "repetition"),
    ],
)
def test_a_misspelt_sampling_argument_is_refused(name, near):
    client = ScriptedClient("4")
    with pytest.raises(ConfigError, match=f"no '{name}', did you mean '{near}"):
        vf.SingleTurnEnv(dataset=ROWS, rubric=RUBRIC).evaluate(
            client, "m", sampling_args={name: 0.5}
        )
    assert client.requests == []


@pytest.mark.parametrize("name", ["top_k", "top_n_sigma", "dry_multiplier", "my_engine_flag"])
def test_an_argument_of_an_engine_is_sent(name):
    client = ScriptedClient("4")
    vf.SingleTurnEnv(dataset=ROWS, rubric=RUBRIC).evaluate(client, "m", sampling_args={name: 1})
    assert client.requests[0].sampling_args[name] == 1


@pytest.mark.parametrize(("num_examples", "said"), [(500, True), (1, False), (-1, False)])
def test_more_examples_than_there_are_is_said(num_examples, said, caplog):
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=RUBRIC)
    asyncio.run(env.a_evaluate(ScriptedClient("4"), "m", num_examples=num_examples))
    assert ("500 examples are requested, and the data have 1" in caplog.text) is said
