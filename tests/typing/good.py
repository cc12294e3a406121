"""Uses of the public API whose types mypy --strict and pyright must infer; nothing here is run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

from openai import AsyncOpenAI, OpenAI

import verifiers as vf
from verifiers.runs.rollout import Progress
from verifiers.testing import ScriptedClient

ROWS = [{"question": "2 + 2", "answer": "4"}]


# --- environments an author writes


class Guess(vf.MultiTurnEnv):
    """Every hook an author may write, typed."""

    def __init__(self, secret: int, **options: Any) -> None:
        super().__init__(max_turns=8, **options)
        self.secret = secret

    async def setup_state(self, state: vf.State) -> None:
        state["guesses"] = 0

    async def env_response(
        self, messages: vf.Messages, state: vf.State, **kwargs: Any
    ) -> vf.Messages:
        assert_type(state["guesses"], Any)
        return [vf.UserMessage("higher")]

    @vf.stop
    def solved(self, state: vf.State) -> bool:
        return bool(state["trajectory"])

    @vf.stop(priority=5)
    async def gave_up(self, state: vf.State) -> bool:
        return False

    @vf.setup
    async def open_book(self, state: vf.State) -> None:
        state["page"] = 1

    @vf.cleanup
    async def close_book(self, state: vf.State) -> None:
        state.pop("page", None)

    @vf.teardown
    async def leave(self) -> None:
        self.logger.info("bye")


class Plain(vf.MultiTurnEnv):
    """Messages as plain dicts, read by key and by attribute."""

    def env_response(self, messages: vf.Messages, state: vf.State) -> vf.Messages:
        if messages[-1]["content"] == "stop":
            return "Then stop."
        if messages[-1].content == "again":
            return [*messages, vf.UserMessage("Again.")]
        return [{"role": "user", "content": "again"}]


class OwnLoop(vf.SingleTurnEnv):
    """A rollout of the author's own."""

    async def rollout(
        self,
        input: Mapping[str, Any],
        client: vf.Client,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
    ) -> vf.State:
        return await self.init_state(input, client, model, sampling_args)


