"""What the ranks of a test do; functions here are found by name in the processes that run them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from support.tiny_vision import odd_lengths
from support.training import (
    metrics_of,
    run,
    small_config,
    small_trainer,
    toy_env,
    weights_hash,
)
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.distributed.ranks import Ranks
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.policy.logprobs import install_logprob_forward
from verifiers_trainer.trainer import RLTrainer


def train(folder: str, resume: bool = False, spoil: str = "", **settings: Any) -> dict[str, Any]:
    """Train; the hash of the weights, and on rank 0 the losses. ``spoil`` is what goes wrong, and
    where."""
    resume = resume and checkpoint_files.newest_valid(Path(folder)) is not None
    trainer = small_trainer(Path(folder), ENVIRONMENTS.get(spoil, toy_env)(), **settings)
    trainer.args.ddp_timeout = settings.get("ddp_timeout", 60)
    SPOILERS.get(spoil, lambda trainer: None)(trainer)
    before = weights_hash(trainer.model)
    try:
        run(trainer, resume_from_checkpoint=resume)
    except BaseException:  # an interrupt, too: records whether the weights moved; raised again
        Path(folder, f"unchanged-{trainer.ranks.rank}").write_text(
            str(weights_hash(trainer.model) == before)
        )
        raise
    return _ended(trainer, folder)


def train_on_images(folder: str, model: str, **settings: Any) -> dict[str, Any]:
    """Train a model that sees; as ``train``."""
    config = small_config(Path(folder), max_seq_len=128, **settings)
    trainer = RLTrainer(model, odd_lengths(), config)
    trainer.args.ddp_timeout = 60
    run(trainer)
    return _ended(trainer, folder)


def _ended(trainer: RLTrainer, folder: str) -> dict[str, Any]:
    lines = metrics_of(Path(folder)) if trainer.ranks.is_main else []
    return {
        "weights": weights_hash(trainer.model),
        "values": (
            torch.cat([p.detach().flatten() for p in trainer.model.parameters()])[::50].tolist()
        ),
        "losses": [row["loss"] for row in lines if "loss" in row],
        "ratios": [row["sampler/log_ratio_abs"] for row in lines if "loss" in row],
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "evaluations": [
            row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row
        ],
    }


KILLED_AFTER_S = 25

# --- what may go wrong ----------------------------------------------------------------------------


def no_judge(completion: Any, **_: Any) -> float:
    raise ConnectionError("no judge here")


def judged_once(completion: Any, **_: Any) -> float:
    """Scores the rollouts of the first step, and fails from then on."""
    judged_once.calls = calls = getattr(judged_once, "calls", 0) + 1  # type: ignore[attr-defined]
    return calls % 2 if calls <= 12 else no_judge(completion)


def solved(completion: Any, **_: Any) -> float:
    """Differs in the rollouts of the first step, and is best from then on."""
    solved.calls = calls = getattr(solved, "calls", 0) + 1  # type: ignore[attr-defined]
    return calls % 2 if calls <= 12 else 1.0


ENVIRONMENTS = {
    name: lambda reward=reward: toy_env(reward)
    for name, reward in (("reward", no_judge), ("judge", judged_once), ("solved", solved))
}


def at_step(trainer: Any, rank: int, step: int, act: Any) -> None:
    """Let ``rank`` do something else before its forward passes of a step."""
    plain = trainer.training_step

    def training_step(model: Any, batch: Any, *args: Any) -> Any:
        if trainer.ranks.rank == rank and trainer.state.global_step == step - 1:
            act(batch.rows_R[rank])
        return plain(model, batch, *args)

    trainer.training_step = training_step


def poison(rows: Any) -> None:
    rows[0].sampler_logprobs[np.flatnonzero(rows[0].loss_mask)[0]] = float("nan")


def fail(rows: Any) -> None:
    raise ZeroDivisionError("a bug on this rank alone")


def die_in_backward(trainer: Any) -> None:
    """Rank 1 is killed in the middle of a backward pass, while rank 0 is inside the all-reduce of
    its gradients."""
    first = next(parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    die = lambda gradient: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    at_step(trainer, 1, 2, lambda rows: first.register_hook(die))


def stop_in_backward(trainer: Any, rank: int) -> None:
    """Rank ``rank`` is stopped in a backward pass, and killed ``KILLED_AFTER_S`` later: its
    connections stay open."""
    folder = Path(trainer.args.output_dir)
    os.dup2(os.open(folder / f"stderr-{trainer.ranks.rank}", os.O_CREAT | os.O_WRONLY), 2)
    first = next(parameter for parameter in trainer.model.parameters() if parameter.requires_grad)

    def stop(gradient: Any) -> None:
        (folder / "stopped").touch()
        subprocess.Popen(["sh", "-c", f"sleep {KILLED_AFTER_S}; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    at_step(trainer, rank, 3, lambda rows: first.register_hook(stop))


class StopsOnOneRank(TrainerCallback):
    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.ranks.rank == 1 and state.global_step == 2:
            control.should_training_stop = control.should_save = True


def break_pipeline(trainer: Any) -> None:
    """The second batch never comes: the pipeline's own task ends."""
    plain = trainer.begin

    def begin() -> None:
        plain()
        if trainer.batches is not None:
            pipeline = trainer.batches.pipeline

            async def ended(index: int, progress: Any) -> None:
                pipeline.fail(KeyError("the generator is gone"))
                async with pipeline._changed:
                    pipeline._changed.notify_all()

            pipeline._run_group = ended

    trainer.begin = begin


