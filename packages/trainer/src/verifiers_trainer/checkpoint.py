"""A checkpoint is whole or absent, holds everything a resumed run needs, and never executes what it reads.

A checkpoint is a folder ``checkpoint-<step>`` of safetensors and JSON files. It is written under a temporary name, each
file is fsynced, ``MANIFEST.json`` (size and sha256 of every file) comes last, and a rename makes it appear. A reader
verifies the manifest and takes the newest valid folder; older ones are removed only after a newer one verifies.

    model or adapter                what ``save_pretrained`` writes, and the tokenizer
    optimizer.safetensors + .json   tensors, and the rest
    scheduler.json  rng.safetensors + rng.json  trainer_state.json
    rl_state.json                   policy version, place in the data, configuration
    pending.jsonl                   rollouts finished but not yet trained: tokens, log-probs, versions, rewards

Pickled files in such a folder are ignored. This module knows no trainer: it takes and gives plain values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from verifiers.durable import sync_folder
from verifiers.encoding import encode_row
from verifiers.errors import CheckpointError
from verifiers.failpoints import failpoint
from verifiers_trainer.batch import Group, Record
from verifiers_trainer.orchestrator import PipelineState
from verifiers_trainer.samples import Turn

log = logging.getLogger(__name__)

PREFIX = "checkpoint-"
MANIFEST = "MANIFEST.json"
SCHEMA = 1


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A temporary folder to write a checkpoint into; at the end of the block it becomes ``folder``, whole.

    Raises ``CheckpointError`` when the files cannot be written; then ``folder`` does not exist.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        failpoint("checkpoint.before_manifest")
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(temporary)): _describe(path) for path in files}
        write_json(temporary / MANIFEST, {"schema": SCHEMA, "files": manifest})
        for path in [*files, temporary / MANIFEST]:
            _sync(path)
        failpoint("checkpoint.before_rename")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {folder} could not be written: {error}", path=str(folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    failpoint("checkpoint.after_rename")


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def verify(folder: Path) -> None:
    """Raise ``CheckpointError`` naming the first file that is missing or not what the manifest says."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} has no readable {MANIFEST}", path=str(folder), file=MANIFEST) from error
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or _describe(path) != expected:
            raise CheckpointError(f"{path} is missing or damaged", path=str(folder), file=name)


