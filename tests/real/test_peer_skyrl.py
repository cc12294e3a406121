"""The real SkyRL: our generator in its types, over a real endpoint, judged by its own validator and
metrics.

Run by ``python3 tests/real/peers.py skyrl``. On Python 3.11 SkyRL's types need
``typing_extensions``' TypedDict.
"""

import json
import sys
import typing
from types import SimpleNamespace

import pytest
import typing_extensions

pytest.importorskip("skyrl", reason="skyrl is not installed: python3 tests/real/peers.py skyrl")

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.inference_servers.engine_utils import (
    get_sampling_params_for_backend,
)
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.utils.trainer_utils import validate_generator_output

import verifiers as vf
from support.embedded import serving
from support.peer_double import differences
from verifiers.testing import ByteTokenizer, FakeServer
from verifiers_integrations.skyrl import VerifiersGenerator, export_dataset
from verifiers_trainer.engines.http.endpoint import Address
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.slow]

SIBLINGS = 3
TOKENS = ByteTokenizer()


@pytest.fixture(scope="module")
def env():
    return vf.load_environment("tool-test", num_train_examples=4, num_eval_examples=2)


@pytest.fixture
def server(env):
    """Solves tool-test; example 1 breaks the server, example 2 is answered without a call."""
    rows = {row["prompt"][-1]["content"]: row for row in env.get_dataset()}

    def answer(request):
        if request.prompt[-1]["role"] == "tool":
            return "done"
        row = rows[request.prompt[-1]["content"]]
        if row["example_id"] == 1:
            raise RuntimeError("this example breaks the server")
        if row["example_id"] == 2:
            return "I call nothing"
        info = json.loads(row["info"]) if isinstance(row["info"], str) else row["info"]
        calls = [(call["name"], call["arguments"]) for call in info["calls"]]
        texts = [
            (name, said if isinstance(said, str) else json.dumps(said)) for name, said in calls
        ]
        return vf.AssistantMessage(
            "", tool_calls=[vf.ToolCall(f"c{n}", *call) for n, call in enumerate(texts)]
        )

    with FakeServer(answer, tokens=True) as server:
        yield server


def batch_of(folder, config, examples):
    """SkyRL's own path from our file to a generator's input."""
    data = PromptDataset(str(folder / "train.parquet"), TOKENS, 8000, num_workers=1)
    rows = data.collate_fn([data[example] for example in examples])
    sampling = get_sampling_params_for_backend("vllm", config.generator.sampling_params)
    made, _ = prepare_generator_input(rows, SIBLINGS, sampling, "verifiers", "train", 1)
    return made


def test_the_peer_has_what_was_recorded():
    assert differences("skyrl") == []


async def test_its_validator_accepts_what_the_generator_gives(tmp_path, env, server):
    export_dataset(env, tmp_path)
    config = SkyRLTrainConfig.from_cli_overrides(["generator.sampling_params.logprobs=0"])
    batch = batch_of(tmp_path, config, [0, 1, 2, 3])
    engines = SimpleNamespace(get_endpoint_url=lambda: server.url.removesuffix("/v1"))
    generator = VerifiersGenerator(config.generator, TOKENS, engines, "policy")
    assert isinstance(generator, GeneratorInterface)
    output = await generator.generate(batch)
    validate_generator_output(len(batch["prompts"]), output)
    assert output["rewards"][:3] == [1.0] * 3
    assert [any(mask) for mask in output["loss_masks"]] == [True] * 3 + [False] * 3 + [True] * 6
    assert output["rewards"][6:9] == [0.0] * 3
    assert output["stop_reasons"][3:6] == ["error"] * 3
    assert output["trajectory_ids"] == batch["trajectory_ids"]
    assert output["rollout_metrics"]["vf/error"] == pytest.approx(0.25)
    assert output["rollout_metrics"]["generate/avg_num_tokens"] > 0


class Talks(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [{"role": "user", "content": "more"}]


async def test_on_the_embedded_engine_its_rows_are_what_a_real_model_sampled(tmp_path, monkeypatch):
    """Also: the engine runs on the older transformers that SkyRL brings (5.8)."""
    talks = Talks(
        max_turns=2,
        dataset=[{"question": "a"}, {"question": "b"}],
        rubric=vf.Rubric(funcs=[lambda: 1.0]),
    )
    export_dataset(talks, tmp_path, env_id="talks")
    monkeypatch.setattr("verifiers_integrations.skyrl.environment", lambda env_id, env_args: talks)
    words = [
        "generator.sampling_params.logprobs=0",
        "generator.sampling_params.max_generate_length=6",
    ]
    # a random model's text is not always the tokens it sampled
    words += ["generator.step_wise_trajectories=true"]
    config = SkyRLTrainConfig.from_cli_overrides(words)
    batch = batch_of(tmp_path, config, [0, 1])
    with serving(address=Address(api_key="none")) as engine:  # SkyRL's own endpoint asks for no key
        engines = SimpleNamespace(get_endpoint_url=lambda: engine.base_url.removesuffix("/v1"))
        generator = VerifiersGenerator(
            config.generator, build_tiny_tokenizer(), engines, engine.served_model
        )
        output = await generator.generate(batch)
    validate_generator_output(len(batch["prompts"]), output, step_wise=True)
    assert sum(output["is_last_step"]) == len(batch["prompts"])
    sampled = 0
    for ids, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs)
        assert all(value < 0 for value, on in zip(logprobs, mask, strict=True) if on)
        sampled += sum(mask)
    assert 2 * len(batch["prompts"]) <= sampled <= 12 * len(batch["prompts"]), (
        "two turns of at most six tokens"
    )


class Forgets(vf.MultiTurnEnv):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return [
            {"role": "user", "content": f"{len(state['trajectory'])} {messages[-1]['content']}"}
        ]

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "more"}]


async def test_its_validator_accepts_forks_as_steps(tmp_path, monkeypatch):
    forgets = Forgets(
        max_turns=2,
        dataset=[{"question": "a"}, {"question": "b"}],
        rubric=vf.Rubric(funcs=[lambda: 0.5]),
    )
    export_dataset(forgets, tmp_path, env_id="forgets")
    monkeypatch.setattr(
        "verifiers_integrations.skyrl.environment", lambda env_id, env_args: forgets
    )
    words = ["generator.sampling_params.logprobs=0", "generator.step_wise_trajectories=true"]
    config = SkyRLTrainConfig.from_cli_overrides(words)
    batch = batch_of(tmp_path, config, [0, 1])
    with FakeServer("so it is", tokens=True) as server:
        engines = SimpleNamespace(get_endpoint_url=lambda: server.url.removesuffix("/v1"))
        output = await VerifiersGenerator(config.generator, TOKENS, engines, "policy").generate(
            batch
        )
    validate_generator_output(len(batch["prompts"]), output, step_wise=True)
    assert len(output["response_ids"]) == 2 * len(batch["prompts"])
