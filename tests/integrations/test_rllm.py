"""rLLM: our workflow against its recorded types, on engines of ids and of messages."""

import json
from types import SimpleNamespace

import openai
import pytest

import verifiers as vf
from support.embedded import serving
from support.integration_envs import ScriptedTokens, right, tool_env
from support.peer_double import Recorded, differences, install
from verifiers.testing import FakeServer
from verifiers_integrations import rllm
from verifiers_integrations.common import peer_task
from verifiers_integrations.token_client import served_generate
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer


class Workflow(Recorded):
    """Recorded fields, and the ``reset`` every run begins with: the peer pools these objects."""

    FIELDS = ("rollout_engine", "executor", "timeout", "gamma", "reward_bonus_coeff", "store")

    def reset(self, task, uid):
        self.was_reset = (task["example_id"], uid)


@pytest.fixture
def double(monkeypatch):
    install(monkeypatch, "rllm", Workflow=Workflow)


class TokenEngine:
    """Token in, token out, as the peer's verl and Tinker engines."""

    supports_token_in_token_out, model_name, weight_version = True, "tiny", 7

    def __init__(self, scripted):
        self.scripted, self.tokenizer, self.ids = scripted, scripted.tokenizer, []

    async def get_token_output_from_token_input(self, token_input, **sampling):
        self.ids.append(sampling.pop("application_id"))
        return await self.scripted(token_input, sampling)

    def assemble_model_output(self, token_input, token_output):
        from rllm.engine.rollout.rollout_engine import ModelOutput

        ids, logprobs, finish = token_output
        return ModelOutput(
            prompt_ids=token_input, completion_ids=ids, logprobs=logprobs, finish_reason=finish
        )


class MessageEngine:
    """Messages in, a ``ModelOutput`` out; ``calls`` is the form its tool calls have."""

    def __init__(self, calls):
        self.calls, self.asked = calls, []

    async def get_model_response(self, messages, **options):
        from rllm.engine.rollout.rollout_engine import ModelOutput

        self.asked.append((messages, options))
        answered = messages[-1]["role"] == "tool"
        return ModelOutput(
            content=messages[-1]["content"] if answered else "", tool_calls=[] if answered else [self.calls],
            prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-0.1, -0.2], finish_reason="stop", weight_version=2,
        )  # fmt: skip


async def episode_of(env, engine, index=0, **options):
    workflow = rllm.VerifiersWorkflow(engine, env, executor=None, **options)
    task = peer_task(env.get_dataset()[index])
    episode = await workflow.run(task, f"{index}:0")
    assert workflow.was_reset == (index, f"{index}:0")
    return episode


async def test_a_rollout_becomes_an_episode_with_the_sampled_ids(double):
    scripted = ScriptedTokens()
    engine = TokenEngine(scripted)
    episode = await episode_of(
        tool_env(2), engine, 1, sampling_args={"temperature": 1.0}, timeout=60
    )
    (trajectory,) = episode.trajectories
    assert [step.response_ids for step in trajectory.steps] == scripted.made
    assert [step.prompt_ids for step in trajectory.steps] == [call[0] for call in scripted.calls]
    assert [len(step.logprobs) for step in trajectory.steps] == [len(ids) for ids in scripted.made]
    assert [step.weight_version for step in trajectory.steps] == [7, 7]
    assert [m["role"] for m in trajectory.steps[1].chat_completions] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (trajectory.reward, episode.is_correct, episode.id) == (1.0, True, "1:0")
    assert (episode.termination_reason.name, episode.metrics["right"]) == ("ENV_DONE", 1.0)
    assert episode.metrics["vf_unscored"] == 0.0
    assert set(engine.ids) == {"1:0"}
    assert scripted.calls[0][1] == {"temperature": 1.0}


CALLS = {
    "a dict": {
        "id": "x",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 0, "b": 1}'},
    },
    "a flat dict": {"name": "add", "arguments": {"a": 0, "b": 1}},
    "an object of the peer": SimpleNamespace(name="add", arguments={"a": 0, "b": 1}),
    "an object of OpenAI": openai.types.chat.ChatCompletionMessageToolCall.model_validate(
        {
            "id": "x",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 0, "b": 1}'},
        }
    ),
}


@pytest.mark.parametrize("form", CALLS)
async def test_every_form_of_tool_call_is_understood(double, form):
    engine = MessageEngine(CALLS[form])
    episode = await episode_of(tool_env(1), engine)
    assert episode.trajectories[0].reward == 1.0
    assert [step.response_ids for step in episode.trajectories[0].steps] == [[3, 4], [3, 4]]
    messages, options = engine.asked[1]
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 0, "b": 1}
    assert (options["application_id"], options["tools"][0]["function"]["name"]) == ("0:0", "add")


async def test_an_unknown_reward_is_zero_and_nothing_of_it_is_trained(double):
    def broken(completion):
        raise KeyError("judge")

    episode = await episode_of(tool_env(1, funcs=[broken]), TokenEngine(ScriptedTokens()))
    assert (episode.trajectories[0].reward, episode.trajectories[0].steps) == (0.0, [])
    assert (episode.metrics["vf_unscored"], episode.is_correct) == (1.0, False)
    assert episode.termination_reason.name == "ERROR"
    assert "broken" not in episode.metrics


