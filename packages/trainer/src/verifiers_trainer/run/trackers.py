"""Send the metrics of a training run to trackers (wandb, trackio, tensorboard) without blocking it.

Each tracker is transformers' reporting callback, run on its own thread behind a bounded queue. A
tracker that is not installed, raises or hangs is dropped with one warning, and training continues;
none prompts for a login. wandb also gets the completions as a table, and a resumed training
continues its run. ``metrics.jsonl`` (``metrics_files``) holds the same metrics and does not depend
on trackers.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from transformers.integrations import WandbCallback, get_reporting_integration_callbacks
from transformers.trainer_callback import TrainerCallback

from verifiers.runtime.bounded import read_text
from verifiers.runtime.install_lines import install_line
from verifiers.storage.files import atomic_write
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.settings.cross_field_rules import trackers

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers.trainer_callback import TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments

log = logging.getLogger(__name__)

QUEUE_SIZE = 256
CLOSE_S, SAY_S = 180.0, 5.0
"""Seconds that a tracker may take to send the rest at the end (``wandb.finish`` uploads then), and
seconds after which the wait is logged."""
TABLE_ROWS = 64
"""Largest number of completions in a table of wandb."""
WANDB_ID = "wandb_id"
"""File in the run's folder with the id of its run at wandb."""
FACTORIES: dict[str, Callable[[], TrainerCallback]] = {}
"""Additional trackers: name -> factory of the callback."""


def installed(report_to: str | Sequence[str] | None) -> list[str]:
    """The trackers in ``report_to`` without those whose package is missing, each of which is a
    warning with the command."""
    names = trackers(report_to)
    modules = {
        "wandb": ("wandb",),
        "trackio": ("trackio",),
        "tensorboard": ("tensorboard", "tensorboardX"),
    }
    missing = [
        n
        for n in names
        if n in modules and n not in FACTORIES and not any(map(find_spec, modules[n]))
    ]
    for name in missing:
        log.warning(
            "%s is not installed and gets no numbers: %s; metrics.jsonl has them all",
            name,
            install_line("verifiers-trainer", name),
        )
    return [name for name in names if name not in missing]


class Trackers(TrainerCallback):
    """Forwards the loop's events to ``names``, with one thread per tracker, started
    with training."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self._running: list[_Worker] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.close()
        self._running = [_Worker(name) for name in self.names]
        self._send("on_train_begin", args, state, control, kwargs)

    def log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float],
    ) -> None:
        """Send metrics, after all callbacks have had them: some add to them."""
        self._send("on_log", args, state, control, {"logs": dict(logs)})

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._send("on_train_end", args, state, control, kwargs)
        self.close()

    def log_completions(self, step: int, groups: Sequence[Group]) -> None:
        """Send the rollouts of a step to the trackers that show tables."""
        self._send("on_completions", None, step, None, {"groups": groups})

    def close(self) -> None:
        """Flush every tracker's queue, for ``CLOSE_S`` seconds at most each; idempotent."""
        running, self._running = self._running, []
        for worker in running:
            worker.close()

    def _send(
        self, event: str, args: object, state: object, control: object, kwargs: Mapping[str, object]
    ) -> None:
        for worker in self._running:
            worker.put((event, args, copy.copy(state), copy.copy(control), kwargs))


class _Worker:
    """Runs one tracker on its own thread."""

    def __init__(self, name: str):
        self.name = name
        self.gave_up = False
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_SIZE)
        self._thread = threading.Thread(target=self._run, name=f"verifiers-{name}", daemon=True)
        self._thread.start()

    def put(self, event: object) -> None:
        if self.gave_up:
            return
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._give_up(f"it has not taken the last {QUEUE_SIZE} events")

    def close(self) -> None:
        self.put(None)
        if not self.gave_up:
            self._thread.join(min(SAY_S, CLOSE_S))
            if self._thread.is_alive():
                log.info(
                    "waiting for %s to send the last numbers, for %g s at most", self.name, CLOSE_S
                )
                self._thread.join(max(0.0, CLOSE_S - SAY_S))
            if self._thread.is_alive():
                self._give_up(f"it does not come to an end within {CLOSE_S:g} s")

    def _run(self) -> None:
        try:
            tracker = _make(self.name)
            while (event := self._queue.get()) is not None and not self.gave_up:
                name, args, state, control, kwargs = event
                if (method := getattr(tracker, name, None)) is not None:
                    method(args, state, control, **kwargs)
            if (finish := getattr(tracker, "finish", None)) is not None:
                finish()
        except BaseException as error:  # noqa: BLE001 - an error of a tracker is logged once and must not stop training
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self.gave_up:
            self.gave_up = True
            log.warning(
                "%s gets no more numbers: %s. metrics.jsonl has them all", self.name, reason
            )


class Wandb(WandbCallback):
    """transformers' callback of wandb, which continues the run of a resumed training and shows
    completions."""

    _owned: Any = None
    """The run that this object started; a run that the user's script started is neither renamed nor
    finished."""

    def setup(self, args: Any, state: TrainerState, model: Module, **kwargs: object) -> None:
        if self._wandb.run is None and state.is_world_process_zero:
            name = {} if args.run_name is None else {"name": args.run_name}
            self._owned = self._wandb.init(
                project=os.getenv("WANDB_PROJECT", "huggingface"),
                id=os.getenv("WANDB_RUN_ID")
                or self._id_of(Path(args.output_dir), state.global_step > 0),
                resume=os.getenv("WANDB_RESUME", "allow"),
                **name,
            )
        super().setup(args, state, model, **kwargs)

    def _id_of(self, folder: Path, is_resumed: bool) -> str:
        """The id in the run's folder, or a new id, which is written there."""
        path = folder / WANDB_ID
        if not (is_resumed and path.is_file()):
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, uuid4().hex[:8].encode())
        return read_text(path).strip()

    def on_completions(
        self, args: TrainingArguments, step: int, control: TrainerControl, groups: Sequence[Group]
    ) -> None:
        """Log the rollouts of a step as a table, ``TABLE_ROWS`` at most."""
        rollouts = [(group, rollout) for group in groups for rollout in group.rollouts][:TABLE_ROWS]
        scores = sorted({name for _, rollout in rollouts for name in rollout.metrics})
        columns = ["step", "example_id", "prompt", "completion", "answer", "reward", *scores]
        rows = [
            [
                *(step, group.example_id, _text(rollout.row["prompt"]), _text(rollout.completion)),
                *(
                    _text(rollout.row["answer"]),
                    rollout.reward,
                    *(rollout.metrics.get(n) for n in scores),
                ),
            ]
            for group, rollout in rollouts
        ]
        table = self._wandb.Table(columns=columns, data=rows)
        self._wandb.log({"completions": table, "train/global_step": step})

    def finish(self) -> None:
        """Send the rest of the run that this object started."""
        if self._owned is not None:
            self._owned.finish()


def _text(value: object) -> str:
    """A prompt or completion in one string: text as it is, messages line by line."""
    if not isinstance(value, list):
        return str(value)
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in value)


def _make(name: str) -> TrainerCallback:
    if name in FACTORIES:
        return FACTORIES[name]()
    if name == "wandb" and not (
        {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys() or (Path.home() / ".netrc").exists()
    ):
        log.warning("wandb has no API key, so its run is kept offline (wandb sync uploads it)")
        os.environ["WANDB_MODE"] = "offline"
    if name == "wandb":
        return Wandb()
    return get_reporting_integration_callbacks([name])[0]()
