"""Write the rows of an environment as Parquet files of a peer, from Python and from the command
line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError
from verifiers_integrations.common import limit


def write_splits(
    env: Environment,
    out_dir: str | Path,
    max_samples: int | None,
    env_id: str | None,
    env_args: Mapping[str, object] | None,
    row_of: Callable[[Mapping[str, object], str, str, str], Mapping[str, object]],
) -> Path:
    """Write ``train.parquet`` and, if there are evaluation rows, ``eval.parquet``; return the
    folder.

    ``row_of``: (task, id of the environment, its arguments as JSON, split) -> row. *Raises*
    ConfigError without an id.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = env_id or env.env_id
    if not name:
        raise ConfigError(
            "the peers load the environment by its id: give env_id, the id of an installed package"
        )
    arguments = json.dumps(dict(env.env_args if env_args is None else env_args))
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for split, tasks in zip(("train", "eval"), limit(env, max_samples), strict=True):
        if tasks:
            rows = [row_of(task, name, arguments, split) for task in tasks]
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def export_command(
    program: str, peer: str, export: Callable[..., Path], words: Sequence[str] | None
) -> None:
    """``PROGRAM ENV OUT_DIR``: export the rows of an environment and print the paths."""
    parser = argparse.ArgumentParser(
        prog=program, description=f"Write an environment's rows for {peer}."
    )
    parser.add_argument("env_id")
    parser.add_argument("out_dir")
    parser.add_argument("--env-args", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--max-samples", type=int)
    args = parser.parse_args(words)
    env = load_environment(args.env_id, **args.env_args)
    folder = export(env, args.out_dir, args.max_samples, env_id=args.env_id, env_args=args.env_args)
    sys.stdout.write("".join(f"{path}\n" for path in sorted(folder.iterdir())))