class PromptTooLong(Exception):
    reason = "TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED"


@pytest.mark.parametrize(
    ("raised", "reason"),
    [(PromptTooLong(), "MAX_PROMPT_LENGTH_EXCEEDED"), (OSError("gone"), "ERROR")],
)
async def test_what_the_engine_raises_is_the_rollouts_reason(double, raised, reason):
    def fails(prompt):
        raise raised

    episode = await episode_of(tool_env(1), TokenEngine(ScriptedTokens(fails)))
    assert episode.termination_reason.name == reason


async def test_a_cut_answer_and_the_last_turn_have_their_reasons(double):
    class Talk(vf.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": "more"}]

    rows, rubric = [{"question": "q"}], vf.Rubric(funcs=[lambda: 1.0])
    engine = TokenEngine(ScriptedTokens(lambda prompt: "yes"))
    many = await episode_of(Talk(dataset=rows, max_turns=2, rubric=rubric), engine)
    single = await episode_of(vf.SingleTurnEnv(dataset=rows, rubric=rubric), engine)
    assert [e.termination_reason.name for e in (many, single)] == ["MAX_TURNS_EXCEEDED", "ENV_DONE"]


async def test_an_engine_without_ids_is_refused(double):
    class NoIds(MessageEngine):
        async def get_model_response(self, messages, **options):
            made = await super().get_model_response(messages, **options)
            made.completion_ids = made.prompt_ids = None
            return made

    with pytest.raises(vf.ConfigError, match="no token ids"):
        await episode_of(tool_env(1), NoIds(CALLS["a dict"]))


async def test_the_agent_flow_plays_through_the_gateway(double):
    env = vf.SingleTurnEnv(
        dataset=[{"question": "q", "answer": "4"}], rubric=vf.Rubric(funcs=[right])
    )
    with FakeServer("4") as gateway:
        config = SimpleNamespace(base_url=gateway.url, model="m", session_uid="0:1")
        task = SimpleNamespace(metadata=peer_task(env.get_dataset()[0]))
        episode = await rllm.VerifiersAgentFlow(env, {"temperature": 0.5}).arun(task, config)
        assert gateway.hits[0].json()["temperature"] == 0.5
    assert (episode.id, episode.trajectories[0].reward, episode.trajectories[0].steps) == (
        "0:1",
        1.0,
        [],
    )


async def test_on_the_embedded_engine_the_ids_are_those_of_its_own_record(double):
    """A rollout engine over a real model: what the episode holds is what the model sampled."""

    class Recording:
        def __init__(self, engine):
            self.tokenizer, self.made = build_tiny_tokenizer(), []
            self.generate = served_generate(engine.base_url, engine.api_key, engine.served_model)

        async def __call__(self, prompt_ids, sampling):
            made = await self.generate(prompt_ids, sampling)
            self.made.append((prompt_ids, *made))
            return made[:3]

    class Talk(vf.MultiTurnEnv):
        async def env_response(self, messages, state):
            return [{"role": "user", "content": "more"}]

    env = Talk(dataset=[{"question": "q"}], max_turns=2, rubric=vf.Rubric(funcs=[lambda: 1.0]))
    with serving() as engine:
        recording = Recording(engine)
        episode = await episode_of(
            env, TokenEngine(recording), sampling_args={"max_tokens": 6, "temperature": 1.0}
        )
    steps = episode.trajectories[0].steps
    assert [(s.prompt_ids, s.response_ids) for s in steps] == [
        (made[0], made[1]) for made in recording.made
    ]
    for step, made in zip(steps, recording.made, strict=True):
        assert step.logprobs == pytest.approx(made[2])


# --- configuration


def config(**keys):
    ours = {
        "env_id": "tool-test",
        "env_args": {"num_train_examples": 5, "num_eval_examples": 4},
        **keys,
    }
    return {"verifiers": ours, "backend": "verl"}


def test_the_keys_of_the_configuration():
    env, sampling, train, held_out = rllm.from_config(
        config(sampling_args={"temperature": 1.0}, max_samples=3)
    )
    assert (len(train), len(held_out), sampling, env.env_id) == (
        3,
        3,
        {"temperature": 1.0},
        "tool-test",
    )
    assert len(rllm.from_config(config())[2]) == 5


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"backend": "verl"}, "verifiers.env_id is missing"),
        (config(env_arg={}), "verifiers.env_arg is unknown"),
        (config() | {"backend": "vllm"}, "backend is 'vllm'"),
        (
            config() | {"backend": "tinker", "sampling": {"temperature": 0.7}},
            "trains only on samples of temperature 1.0",
        ),
        (
            config(sampling_args={"temperature": 0.7}) | {"backend": "tinker"},
            "trains only on samples of temperature 1.0",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(settings, problem):
    with pytest.raises(vf.ConfigError, match=problem):
        rllm.from_config(settings)


def test_without_the_peer_the_install_step_is_named():
    import importlib.util

    if importlib.util.find_spec("rllm") is not None:
        pytest.skip("rllm is installed")
    with pytest.raises(ImportError, match="rllm is not installed: pip install git"):
        rllm.VerifiersWorkflow


@pytest.mark.real
def test_the_peer_has_what_was_recorded():
    pytest.importorskip("rllm", reason="rllm is on no package index; put its source on the path")
    assert differences("rllm") == []
