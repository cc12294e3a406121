"""Tinker: client, data, trainer, resume and command against a small service that learns. Real one:
``tests/real``."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import verifiers as vf
from support.integration_envs import ScriptedTokens, tool_env
from support.peer_double import install
from support.running_baseline import BASELINE
from support.tinker_service import REPLACED, Service
from verifiers.errors import CheckpointError, ModelError, RunError, RunMismatch
from verifiers.rollouts.turn import Turn
from verifiers.types import ModelRequest
from verifiers_integrations.common import generate_group, peer_task
from verifiers_integrations.tinker import TinkerClient, TinkerConfig, TinkerTrainer
from verifiers_integrations.tinker.__main__ import main, read
from verifiers_integrations.tinker.data import datum
from verifiers_integrations.tinker.settings import AsInTrainer
from verifiers_trainer.algorithm.packing import pack
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.pipeline.schedule import PipelineState
from verifiers_trainer.settings.fields import Settings


@pytest.fixture(autouse=True)
def service(monkeypatch):
    service = Service()
    install(monkeypatch, "tinker", **REPLACED, ServiceClient=service)
    return service


def letters(completion):
    """Share of lower-case letters."""
    text = completion[-1]["content"]
    return sum(letter.islower() for letter in text) / max(1, len(text))


def letters_env(**parameters):
    rows = [{"question": f"say {n}"} for n in range(6)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[letters]), **parameters)


def config(folder, **settings):
    defaults = {
        "model": "m",
        "output_dir": str(folder),
        "rollouts_per_example": 8,
        "batch_size": 32,
        "max_steps": 8,
    }
    return TinkerConfig(
        **{**defaults, "max_seq_len": 64, "max_tokens": 8, "save_steps": 100, **settings}
    )


def trained(folder, service, resume=False, env=None, **settings):
    trainer = TinkerTrainer(env or letters_env(), config(folder, **settings), service=service)
    return trainer, trainer.train(resume_from_checkpoint=resume)


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- data


def test_a_datum_has_the_layout_of_the_service():
    turns = [Turn([1, 15], [7, 2], [-0.1, -0.7], 4), Turn([1, 15, 7, 2, 9], [8], [-0.2], 5)]
    (sample,) = rollout_samples(turns, 0.5).samples
    weights = [np.array([0, 0, 0.2, 0.2, 0, 0.2])]
    import tinker

    ((row,),) = pack([sample], weights, max_tokens=9, packing=False)
    made = datum(tinker, row)
    fields = {name: tensor.to_numpy() for name, tensor in made.loss_fn_inputs.items()}
    assert made.model_input.to_ints() == [1, 15, 7, 2, 9]
    assert fields["target_tokens"].tolist() == [15, 7, 2, 9, 8]
    assert fields["logprobs"] == pytest.approx([0, -0.1, -0.7, 0, -0.2])
    assert fields["advantages"] == pytest.approx([0, 0.1, 0.1, 0, 0.1]), (
        "advantage times weight; zero is the mask"
    )


# --- the trainer


def test_the_calls_are_in_the_services_order(tmp_path, service):
    trained(tmp_path, service, max_steps=2, max_off_policy_steps=0, save_steps=2, lora_rank=4)
    calls = [call for n, call in enumerate(service.log) if call != service.log[n - 1] or not n]
    step = ["sample", "forward_backward", "optim_step", "sampler"]
    assert calls == ["create", "sampler", *step, *step, "sample", "save_state"] or calls == [
        "create", "sampler", *step, *step, "save_state",
    ]  # fmt: skip
    assert service.made == [{"base_model": "m", "rank": 4, "seed": 42}]
    assert vars(service.adam)["learning_rate"] is None, "the SDK's default is the SDK's"


def test_it_learns(tmp_path, service):
    trained(tmp_path, service, max_off_policy_steps=0)
    rewards = [row["reward/mean"] for row in metrics(tmp_path)]
    assert rewards[-1] > rewards[0] + 0.2
    assert metrics(tmp_path)[3]["sampler/log_ratio_abs"] < 1e-6, (
        "sampler and trainer are one policy"
    )
    assert max(row["staleness/max"] for row in metrics(tmp_path)) == 0


def test_tokens_are_at_most_as_old_as_allowed(tmp_path, service):
    trained(tmp_path, service, max_off_policy_steps=1, max_steps=5)
    assert [row["staleness/max"] for row in metrics(tmp_path)] == [0, 1, 1, 1, 1]
    assert metrics(tmp_path)[2]["ratio/max"] > 1.001, (
        "negative control: an older policy has another ratio"
    )


def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(tmp_path, service):
    uncut, _ = trained(tmp_path / "whole", service, max_off_policy_steps=0)
    trained(tmp_path / "cut", service, max_off_policy_steps=0, max_steps=4)
    cut, _ = trained(tmp_path / "cut", service, resume=True, max_off_policy_steps=0)
    assert cut.training.logits == pytest.approx(uncut.training.logits, abs=1e-6)
    assert [row["step"] for row in metrics(tmp_path / "cut")] == list(range(1, 9))
    assert "restore" in service.log


def test_the_state_of_an_advantage_is_in_the_checkpoint(tmp_path, service, monkeypatch):
    (tmp_path / "tinker_baseline.py").write_text(BASELINE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, is_kept in (("RunningBaseline", True), ("Forgetful", False)):
        settings = {"advantage": f"tinker_baseline.py:{name}", "max_off_policy_steps": 0}
        uncut, _ = trained(tmp_path / name / "whole", service, **settings, max_steps=5)
        cut = tmp_path / name / "cut"
        trained(cut, service, **settings, max_steps=3)
        resumed, _ = trained(cut, service, resume=True, **settings, max_steps=5)
        same = resumed.training.logits == pytest.approx(uncut.training.logits, abs=1e-6)
        assert same == is_kept
        saved = cut / "checkpoint-3" / "algorithm.json"
        assert saved.exists() == is_kept
    counted = json.loads((tmp_path / "RunningBaseline/cut/checkpoint-3/algorithm.json").read_text())
    assert counted["advantage"]["count"] == 3 * 32
    with pytest.raises(vf.ConfigError, match="advantage cannot be used: unknown advantage 'meen'"):
        config(tmp_path, advantage="meen")


def test_without_the_place_in_the_data_it_goes_on_otherwise(tmp_path, service, monkeypatch):
    uncut, _ = trained(tmp_path / "whole", service, max_off_policy_steps=0)
    trained(tmp_path / "cut", service, max_off_policy_steps=0, max_steps=4)
    load = TinkerTrainer._load
    monkeypatch.setattr(
        TinkerTrainer, "_load", lambda self, folder: load(self, folder) and PipelineState()
    )
    cut, _ = trained(tmp_path / "cut", service, resume=True, max_off_policy_steps=0)
    assert not np.allclose(cut.training.logits, uncut.training.logits, atol=1e-3)


def test_rollouts_that_wait_are_kept_in_the_checkpoint(tmp_path, service):
    trained(tmp_path, service, max_steps=3, max_off_policy_steps=1)
    saved = json.loads((tmp_path / "checkpoint-3" / "rl_state.json").read_text())
    waiting = (tmp_path / "checkpoint-3" / "pending.jsonl").read_text().splitlines()
    assert len(waiting) + len(saved["requeue"]) > 0
    trainer, _ = trained(tmp_path, service, resume=True, max_steps=5, max_off_policy_steps=1)
    assert trainer.step == 5


def test_what_cannot_be_resumed_says_why(tmp_path, service):
    trained(tmp_path, service, max_steps=1)
    with pytest.raises(RunMismatch, match="seed was 42, is 7"):
        trained(tmp_path, service, resume=True, max_steps=2, seed=7)
    service.states.clear()
    with pytest.raises(CheckpointError, match="cannot load tinker://run/0/step-1"):
        trained(tmp_path, service, resume=True, max_steps=2)
    with pytest.raises(CheckpointError, match="holds no valid checkpoint"):
        trained(tmp_path / "other", service, resume=True)


def test_a_service_that_fails_ends_the_run_and_leaves_the_checkpoint(tmp_path, service):
    trained(tmp_path, service, max_steps=1)
    service.broken = True
    with pytest.raises(RunError, match="failed in step 2: RuntimeError: the service is down"):
        trained(tmp_path, service, resume=True, max_steps=2)
    service.broken = False
    assert trained(tmp_path, service, resume=True, max_steps=2)[0].step == 2


def test_a_run_of_an_earlier_time_is_moved_aside(tmp_path, service):
    trained(tmp_path, service, max_steps=1)
    trained(tmp_path, service, max_steps=1)
    assert (tmp_path / "earlier-1" / "checkpoint-1" / "tinker.json").exists()


def test_a_tool_environment_is_trained_on_what_the_model_said(tmp_path, service):
    env = tool_env(2, funcs=[lambda completion: len(completion[-1]["content"] or "") / 9])
    trainer, _ = trained(
        tmp_path, service, env=env, max_steps=1, max_seq_len=2048, batch_size=16, max_tokens=4
    )
    for trained_datum in trainer.training.data:
        fields = {name: tensor.to_numpy() for name, tensor in trained_datum.loss_fn_inputs.items()}
        assert 0 < np.count_nonzero(fields["logprobs"]) <= 4


# --- settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 0.7}, "temperature is 0.7"),
        ({"batch_size": 30}, "not a multiple of rollouts_per_example"),
        ({"loss": "cross_entropy"}, "loss must be .*not 'cross_entropy'"),
        ({"model": ""}, "model is missing"),
        ({"rollouts_per_example": 1}, "compares siblings"),
        ({"max_steps": 0}, "max_steps must be .*not 0"),
        # by the line of the setting of vf-train
        ({"oversample": 0.5}, "oversample must be a number from 1 to 1000, not 0.5"),
        (
            {"max_off_policy_steps": -1},
            "max_off_policy_steps must be a whole number from 0 to 16, not -1",
        ),
        ({"min_group_fraction": 2}, "min_group_fraction must be a number .*not 2"),
        ({"max_error_fraction": "all"}, "max_error_fraction must be a number .*not 'all'"),
        ({"rollout_timeout": 0}, "rollout_timeout must be a number .*, or None, not 0"),
        ({"no_signal_steps": -1}, "no_signal_steps must be a whole number .*not -1"),
    ],
)
def test_settings_are_refused_with_the_reason(tmp_path, settings, said):
    with pytest.raises(vf.ConfigError, match=said):
        config(tmp_path, **settings)


def test_every_problem_is_said_at_once_and_names_are_checked(tmp_path):
    with pytest.raises(vf.ConfigError, match=r"2 setting\(s\)"):
        config(tmp_path, temperature=2.0, max_steps=-1)
    with pytest.raises(vf.ConfigError, match="did you mean 'learning_rate'"):
        TinkerConfig.of({"model": "m", "learning_rat": 1.0})
    with pytest.raises(vf.ConfigError, match="TINKER_API_KEY only"):
        TinkerConfig.of({"model": "m", "api_key": "secret"})


def test_a_setting_that_is_none_here_has_the_default_of_the_trainer():
    settings, of_trainer = TinkerConfig(model="m"), Settings()
    assert settings.stale_policy == of_trainer.stale_policy
    for name in AsInTrainer.__annotations__.keys() - {"seed", "save_total_limit"}:
        assert getattr(settings, name) == getattr(of_trainer, name)
    with pytest.raises(AttributeError, match="TinkerConfig has no setting 'curiosity'"):
        _ = settings.curiosity
    with pytest.raises(TypeError):
        TinkerConfig(model="m", stale_policy="drop")


# --- the client


class Engine(ScriptedTokens):
    """A sampling client that plays ``tool_env``."""

    def get_tokenizer(self):
        return self.tokenizer

    async def sample_async(self, prompt, num_samples, sampling_params):
        from types import SimpleNamespace as Some

        ids, logprobs, reason = await self(prompt.to_ints(), vars(sampling_params))
        return Some(sequences=[Some(tokens=ids, logprobs=logprobs, stop_reason=reason)])


async def test_tools_work_through_the_client():
    engine, env = Engine(), tool_env(2)
    rows = [peer_task(env.get_dataset()[n]) for n in range(2)]
    made = await generate_group(
        env, rows, TinkerClient(engine, version=3), "m", {"temperature": 1.0, "max_tokens": 50}
    )
    assert [rollout["reward"] for rollout in made] == [1.0, 1.0]
    asked = engine.calls[0][1]
    assert (asked["max_tokens"], asked["temperature"]) == (50, 1.0)
    assert asked["stop"] == [engine.tokenizer.eos_token_id]


async def test_new_weights_serve_new_requests(service):
    first, second = Engine(lambda prompt: "a"), Engine(lambda prompt: "b")
    client = TinkerClient(first, version=0)
    ask = ModelRequest([{"role": "user", "content": "?"}], "m")
    before = await client.complete(ask)
    client.set_sampling_client(second, 1)
    after = await client.complete(ask)
    assert [(reply.text, reply.version) for reply in (before, after)] == [("a", 0), ("b", 1)]


async def test_what_the_service_cannot_sample_is_refused_and_lengths_are_bounded():
    client = TinkerClient(engine := Engine(lambda prompt: "a"), max_seq_len=80)
    ask = [{"role": "user", "content": "?"}]
    with pytest.raises(vf.ConfigError, match="Tinker has no sampling argument min_p"):
        await client.complete(ModelRequest(ask, "m", sampling_args={"min_p": 0.1}))
    await client.complete(ModelRequest(ask, "m", sampling_args={"stop": ["\n"]}))
    prompt_ids, asked = engine.calls[-1]
    assert asked["max_tokens"] == 80 - len(prompt_ids)
    assert asked["stop"] == ["<|im_end|>", "\n"]


async def test_a_failing_service_is_the_rollouts_failure():
    class Down(Engine):
        async def sample_async(self, **_):
            raise ConnectionError("no route")

    with pytest.raises(ModelError, match="ConnectionError: no route"):
        await TinkerClient(Down()).complete(ModelRequest([{"role": "user", "content": "?"}], "m"))


def test_a_missing_sdk_names_the_extra(monkeypatch):
    import sys

    from verifiers_integrations.tinker.client import TINKER

    monkeypatch.delitem(sys.modules, "tinker")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"packages/trainer\[tinker\]"):
        TINKER.load()


# --- the command


FILE = """
model = "m"
[env]
id = "tinker-letters"
[trainer.args]
base_url = "http://127.0.0.1:9"
rollouts_per_example = 4
batch_size = 16
max_steps = 2
max_seq_len = 64
max_tokens = 12
"""


PACKAGE = """
import verifiers as vf

