"""Whole uses of a trainer whose model is split over the ranks of a test: more than one training
from its beginning."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from support import ranks_work
from support.ranks_work import group
from support.split import as_launched, digest, share_of, train
from support.training import (
    metrics_of,
    rows,
    run,
    small_config,
    small_policy,
    small_trainer,
    toy_env,
)
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm import old_logprobs
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.algorithm.samples import NOT_SAMPLED
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.pipeline.warmup import warm_up
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer


def launched(**split: Any) -> None:
    """Set what the launcher sets, where there are several ranks."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        as_launched(**split)


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return dict(fsdp.whole_tensors(trainer.model, trained_only=True))


def numbers(weights: dict[str, torch.Tensor]) -> list[float]:
    return torch.cat([tensor.flatten() for tensor in weights.values()])[::50].tolist()


def ended(trainer: Any, **facts: Any) -> dict[str, Any]:
    """What a rank tells of a finished training; every rank calls it."""
    weights = whole_weights(trainer)
    if trainer.ranks.is_main:
        lines = [row for row in metrics_of(trainer.args.folder) if "loss" in row]
    else:
        lines = []
    trainer.ranks.gather([0.0], "the end")  # the store ends with rank 0's process
    return {
        "weights": digest(weights),
        "values": numbers(weights),
        "share": share_of(trainer.model),
        "losses": [row["loss"] for row in lines],
        **facts,
    }


# --- what a step exchanges -----------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts the calls of collectives, and the bytes that arrive by a ring, of large tensors."""

    SHARES = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "allreduce_": 0}
    """Collective of torch -> which of its arguments is whole."""

    def __init__(self, least_bytes: int):
        super().__init__()
        self.least_bytes, self.calls, self.bytes = least_bytes, Counter(), Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("c10d::").split(".")[0]
        if func.namespace == "c10d" and name in self.SHARES:
            whole = args[self.SHARES[name]]
            whole = whole[0] if isinstance(whole, (list, tuple)) else whole
            if (size := whole.numel() * whole.element_size()) >= self.least_bytes:
                self.calls[name] += 1
                self.bytes[name] += size * (2 if name == "allreduce_" else 1) / 2  # of two ranks
        return func(*args, **(kwargs or {}))


def counted(folder: str, is_split: bool = True, **settings: Any) -> dict[str, Any]:
    """What the second step exchanged: (calls, bytes, rows of a rank)."""
    if is_split:
        launched()
    trainer = small_trainer(Path(folder), **settings, max_steps=2)
    original, seen = trainer._backward, []

    def backward(model: Any, step: Any) -> Any:
        with Collectives(least_bytes=4096) as counting:
            loss = original(model, step)
        seen.append((dict(counting.calls), dict(counting.bytes), len(step.rows)))
        return loss

    trainer._backward = backward
    run(trainer)
    trainer.ranks.gather([0.0], "the end")
    return {"seen": seen[1]}


# --- text that nobody sampled, on one rank alone --------------------------------------------------

OF_ANOTHER_RUN = -1


def of_version(played: Group, version: int) -> Group:
    def again(turn: Turn) -> Turn:
        return Turn(turn.prompt_ids, turn.completion_ids, turn.sampler_logprobs, version)

    rollouts = [replace(r, transcript=Transcript(map(again, r.turns))) for r in played.rollouts]
    return replace(played, rollouts=tuple(rollouts))


def one_written_one_sampled() -> list[Group]:
    """Two groups that two ranks train one each: of one nobody sampled the text, the other was
    sampled by another run.

    Samples are dealt largest first into the emptiest row: 20 and 17 tokens, 19 and 18.
    """
    return [
        of_version(group(0, [17, 14]), NOT_SAMPLED),
        of_version(group(1, [16, 15]), OF_ANOTHER_RUN),
    ]


class GivenRollouts(RLTrainer):
    """Trains on rollouts that are at hand, and notes which ranks' rows need the policy of the
    batch."""

    needed: list[bool]

    def get_batch(self, epoch: int, step: int) -> list[Group]:
        return one_written_one_sampled()

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        rows = inputs.rows_R[self.ranks.rank]
        self.needed.append(
            old_logprobs.needs_old(rows, self.args.steps_per_batch, self.args.anchor)
        )
        return super().training_step(model, inputs, *args)


PAIRS = {"deterministic": True, "batch_size": 4, "rollouts_per_example": 2, "micro_batch_size": 2}


def train_given(folder: str, each_rank_decides: bool = False, **settings: Any) -> dict[str, Any]:
    """Two passes over each of two batches, as every rank decides alone or as they agree."""
    launched()
    config = small_config(
        Path(folder), **PAIRS, num_iterations=2, max_steps=4, learning_rate=1e-2, **settings
    )
    trainer = GivenRollouts(small_policy(), toy_env(), config, build_tiny_tokenizer())
    trainer.needed = []
    if each_rank_decides:
        agree = trainer.ranks.any
        trainer.ranks.any = lambda flags, what: (
            list(flags) if "old log-probabilities" in what else agree(flags, what)
        )
    trainer.train()
    return ended(trainer, needed=trainer.needed)


