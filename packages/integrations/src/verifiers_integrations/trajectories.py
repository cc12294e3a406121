"""The peer-neutral way out and back in: token-exact trajectories as JSON lines, for any trainer
without an adapter.

Promise: what a server sampled is what stands in the file. Nothing is decoded, re-encoded, padded or
cut. One line is one token row; a rollout whose turns fork has several, which share ``rollout``.
Keys, ``C`` completion tokens::

    prompt_ids       list[int]     ids before the first sampled token
    completion_ids   list[int]     [C] sampled tokens and, between turns, the environment's
    completion_mask  list[0|1]     [C] 1 = sampled by the policy
    logprobs         list[float]   [C] of the distribution that was sampled; 0.0 if the mask is 0; null when unknown
    versions         list[int]     [C] policy version; -1 where unknown or not sampled
    reward           float|null    of the rollout; null = unknown, which is not 0
    advantage        float|null    reward less the mean of its group's known rewards
    example_id       int           rows of an example form a group
    rollout          int           rows of a rollout share it
    images           list[str]     data URLs of the images that the ids have placeholders of; absent without
    fork             object        sibling, parent, turn of a rollout in a tree; absent without

``write_trajectories`` is ``vf.export_trajectories`` and takes a run directory as well.
``read_trajectories`` checks every line; turning rows into groups to train on is
``verifiers_integrations.common``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.errors import DatasetError
from verifiers.rollouts.values import Fork
from verifiers.runtime.bounded import lines_of, open_file
from verifiers.runtime.decoding import decode_json

if TYPE_CHECKING:
    import numpy.typing as npt

    from verifiers.results.outputs import GenerateOutputs

COLUMNS = "prompt_ids completion_ids completion_mask logprobs versions reward advantage example_id".split()


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryRow:
    """One line. Example: two turns of two tokens with one token of the environment between them::

    TrajectoryRow(prompt_ids=[1, 5], completion_ids=[7, 2, 9, 8, 2], completion_mask=[1, 1, 0, 1,
    1],
                  logprobs=[-.1, -.2, 0, -.3, -.4], versions=[4, 4, -1, 5, 5], reward=1.0, advantage=0.5,
                  example_id=0, rollout=3)
    """

    prompt_ids: np.ndarray  # int32 [P]
    completion_ids: np.ndarray  # int32 [C]
    completion_mask: np.ndarray  # bool [C]
    logprobs: np.ndarray | None  # float32 [C]; None when the server gave none
    versions: np.ndarray  # int32 [C]
    reward: float
    """NaN when unknown."""
    advantage: float
    """NaN when unknown."""
    example_id: Any
    rollout: int
    images: tuple[str, ...] = ()
    fork: Fork | None = None

    def turns(self) -> list[tuple[int, int]]:
        """(start, end) of each stretch of sampled tokens within the completion."""
        edges = np.flatnonzero(
            np.diff(np.concatenate(([0], self.completion_mask.astype(np.int8), [0])))
        )
        return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def write_trajectories(source: GenerateOutputs | str | Path, path: str | Path) -> int:
    """Write results, or those in a run directory, to ``path``; the number of lines.

    *Raises* ConfigError when there are no results or a rollout has no recorded token ids.
    """
    from verifiers.results import export_trajectories, load_results

    results = load_results(source) if isinstance(source, str | Path) else source
    return export_trajectories(results, path)


def read_trajectories(path: str | Path) -> list[TrajectoryRow]:
    """Every row of a file, in order. *Raises* DatasetError that names the line and what is wrong
    with it."""
    return list(iterate_trajectories(path))


def iterate_trajectories(path: str | Path) -> Iterator[TrajectoryRow]:
    """The rows one at a time; see ``read_trajectories``."""
    with open_file(path) as lines:
        for number, line in enumerate(lines_of(lines), 1):
            if line.strip():
                yield _row(line, number - 1, f"{path}:{number}")


def _row(line: bytes, index: int, location: str) -> TrajectoryRow:
    try:
        fields = decode_json(line)
        missing = [name for name in COLUMNS if name not in fields]
        if missing:
            raise ValueError(f"it has no {missing[0]!r}")
        row = TrajectoryRow(
            _array(fields["prompt_ids"], np.int32),
            _array(fields["completion_ids"], np.int32),
            _array(fields["completion_mask"], np.bool_),
            None if fields["logprobs"] is None else _array(fields["logprobs"], np.float32),
            _array(fields["versions"], np.int32),
            _number(fields["reward"]),
            _number(fields["advantage"]),
            fields["example_id"],
            fields.get("rollout", index),
            tuple(map(str, fields.get("images") or ())),
            Fork.read(fields.get("fork")),
        )
        _check(row)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DatasetError(f"{location}: this line is no trajectory: {error}") from error
    return row


def _check(row: TrajectoryRow) -> None:
    if not len(row.prompt_ids):
        raise ValueError("prompt_ids is empty; the first sampled token would have no context")
    for name in ("completion_mask", "logprobs", "versions"):
        values = getattr(row, name)
        if values is not None and len(values) != len(row.completion_ids):
            raise ValueError(
                f"{name} has {len(values)} entries for {len(row.completion_ids)} completion_ids"
            )


def _array(values: npt.ArrayLike, dtype: npt.DTypeLike) -> np.ndarray:
    array = np.asarray(values, dtype)
    if array.ndim != 1:
        raise ValueError(f"a list of numbers is needed, not {values!r:.40}")
    return array


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
