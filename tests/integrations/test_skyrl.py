"""SkyRL: what the generator gives for a batch, over a real server. The peer's own validator:
``tests/real``."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import verifiers as vf
from support.integration_envs import tool_env
from support.peer_double import install
from verifiers.errors import RunError
from verifiers.testing import ByteTokenizer, FakeServer
from verifiers_integrations import skyrl, skyrl_data, skyrl_entrypoint
from verifiers_integrations.common import limit

SAMPLING = {
    "max_tokens": 64, "temperature": 0.9, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 1, "logprobs": 0,
    "stop": None, "skip_special_tokens": True, "include_stop_str_in_output": True,
}  # fmt: skip
TOKENS = ByteTokenizer()


class Interface:
    """SkyRL's interface has one abstract method."""


def counted(responses, rewards, env_metrics=None, env_classes=None, loss_masks=None):
    if env_classes is not None:
        raise ValueError(f"No registered env with id: {env_classes[0]}")
    assert len(responses) == len(rewards) == len(loss_masks)
    return {"generate/avg_num_tokens": sum(map(len, responses)) / len(responses)}


@pytest.fixture(autouse=True)
def double(monkeypatch):
    install(monkeypatch, "skyrl", GeneratorInterface=Interface, get_rollout_metrics=counted)
    skyrl._generator_class.cache_clear()


def plays(request):
    """Calls the tool, then says what it gave; an example whose number is 3 breaks the server."""
    last = request.prompt[-1]
    if request.sampling_args.get("max_completion_tokens") == 3:
        return vf.Response(vf.AssistantMessage("cut"), "length")
    if last["role"] == "tool":
        return str(last["content"])
    number = int(str(last["content"]).split()[0])
    if number == 3:
        raise RuntimeError("this example breaks the server")
    return vf.AssistantMessage(
        "", tool_calls=[vf.ToolCall("c", "add", json.dumps({"a": number, "b": 1}))]
    )


@pytest.fixture
def server():
    with FakeServer(plays, tokens=True) as server:
        yield server


@pytest.fixture
def generate(monkeypatch, server):
    """Plays a batch: the output, and the environment's batch of (example, siblings)."""

    async def generated(env, examples, siblings=2, sampling=SAMPLING, phase="train", **config):
        monkeypatch.setattr(skyrl, "environment", lambda env_id, env_args: env)
        rows = [skyrl_data._row(task, "e", "{}", phase) for task in limit(env, None)[0]]
        batch = {name: [] for name in ("prompts", "env_extras", "env_classes", "trajectory_ids")}
        # siblings far apart: they belong together by their ids alone
        for sibling in range(siblings):
            for example in examples:
                row = dict(rows[example])
                batch["prompts"].append(row.pop("prompt"))
                batch["env_classes"].append(row.pop("env_class"))
                batch["env_extras"].append(row)
                batch["trajectory_ids"].append(
                    SimpleNamespace(instance_id=str(example), repetition_id=sibling)
                )
        batch |= {
            "sampling_params": sampling,
            "batch_metadata": SimpleNamespace(training_phase=phase),
        }
        defaults = {
            "step_wise_trajectories": False,
            "zero_reward_on_non_stop": False,
            "apply_overlong_filtering": False,
        }
        engines = SimpleNamespace(get_endpoint_url=lambda: server.url.removesuffix("/v1"))
        generator = skyrl.VerifiersGenerator(
            SimpleNamespace(**{**defaults, **config}), TOKENS, engines, "policy"
        )
        return await generator.generate(batch), batch

    return generated


async def test_rows_come_in_the_order_of_the_prompts_with_the_servers_ids(generate, server):
    output, _ = await generate(tool_env(), [2, 0, 1])
    assert [trajectory_id.instance_id for trajectory_id in output["trajectory_ids"]] == [
        "2",
        "0",
        "1",
    ] * 2
    assert output["rewards"] == [1.0] * 6
    text = TOKENS.decode(output["prompt_token_ids"][0] + output["response_ids"][0])
    assert "2 + 1" in text
    for position, (ids, mask, logprobs) in enumerate(
        zip(output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True)
    ):
        assert len(ids) == len(mask) == len(logprobs)
        sampled = TOKENS.decode([token for token, on in zip(ids, mask, strict=True) if on])
        number = (2, 0, 1)[position % 3]
        assert f'a\\": {number}' in sampled
        assert sampled.endswith(f"{number + 1}{TOKENS.eos_token}")
        assert all(value < 0 for value, on in zip(logprobs, mask, strict=True) if on)
        assert all(value == 0 for value, on in zip(logprobs, mask, strict=True) if not on)
    assert output["stop_reasons"] == ["stop"] * 6
    assert output["rollout_metrics"]["vf/right"] == 1.0
    assert output["is_last_step"] is None
    asked = server.requests[0]
    assert (asked["temperature"], asked["max_completion_tokens"], asked["model"]) == (
        0.9,
        64,
        "policy",
    )
    assert "skip_special_tokens" not in asked
    # sent, or the server would take the defaults of the model's files
    assert (asked["top_k"], asked["min_p"], asked["top_p"]) == (-1, 0.0, 1.0)