def train_offline(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on finished rollouts: of each prompt an answer of digits, worth 1, and one of letters,
    worth 0."""
    launched()
    prompts = [[{"role": "user", "content": row["question"]}] for row in rows(6) for _ in range(2)]
    answers = [
        [{"role": "assistant", "content": "ab" if n % 2 else "12"}] for n in range(len(prompts))
    ]
    dataset = {
        "prompts": prompts,
        "completions": answers,
        "rewards": [float(n % 2 == 0) for n in range(len(prompts))],
    }
    config = small_config(Path(folder), **PAIRS, max_steps=3, learning_rate=1e-2, **settings)
    trainer = RLTrainer(small_policy(), None, config, build_tiny_tokenizer(), dataset=dataset)
    trainer.train()
    return ended(trainer)


# --- before, between and after trainings ----------------------------------------------------------


def teach(trainer: Any) -> list[float]:
    """A supervised warm-up on every rank, until half of what it answers is digits; what it measured
    on its way."""
    rewards: list[float] = []

    def reward() -> float:
        rewards.append(trainer.evaluate(num_examples=8)["eval_reward"])
        return rewards[-1]

    warm_up(
        trainer.model,
        trainer.processing_class,
        trainer.env,
        reward=reward,
        target=0.5,
        answers=lambda row: "7",
        max_steps=40,
        rows_per_step=8,
        learning_rate=1e-2,
    )
    return rewards


def seen(trainer: Any, name: str) -> dict[str, Any]:
    """What a user sees of the present policy: its evaluation, an answer, its files; every rank
    calls it."""
    evaluated = trainer.evaluate(num_examples=8)["eval_reward"]
    answers = (
        [a[-1]["content"] for a in trainer.generate(["ab", "cd"])]
        if trainer.ranks.is_main
        else None
    )
    folder = trainer.args.folder / name
    trainer.save_model(str(folder))
    saved = load_file(folder / "model.safetensors") if trainer.ranks.is_main else None
    tensors = {n: t for n, t in fsdp.whole_tensors(trainer.model)}
    is_own = saved is None or all(torch.equal(saved[n], tensors[n]) for n in tensors)
    return {"evaluated": evaluated, "answers": answers, "is_own": is_own}


def taught_and_trained(
    folder: str, stale: bool = False, until: str = "", **settings: Any
) -> dict[str, Any]:
    """Look, warm up, look, train, look, train anew, look. ``stale``: rank 0's copy is as old as its
    last step."""
    launched()
    trainer = small_trainer(Path(folder), deterministic=True, max_steps=2, **settings)
    if stale:
        type(trainer.training_run).whole_model = property(
            lambda self: self.full_copy.model if self.full_copy else self.model
        )
    first = seen(trainer, "first")
    rewards = teach(trainer)
    taught = seen(trainer, "taught")
    if until == "taught":
        return ended(trainer, first=first, rewards=rewards, taught=taught)
    trainer.train()
    trained = seen(trainer, "trained")
    trainer.args.max_steps = 3
    trainer.train()
    again = seen(trainer, "again")
    trainer.close()
    return ended(trainer, first=first, rewards=rewards, taught=taught, trained=trained, again=again)


class BestAtFirst(RLTrainer):
    """Its evaluations say that the first step's weights are the best."""

    def evaluate(self, **_: Any) -> dict[str, float]:
        return {"eval_reward": -float(self.state.global_step)}


def best_at_first(folder: str, stale: bool = False, **settings: Any) -> dict[str, Any]:
    """Train three steps and come back to the weights of the first. ``stale``: rank 0's copy does
    not come along."""
    launched()
    each_step = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "max_steps": 3}
    config = small_config(
        Path(folder), deterministic=True, learning_rate=1e-2, **each_step, **best, **settings
    )
    trainer = BestAtFirst(small_policy(), toy_env(), config, build_tiny_tokenizer())
    if stale:
        load = trainer._load_best_model
        trainer._load_best_model = lambda: (
            load(),
            setattr(trainer.training_run, "renew", lambda **_: None),
        )
    trainer.train()
    weights = whole_weights(trainer)
    copied = dict(trainer.whole_model.named_parameters()) if trainer.ranks.is_main else weights
    saved = load_file(next(Path(folder).glob("checkpoint-1/*model.safetensors")))
    return ended(
        trainer,
        best=trainer.state.best_global_step,
        as_saved=all(
            torch.equal(tensor, saved[saved_name(name)]) for name, tensor in weights.items()
        ),
        as_sampled=all(torch.equal(tensor, copied[name]) for name, tensor in weights.items()),
    )


def spoilt(folder: str, spoil: str, **settings: Any) -> dict[str, Any]:
    """Train where the whole weights that a forward pass left are never dropped, or taken for all
    that there is."""
    if spoil == "left":
        fsdp.forget_whole = lambda model: None
    else:
        fsdp.is_split = lambda model: any(isinstance(p, DTensor) for p in model.parameters())
    return train(folder, **settings)


def saved_name(name: str) -> str:
    return name.replace(".default.", ".")


def resumed_by_the_same_trainer(folder: str, **settings: Any) -> dict[str, Any]:
    """Train two steps, and two more of the same trainer from its checkpoint."""
    launched()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = small_trainer(
        Path(folder), deterministic=True, learning_rate=1e-2, **saving, **settings
    )
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(f"{folder}/merged", merged=True)
    merged = load_file(Path(folder) / "merged/model.safetensors") if trainer.ranks.is_main else {}
    return ended(trainer, merged=numbers(merged) if merged else None)


def spoilt_on_rank_1(folder: str, spoil: str, **settings: Any) -> Any:
    """Train while something goes wrong on rank 1."""
    launched()
    trainer = small_trainer(Path(folder), max_steps=4, **settings)
    ranks_work.SPOILERS[spoil](trainer)
    trainer.train()
    return ended(trainer, step=trainer.state.global_step)