def break_evaluation(trainer: Any) -> None:
    from verifiers.errors import RunError

    def evaluate(**_: Any) -> Any:
        raise RunError("the evaluation set is gone")

    trainer.evaluate = evaluate


SPOILERS: dict[str, Any] = {
    "nan": lambda trainer: at_step(trainer, 1, 2, poison),
    "bug": lambda trainer: at_step(trainer, 1, 2, fail),
    "kill": lambda trainer: at_step(
        trainer, 1, 2, lambda rows: os.kill(os.getpid(), signal.SIGKILL)
    ),
    "kill in backward": die_in_backward,
    "stop 0 in backward": lambda trainer: stop_in_backward(trainer, 0),
    "stop 1 in backward": lambda trainer: stop_in_backward(trainer, 1),
    "slow": lambda trainer: at_step(trainer, 1, 2, lambda rows: time.sleep(6)),
    "hang": lambda trainer: at_step(trainer, 1, 2, lambda rows: time.sleep(8)),
    "stop": lambda trainer: trainer.add_callback(StopsOnOneRank(trainer)),
    "generator": break_pipeline,
    "evaluation": break_evaluation,
}


# --- one batch of known rollouts ------------------------------------------------------------------


def gradient(folder: str, lengths: list[list[int]], **settings: Any) -> dict[str, Any]:
    """Loss and gradient of a batch with a group for each list of lengths, rewarded 0,
    1, 0, 1, ..."""
    trainer = small_trainer(Path(folder), **settings)
    trainer.checks_sampler = False
    install_logprob_forward(trainer.model)
    model = trainer.accelerator.prepare(trainer.model)
    batch = build(
        [group(index, sizes) for index, sizes in enumerate(lengths)],
        [],
        trainer.args,
        trainer.args.world_size,
    )
    trainer.model_wrapped, trainer.session.is_open = model, True  # without an engine
    output = trainer.forward_backward(batch)
    gradients = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    rows = batch.rows_R[trainer.ranks.rank]
    return {
        "loss": output.loss,
        "gradient": gradients[::7].tolist(),
        "norm": float(gradients.norm()),
        "rows": len(rows),
        "fillers": sum(row.is_filler for row in rows),
        "tokens": sum(int(row.loss_mask.sum()) for row in rows),
        "kept": output.metrics["ratio/kept"],
    }


def group(index: int, lengths: list[int]) -> Group:
    records = []
    for number, length in enumerate(lengths):
        ids = np.random.default_rng([index, number]).integers(5, 40, length + 3)
        turn = Turn(ids[:3], ids[3:], np.full(length, -3.6), 0, False)
        records.append(Rollout((turn,), float(number % 2), {}, Status("stop")))
    return Group(index, index, tuple(records))


# --- the exchanges alone --------------------------------------------------------------------------


def exchange(timeout_s: float = 30.0) -> Any:
    """One of each exchange."""
    ranks = connected(timeout_s)
    with ranks.together():
        shared = ranks.share(lambda: {"nan": float("nan"), "n": 3}, "a value")
        scattered = ranks.scatter(
            [bytes([r]) * (r + 1) for r in range(ranks.world)] if ranks.is_main else None, "parts"
        )
        collected = ranks.collect(bytes([ranks.rank]) * 3 * ranks.rank, "pieces")
        flags = ranks.any([ranks.rank == 1, False], "flags")
        return [
            shared["n"],
            shared["nan"] != shared["nan"],
            list(scattered),
            [list(p) for p in collected],
            flags,
        ]


def connected(timeout_s: float) -> Ranks:
    torch.distributed.init_process_group("gloo")
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout_s)


def late(timeout_s: float, what: str) -> None:
    """Rank 0 is not there in time for an exchange of that kind."""
    ranks = connected(timeout_s)
    with ranks.together():
        ranks.gather([1.0], "hello")
        if ranks.is_main:
            time.sleep(4 * timeout_s)
        ranks.share(lambda: 1, "the tea") if what == "share" else ranks.gather([1.0], "the tea")


def alive(timeout_s: float) -> int:
    """Rank 0 takes longer than the bound for what it shares, and lives."""
    ranks = connected(timeout_s)
    with ranks.together():
        ranks.gather([1.0], "hello")
        with ranks.alive():
            value = ranks.share(lambda: time.sleep(4 * timeout_s) or 1, "the tea", while_alive=True)
        ranks.gather([1.0], "goodbye")  # the store ends with rank 0
        return value


def raises(bare: bool) -> None:
    """Rank 0 fails while rank 1 waits for it; ``bare``: outside of ``together``."""
    from verifiers.errors import WeightSyncError

    ranks = connected(8.0)
    ranks.gather([1.0], "hello")

    def work() -> None:
        if ranks.is_main:
            raise WeightSyncError("the server does not answer", stage="push", elapsed_s=3.5)
        ranks.share(lambda: None, "the next step")

    if bare:
        work()
        return
    with ranks.together():
        work()