def steps_in(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint folder, newest first, valid or not."""
    found = [
        (int(path.name.removeprefix(PREFIX)), path)
        for path in output_dir.glob(f"{PREFIX}*")
        if path.name.removeprefix(PREFIX).isdigit()
    ]
    return sorted(found, reverse=True)


def newest_valid(output_dir: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are skipped with a warning."""
    for _, folder in steps_in(output_dir):
        try:
            verify(folder)
        except CheckpointError as error:
            log.warning("skipping a checkpoint: %s", error)
        else:
            return folder
    return None


def prune(output_dir: Path, keep: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints; the newest is known to be valid."""
    if keep:
        for _, folder in steps_in(output_dir)[keep:]:
            shutil.rmtree(folder, ignore_errors=True)


# --- what is in it ----------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """JSON with sorted keys, without NaN."""
    path.write_text(json.dumps(value, sort_keys=True, indent=1, allow_nan=False), encoding="ascii")


def read_json(path: Path) -> Any:
    """The value of a JSON file."""
    return json.loads(path.read_bytes())


def save_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's state as tensors (``<parameter>.<name>``) and JSON (groups and plain values)."""
    state = optimizer.state_dict()
    tensors, plain = {}, {}
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
    """Restore what ``save_optimizer`` wrote, bit for bit."""
    described = read_json(folder / "optimizer.json")
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**load_file(folder / "optimizer.safetensors"), **described["state"]}.items():
        parameter, _, name = key.partition(".")
        state.setdefault(int(parameter), {})[name] = value
    current = optimizer.state_dict()["param_groups"]
    groups = [{**now, **then} for now, then in zip(current, described["param_groups"], strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def save_scheduler(folder: Path, scheduler: Any) -> None:
    """A learning-rate scheduler's numbers."""
    write_json(folder / "scheduler.json", {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"})


def load_scheduler(folder: Path, scheduler: Any) -> None:
    """Restore what ``save_scheduler`` wrote."""
    scheduler.load_state_dict({**scheduler.state_dict(), **read_json(folder / "scheduler.json")})


def save_rng(folder: Path) -> None:
    """The state of the random generators of python, numpy and torch."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    tensors = {"torch": torch.random.get_rng_state(), "numpy": torch.from_numpy(keys.astype(np.int64))}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_file(tensors, folder / "rng.safetensors")
    python = {"version": version, "words": list(words), "gauss": gauss}
    numpy = {"name": name, "position": position, "has_gauss": has_gauss, "cached": cached}
    write_json(folder / "rng.json", {"python": python, "numpy": numpy})


def load_rng(folder: Path) -> None:
    """Restore what ``save_rng`` wrote."""
    tensors, described = load_file(folder / "rng.safetensors"), read_json(folder / "rng.json")
    python, legacy = described["python"], described["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((legacy["name"], keys, legacy["position"], legacy["has_gauss"], legacy["cached"]))
    torch.random.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensors[key] for key in sorted(tensors) if key.startswith("cuda.")])


def save_pipeline(folder: Path, state: PipelineState, version: int, configuration: Mapping[str, Any]) -> None:
    """The pipeline: its counters and configuration, and the groups that are finished but not trained."""
    write_json(
        folder / "rl_state.json",
        {
            "schema": SCHEMA,
            "policy_version": version,
            "next_index": state.next_index,
            "delivered": state.delivered,
            "base": state.base,
            "requeue": state.requeue,
            "configuration": dict(configuration),
        },
    )
    lines = b"".join(encode_row(_group_to_json(group)) + b"\n" for group in state.ready)
    (folder / "pending.jsonl").write_bytes(lines)


def load_pipeline(folder: Path) -> tuple[PipelineState, int, dict[str, Any]]:
    """(pipeline, policy version, configuration) as ``save_pipeline`` wrote them."""
    saved = read_json(folder / "rl_state.json")
    lines = (folder / "pending.jsonl").read_text(encoding="ascii").split("\n")
    state = PipelineState(
        next_index=saved["next_index"],
        delivered=saved["delivered"],
        base=saved["base"],
        ready=[_group_from_json(json.loads(line)) for line in lines if line],
        requeue=saved["requeue"],
    )
    return state, saved["policy_version"], saved["configuration"]


def _group_to_json(group: Group) -> dict[str, Any]:
    return {
        "index": group.index,
        "example_id": group.example_id,
        "records": [
            {
                "turns": [_turn_to_json(turn) for turn in record.turns],
                "reward": _number(record.reward),
                "metrics": {name: _number(value) for name, value in record.metrics.items()},
                "error": record.error,
                "stop": record.stop,
                "is_truncated": record.is_truncated,
                "text": record.text,
            }
            for record in group.records
        ],
    }


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    fields = {name: getattr(turn, name).tolist() for name in ("prompt_ids", "completion_ids", "logprobs")}
    version = turn.version if isinstance(turn.version, int) else np.asarray(turn.version).tolist()
    return fields | {"version": version, "is_truncated": turn.is_truncated, "shared": turn.shared}


def _group_from_json(saved: Mapping[str, Any]) -> Group:
    records = tuple(
        Record(
            turns=tuple(_turn_from_json(turn) for turn in record["turns"]),
            reward=_from_number(record["reward"]),
            metrics={name: _from_number(value) for name, value in record["metrics"].items()},
            error=record["error"],
            stop=record["stop"],
            is_truncated=record["is_truncated"],
            text=record["text"],
        )
        for record in saved["records"]
    )
    return Group(saved["index"], saved["example_id"], records)


def _turn_from_json(saved: Mapping[str, Any]) -> Turn:
    version = saved["version"] if isinstance(saved["version"], int) else np.array(saved["version"], np.int32)
    return Turn(
        prompt_ids=np.array(saved["prompt_ids"], np.int32),
        completion_ids=np.array(saved["completion_ids"], np.int32),
        logprobs=np.array(saved["logprobs"], np.float32),
        version=version,
        is_truncated=saved["is_truncated"],
        shared=saved["shared"],
    )


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _from_number(value: float | None) -> float:
    return math.nan if value is None else value


__all__ = [
    "load_optimizer",
    "load_pipeline",
    "load_rng",
    "load_scheduler",
    "newest_valid",
    "prune",
    "save_optimizer",
    "save_pipeline",
    "save_rng",
    "save_scheduler",
    "verify",
    "writing",
]
