"""``RLTrainer``: what it refuses, what it never does to weights, adapters, and the numbers it
leaves."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import verifiers as vf
from support.host_values import HostValues
from support.threads import no_new_thread
from support.training import (
    digits,
    first_batch,
    metrics_of,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
    weights_hash,
)
from verifiers.errors import (
    ConfigError,
    DatasetError,
    NoLearningSignal,
    NonFiniteLoss,
    TooManyFaults,
)
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.loading import get_tokenizer
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer

# --- constructing ---------------------------------------------------------------------------------


def test_importing_the_package_loads_no_torch_and_the_trainer_no_vllm():
    code = (
        "import sys, verifiers_trainer; sys.exit(bool({'torch', 'transformers'} &"
        " sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert "vllm" not in sys.modules


def test_constructing_starts_nothing_and_seeds_nothing(tmp_path):
    small_trainer(tmp_path / "warm")  # lazy imports of libraries happen here
    connections = len(psutil.Process().net_connections())
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(5)
    np.random.seed(5)

    with no_new_thread():
        trainer = small_trainer(tmp_path / "run", use_lora=True)

    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3) == expected[1]).all()
    assert len(psutil.Process().net_connections()) == connections
    assert trainer.engine is trainer.batches is None
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_training_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    run(small_trainer(tmp_path, max_steps=1))
    threads = {
        t for t in set(threading.enumerate()) - before if t.name.startswith(("verifiers", "vf-"))
    }
    assert threads == set()


def test_the_callers_configuration_is_not_changed(tmp_path):
    config = small_config(tmp_path, report_to="tensorboard")
    trainer = RLTrainer(small_policy(), toy_env(), config, build_tiny_tokenizer())
    trainer.args.packing = False
    assert config.packing is True
    assert config.report_to == ["tensorboard"]
    assert trainer.config is not config


def test_what_is_set_on_the_configuration_afterwards_is_what_is_trained_with(tmp_path):
    config = small_config(tmp_path)
    config.temperature = 0.5
    config.max_steps = 1
    config.eval_strategy = "steps"
    config.eval_steps = 1
    trainer = RLTrainer(small_policy(), toy_env(), config, build_tiny_tokenizer())
    batch = run(trainer)
    assert len(batch.steps) == 1
    assert trainer.batch.rows_R[0][0].inv_temperature[0] == 2
    assert any("eval_reward" in row for row in metrics_of(tmp_path))


def test_other_names_for_arguments_and_two_of_them_at_once(tmp_path):
    config, tokenizer = small_config(tmp_path), build_tiny_tokenizer()
    trainer = RLTrainer(small_policy(), toy_env(), config=config, tokenizer=tokenizer)
    assert trainer.tokenizer is trainer.processing_class is tokenizer
    with pytest.raises(ConfigError, match="config is another name of args"):
        RLTrainer(small_policy(), toy_env(), config, tokenizer, config=small_config(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"env": 3}, "env must be an environment or the id of one, not int"),
        ({"args": 3}, "args must be an RLConfig, not int"),
        ({"env": vf.SingleTurnEnv(dataset=[{"question": "a"}])}, "has no reward function"),
        ({"model": "builtin:tinny"}, "did you mean 'builtin:tiny'"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_construction(tmp_path, change, said):
    arguments = {"model": small_policy(), "env": toy_env(), "args": small_config(tmp_path)} | change
    with pytest.raises(ConfigError, match=said):
        RLTrainer(**arguments, processing_class=build_tiny_tokenizer())


def test_a_base_model_without_a_chat_template_is_trained_with_a_plain_one(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = None
    trainer = RLTrainer(small_policy(), toy_env(), small_config(tmp_path, max_steps=1), tokenizer)
    run(trainer)
    prompt = trainer.batch.groups[0].rollouts[0].turns[0].prompt_ids
    assert tokenizer.decode(prompt).startswith("User:\n")
    assert tokenizer.decode(prompt).endswith("\n\nAssistant:\n")
    trainer.save_model(str(tmp_path / "saved"))
    assert get_tokenizer(str(tmp_path / "saved")).chat_template == tokenizer.chat_template


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="empty"):
        small_trainer(tmp_path, toy_env(count=0)).train()


def test_passes_over_the_examples_decide_the_number_of_steps(tmp_path):
    config = RLConfig(
        output_dir=str(tmp_path),
        batch_size=8,
        rollouts_per_example=4,
        micro_batch_size=4,
        num_train_epochs=2,
    )
    assert (
        RLTrainer(small_policy(), toy_env(count=10), config, build_tiny_tokenizer()).args.max_steps
        == 10
    )


# --- numbers that are none ------------------------------------------------------------------------


def assert_refused(trainer, key, match=None):
    before = weights_hash(trainer.model)
    with pytest.raises(NonFiniteLoss, match=match or key) as raised:
        trainer.train()
    assert weights_hash(trainer.model) == before
    assert raised.value.key == key
    assert Path(raised.value.dump).is_file()
    assert trainer.state.global_step == 0
    assert trainer.engine is None


def poisoned(trainer, change):
    """Let ``change`` alter every batch before it is trained on."""
    plain = trainer.training_step

    def step(model, batch, *args):
        change(batch)
        return plain(model, batch, *args)

    trainer.training_step = step
    return trainer


def spoil_first_trained(name, value):
    def change(batch):
        row = batch.rows_R[0][0]
        getattr(row, name)[np.flatnonzero(row.loss_mask)[0]] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_sampled_log_probability_that_is_no_number_stops_the_run(tmp_path, value):
    assert_refused(
        poisoned(small_trainer(tmp_path), spoil_first_trained("sampler_logprobs", value)),
        "sampled log-probability",
    )


def test_an_advantage_that_is_no_number_stops_the_run(tmp_path):
    assert_refused(
        poisoned(small_trainer(tmp_path), spoil_first_trained("advantage", float("inf"))),
        "advantage",
    )


def test_what_is_no_number_where_nothing_is_trained_does_not_matter(tmp_path):
    def change(batch):
        row = batch.rows_R[0][0]
        row.sampler_logprobs[~row.loss_mask] = float("nan")

    run(poisoned(small_trainer(tmp_path, max_steps=1), change))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    def broken(row):
        return row.log_pi * float("nan")

    assert_refused(small_trainer(tmp_path, loss=broken), "loss")


def test_a_gradient_that_is_no_number_stops_the_run(tmp_path):
    def steep(row):  # finite itself, with an infinite derivative
        return (row.log_pi - row.log_pi.detach()).abs().sqrt()

    assert_refused(small_trainer(tmp_path, loss=steep), "gradient norm")


def test_a_policy_whose_log_probability_is_no_number_stops_the_run(tmp_path):
    def keep_mask_hides_it(row):
        return torch.zeros_like(row.log_pi).where(row.log_pi.isnan(), -row.log_pi)

    trainer = small_trainer(tmp_path, loss=keep_mask_hides_it)
    plain = trainer.training_step

    def step(model, batch, *args):
        model.model.norm.register_forward_hook(lambda module, args, out: out * float("nan"))
        return plain(model, batch, *args)

    trainer.training_step = step
    assert_refused(trainer, "log-probability of the policy")


def test_an_infinite_reward_stops_the_run(tmp_path):
    def change(batch):
        batch.groups[0].rollouts[0].reward = float("inf")

    assert_refused(poisoned(small_trainer(tmp_path), change), "reward")


def test_a_reward_function_that_gives_nan_is_an_unknown_reward_and_never_a_number(tmp_path):
    def sometimes(completion, **_):
        score = digits(completion)
        return float("nan") if score > 0 else score + len(completion[-1]["content"] or "")

    log = run(
        small_trainer(
            tmp_path,
            toy_env(sometimes),
            max_steps=1,
            min_group_fraction=0.5,
            max_error_fraction=1.0,
        )
    )
    assert log.steps[0]["reward/unscored"] > 0
    assert np.isfinite(log.steps[0]["loss"])


def test_a_reward_that_always_fails_ends_the_run_with_its_cause(tmp_path):
    def no_judge(completion, **_):
        raise ConnectionError("no judge here")

    trainer = small_trainer(tmp_path, toy_env(no_judge))
    with pytest.raises(TooManyFaults, match="no judge here"):
        trainer.train()
    assert trainer.engine is None


def test_rewards_that_never_differ_end_the_run(tmp_path):
    trainer = small_trainer(
        tmp_path, toy_env(lambda completion, **_: 1.0), no_signal_steps=2, oversample=1.0
    )
    with pytest.raises(NoLearningSignal, match=r"rewards: 1 x"):
        trainer.train()


# --- adapters -------------------------------------------------------------------------------------


LORA = {"use_lora": True, "lora_rank": 2, "lora_alpha": 4, "learning_rate": 5e-3}


def adapter_hash(model):
    return weights_hash(
        torch.nn.ModuleList(
            [m for n, m in model.named_modules() if "lora_" in n and not list(m.children())]
        )
    )


def base_hash(model):
    return {n: p.sum().item() for n, p in model.named_parameters() if "lora_" not in n}


def test_an_adapter_trains_alone_is_saved_alone_and_resumes(tmp_path):
    settings = LORA | {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "deterministic": True,
    }
    trainer = small_trainer(tmp_path / "one", **settings)
    base, adapter = base_hash(trainer.model), adapter_hash(trainer.model)
    log = run(trainer)

    assert base_hash(trainer.model) == base
    assert adapter_hash(trainer.model) != adapter
    assert log.steps[0]["sampler/log_ratio_abs"] < 1e-4
    saved = tmp_path / "one" / "checkpoint-2"
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (saved / "model.safetensors").exists()

    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "checkpoint-1").rename(tmp_path / "two" / "checkpoint-1")
    resumed = small_trainer(tmp_path / "two", **settings)
    again = run(resumed, resume_from_checkpoint=True)
    assert again.losses == log.losses[1:]
    assert adapter_hash(resumed.model) == adapter_hash(trainer.model)


def test_merged_and_unmerged_adapters_give_the_same_log_probabilities(tmp_path):
    trainer = small_trainer(tmp_path, **LORA, max_steps=2)
    run(trainer)
    ids = torch.arange(20, device=trainer.model.device).unsqueeze(0)
    with torch.no_grad():
        unmerged = trainer.model(input_ids=ids).logits.log_softmax(-1)
        merged = trainer.model.merge_and_unload()(input_ids=ids).logits.log_softmax(-1)
    assert (unmerged - merged).abs().max() < 1e-5


def test_a_model_that_has_an_adapter_keeps_it(tmp_path):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        small_policy(), LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    trainer = small_trainer(tmp_path, model=wrapped, use_lora=True, max_steps=1)
    assert trainer.model is wrapped
    run(trainer)
    with pytest.raises(ConfigError, match="already has an adapter"):
        small_trainer(tmp_path, model=wrapped, peft_config=LoraConfig(r=1))


def test_peft_config_wins_over_the_lora_fields(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=5, target_modules=["v_proj"], task_type="CAUSAL_LM")
    trainer = small_trainer(tmp_path, peft_config=lora, **LORA)
    assert trainer.model.peft_config["default"].r == 5


def test_the_builtin_model_with_an_adapter_by_name(tmp_path):
    config = small_config(tmp_path, **LORA, max_steps=1)
    trainer = RLTrainer("builtin:tiny", toy_env(), config)
    assert len(run(trainer).steps) == 1


def test_sync_and_async_with_lag_zero_are_one(tmp_path):
    """In deterministic mode a run with lag 0 does not depend on how it is pipelined: every token is
    of its step."""
    log = run(small_trainer(tmp_path, deterministic=True, max_off_policy_steps=0, max_steps=3))
    assert all(
        step["staleness/max"] == 0 and step["sampler/log_ratio_abs"] < 1e-5 for step in log.steps
    )
    lagged = run(
        small_trainer(
            tmp_path / "again",
            deterministic=True,
            max_off_policy_steps=0,
            max_steps=3,
            max_concurrent=4,
        )
    )
    assert lagged.losses == log.losses


# --- what a run leaves ----------------------------------------------------------------------------

REQUIRED = """reward/mean reward/std reward/min reward/max reward/unscored reward/digits groups/live groups/dead
groups/dropped_stale groups/backfilled rollouts/errors rollouts/truncated rollouts/overlong rollouts/timeouts
samples/forks_per_rollout tokens/prompt tokens/completion tokens/longest tokens/trained sampler/mismatch_kl
sampler/log_ratio_abs ratio/mean ratio/max ratio/kept ratio/capped staleness/mean staleness/max loss grad_norm entropy
learning_rate time/wait_generation time/pack time/train time/pause time/step throughput/train_tokens_per_s
throughput/generated_tokens_per_s packing/rows packing/fill step policy_version time""".split()


def test_every_step_has_its_line_with_every_number(tmp_path):
    trainer = small_trainer(
        tmp_path, max_steps=3, log_completions=True, save_strategy="steps", save_steps=1
    )
    run(trainer)
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert set(REQUIRED) <= line.keys()
    assert "time/checkpoint" in lines[1]
    assert lines[0]["learning_rate"] == 1e-3
    assert trainer.last_step["loss"] == lines[-1]["loss"]
    written = sorted(path.name for path in (tmp_path / "completions").glob("step-*"))
    assert written == [f"step-{n}.jsonl" for n in (1, 2, 3)]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0]["reward/mean"] == lines[0]["reward/mean"]


def test_the_saved_model_is_an_ordinary_one(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = small_trainer(tmp_path, max_steps=1)
    run(trainer)
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert weights_hash(loaded) == weights_hash(trainer.model)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    assert not list((tmp_path / "model").glob("*.bin"))
    assert (
        trainer.model(input_ids=torch.tensor([[1, 2]], device=trainer.model.device)).logits.shape[
            -1
        ]
        == loaded.config.vocab_size
    )


def test_epoch_strategies_mean_passes_over_the_examples(tmp_path):
    run(
        small_trainer(
            tmp_path, toy_env(count=4), max_steps=5, save_strategy="epoch", eval_strategy="epoch"
        )
    )
    assert {step for step, _ in checkpoint_files.steps_in(tmp_path)} >= {2, 4}
    assert {row["step"] for row in metrics_of(tmp_path) if "eval_reward" in row} >= {2, 4}


def test_training_again_starts_afresh(tmp_path):
    trainer = small_trainer(tmp_path, max_steps=2)
    assert len(run(trainer).steps) == 2
    assert len(run(trainer).steps) == 2
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2]
    assert len(list(tmp_path.glob("earlier-1/metrics.jsonl"))) == 1


def test_gradient_checkpointing_and_dropout_do_not_change_the_gradient(tmp_path):
    plain = small_trainer(tmp_path / "a", max_steps=1, deterministic=True)
    checkpointed = small_trainer(
        tmp_path / "b", max_steps=1, deterministic=True, gradient_checkpointing=True
    )
    first, two = run(plain), run(checkpointed)
    assert checkpointed.model.is_activation_checkpointing
    assert first.losses == two.losses
    assert weights_hash(plain.model) == weights_hash(checkpointed.model)


def test_a_pass_of_the_pipeline_gives_the_batch_of_the_step(tmp_path):
    with small_trainer(tmp_path) as trainer:
        batch = first_batch(trainer)
        assert sum(len(g.rollouts) for g in batch.groups) == 8
    assert trainer.engine is None


@pytest.mark.parametrize("share_prompts", [False, True])
def test_a_row_waits_for_no_value_of_the_device(tmp_path, monkeypatch, share_prompts):
    """But for one of transformers', which looks for packed samples in the positions."""
    waits = []

    def watched(self, model, step):
        with HostValues() as seen:
            loss = backward(self, model, step)
        waits.append((len(step.rows), len(seen.names)))
        return loss

    backward = RLTrainer._backward
    monkeypatch.setattr(RLTrainer, "_backward", watched)
    for name, size in (("one", 8), ("many", 1)):
        settings = {"share_prompts": share_prompts, "micro_batch_tokens": 32 * size}
        run(small_trainer(tmp_path / name, max_steps=1, **settings))
    (few_rows, few_waits), (many_rows, many_waits) = waits
    assert many_rows >= few_rows + 2
    assert many_waits - few_waits <= many_rows - few_rows
    with HostValues() as seen:  # negative control
        bool(torch.isfinite(torch.ones(3)).all())
    assert seen.names
