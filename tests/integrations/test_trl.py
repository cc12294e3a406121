"""TRL: what ``rollout_func`` gives for the prompts it is handed. The real trainer:
``tests/real``."""

from types import SimpleNamespace

import pytest

import verifiers as vf
from support.integration_envs import ScriptedTokens, right, tool_env
from support.peer_double import install
from verifiers_integrations.common import TokenClient
from verifiers_integrations.trl import (
    as_reward_func,
    make_rollout_func,
    reward_from_rollout,
    sampling_of,
    to_dataset,
)


@pytest.fixture(autouse=True)
def double(monkeypatch):
    install(monkeypatch, "trl")


@pytest.fixture
def engine():
    return ScriptedTokens()


def trainer(engine, **settings):
    args = {
        "max_completion_length": 32,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
    }
    args |= {"repetition_penalty": 1.0, "generation_kwargs": {"seed": 5}, **settings}
    return SimpleNamespace(args=SimpleNamespace(**args), processing_class=engine.tokenizer)


def rollouts(env, engine):
    return make_rollout_func(env, TokenClient(engine, engine.tokenizer))


def prompts(env, *numbers, split="train"):
    dataset = to_dataset(env, split)
    return [dataset[number]["prompt"] for number in numbers]


def test_one_completion_per_element_with_the_sampled_ids(engine):
    env = tool_env(3)
    made = rollouts(env, engine)(prompts(env, 1, 1, 0, 0), trainer(engine))
    assert {len(values) for values in made.values()} == {4}
    assert made["vf_reward"] == [1.0] * 4
    assert reward_from_rollout(completions=[], **made) == [1.0] * 4
    columns = [made[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")]
    for prompt, ids, mask, logprobs in zip(*columns, strict=True):
        assert len(ids) == len(mask) == len(logprobs)
        assert 0 < sum(mask) < len(mask)
        assert engine.tokenizer.decode(prompt).startswith("<|im_start|>system\nTools:")
    assert ["1 + 1" in engine.tokenizer.decode(ids) for ids in made["prompt_ids"]] == [
        True,
        True,
        False,
        False,
    ]


def test_an_unknown_reward_is_none_and_masked(engine):
    def judged(completion, answer, info):
        return right(completion, answer) if info["n"] else 1 / 0

    env = tool_env(2, funcs=[judged])
    made = rollouts(env, engine)(prompts(env, 0, 1), trainer(engine))
    assert made["vf_reward"] == [None, 1.0]
    assert [any(mask) for mask in made["env_mask"]] == [False, True]
    assert not any(made["logprobs"][0])


def test_rows_with_the_same_prompt_are_told_apart(engine):
    rows = [{"question": "guess", "answer": str(n)} for n in range(3)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))
    engine.say = lambda prompt: "2"
    made = rollouts(env, engine)(prompts(env, 0, 2), trainer(engine))
    assert made["vf_reward"] == [0.0, 1.0]
    bare = [{"role": "user", "content": "guess"}]
    with pytest.raises(vf.ConfigError, match="same prompt and different answers"):
        rollouts(env, engine)([bare], trainer(engine))
    with pytest.raises(vf.ConfigError, match="is not in the environment"):
        rollouts(env, engine)([[{"role": "user", "content": "other"}]], trainer(engine))


def test_both_sets_have_their_own_rows(engine):
    env = vf.SingleTurnEnv(
        dataset=[{"question": "a", "answer": "1"}], eval_dataset=[{"question": "b", "answer": "2"}],
        rubric=vf.Rubric(funcs=[right]),
    )  # fmt: skip
    engine.say = lambda prompt: "2"
    made = rollouts(env, engine)(prompts(env, 0) + prompts(env, 0, split="eval"), trainer(engine))
    assert made["vf_reward"] == [0.0, 1.0]


def test_sampling_is_the_trainers_and_nothing_else(engine):
    env = tool_env(1)
    rollouts(env, engine)(prompts(env, 0), trainer(engine, top_k=7))
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    asked = {"max_tokens": 32, "temperature": 0.8, **neutral, "top_k": 7, "seed": 5}
    assert engine.calls[0][1] == asked
    settings = SimpleNamespace(max_completion_length=4, top_p=0.9, top_k=0, min_p=None)
    assert sampling_of(settings) == {"max_tokens": 4, **neutral, "top_p": 0.9}


def test_a_step_without_a_token_is_an_error_that_says_why(engine):
    async def dead(prompt_ids, sampling):
        raise OSError("connection refused")

    env = tool_env(1)
    with pytest.raises(
        vf.RunError, match=r"every token of this step is masked.*connection refused"
    ):
        make_rollout_func(env, TokenClient(dead, engine.tokenizer))(
            prompts(env, 0, 0), trainer(engine)
        )


def test_why_nothing_can_be_trained_is_one_short_line(engine):
    def breaks(prompt):
        raise OSError("the disk\nis full " + "and full " * 100)

    env = tool_env(1)
    func = rollouts(env, ScriptedTokens(breaks))
    with pytest.raises(vf.RunError) as caught:
        func(prompts(env, 0, 0), trainer(engine))
    said = str(caught.value)
    assert "the disk is full" in said
    assert "\n" not in said
    assert len(said) < 280


def test_one_failed_rollout_costs_only_itself(engine):
    async def sometimes(prompt_ids, sampling):
        if not engine.calls:
            engine.calls.append(None)
            raise OSError("connection reset")
        return await engine(prompt_ids, sampling)

    env = tool_env(1)
    made = make_rollout_func(env, TokenClient(sometimes, engine.tokenizer))(
        prompts(env, 0, 0, 0), trainer(engine)
    )
    assert sorted(made["vf_reward"], key=str) == [1.0, 1.0, None]
    failed = made["vf_reward"].index(None)
    assert (made["env_mask"][failed], len(made["prompt_ids"][failed])) == ([0], 1)


def test_earlier_branches_are_dropped_and_counted(engine):
    class Forgets(vf.MultiTurnEnv):
        async def get_prompt_messages(self, state):
            asked = await super().get_prompt_messages(state)
            if not state["trajectory"]:
                return asked
            return [*asked[:-2], {"role": "user", "content": "again"}]

        async def env_response(self, messages, state):
            return "more"

    engine.say = lambda prompt: "yes"
    env = Forgets(dataset=[{"question": "q"}], max_turns=2, rubric=vf.Rubric(funcs=[lambda: 1.0]))
    func = rollouts(env, engine)
    made = func(prompts(env, 0), trainer(engine))
    assert (func.dropped, made["completion_ids"]) == (1, [engine.made[1]])


def test_text_without_ids_is_refused(engine):
    from verifiers.testing import ScriptedClient

    env = tool_env(1)
    with pytest.raises(vf.ConfigError, match="has no token ids"):
        make_rollout_func(env, ScriptedClient("5"))(prompts(env, 0), trainer(engine))


def test_completions_of_a_single_turn_environment_are_scored():
    def judged(completion, answer):
        return right(completion, answer) if answer != "3" else 1 / 0

    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric(funcs=[judged]))
    score = as_reward_func(env)
    asked = [[{"role": "user", "content": "q"}]] * 3
    said = [[{"role": "assistant", "content": "1"}], "1", "3"]
    assert score(
        asked, said, answer=["1", "2", "3"], info=["{}"] * 3, completion_ids=[[1]] * 3
    ) == [1.0, 0.0, None]
    with pytest.raises(vf.ConfigError, match="scores single turns"):
        as_reward_func(tool_env(1))


def test_history_exact_is_the_engines():
    with pytest.raises(vf.ConfigError, match="leave client out"):
        make_rollout_func(tool_env(1), object(), history="exact")
