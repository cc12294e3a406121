"""Write and read checkpoints atomically, with everything a resumed run needs, and without executing
anything.

A checkpoint is a folder ``checkpoint-<step>`` of safetensors and JSON files. It is written under a
temporary name, each file is fsynced, ``MANIFEST.json`` (size and checksum of every file) comes
last, and a rename makes it appear. A reader verifies the manifest and takes the newest valid
folder; older folders are removed only after a newer folder verifies.

    model or adapter                what ``save_pretrained`` writes, and the tokenizer
    optimizer.safetensors + .json   tensors, and the rest
    reference.safetensors           the reference policy, where it is a copy
    scheduler.json  trainer_state.json  rng.safetensors, rng_<rank>.safetensors of further processes
    batch_<rank>.safetensors        between the steps of a batch: log-probabilities that stay fixed during it
    rl_state.json                   policy version, position in the data, configuration
    pending.jsonl                   rollouts finished but not yet trained: tokens, log-probs, versions, rewards

Only these names are read, so a pickle or any other file in such a folder is never opened. The
manifest detects damage, not forgery: a process that can write the folder can write the manifest.
``pipeline.saved_state`` defines the files of the pipeline.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from verifiers.errors import CheckpointError, ConfigError
from verifiers.runtime.bounded import open_file
from verifiers.runtime.decoding import decode_json, read_json
from verifiers.runtime.failpoints import failpoint
from verifiers.storage.files import atomic_write, share_modes, sync_folder
from verifiers_trainer.algorithm.state import load_state
from verifiers_trainer.distributed import deepspeed, fsdp

log = logging.getLogger(__name__)

PREFIX = "checkpoint-"
UNFINISHED = ".tmp-"
MANIFEST = "MANIFEST.json"
SCALER = "scaler.json"
ALGORITHM = "algorithm.json"
"""The state of an algorithm that has one."""
SCHEMA = 2
CHECKSUM = "xxh3_128"
CHECKSUMS: dict[str, Callable[[], Any]] = {CHECKSUM: xxhash.xxh3_128, "sha256": hashlib.sha256}
"""By its name in the manifest; the second, 15 times slower, is that of older checkpoints."""


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A temporary folder to write a checkpoint into; at the end of the block it is renamed to
    ``folder``.

    Raises ``CheckpointError`` when the files cannot be written; then ``folder`` is unchanged.
    """
    for stale in folder.parent.glob(f"{UNFINISHED}{PREFIX}*"):  # of a killed process
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder.with_name(f"{UNFINISHED}{folder.name}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        failpoint("checkpoint.before_manifest")
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        share_modes(files)
        with ThreadPoolExecutor() as pool:  # hashing and fsync release the GIL
            described, synced = pool.map(_describe, files), pool.map(_sync, files)
            manifest = {
                path.relative_to(temporary).as_posix(): entry
                for path, entry in zip(files, described, strict=True)
            }
            list(synced)  # raises the error of a failed fsync
        write_json(temporary / MANIFEST, {"schema": SCHEMA, "files": manifest})
        _sync(temporary / MANIFEST)
        for inner in [path for path in temporary.rglob("*") if path.is_dir()] + [temporary]:
            sync_folder(inner)
        failpoint("checkpoint.before_rename")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except Exception as error:
        is_of_files = isinstance(error, OSError | SafetensorError | TypeError | ValueError)
        if (
            not is_of_files and type(error) is not Exception
        ):  # tokenizers raise that for a full disk
            raise
        raise CheckpointError(
            f"the checkpoint {folder} could not be written: {error}", path=str(folder)
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    failpoint("checkpoint.after_rename")


def replaceable(folder: Path) -> Path:
    """The absolute ``folder``, new, empty or a checkpoint. Raises ``ConfigError`` where it has
    other content, which ``writing`` would remove."""
    folder = folder.absolute()
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if is_free or (folder / MANIFEST).is_file():
        return folder
    raise ConfigError(f"{folder} has other content than a state: name a new folder to save it to")


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise any failure to read the checkpoint as a ``CheckpointError`` that names it."""
    try:
        yield
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"{folder} cannot be resumed from: {cause}", path=str(folder)
        ) from error


def _describe(path: Path, checksum: str = CHECKSUM) -> dict[str, object]:
    with open_file(path) as file:
        return {
            "size": path.stat().st_size,
            checksum: hashlib.file_digest(file, CHECKSUMS[checksum]).hexdigest(),
        }


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def verify(folder: Path) -> None:
    """Raise ``CheckpointError`` naming the first file that is missing or unlike the manifest."""

    def fault(reason: str, file: str = MANIFEST) -> CheckpointError:
        return CheckpointError(reason, path=str(folder), file=file)

    try:
        files = dict(read_json(folder / MANIFEST)["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise fault(f"{folder} has no readable {MANIFEST}") from error
    if not files:
        raise fault(f"{folder / MANIFEST} lists no files")
    for name, expected in files.items():
        path = folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise fault(f"{folder / MANIFEST} names {name!r}, outside it", name)
        is_described = path.is_file() and isinstance(expected, dict)
        checksum = next((name for name in CHECKSUMS if is_described and name in expected), CHECKSUM)
        if not is_described or _describe(path, checksum) != expected:
            raise fault(f"{path} is missing or damaged", name)


def steps_in(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint folder, newest first, valid or not."""
    steps = [
        (int(path.name.removeprefix(PREFIX)), path)
        for path in output_dir.glob(f"{PREFIX}*")
        if path.name.removeprefix(PREFIX).isdecimal()
    ]
    return sorted(steps, reverse=True)


def newest_valid(output_dir: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged checkpoints are skipped with a warning."""
    for _, folder in steps_in(output_dir):
        try:
            verify(folder)
        except CheckpointError as error:
            log.warning("skipping a checkpoint: %s", error)
        else:
            return folder
    return None


def prune(
    newest: Path, keep: int | None, protected: Path | None = None, keep_every: int | None = None
) -> None:
    """Remove the checkpoints before ``newest`` but the last ``keep - 1``, ``protected``, and those
    of every ``keep_every``-th step, once ``newest`` verifies.

    Raises ``CheckpointError``, with nothing removed, when ``newest`` is damaged.
    """
    step = int(newest.name.removeprefix(PREFIX))
    older = [
        folder
        for number, folder in steps_in(newest.parent)
        if number < step and (keep_every is None or number % keep_every)
    ]
    if not keep or len(older) < keep:
        return
    verify(newest)
    for folder in older[keep - 1 :]:
        if folder != protected:
            # so that a partly removed folder does not look whole
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(output_dir: Path, names: tuple[str, ...]) -> Path | None:
    """Move the checkpoints of an earlier run and the files called ``names`` into ``earlier-<n>``;
    returns that folder.

    None when there is nothing to move.
    """
    paths = [folder for _, folder in steps_in(output_dir)]
    paths += [output_dir / name for name in names if (output_dir / name).exists()]
    if not paths:
        return None
    number = 1
    while (aside := output_dir / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in paths:
        path.rename(aside / path.name)
    return aside


# --- contents -------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    """Write JSON with sorted keys, completely or not at all. *Raises* ValueError for NaN; OSError."""
    atomic_write(path, json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode("ascii"))


def save_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, state: dict[str, Any] | None = None
) -> None:
    """Write an optimizer's state as tensors (``<parameter>.<name>``) and JSON (groups and plain
    values).

    For a split model, ``state`` is the result of ``fsdp.whole_state``: the file is the same for any
    number of ranks.
    """
    state = optimizer.state_dict() if state is None else state
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, object] = {}
    for parameter, values in state["state"].items():
        for name, value in values.items():
            key = f"{parameter}.{name}"
            if isinstance(value, torch.Tensor):
                tensors[key] = value.detach().cpu().contiguous()
            else:
                plain[key] = value
    save_file(tensors, folder / "optimizer.safetensors")
    write_json(folder / "optimizer.json", {"param_groups": state["param_groups"], "state": plain})


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore what ``save_optimizer`` wrote, bit for bit. Raises ``CheckpointError``."""
    with reading(folder), safe_open(folder / "optimizer.safetensors", "pt") as file:
        described = read_json(folder / "optimizer.json")
        state: dict[int, dict[str, Any]] = {}
        for key in [*file.keys(), *described["state"]]:
            index, _, name = key.partition(".")
            value = described["state"][key] if key in described["state"] else file.get_tensor(key)
            state.setdefault(int(index), {})[name] = value
        # older files had empty groups
        written = [group for group in described["param_groups"] if group["params"]]
        if deepspeed.is_split_optimizer(optimizer):
            deepspeed.load_state(optimizer, state, written)
            return
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        for index, values in state.items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                    values[name] = fsdp.part_like(value, parameters[index])
        current = optimizer.state_dict()["param_groups"]
        groups = [{**now, **then} for now, then in zip(current, written, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def save_algorithm(folder: Path, state: Mapping[str, object]) -> None:
    """Write ``algorithm.state.state_of`` the settings; nothing for an algorithm without a state."""
    if state:
        write_json(folder / ALGORITHM, state)


def load_algorithm(folder: Path, settings: object) -> None:
    """Load what ``save_algorithm`` wrote, if anything, into the objects of ``settings``."""
    if (folder / ALGORITHM).exists():
        with reading(folder):
            load_state(settings, read_json(folder / ALGORITHM))


def save_scheduler(folder: Path, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Write the state of a learning-rate scheduler.

    An infinite value, such as the best value of "reduce_lr_on_plateau" before any evaluation, is
    what a new scheduler has, so it is left out.
    """
    state = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}
    finite = {k: v for k, v in state.items() if not (isinstance(v, float) and math.isinf(v))}
    write_json(folder / "scheduler.json", finite)


def load_scheduler(folder: Path, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Restore what ``save_scheduler`` wrote. Raises ``CheckpointError`` when it does not fit."""
    with reading(folder):
        current, saved = scheduler.state_dict(), read_json(folder / "scheduler.json")
        # older checkpoints have another, for a group without parameters
        for name in ("base_lrs", "_last_lr"):
            if name in saved:
                saved[name] = saved[name][: len(current[name])]
        scheduler.load_state_dict({**current, **saved})


def rng_to_bytes() -> bytes:
    """This process's random generators (python, numpy, torch) as a safetensors file."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    name, keys, position, has_gauss, cached = legacy
    tensors = {
        "torch": torch.random.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    python = {"version": version, "words": list(words), "gauss": gauss}
    numpy = {"name": name, "position": position, "has_gauss": has_gauss, "cached": cached}
    return save(tensors, {"plain": json.dumps({"python": python, "numpy": numpy}, sort_keys=True)})


def save_rng(folder: Path, state: bytes | None = None, rank: int = 0) -> None:
    """Write a rank's ``rng_to_bytes()``; by default this process's."""
    (folder / _rng_file(rank)).write_bytes(rng_to_bytes() if state is None else state)


def _rng_file(rank: int) -> str:
    return f"rng_{rank}.safetensors" if rank else "rng.safetensors"


def load_rng(folder: Path, rank: int = 0) -> None:
    """Restore the random generators of a rank. Warn and leave them unchanged where none is saved.

    *Raises* CheckpointError when the file does not fit.
    """
    path = folder / _rng_file(rank)
    if rank and not path.exists():
        log.warning(
            "%s was written by fewer processes, so rank %d begins with fresh random generators",
            folder,
            rank,
        )
        return
    with reading(folder):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            plain = decode_json(file.metadata()["plain"])
        python, legacy = plain["python"], plain["numpy"]
        random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
        keys = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state(
            (legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"])
        )
        torch.random.set_rng_state(tensors["torch"])
        names = [f"cuda.{i}" for i in range(torch.cuda.device_count())]
        if states := [tensors[name] for name in names if name in tensors]:
            torch.cuda.set_rng_state_all(states)


def save_scaler(folder: Path, scaler: torch.amp.GradScaler | None) -> None:
    """Write the loss scale of fp16; do nothing without a scaler."""
    if scaler is not None and (state := scaler.state_dict()):
        write_json(folder / SCALER, state)


def load_scaler(folder: Path, scaler: torch.amp.GradScaler | None) -> None:
    """Restore what ``save_scaler`` wrote, if it wrote anything. Raises ``CheckpointError`` when it
    does not fit."""
    if scaler is not None and (folder / SCALER).exists():
        with reading(folder):
            scaler.load_state_dict(read_json(folder / SCALER))


@contextmanager
def untouched_rng() -> Iterator[None]:
    """Restore the random generators of python, numpy and torch's CPU at the end of the block."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(cpu)
