"""A model that DeepSpeed splits over two processes trains as one process trains it, and comes back
from its files."""

import json
import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from support import split, zero_runs
from support.ranks import on_ranks, results
from support.training import small_policy, small_trainer
from support.training_child import child_context
from verifiers.errors import ConfigError
from verifiers.runtime.install_lines import install_line
from verifiers_trainer.distributed import deepspeed, fsdp
from verifiers_trainer.policy import checkpoint_files

RUN = {"deterministic": True, "max_steps": 3, "max_off_policy_steps": 0, "max_grad_norm": 0.01}
RUN |= {"micro_batch_size": 1, "max_seq_len": 32}  # so a step has several rows on each rank


def needs_deepspeed():
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")


@pytest.fixture(scope="module")
def children():
    needs_deepspeed()
    return child_context()


@pytest.fixture
def on(children, tmp_path):
    """Train on some ranks, split where they are several, in a folder of that name."""

    def call(name="run", world=2, failpoint="", work=zero_runs.train, **settings):
        folder = tmp_path / name
        ended = on_ranks(
            children, folder, work, str(folder), world=world, failpoint=failpoint, **settings
        )
        return ended if failpoint else results(ended)

    return call


KINDS = {
    "stage 3": {"persist": False},
    "stage 3, small parameters whole": {},
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1},
    "stage 3, offloaded": {"offload": "cpu"},
    "stage 2, offloaded": {"stage": 2, "offload": "cpu"},
    "stage 3, lora": {"use_lora": True, "persist": False},
    "stage 1, lora": {"use_lora": True, "stage": 1},
    "stage 3, reference": {"beta": 0.1, "persist": False},
    "stage 3, reference that follows": {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "persist": False,
    },
    "stage 2, reference that follows": {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "stage": 2,
    },
    "stage 3, lora, reference": {"use_lora": True, "beta": 0.1, "persist": False},
    "stage 3, recomputed anchor": {
        "loss": "ppo",
        "anchor": "recomputed",
        "num_iterations": 2,
        "max_steps": 4,
        "persist": False,
    },
    "stage 3, gradient checkpointing": {"gradient_checkpointing": True, "persist": False},
    "stage 3, shared prompts": {"share_prompts": True, "persist": False},
}


def unsplit(settings):
    return {
        name: value
        for name, value in settings.items()
        if name not in ("stage", "persist", "offload", "half")
    }


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "stage 3" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_two_ranks_that_share_the_model_are_as_one(on, kind):
    settings = RUN | KINDS[kind]
    first, second = on(**settings)
    (single,) = on("one", world=1, **unsplit(settings))

    assert min(first["rows"]) >= 4
    assert first["share"] < 0.6 if settings.get("stage", 3) == 3 else first["share"] == 1
    split.require_as_one(first, second, single, has_penalty="beta" in settings)


@pytest.mark.slow
def test_a_step_with_every_row_would_be_another_run(on):
    """Negative control: DeepSpeed steps inside a backward pass, so it must be told which of a
    step's is the last."""
    first, _ = on(spoil="a step with every row", persist=False, **RUN)
    (single,) = on("one", world=1, **RUN)
    assert not np.allclose(first["values"], single["values"], rtol=1e-3, atol=2e-6)


@pytest.mark.slow
def test_a_second_run_of_the_same_trainer_goes_on_with_the_same_weights(on):
    first, _ = on(again=2, persist=False, **RUN)
    (single,) = on("one", world=1, again=2, **RUN)
    np.testing.assert_allclose(first["values"], single["values"], rtol=1e-3, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 1])
def test_the_best_checkpoint_is_taken_back_at_the_end(on, tmp_path, stage):
    first, second = on(stage=stage, evaluating=True, **SAVING)
    saved = load_file(tmp_path / "run/saved/model.safetensors")
    best = load_file(tmp_path / f"run/checkpoint-{first['best']}/model.safetensors")
    assert saved.keys() == best.keys()
    assert all((saved[name] == best[name]).all() for name in best)
    assert first["weights"] == second["weights"]


@pytest.mark.slow
def test_without_the_renewal_of_rank_0s_copy_the_sampler_falls_behind(children, tmp_path):
    """By so much that the check of the first batch of a new version ends the run."""
    settings = {"spoil": "copy never renewed", **RUN, "learning_rate": 1e-2}
    ended = on_ranks(children, tmp_path, zero_runs.train, str(tmp_path), world=2, **settings)
    for rank in ended:
        assert rank.result[0] == "ConfigError", rank
        assert "with identical weights (version 1), sampler and trainer disagree" in rank.result[1]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 1])
def test_gradients_that_are_no_numbers_stop_the_run_and_change_no_weight(on, stage):
    for rank in on(work=zero_runs.stopped_by_a_gradient, stage=stage):
        kind, said = rank["raised"]
        assert (kind, "gradient norm" in said) == ("NonFiniteLoss", True), rank
        assert not rank["moved"]


