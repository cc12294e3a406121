"""What the ranks of a test do with a model that DeepSpeed splits over them, as
``configs/zero3.yaml`` has it split."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml

from support.split import ROOT, digest, told
from support.training import metrics_of, run, small_policy, small_trainer
from verifiers_trainer.distributed import deepspeed, fsdp
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.run import sanity_checks

NAMES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}


def as_launched(**changed: Any) -> None:
    """Set what ``accelerate launch --config_file configs/zero3.yaml`` sets for each process."""
    described = (
        yaml.safe_load((ROOT / "configs/zero3.yaml").read_text())["deepspeed_config"] | changed
    )
    os.environ.update(
        {NAMES[name]: str(value) for name, value in described.items() if name in NAMES}
    )
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_MIXED_PRECISION="bf16")


def nothing_persists(folder: Path, stage: int) -> str:
    """A DeepSpeed file under which stage 3 keeps no small parameter whole: of a small model it
    splits nothing else."""
    path = folder / "deepspeed.json"
    path.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
            }
        )
    )
    return str(path)


def share_of(model: Any) -> float:
    """The part of all parameters that this process holds between two passes."""
    fsdp.forget_whole(model)
    held = sum(
        p.ds_tensor.numel() + p.numel() if hasattr(p, "ds_id") else p.numel()
        for p in model.parameters()
    )
    return held / sum(deepspeed.size(p).numel() for p in model.parameters())


def train(
    folder: str,
    resume: bool = False,
    spoil: str = "",
    stage: int = 3,
    persist: bool = True,
    offload: str = "none",
    half: bool = False,
    again: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Train; the whole weights as every rank gathers them, and on rank 0 what was logged."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        file = {} if persist else {"deepspeed_config_file": nothing_persists(Path(folder), stage)}
        as_launched(
            zero_stage=stage, offload_optimizer_device=offload, offload_param_device=offload, **file
        )
    if settings.pop("evaluating", False):
        settings |= {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_num_examples": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_reward",
            "greater_is_better": False,
        }
    resume = resume and checkpoint_files.newest_valid(Path(folder)) is not None
    if half:
        _compute_in_half()
    trainer = small_trainer(Path(folder), **settings)
    trainer.args.ddp_timeout, trainer.args.bf16 = 60, half
    SPOILERS.get(spoil, lambda trainer: None)(trainer)
    run(trainer, resume_from_checkpoint=resume)
    lines = (
        [row for row in metrics_of(Path(folder)) if "loss" in row] if trainer.ranks.is_main else []
    )
    if again:
        trainer.args.max_steps = again
        run(trainer)
    weights = dict(fsdp.whole_tensors(trainer.model, trained_only=True))
    evaluated = trainer.evaluate(num_examples=2)["eval_reward"]
    trainer.save_model(f"{folder}/saved")
    trainer.close()
    trainer.ranks.gather([0.0], "the end")  # the store ends with rank 0's process
    return {
        **told(weights, lines, evaluated),
        "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "share": share_of(trainer.model),
        "rows": [row["packing/rows"] for row in lines],
        "best": trainer.state.best_global_step,
    }


def stopped_by_a_gradient(folder: str, stage: int) -> dict[str, Any]:
    """Let rank 1's gradient be no number in the second step; what was raised, and whether the
    weights moved by it."""
    as_launched(zero_stage=stage)
    trainer = small_trainer(Path(folder), deterministic=True, max_steps=3, max_off_policy_steps=0)
    trainer.args.ddp_timeout = 60
    plain, seen = trainer.training_step, {}

    def training_step(model: Any, batch: Any, *args: Any) -> Any:
        seen["before"] = digest(dict(fsdp.whole_tensors(trainer.model)))
        if trainer.state.global_step == 1 and trainer.ranks.rank == 1:
            trainer.model.get_input_embeddings().register_forward_hook(
                lambda module, inputs, output: (
                    output.register_hook(lambda gradient: gradient * float("nan")) and None
                )
            )
        return plain(model, batch, *args)

    trainer.training_step = training_step
    try:
        run(trainer)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        raised = [type(error).__name__, str(error)]
    trainer.ranks.gather([0.0], "the end")
    return {
        "raised": raised,
        "moved": digest(dict(fsdp.whole_tensors(trainer.model))) != seen["before"],
    }


def loaded_under_a_config(folder: str) -> dict[str, Any]:
    """A model that is read from files after the settings were made, which transformers would split
    while it reads."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import is_deepspeed_zero3_enabled

    from support.training import small_config

    as_launched()
    config = small_config(Path(folder))
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    return {
        "split": deepspeed.is_split(model),
        "would": is_deepspeed_zero3_enabled(),
        "plugin": config.deepspeed_plugin is not None,
    }


def made_split(folder: str) -> dict[str, Any]:
    """A model that was made inside ``deepspeed.zero.Init``, and what the trainer says of it."""
    import deepspeed as library

    as_launched()
    torch.distributed.init_process_group("gloo")
    deepspeed._without_compiler()
    model = small_policy()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    library.zero.Init(module=model, config_dict_or_path=config)
    try:
        small_trainer(Path(folder), model=model)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return {"raised": [type(error).__name__, str(error)]}
    return {"raised": None}


def _compute_in_half() -> None:
    settle = deepspeed.settle

    def as_on_gpus(config: dict[str, Any], settings: Any) -> None:
        settings = copy.copy(settings)
        settings.__dict__["bf16"] = True
        settle(config, settings)

    deepspeed.settle, deepspeed.in_one_precision = as_on_gpus, lambda *_: None


def _step_with_every_row(trainer: Any) -> None:
    backward, step = trainer.backward, deepspeed.step

    def backward_and_step(model: Any, loss: Any) -> None:
        deepspeed.mark(trainer.accelerator, is_last=True)
        backward(model, loss)
        step(trainer.accelerator)

    trainer.backward, deepspeed.step = backward_and_step, lambda accelerator: None
    sanity_checks.Agreement.check = (
        lambda *_: {}
    )  # it finds that a row was sampled with other weights


SPOILERS = {
    "copy never renewed": lambda trainer: setattr(trainer.training_run, "renew", lambda **_: None),
    "a step with every row": _step_with_every_row,
}
