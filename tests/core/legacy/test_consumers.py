"""What other frameworks call and read, in their own words: rLLM, prime-rl, the Tinker cookbook,
SkyRL."""

import asyncio
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, exact, single_turn, sums
from verifiers.testing import ByteTokenizer, FakeServer, ScriptedClient
from verifiers.types import GenerateOutputs, ProcessedOutputs, RolloutInput, State, TrajectoryStep
from verifiers.utils.async_utils import maybe_semaphore
from verifiers.utils.logging_utils import print_prompt_completions_sample
from verifiers.utils.message_utils import messages_to_printable

PACKAGES = Path(__file__).parents[2] / "compat" / "packages"


# --- rLLM: rollouts one by one through a client of its own, scored afterwards


class RolloutEngine:
    """Only ``chat.completions.create``, ``base_url`` and ``api_key``; ids beside placeholder
    log-probabilities."""

    base_url, api_key = "http://engine.invalid/v1", "none"

    def __init__(self, answer):
        self.answer, self.asked = answer, []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    async def create(self, **request):
        self.asked.append(request)
        ids = list(self.answer.encode())
        return openai.types.chat.ChatCompletion.model_validate(
            {
                "id": "1",
                "created": 0,
                "model": request["model"],
                "object": "chat.completion",
                "prompt_token_ids": [1, 2, 3],
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": self.answer},
                        "token_ids": ids,
                        "logprobs": {
                            "content": [
                                {"token": "", "logprob": -0.5, "top_logprobs": []} for _ in ids
                            ]
                        },
                    }
                ],
            }
        )