def correct(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
    return float(parser.parse_answer(completion) == answer)


def exact(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def always() -> float:
    return 1.0


async def of_everything(
    prompt: vf.Messages,
    completion: vf.Messages,
    answer: str,
    state: vf.State,
    task: str,
    info: vf.Info,
    parser: vf.Parser,
    **kwargs: Any,
) -> float:
    return float(
        completion[-1].content == answer and info["level"] == 1 and bool(state["trajectory"])
    )


def best_of(completions: list[vf.Messages], answers: list[str]) -> list[float]:
    return [
        float(text[-1]["content"] == answer)
        for text, answer in zip(completions, answers, strict=True)
    ]


def square(n: int) -> int:
    return n * n


def load_environment(num_examples: int = 100) -> vf.Environment:
    parser = vf.XMLParser(["think", ("answer", "result")], answer_field="answer")
    rubric = vf.Rubric(
        funcs=[correct, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser
    )
    return vf.SingleTurnEnv(
        dataset=ROWS * num_examples, system_prompt="Add.", parser=parser, rubric=rubric
    )


# --- making them

guess = Guess(7, dataset=ROWS, rubric=vf.Rubric([correct]))
assert_type(guess, Guess)
assert_type(vf.Rubric([exact, always, of_everything, best_of]), vf.Rubric)
plain = Plain(dataset=ROWS, rubric=vf.Rubric([exact]))
assert_type(guess.secret, int)
assert_type(guess.rubric, vf.Rubric)
assert_type(guess.parser, vf.Parser)
assert_type(Guess.solved(guess, vf.State()), bool)
single = vf.SingleTurnEnv(
    dataset=lambda: ROWS,
    eval_dataset="rows.jsonl",
    few_shot=[vf.UserMessage("1 + 1"), vf.AssistantMessage("2")],
    sampling_args={"temperature": 0.5},
    max_seq_len=2048,
    timeout_seconds=60,
    max_concurrent=8,
    rollouts_per_example=4,
)
assert_type(single, vf.SingleTurnEnv)
assert_type(vf.load_environment("reverse-text", unit="word"), vf.Environment)
assert_type([environment.id for environment in vf.list_environments()], list[str])
tools = vf.ToolEnv(
    tools=[square], max_turns=4, stop_errors=[KeyError], parallel_tool_calls=True, dataset=ROWS
)
assert_type(tools, vf.ToolEnv)
assert_type(vf.StatefulToolEnv(tools=[square], dataset=ROWS), vf.StatefulToolEnv)
assert_type(vf.SandboxEnv(memory_gb=1, docker_image="python:3.11", dataset=ROWS), vf.SandboxEnv)
python = vf.PythonEnv(
    "numpy", 60, code_from="auto", system_prompt="Compute.", timeout_minutes=5, dataset=ROWS
)
assert_type(python, vf.PythonEnv)
group = vf.EnvGroup([guess, single], env_names=["guess", "single"], score_rollouts=True)
assert_type(group.get_env_for_task("guess"), vf.Environment)
assert_type(vf.GymEnv("FrozenLake-v1", max_turns=9, rubric=vf.Rubric()), vf.GymEnv)
assert_type(vf.TextArenaEnv("Wordle-v0", parser=vf.XMLParser(["guess"])), vf.TextArenaEnv)
assert_type(vf.ReasoningGymEnv("chain_sum", num_eval_examples=5), vf.ReasoningGymEnv)
assert_type(
    vf.MCPEnv([{"name": "time", "command": "time-server"}], tools=[square], dataset=ROWS), vf.MCPEnv
)

# --- running them

client = vf.OpenAIChatCompletionsClient(
    base_url="http://127.0.0.1:8000/v1", max_retries=4, timeout=60
)
assert_type(client, vf.OpenAIChatCompletionsClient)
assert_type(vf.as_client(vf.ClientConfig(api_base_url="http://127.0.0.1:8000/v1")), vf.Client)
assert_type(vf.as_client(OpenAI()), vf.Client)
assert_type(
    vf.as_client([vf.EndpointConfig("small", "qwen3-4b"), vf.EndpointConfig("large", "qwen3-32b")]),
    vf.Client,
)

results = guess.evaluate(
    OpenAI(), model="my-model", num_examples=20, rollouts_per_example=4, temperature=0.8
)
kept: vf.GenerateOutputs = results
assert_type(results.metadata, vf.GenerateMetadata)
assert_type(results.metadata.avg_reward, float)
assert_type(results.metadata.pass_at_k, dict[str, float])
assert_type(results.rewards, list[float])
assert_type(results["rewards"], list[float])
assert_type(results["states"], list[vf.State])
assert_type(results.states[0], vf.State)
assert_type(results.outputs, list[vf.RolloutOutput])
assert_type(results.outputs[0].error, vf.ErrorInfo | None)
assert_type(results["metrics"], dict[str, list[float]])
assert_type(len(results), int)
for prompt, completion, reward in zip(*results, strict=True):
    print(prompt, completion[-1].content, reward)

assert_type(guess.evaluate_sync(AsyncOpenAI(), "my-model"), vf.GenerateOutputs)
assert_type(
    guess.generate_sync(ROWS, ScriptedClient("4"), "m", rollouts_per_example=2), vf.GenerateOutputs
)


async def in_a_loop() -> None:
    assert_type(await guess.evaluate("local"), vf.GenerateOutputs)
    assert_type(await vf.load_environment("reverse-text").evaluate(client, "m"), vf.GenerateOutputs)
    assert_type(await plain.evaluate(vf.ClientConfig(), "m"), vf.GenerateOutputs)
    assert_type(
        await guess.a_evaluate(client, "my-model", {"temperature": 0.0}, 20), vf.GenerateOutputs
    )
    assert_type(await guess.generate(ROWS, client, "my-model"), vf.GenerateOutputs)
    assert_type(await guess.a_generate(None, client, "my-model", n_samples=8), vf.GenerateOutputs)
    both = await asyncio.gather(guess.evaluate(client, "a"), guess.evaluate(client, "b"))
    assert_type(both[0], vf.GenerateOutputs)


every_option = single.evaluate(
    client,
    "my-model",
    {"n": 1},
    20,
    4,
    max_concurrent=64,
    max_concurrent_generation=32,
    max_concurrent_scoring=16,
    max_concurrent_tools=8,
    independent_scoring=False,
    score_rollouts=True,
    interleave_scoring=True,
    max_retries=2,
    rollout_timeout_s=60.0,
    abort_after=8,
    seed=1,
    results_path=Path("outputs"),
    save_results=True,
    resume=True,
    retry_errors=True,
    state_columns=["page"],
    keep_states=False,
    num_workers=2,
    worker_backend="process",
    keep_raw_responses=True,
    shuffle_seed=7,
    preflight=False,
    progress=Progress(),
    on_start=print,
    on_progress=print,
    on_log=print,
    push_to_hub=False,
    hub_name="me/rows",
    temperature=0.7,
    max_tokens=256,
    top_p=0.9,
    top_k=40,
    stop=["\n"],
    extra_body={"guided_regex": "[0-9]+"},
)
assert_type(every_option.metadata.num_rollouts, int)
with vf.use_client(ScriptedClient("4"), "m") as current:
    assert_type(current, vf.Client)
with single as entered:
    assert_type(entered, vf.SingleTurnEnv)

# --- rubrics, parsers, messages


class Polite(vf.Rubric):
    @vf.reward(weight=0.5)
    def says_please(self, completion: vf.Messages) -> float:
        return 1.0

    @vf.metric
    def num_chars(self, completion: vf.Messages) -> float:
        return 3.0


assert_type(Polite(timeout_s=10).get_reward_weights(), list[float])
assert_type(
    vf.RubricGroup([Polite(), vf.Rubric([correct])], weights=[1, 0.5], names=["a", "b"]),
    vf.RubricGroup,
)
judge = vf.JudgeRubric(
    judge_client=OpenAI(), judge_model="gpt-4.1-nano", score_range=(0, 10), parallelize_scoring=True
)
assert_type(judge, vf.JudgeRubric)
assert_type(vf.MathRubric(max_workers=2, timeout_s=None), vf.MathRubric)
assert_type(vf.ToolRubric([square], parser=vf.Parser()), vf.ToolRubric)
assert_type(vf.Parser(str.upper).get_format_reward_func()(completion="x"), float)
assert_type(vf.ThinkParser(vf.extract_boxed_answer).format_reward("x"), float)
assert_type(vf.XMLParser(["answer"]).get_fields(), list[str])
assert_type(vf.UserMessage("hi").role, str)
assert_type(vf.ToolCall("c1", "add", {"a": 1}).name, str)
assert_type(vf.ToolCall("c1", "add", {"a": 1}).arguments, str)
assert_type(vf.Tool("add", "Add.", {"type": "object"}).strict, bool | None)
assert_type(vf.ModelRequest([vf.UserMessage("hi")], "m").prompt, vf.Messages)
assert_type(vf.Response(vf.AssistantMessage("4")).usage.total_tokens, int)
assert_type(vf.load_results("outputs"), vf.GenerateOutputs)
assert_type(vf.errors.ConfigError("no"), vf.ConfigError)
assert_type(vf.SandboxLimit, type[vf.SandboxLimit])

# --- tests and replays

scripted = vf.testing.ScriptedClient(["4"])
assert_type(scripted, vf.testing.ScriptedClient)
assert_type(vf.testing.make_state("2 + 2?", "4", answer="4"), vf.State)
assert_type(
    vf.testing.replay(
        vf.load_environment("reverse-text"), vf.load_results("run").rollout(0)
    ).difference,
    vf.testing.Difference | None,
)

# --- training

config = vf.RLConfig(
    batch_size=64, rollouts_per_example=8, learning_rate=1e-5, weight_decay=0.1, loss="cispo"
)
assert_type(config, vf.RLConfig)
assert_type(config.temperature, float)
trainer = vf.RLTrainer("builtin:tiny", "reverse-text", config)
assert_type(trainer, vf.RLTrainer)
assert_type(
    vf.RLTrainer(model="builtin:tiny", env=[guess, "reverse-text"], args=config), vf.RLTrainer
)
assert_type(vf.GRPOConfig(num_generations=16, per_device_train_batch_size=8), vf.GRPOConfig)
assert_type(vf.grpo_defaults("my-run", max_steps=10), vf.GRPOConfig)
