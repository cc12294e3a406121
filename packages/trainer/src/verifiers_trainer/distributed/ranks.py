"""``Ranks``: the processes of a training run, their exchanges, and how an error on one ends all.

Rank 0 generates, packs and writes; the others train their share of the rows. Everything but
gradients is exchanged here: small values through the key-value store of torch's launcher, arrays
through a separate gloo group. Every wait is bounded and names what it waits for; an error on one
rank is raised on all of them, as the same class where it is one of ``verifiers.errors``; with one
process nothing is connected, sent or copied.

    batch = ranks.share(lambda: {"step": 3}, "the step")          computed on rank 0, returned on every rank
    sums = ranks.gather([loss, tokens], "the step's numbers")      [world, 2], on every rank
    with ranks.together(): ...                                     an error in here ends all ranks

DDP, FSDP2 or DeepSpeed reduce gradients; only the time-out of their collectives is set here. A rank
that waits inside a collective is woken when the process it waits for ends, or ended by its
``Heartbeat`` when that process is stopped or unreachable.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from verifiers import errors
from verifiers.errors import RunError, VerifiersError
from verifiers_trainer.distributed.heartbeat import Heartbeat

log = logging.getLogger(__name__)

POLL_S = 0.02
LINGER_S = 3.0
"""Seconds that a failing rank waits until the others have read its error: the store may end with
its process."""
FAILURE, ALIVE = "failure", "alive"
BEAT_S = 5.0
"""Seconds between two signs of life."""
_count = itertools.count()


class Launched(Protocol):
    """The settings that a launcher decides, and the bounds of waiting, in seconds."""

    @property
    def process_index(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def ddp_timeout(self) -> float: ...

    @property
    def rank_timeout(self) -> float: ...


class Ranks:
    """The processes of a run; connects at first use.

    ``timeout_s`` bounds every exchange among all of them; ``rank_timeout_s`` the silence of a rank
    (0: not watched).
    """

    def __init__(
        self, rank: int = 0, world: int = 1, timeout_s: float = 1800.0, rank_timeout_s: float = 0.0
    ):
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self.rank_timeout_s = rank_timeout_s
        self._store: Any = None
        self._group: Any = None
        self._number, self._blocks = itertools.count(), itertools.count()
        self._keys_to_delete: list[str] = []
        self._depth = 0
        self._received: BaseException | None = None

    @classmethod
    def of(cls, config: Launched) -> Ranks:
        """The processes that the launcher started, with the bounds ``ddp_timeout`` and
        ``rank_timeout``, in seconds."""
        if config.world_size == 1:
            warn_of_one_process()
        return cls(
            config.process_index, config.world_size, float(config.ddp_timeout), config.rank_timeout
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which generates rollouts and writes files."""
        return self.rank == 0

    # --- exchanges --------------------------------------------------------------------------------

    def share(
        self,
        make: Callable[[], object],
        what: str,
        timeout_s: float | None = None,
        while_alive: bool = False,
    ) -> Any:
        """Call ``make`` on rank 0 and return its value on every rank; a value of JSON, NaN
        included.

        *Raises* the error of ``make`` on every rank, and RunError when rank 0 shares nothing for
        ``timeout_s`` seconds; ``while_alive``: when it has given no sign of life (``alive``) for
        that long.
        """
        if self.world == 1:
            return make()
        self._connect()
        key = f"shared/{next(self._number)}"
        if self.is_main:
            try:
                value = make()
            except Exception as error:
                self._put(key, {"error": _to_json(error, self.rank)})
                raise
            self._put(key, {"value": value})
            return value
        message = json.loads(self._await(key, what, timeout_s, while_alive))
        if "error" in message:
            raise self._receive(message["error"])
        return message["value"]

    @contextmanager
    def alive(self) -> Iterator[None]:
        """In the block, rank 0 gives signs of life to ranks that wait for it ``while_alive``."""
        if self.world == 1 or not self.is_main:
            yield
            return
        self._connect()
        ended = threading.Event()

        def beat() -> None:
            try:
                while not ended.wait(min(BEAT_S, self.timeout_s / 4)):
                    self._store.add(ALIVE, 1)
            except RuntimeError as lost:  # the store ended with its process, and so did the wait
                log.debug("no sign of life could be given: %s", lost)

        thread = threading.Thread(target=beat, name="verifiers-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def gather(self, numbers: Sequence[float], what: str) -> np.ndarray:
        """float64 [world, numbers]: the numbers of every rank, on every rank."""
        local = np.asarray(numbers, np.float64)
        if self.world == 1:
            return local[None]
        self._connect()
        gathered = [torch.zeros(len(local), dtype=torch.float64) for _ in range(self.world)]
        tensor = torch.from_numpy(local)
        self._finish(
            lambda: dist.all_gather(gathered, tensor, group=self._group, async_op=True), what
        )
        keys, self._keys_to_delete = self._keys_to_delete, []
        for key in keys:  # every rank has read them
            self._store.delete_key(key)
        return torch.stack(gathered).numpy()

    def any(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Which of the flags are set on some rank."""
        return [bool(flag) for flag in self.gather([float(flag) for flag in flags], what).max(0)]

    def scatter(
        self, parts: Sequence[bytes] | None, what: str, timeout_s: float | None = None
    ) -> bytes:
        """The ``rank``-th of the ``parts`` that rank 0 gives."""
        if self.world == 1:
            assert parts is not None
            return parts[0]
        sizes = self.share(lambda: [len(part) for part in parts or ()], what, timeout_s)
        buffer = torch.zeros(max(sizes), dtype=torch.uint8)
        padded = [_padded(part, max(sizes)) for part in parts or ()] if self.is_main else None
        self._finish(
            lambda: dist.scatter(buffer, padded, src=0, group=self._group, async_op=True), what
        )
        return buffer[: sizes[self.rank]].numpy().tobytes()

    def collect(self, part: bytes, what: str) -> list[bytes]:
        """The ``part`` of every rank, in rank order, on rank 0; an empty list on the others."""
        if self.world == 1:
            return [part]
        sizes = [int(size) for size in self.gather([float(len(part))], what)[:, 0]]
        padded = _padded(part, max(sizes))
        buffers = [torch.zeros_like(padded) for _ in range(self.world)] if self.is_main else None
        self._finish(
            lambda: dist.gather(padded, buffers, dst=0, group=self._group, async_op=True), what
        )
        return [
            piece.numpy().tobytes()[:size]
            for piece, size in zip(buffers or (), sizes, strict=False)
        ]

    # --- ending together --------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error inside the block on every rank, at its next exchange.

        A ``VerifiersError`` keeps its class; for any other the other ranks raise a RunError that
        names it and its rank.
        """
        if self.world == 1 or self._depth:
            yield
            return
        self._connect()
        self._depth += 1
        heartbeat = self._heartbeat(next(self._blocks))
        try:
            yield
        except BaseException as error:
            failure = self._failure(wait_s=0.0 if isinstance(error, VerifiersError) else 1.0)
            if failure is None:
                if (broken := _broken_connection(error)) is not None:
                    error = RunError(
                        f"rank {self.rank} lost the other processes of this training: {broken}"
                    )
                self._publish(error)
                raise error
            self._put(f"read/{self.rank}", True)
            if failure["rank"] == self.rank or error is self._received:
                raise
            raise _from_json(failure) from error
        finally:
            self._depth -= 1
            self._received = None
            if heartbeat is not None:
                heartbeat.stop()

    def _heartbeat(self, block: int) -> Heartbeat | None:
        if not self.rank_timeout_s:
            return None

        def publish(store: torch.distributed.Store, message: str) -> None:
            store.compare_set(FAILURE, "", json.dumps(_to_json(RunError(message), self.rank)))

        return Heartbeat(
            self._store, self.rank, self.world, self.rank_timeout_s, block=block, publish=publish
        )

    def _publish(self, error: BaseException) -> None:
        """Publish the error and wait up to ``LINGER_S`` for the others to read it."""
        try:
            self._store.compare_set(FAILURE, "", json.dumps(_to_json(error, self.rank)))
            deadline = time.monotonic() + LINGER_S
            reads = [f"read/{rank}" for rank in range(self.world) if rank != self.rank]
            while time.monotonic() < deadline and not self._store.check(reads):
                time.sleep(POLL_S)
        except RuntimeError as lost:  # the store ended with its process: no rank can read the error
            log.debug("the error could not be sent to the other processes: %s", lost)

    def _failure(self, wait_s: float = 0.0) -> dict[str, Any] | None:
        """The error that a rank published; None when none did."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                if self._store.check([FAILURE]):
                    return json.loads(self._store.get(FAILURE))
            except RuntimeError:
                return None
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    # --- the connection ---------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._group is not None:
            return
        from torch.distributed import distributed_c10d

        if not dist.is_initialized():
            raise RunError(
                f"this is one of {self.world} processes, and torch.distributed is not initialised:"
                " start them with accelerate launch or torchrun"
            )
        bound = timedelta(seconds=self.timeout_s)
        distributed_c10d._set_pg_timeout(bound)
        store = distributed_c10d._get_default_store()
        self._store = distributed_c10d.PrefixStore(f"verifiers-{next(_count)}", store)
        self._group = dist.new_group(backend="gloo", timeout=bound)

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value, default=float))
        if self.is_main:
            self._keys_to_delete.append(key)

    def _await(
        self, key: str, what: str, timeout_s: float | None, while_alive: bool = False
    ) -> bytes:
        bound = self.timeout_s if timeout_s is None else timeout_s
        started, signs = time.monotonic(), 0
        try:
            while not self._store.check([key]):
                if (failure := self._failure()) is not None:
                    raise self._receive(failure)
                if (waited := time.monotonic() - started) > bound:
                    signs, before = self._store.add(ALIVE, 0), signs
                    if not while_alive or signs == before:
                        raise self._timeout_error(what, bound)
                    started = time.monotonic()
                time.sleep(min(POLL_S, waited / 10))
            return self._store.get(key)
        except VerifiersError:
            raise
        except RuntimeError as error:
            raise RunError(
                f"rank {self.rank} waited for {what}, and rank 0 has ended: {_first_line(error)}"
            ) from error

    def _receive(self, failure: dict[str, object]) -> BaseException:
        """The error that another rank published; ``together`` raises it as it is."""
        self._received = _from_json(failure)
        return self._received

    def _finish(self, begin: Callable[[], Any], what: str) -> None:
        """Run an exchange among all ranks, and stop waiting as soon as any of them fails."""
        started = time.monotonic()
        try:
            work = begin()
            while not work.is_completed():
                waited = time.monotonic() - started
                if waited > 0.2 and (failure := self._failure()) is not None:
                    raise self._receive(failure)
                if waited > self.timeout_s:
                    raise self._timeout_error(what, self.timeout_s)
                time.sleep(min(POLL_S, waited / 10))
            work.wait()
        except VerifiersError:
            raise
        except RuntimeError as error:
            if (failure := self._failure(wait_s=1.0)) is not None:
                raise self._receive(failure) from error
            raise RunError(
                f"rank {self.rank} lost another process while exchanging {what}:"
                f" {_first_line(error)}"
            ) from error

    def _timeout_error(self, what: str, bound_s: float) -> RunError:
        return RunError(
            f"rank {self.rank} of {self.world} waited {bound_s:g} s for {what}; the other processes"
            " do not answer. Check their logs, or raise ddp_timeout",
            waiting_for=what,
            elapsed_s=bound_s,
        )


def warn_of_one_process() -> None:
    """Warn that ``accelerate launch --cpu`` starts one process, whatever ``--num_processes`` is."""
    if (
        "MASTER_PORT" in os.environ
        and "WORLD_SIZE" not in os.environ
        and "ACCELERATE_USE_CPU" in os.environ
    ):
        log.warning(
            "accelerate launch --cpu ignores --num_processes and starts one process; on a CPU use"
            " accelerate launch --multi_gpu --num_processes N, or torchrun --nproc-per-node N"
        )


def _padded(part: bytes, size: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(part.ljust(size, b"\0"), np.uint8).copy())


def _to_json(error: BaseException, rank: int) -> dict[str, object]:
    facts = {name: value for name, value in getattr(error, "facts", {}).items() if _is_plain(value)}
    return {"rank": rank, "kind": type(error).__name__, "message": str(error), "facts": facts}


def _from_json(failure: dict[str, Any]) -> BaseException:
    """The error that another rank published."""
    kind = getattr(errors, failure["kind"], None)
    if isinstance(kind, type) and issubclass(kind, VerifiersError):
        error: BaseException = kind(failure["message"], **failure["facts"])
    elif failure["kind"] == "KeyboardInterrupt":
        error = KeyboardInterrupt()
    else:
        error = RunError(f"rank {failure['rank']} failed: {failure['kind']}: {failure['message']}")
    return error


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _broken_connection(error: BaseException) -> str | None:
    """First line of a collective's error if the process at its other end has ended, else None."""
    text = str(error)
    broken = type(error) in (RuntimeError, dist.DistBackendError, dist.DistNetworkError)
    marks = ("peer", "Timed out waiting", "timeout", "Socket", "Broken pipe")
    return _first_line(error) if broken and any(mark in text for mark in marks) else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