async def test_rllm(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    config = {"env_id": "capital-guess", "env_args": {"num_train_examples": 2}, "max_samples": 1}
    env = vf.load_environment(config["env_id"], **config["env_args"])
    sys.modules.pop("capital_guess")
    for dataset in (env.get_dataset(), env.get_eval_dataset()):
        tasks = dataset.select(range(min(config["max_samples"], len(dataset))))
    task = tasks[0]
    row = {name: task[name] for name in ("prompt", "example_id", "task", "answer", "info")}
    engine = RolloutEngine("<think>x</think><answer>Paris</answer>")
    state = await env.rollout(
        input=row, client=engine, model="policy", sampling_args={"temperature": 1.0}
    )
    score_sem = await maybe_semaphore(-1)
    assert state["reward"] is None
    await env.rubric.score_rollout(state, score_sem=score_sem)
    step = state["trajectory"][0]
    assert step["tokens"]["completion_ids"] == list(engine.answer.encode())
    assert step["tokens"]["completion_logprobs"] == [-0.5] * len(engine.answer)
    assert (step["prompt"][-1]["content"], step["completion"][0]["role"]) == (
        "Capital of France?",
        "assistant",
    )
    assert step["reward"] == state["reward"] == pytest.approx(1.2)
    assert state["metrics"]["correct"] == 1.0
    assert (state["task"], state["completion"][0]["content"]) == ("capitals", engine.answer)
    assert engine.asked[0]["temperature"] == 1.0


async def test_rllm_its_semaphores():
    waiting = await maybe_semaphore(2)
    assert isinstance(waiting, asyncio.Semaphore)
    for none in (None, -1, 0):
        async with await maybe_semaphore(none):
            pass


# --- prime-rl of the second generation


def group():
    first = single_turn(2, system_prompt="Add.")
    second = Talk(2, max_turns=2, rubric=vf.Rubric(funcs=[exact]))
    return vf.EnvGroup(envs=[first, second], env_names=["sums", "talk"], map_kwargs={"num_proc": 1})


def policy():
    return ScriptedClient(add_one_or_more, tokens=True)


def add_one_or_more(request):
    return add_one(request) if "+" in str(request.prompt[-1]["content"]) else "more"


async def test_prime_rl_gets_states_for_semaphores():
    env = group()
    env.set_max_seq_len(2048)
    env.set_interleaved_rollouts(True)
    env.set_score_rollouts(True)
    dataset = env.get_dataset(seed=1)
    assert sorted(set(dataset["task"])) == ["sums", "talk"]
    assert len(env.get_eval_dataset(n=3)) == 3
    example = dataset.to_list()[0]
    assert env.get_env_for_task(example["task"]).rubric.get_reward_func_names() == ["exact"]
    states = await env.run_group(
        group_inputs=[RolloutInput(**example) for _ in range(2)],
        client=policy(),
        model="policy",
        gen_sampling_args={"temperature": 1.0},
        gen_sem=await maybe_semaphore(4),
        score_sem=await maybe_semaphore(-1),
    )
    for state in states:
        assert isinstance(state, State)
        assert state["example_id"] == example["example_id"]
        assert state["task"] == example["task"]
        assert isinstance(state["reward"], float)
        assert (state["is_truncated"], state["error"]) == (False, None)
        assert state["timing"].total_ms == state["timing"]["total_ms"] > 0
        assert set(state["metrics"]) >= {"exact"}
        for step in state["trajectory"]:
            tokens = step["tokens"]
            assert len(tokens["prompt_ids"]) == len(tokens["prompt_mask"]) > 0
            assert len(tokens["completion_ids"]) == len(tokens["completion_mask"])
            assert len(tokens["completion_ids"]) == len(tokens["completion_logprobs"])
            assert tokens["is_truncated"] is False
    rebuilt = State(**states[0].copy())
    assert {name: rebuilt[name] for name in State.INPUT_FIELDS} == {
        n: states[0][n] for n in State.INPUT_FIELDS
    }
    assert (
        TrajectoryStep(**dict(states[0]["trajectory"][0]))["completion"]
        == states[0]["trajectory"][0]["completion"]
    )


async def test_prime_rl_gets_rows_for_retries():
    env = group()
    example = env.get_dataset(seed=1).to_list()[0]
    outputs = await env.run_group(
        group_inputs=[RolloutInput(**example)] * 2,
        client=policy(),
        model="policy",
        sampling_args={"temperature": 1.0},
        max_retries=1,
        state_columns=["trajectory"],
    )
    for output in outputs:
        assert output["trajectory"][0]["tokens"]["completion_ids"]
        assert output["completion"][0]["role"] == "assistant"
        assert math.isfinite(output["reward"])
        assert output["advantage"] == 0.0
    rollout = await env.run_rollout(
        RolloutInput(**example),
        policy(),
        "policy",
        sampling_args={},
        max_retries=0,
        state_columns=["trajectory"],
    )
    assert rollout["trajectory"][0]["tokens"]["prompt_ids"]
    leading = await env.run_rollout(
        await maybe_semaphore(1), RolloutInput(**example), policy(), "policy", {}
    )
    assert isinstance(leading, State)


async def test_prime_rl_plays_an_evaluation_itself():
    env, client = single_turn(3), policy()
    inputs = env._get_eval_inputs(2, 2)
    assert [row["example_id"] for row in inputs] == [0, 0, 1, 1]
    inputs[0]["info"]["mine"] = True
    assert "mine" not in inputs[1]["info"]
    states = [
        await env.run_rollout(row, client, "policy", gen_sampling_args={}, score=True)
        for row in inputs
    ]
    results = env._prepare_rollout_results(
        states,
        "policy",
        client,
        ["trajectory"],
        Path("nowhere"),
        {"temperature": 0.0},
        start_time=0.0,
    )
    assert results.reward == [1.0] * 4
    assert results.metadata.rollouts_per_example == 2
    assert (results.metadata.model, results.metadata.pass_at_k) == ("policy", {"1": 1.0, "2": 1.0})
    assert results["states"] == states
    assert not Path("nowhere").exists()


# --- the Tinker cookbook


class SamplingClient(openai.AsyncOpenAI):
    """A subclass that answers by itself; nothing of it may be taken for an address to call."""

    def __init__(self, answer):
        super().__init__(api_key="tinker", base_url="http://127.0.0.1:9/v1")
        self.engine = RolloutEngine(answer)

    @property
    def chat(self):
        return self.engine.chat


async def test_the_tinker_cookbook_trains(capsys):
    env = single_turn(4)
    dataset = env.get_dataset(n=2, seed=0)
    columns = {
        name: name in dataset.column_names
        for name in ("prompt", "answer", "task", "info", "example_id")
    }
    assert all(columns.values())
    record = dataset[0]
    row = RolloutInput(
        prompt=record["prompt"],
        answer=record["answer"],
        task=record["task"],
        info=record["info"],
        example_id=record["example_id"],
    )
    states = await env.run_group(
        group_inputs=[row, row],
        client=SamplingClient(record["answer"]),
        model="tinker",
        gen_sampling_args={"max_tokens": 16},
        gen_sem=await maybe_semaphore(-1),
        score_sem=await maybe_semaphore(-1),
    )
    assert [state.get("reward") for state in states] == [1.0, 1.0]
    assert [state.get("metrics")["exact"] for state in states] == [1.0, 1.0]
    assert all(
        step.get("tokens")["completion_ids"] for state in states for step in state.get("trajectory")
    )
    print_prompt_completions_sample(
        prompts=[messages_to_printable(state["prompt"]) for state in states],
        completions=[messages_to_printable(state["completion"]) for state in states],
        errors=[state.get("error") for state in states],
        rewards=[state.get("reward") for state in states],
        step=3,
    )
    assert "Step 3" in capsys.readouterr().out


def test_the_tinker_cookbook_evaluates():
    results = single_turn(3).evaluate_sync(
        client=SamplingClient("2"),
        model="tinker",
        num_examples=2,
        rollouts_per_example=2,
        max_concurrent=2,
        sampling_args={"max_tokens": 16},
    )
    assert results["reward"] == [0.0, 0.0, 1.0, 1.0]
    assert len(results["prompt"]) == len(results["completion"]) == 4
    assert results["metrics"]["exact"] == results["reward"]


# --- SkyRL


async def test_skyrl(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    env = vf.load_environment(env_id="ledger-game")
    sys.modules.pop("ledger_game")
    assert len(env.get_dataset(1)) == len(env.get_eval_dataset(1)) == 1
    env = single_turn(2)
    with FakeServer(lambda request: add_one(request), tokens=True) as server:
        out = await env.generate(
            inputs=[
                RolloutInput(
                    prompt=row["prompt"], answer=row["answer"], example_id=n, info={}, task="sums"
                )
                for n, row in enumerate(env.get_dataset(2))
            ],
            client=openai.AsyncOpenAI(api_key="none", base_url=server.url),
            model="policy",
            sampling_args={
                "max_tokens": 8,
                "logprobs": True,
                "top_logprobs": 1,
                "extra_body": {"return_tokens_as_token_ids": True},
            },
        )
    assert isinstance(out, GenerateOutputs)
    processed = env.process_env_results_vllm(
        prompts=out.prompt,
        completions=out.completion,
        states=out.state,
        rewards=out.reward,
        processing_class=ByteTokenizer(),
        max_seq_len=512,
        mask_env_responses=True,
    )
    assert isinstance(processed, ProcessedOutputs)
    assert processed.rewards == [1.0, 1.0]
    assert processed.source == ["sampled", "sampled"]
    for lists in zip(
        processed.completion_ids,
        processed.completion_mask,
        processed.completion_logprobs,
        strict=True,
    ):
        assert len({len(values) for values in lists}) == 1
    assert all(processed.prompt_ids)


def test_skyrl_without_a_training_set():
    env = vf.SingleTurnEnv(eval_dataset=sums(1))
    with pytest.raises(ValueError, match="no training set"):
        env.get_dataset(1)


def test_an_unknown_reward_is_loud_in_arithmetic_and_no_success():
    def broken(completion):
        raise KeyError("x")

    (reward,) = single_turn(1, rubric=vf.Rubric(funcs=[broken])).evaluate(ScriptedClient("1"), "m")[
        "reward"
    ]
    assert math.isnan(sum([1.0, reward]))
    assert not reward > 0