def letters(completion):
    return sum(letter.islower() for letter in completion[-1]["content"]) / 9

def load_environment():
    rows = [{"question": f"say {n}"} for n in range(6)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[letters]))
"""


def test_the_command_reads_other_names_and_says_where_a_value_is_wrong(tmp_path):
    file = tmp_path / "tinker.toml"
    file.write_text(FILE, encoding="utf-8")
    words = ["@", str(file), "--trainer.args.lr", "1e-3", "--env.args.deep.level=2"]
    env_id, env_args, settings = read(words)
    assert (env_id, env_args) == ("tinker-letters", {"deep": {"level": 2}})
    assert (settings["learning_rate"], settings["max_steps"]) == (1e-3, 2)
    file.write_text(FILE.replace("max_steps = 2", 'max_stps = 2\nseed = "x"'), encoding="utf-8")
    with pytest.raises(vf.ConfigError) as caught:
        read(["@", str(file)])
    assert (
        f"{file}:9: unknown key 'max_stps' in [trainer.args], did you mean \"max_steps\"?"
        in str(caught.value)
    )
    assert f"{file}:10: seed in [trainer.args] must be a whole number, not 'x'" in str(caught.value)


def test_the_command_trains_and_goes_on(tmp_path, service, capsys, monkeypatch):
    (tmp_path / "tinker_letters.py").write_text(PACKAGE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "tinker.toml"
    file.write_text(FILE, encoding="utf-8")
    words = ["@", str(file), "--trainer.args.output_dir", str(tmp_path / "run")]
    main(words)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["output_dir"]) == (2, str(tmp_path / "run"))
    assert service.made[0] == {"base_url": "http://127.0.0.1:9"}
    main([*words, "--trainer.args.max_steps", "3"])
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert service.log.count("create") == 1
    main([*words, "--fresh"])
    assert service.log.count("create") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "m"], "env.id is missing"),
        (
            ["--model", "m", "--env.id", "reverse-text", "--wandb.project", "x"],
            "wandb.project is not a setting of a Tinker run",
        ),
        (
            ["--model", "m", "--env.id", "reverse-text", "--trainer.args.temperature", "0.5"],
            "temperature is 0.5",
        ),
    ],
)
def test_the_command_says_what_is_wrong(words, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_a_mistake_is_named_without_the_imports_that_take_seconds(warm):
    """In a child, which fails when ``transformers`` or ``torch`` was imported."""
    script = (
        "import sys\nfrom verifiers_integrations.tinker.__main__ import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as stop: print('exit code', stop.code)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    words = ["--model", "m", "--env.id", "reverse-text", "--trainer.args.temperature", "0.5"]
    child = warm.run(script, *words)
    assert (child.lines, child.returncode) == (["exit code 2"], 0), child.stderr
    assert "temperature is 0.5" in child.stderr


# --- the cookbook


async def test_a_group_for_the_cookbook(monkeypatch):
    install(monkeypatch, "tinker_cookbook")
    from verifiers_integrations.tinker import VerifiersGroupBuilder, to_trajectory_group

    env = tool_env(1, funcs=[lambda completion: 1.0])
    engine = Engine()
    rollouts = await generate_group(
        env, [peer_task(env.get_dataset()[0])] * 3, TinkerClient(engine), "m", {}
    )
    rewards = [1.0, float("nan"), 0.0]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout["reward"] = reward
    group = to_trajectory_group(rollouts)
    assert group.final_rewards_G == [1.0, 0.5, 0.0], (
        "the unknown one has the mean, so its advantage is zero"
    )
    assert [row_metrics["vf_unscored"] for row_metrics in group.metrics_G] == [0.0, 1.0, 0.0]
    first, second = group.trajectories_G[0].transitions
    assert (first.episode_done, second.episode_done) == (False, True)
    assert first.ac.tokens == engine.made[0]
    assert second.ob.to_ints()[: len(first.ob.to_ints()) + len(first.ac.tokens)] == [
        *first.ob.to_ints(),
        *first.ac.tokens,
    ]
    builder = VerifiersGroupBuilder("tool-test", {"prompt": [], "example_id": 0}, 2)
    assert pickle.loads(pickle.dumps(builder)) == builder


SHARED = (
    "pipeline/pipeline",
    "pipeline/thread",
    "pipeline/schedule",
    "pipeline/health",
    "algorithm/batch",
    "algorithm/samples",
    "algorithm/advantages",
)
"""Modules of the pipeline that Tinker's trainer has in common with the other one."""


SETTING = re.compile(r"\b(?:config|settings)\.([a-z_]+)\b(?!\()")


def test_every_setting_that_the_shared_pipeline_reads_is_there():
    import verifiers_trainer

    folder = Path(verifiers_trainer.__file__).parent
    read = {
        name
        for module in SHARED
        for name in SETTING.findall((folder / f"{module}.py").read_text(encoding="utf-8"))
    }
    # of the rows of a device, which the service has no part in
    read -= {"micro_batch_size", "use_cpu", "config"}
    assert len(read) > 20, "the modules were found and read"
    assert sorted(name for name in read if not hasattr(TinkerConfig(model="m"), name)) == []