async def test_an_unknown_reward_has_the_mean_of_its_siblings_and_no_loss(generate):
    seen = []

    def right(completion):
        seen.append(completion)
        if len(seen) == 2:
            raise ValueError("no judge")
        return float(len(seen))

    output, _ = await generate(tool_env(funcs=[right]), [0], siblings=3)
    rewards_known = sorted(
        reward
        for reward, mask in zip(output["rewards"], output["loss_masks"], strict=True)
        if any(mask)
    )
    (unknown,) = [n for n, mask in enumerate(output["loss_masks"]) if not any(mask)]
    assert output["rewards"][unknown] == pytest.approx(sum(rewards_known) / 2)
    assert output["rollout_metrics"]["vf/unscored"] == pytest.approx(1 / 3)


async def test_a_failure_is_its_own_rollouts(generate, caplog):
    output, _ = await generate(tool_env(), [0, 3], siblings=1)
    assert [any(mask) for mask in output["loss_masks"]] == [True, False]
    assert output["stop_reasons"] == ["stop", "error"]
    assert output["response_ids"][1] == [TOKENS.eos_token_id]
    assert "3 + 1" in TOKENS.decode(output["prompt_token_ids"][1])
    assert "1 of 2 rollouts failed" in caplog.text


async def test_a_training_batch_of_failures_stops_and_an_evaluation_does_not(generate):
    with pytest.raises(RunError, match=r"every token of this batch is masked.*ModelUnavailable"):
        await generate(tool_env(), [3])
    output, _ = await generate(tool_env(), [3], phase="eval")
    assert output["rewards"] == [0.0, 0.0]


async def test_training_without_log_probabilities_is_refused(generate):
    without = {**SAMPLING, "logprobs": None}
    with pytest.raises(vf.ConfigError, match="logprobs=0"):
        await generate(tool_env(), [0], sampling=without)
    assert (await generate(tool_env(), [0], sampling=without, phase="eval"))[0]["rewards"] == [
        1.0,
        1.0,
    ]


class Forgets(vf.MultiTurnEnv):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        turn = len(state["trajectory"])
        return [{"role": "user", "content": f"{turn} {messages[-1]['content']}"}]

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "more"}]


async def test_a_fork_is_a_step_each_and_the_last_carries_the_reward(generate, server):
    env = Forgets(max_turns=2, dataset=[{"question": "0"}], rubric=vf.Rubric(funcs=[lambda: 0.5]))
    with pytest.raises(vf.ConfigError, match=r"2 token samples.*step_wise_trajectories=true"):
        await generate(env, [0])
    output, _ = await generate(env, [0], step_wise_trajectories=True)
    assert output["is_last_step"] == [False, True] * 2
    assert output["rewards"] == [0.0, 0.5] * 2
    assert [trajectory_id.repetition_id for trajectory_id in output["trajectory_ids"]] == [
        0,
        0,
        1,
        1,
    ]


async def test_the_generators_settings_keep_their_meaning(generate):
    env = vf.SingleTurnEnv(dataset=[{"question": "0 + 1"}], rubric=vf.Rubric(funcs=[lambda: 1.0]))
    short = {**SAMPLING, "max_tokens": 3}
    plain, _ = await generate(env, [0], sampling=short)
    assert set(plain["stop_reasons"]) == {"length"}
    assert plain["rewards"] == [1.0, 1.0]
    zeroed, _ = await generate(
        env, [0], sampling=short, zero_reward_on_non_stop=True, apply_overlong_filtering=True
    )
    assert zeroed["rewards"] == [0.0, 0.0]
    assert not any(any(mask) for mask in zeroed["loss_masks"])


def test_rubrics_may_compare_siblings_and_rows_of_others_are_refused():
    assert skyrl._groups({"prompts": [1, 2], "trajectory_ids": None}) == [[0], [1]]
    with pytest.raises(vf.ConfigError, match="no column 'verifiers'"):
        skyrl.task_of([], {"answer": "x"})


def test_the_rows_of_an_environment(tmp_path, capsys):
    skyrl_entrypoint.main(["export", "tool-test", str(tmp_path), "--max-samples", "3"])
    assert capsys.readouterr().out.split() == [
        str(tmp_path / name) for name in ("eval.parquet", "train.parquet")
    ]
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert {"answer", "task", "environment", "info"} <= rows[0]["verifiers"].keys()
    env = vf.load_environment("tool-test")
    tasks = limit(env, 3)[0]
    assert [skyrl.task_of(row["prompt"], row) for row in rows] == tasks
    assert (
        skyrl.environment(
            rows[0]["verifiers"]["environment"], rows[0]["verifiers"]["env_args"]
        ).env_id
        == "tool-test"
    )


def test_the_entrypoint_gives_skyrl_our_generator(monkeypatch):
    made = {}

    class Experiment:
        def __init__(self, cfg):
            self.cfg = cfg

        def run(self):
            made["generator"] = self.get_generator(self.cfg, TOKENS, "engines")

    install(
        monkeypatch, "skyrl", GeneratorInterface=Interface, BasePPOExp=Experiment,
        resolve_policy_model_name=lambda cfg: "policy",
    )  # fmt: skip
    skyrl._generator_class.cache_clear()
    skyrl_entrypoint.run(SimpleNamespace(generator="its settings"))
    generator = made["generator"]
    assert (generator.generator_cfg, generator.model, generator.engines) == (
        "its settings",
        "policy",
        "engines",
    )
    assert isinstance(generator, Interface)