# --- checkpoints ----------------------------------------------------------------------------------

SAVING = {
    "deterministic": True,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_off_policy_steps": 1,
}

HALF = {
    "stage 3, bfloat16": {"half": True},
    "stage 1, bfloat16": {"half": True, "stage": 1},
    "stage 2, bfloat16, reference that follows": (
        KINDS["stage 2, reference that follows"] | {"half": True}
    ),
}
"""As on GPUs: the trainer itself computes in float32 on a CPU, so the ranks are made to do
otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "stage 3",
        "stage 1",
        "stage 3, lora",
        "stage 3, offloaded",
        "stage 2, offloaded",
        "stage 3, reference that follows",
        "stage 2, reference that follows",
        "stage 3, bfloat16",
        "stage 1, bfloat16",
        "stage 2, bfloat16, reference that follows",
    ],
)
def test_killed_while_it_saves_a_split_run_ends_with_the_same_weights(on, kind):
    settings = SAVING | KINDS.get(kind, HALF.get(kind))
    uninterrupted, _ = on("whole", **settings)
    ended = on("killed", failpoint="checkpoint.before_rename:2", **settings)
    assert -9 in [e.exit_code for e in ended]
    again, second_rank = on("killed", resume=True, **settings)
    assert again["weights"] == second_rank["weights"] == uninterrupted["weights"]
    assert again["losses"] == uninterrupted["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALF)
def test_in_bfloat16_losses_and_norms_are_nearly_those_of_float32(on, kind):
    first, second = on(**SAVING | HALF[kind])
    (single,) = on("one", world=1, **SAVING | unsplit(HALF[kind]))
    assert first["dtypes"] == ["torch.bfloat16"]
    assert first["weights"] == second["weights"]
    np.testing.assert_allclose(first["losses"][:2], single["losses"][:2], rtol=0.05, atol=1e-3)
    np.testing.assert_allclose(first["norms"][:2], single["norms"][:2], rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stage 3", "stage 2", "stage 3, lora"])
def test_a_checkpoint_is_plain_files_that_do_not_show_how_the_run_was_split(on, tmp_path, kind):
    on(**SAVING | KINDS[kind])
    on("one", world=1, **SAVING | unsplit(KINDS[kind]))
    here, there = (tmp_path / name / "checkpoint-4" for name in ("run", "one"))
    assert {path.suffix for path in here.iterdir()} <= {
        ".json",
        ".jsonl",
        ".safetensors",
        ".jinja",
        ".md",
    }
    assert {p.name for p in here.iterdir()} - {p.name for p in there.iterdir()} == {
        "rng_1.safetensors"
    }
    assert json.loads((here / "optimizer.json").read_text()) == json.loads(
        (there / "optimizer.json").read_text()
    )
    weights = next(path.name for path in here.glob("*model.safetensors"))
    for name in (weights, "optimizer.safetensors"):
        ours, theirs = load_file(here / name), load_file(there / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            np.testing.assert_allclose(
                tensor, theirs[key], rtol=1e-3, atol=2e-6, err_msg=f"{name}: {key}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stage 3", "stage 2", "stage 3, lora"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_from_it(on, kind, before, after):
    def settings(world):
        return SAVING | (KINDS[kind] if world > 1 else unsplit(KINDS[kind]))

    (single,) = on("one", world=1, **settings(1))
    on("moved", world=before, **settings(before) | {"max_steps": 2})
    moved = on("moved", world=after, resume=True, **settings(after))[0]
    np.testing.assert_allclose(moved["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved["values"], single["values"], rtol=1e-3, atol=2e-6)


def test_a_checkpoint_with_an_empty_group_of_parameters_is_read(tmp_path):
    """Optimizers had one in earlier runs with an adapter; DeepSpeed cannot have any."""

    def made(*sizes):
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    optimizer, scheduler = made(1, 0)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    checkpoint_files.save_optimizer(tmp_path, optimizer)
    checkpoint_files.save_scheduler(tmp_path, scheduler)

    again, its = made(1)
    checkpoint_files.load_optimizer(tmp_path, again)
    checkpoint_files.load_scheduler(tmp_path, its)
    assert (
        again.state_dict()["state"][0]["exp_avg"].tolist()
        == optimizer.state_dict()["state"][0]["exp_avg"].tolist()
    )
    its.step()
    scheduler.step()
    assert its.get_last_lr() == scheduler.get_last_lr()[:1] == [pytest.approx(0.1 / 3)]


@pytest.mark.slow
def test_another_way_of_splitting_goes_on_from_it(on):
    (single,) = on("one", world=1, **SAVING)
    on("moved", stage=3, **SAVING | {"max_steps": 2})
    moved, _ = on("moved", work=split.train, resume=True, **SAVING)
    np.testing.assert_allclose(moved["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved["values"], single["values"], rtol=1e-3, atol=2e-6)


# --- models that are read under a configuration of DeepSpeed --------------------------------------


@pytest.mark.slow
def test_models_are_read_whole_after_the_settings_are_made(on, tmp_path):
    small_policy().save_pretrained(tmp_path / "run" / "model")
    (result,) = on(work=zero_runs.loaded_under_a_config, world=1)
    assert result == {"split": False, "would": False, "plugin": True}


@pytest.mark.slow
def test_a_model_that_was_split_when_it_was_made_is_refused_with_what_to_do(on):
    (result,) = on(work=zero_runs.made_split, world=1)
    kind, said = result["raised"]
    assert kind == "ConfigError"
    assert "the model is split already, by deepspeed.zero.Init: give its name" in said


# --- what the configuration of DeepSpeed may say --------------------------------------------------


def settings(**changed):
    return SimpleNamespace(
        **{"max_grad_norm": 0.01, "world_size": 2, "bf16": False, "fp16": False} | changed
    )


def config(stage=3, **changed):
    return {"zero_optimization": {"stage": stage}, **changed}


def test_the_trainers_clipping_and_accumulation_win_with_a_warning(caplog):
    ds_config = config(gradient_clipping=1.0, gradient_accumulation_steps=4)
    with caplog.at_level(logging.WARNING):
        deepspeed.settle(ds_config, settings())
    assert (ds_config["gradient_clipping"], ds_config["gradient_accumulation_steps"]) == (0.01, 1)
    assert "gradient_clipping is 0.01 (max_grad_norm); its configuration has 1.0" in caplog.text
    assert (
        "gradient_accumulation_steps is 1 (one step per batch); its configuration has 4"
        in caplog.text
    )

    caplog.clear()
    deepspeed.settle(
        config(gradient_clipping="auto", gradient_accumulation_steps="auto"), settings()
    )
    assert not caplog.text


def test_half_precision_sums_gradients_in_float32():
    ds_config = config()
    deepspeed.settle(ds_config, settings(bf16=True))
    assert ds_config["bf16"]["enabled"]
    assert (ds_config["communication_data_type"], ds_config["data_types"]["grad_accum_dtype"]) == (
        "fp32",
        "fp32",
    )


@pytest.mark.parametrize(
    ("ds_config", "changed", "said"),
    [
        (config(stage=0), {}, "zero_stage 0 splits nothing: set it to 1, 2 or 3"),
        (
            config(optimizer={"type": "Adam"}),
            {},
            "section 'optimizer', which the trainer ignores: remove it",
        ),
        (config(scheduler={"type": "WarmupLR"}), {}, "section 'scheduler'"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            {},
            "offload_param_device 'nvme' is not supported: set it to cpu or none",
        ),
        (config(), {"fp16": True}, "fp16 is not supported under DeepSpeed: use bf16"),
    ],
)
def test_what_cannot_work_is_refused_by_name_with_what_to_do(ds_config, changed, said):
    with pytest.raises(ConfigError, match=said):
        deepspeed.settle(ds_config, settings(**changed))


def test_one_process_on_a_cpu_is_not_split_and_told_so(caplog):
    state = SimpleNamespace(distributed_type=DistributedType.NO)
    with caplog.at_level(logging.WARNING):
        assert not deepspeed.adopt(
            SimpleNamespace(state=state), SimpleNamespace(deepspeed_plugin=object())
        )
    assert "one process on a CPU splits nothing" in caplog.text


def test_without_deepspeed_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fsdp.require_launchable((None, None))
    monkeypatch.setenv(deepspeed.FLAG, "true")
    with pytest.raises(
        ConfigError, match=re.escape(install_line("verifiers-trainer", "deepspeed"))
    ):
        fsdp.require_launchable((None, None))


def test_an_optimizer_cannot_be_given_for_parameters_that_will_be_emptied(monkeypatch, tmp_path):
    needs_deepspeed()
    monkeypatch.setenv(deepspeed.FLAG, "true")
    fsdp.require_launchable((None, None))
    with pytest.raises(ConfigError, match="optimizers= is not supported under DeepSpeed"):
        small_trainer(tmp_path, optimizers=(object(), None))


@pytest.mark.slow
def test_where_it_is_installed_and_not_used_it_says_nothing_on_stdout():
    """accelerate imports it in every training, and what a command prints there may be read by a
    program."""
    needs_deepspeed()

    def said(preamble):
        words = [
            sys.executable,
            "-c",
            f"{preamble}; import deepspeed.accelerator as a; a.get_accelerator()",
        ]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert said("import verifiers_trainer.distributed.deepspeed") == ""
    if not torch.cuda.is_available():
        assert "Setting accelerator to CPU" in said("pass")
