"""A run of ours as prime-rl's files, of either age, and the command that starts it there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.integrations.prime_rl.reading import GPUS, NUMBERS, PARALLEL, SAMPLING, WANDB, is_prime_rl, read

ERAS = ("v0.4", "2025")
ONLY_2025 = ("micro_batch_size", "mask_truncated_completions")
"""Settings that the one file of v0.3 and v0.4 has no key for."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """The files that were written, and what starts the run."""

    paths: tuple[Path, ...]
    command: str


def emit(run: Mapping[str, Any] | str | Path, era: str = "v0.4", out_dir: str | Path = ".") -> Emitted:
    """Write a run's files for prime-rl and print the command that starts it.

    ``run`` is a document as ``read`` gives, or the path of a ``vf-train`` file. Era "2025" writes ``orch.toml``,
    ``train.toml`` and ``infer.toml``; "v0.4" (also v0.3) one ``rl.toml``. *Raises* ConfigError that names every
    setting prime-rl has no key for.
    """
    import click

    from verifiers_trainer.cli.toml_text import write_toml

    if era not in ERAS:
        raise ConfigError(f"era is {era!r}; it must be one of {', '.join(ERAS)}", key="era")
    document = dict(run) if isinstance(run, Mapping) else _document(Path(run))
    _check(document, era)
    files = _files_2025(document) if era == "2025" else {"rl.toml": _tables_v04(document)}
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tables in files.items():
        (folder / name).write_text(write_toml(tables), encoding="utf-8")
    command = _command_2025(document, folder) if era == "2025" else f"uv run rl @ {(folder / 'rl.toml').as_posix()}"
    click.echo(command)
    return Emitted(tuple(folder / name for name in files), command)


def _document(path: Path) -> dict[str, Any]:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return read(path) if is_prime_rl(document) else document


def _check(document: Mapping[str, Any], era: str) -> None:
    known = {*NUMBERS.values(), *SAMPLING, "learning_rate", "save_steps", "run_name"}
    known -= set(ONLY_2025) if era != "2025" else set()
    unknown = [f"trainer.args.{name}" for name in _args(document) if name not in known]
    flags = set(_of(document, "inference", "args")) - set(PARALLEL.values())
    unknown += [f"inference.args.{name}" for name in sorted(flags)]
    unknown += [name for name in document if name not in ("model", "env", "trainer", "inference", "wandb")]
    unknown += [f"wandb.{name}" for name in _of(document, "wandb") if name not in WANDB]
    if unknown:
        raise ConfigError(f"prime-rl {era} has no key for {', '.join(unknown)}; leave them out, or write them there")
    if era == "2025" and len(_environments(document)) > 1:
        raise ConfigError('the files of 2025 hold one environment; write several with era="v0.4"')


def _files_2025(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    model = {"name": document["model"]} if "model" in document else {}
    (environment,) = _environments(document) or [{}]
    orchestrator = {
        **_chosen(document, {key: ours for key, ours in NUMBERS.items()}),
        **_filled(
            model=model,
            environment={name: environment[name] for name in ("id", "args") if environment.get(name)},
            sampling=_chosen(document, {name: name for name in SAMPLING}),
            wandb=_wandb(document),
            ckpt=_chosen(document, {"interval": "save_steps"}),
        ),
    }
    trainer = _filled(model=model, optim=_chosen(document, {"lr": "learning_rate"}))
    inference = _filled(model=model, parallel=_parallel(document))
    return {"orch.toml": orchestrator, "train.toml": trainer, "infer.toml": inference}


def _command_2025(document: Mapping[str, Any], folder: Path) -> str:
    flags = {"trainer": "train.toml", "orchestrator": "orch.toml", "inference": "infer.toml"}
    words = [f"--{role} @ {(folder / name).as_posix()}" for role, name in flags.items()]
    gpus = [(role, _of(document, role).get("gpus")) for role in ("trainer", "inference")]
    return " ".join(["uv run rl", *words, *(f"--{role}-gpus {count}" for role, count in gpus if count)])


def _tables_v04(document: Mapping[str, Any]) -> dict[str, Any]:
    top = _chosen(document, {"max_steps": "max_steps", "seq_len": "max_seq_len"})
    first = 0
    for key, role in GPUS.items():
        count = _of(document, role).get("gpus") or 0
        if count:
            top[key] = list(range(first, first + count))
        first += count
    orchestrator = _chosen(document, {name: name for name in ("batch_size", "rollouts_per_example")})
    orchestrator |= _filled(
        env=[_filled(**one) for one in _environments(document)],
        sampling=_chosen(document, {name: name for name in SAMPLING}),
    )
    return top | _filled(
        model={"name": document["model"]} if "model" in document else {},
        wandb=_wandb(document),
        ckpt=_chosen(document, {"interval": "save_steps"}),
        orchestrator=orchestrator,
        trainer=_filled(optim=_chosen(document, {"lr": "learning_rate"})),
        inference=_filled(parallel=_parallel(document)),
    )


def _args(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return _of(document, "trainer", "args")


def _of(document: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    table: Mapping[str, Any] = document
    for name in names:
        table = table.get(name) or {}
    return table


def _chosen(document: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Their key -> the value of our setting, for the settings that are given."""
    given = _args(document)
    return {key: given[ours] for key, ours in names.items() if ours in given}


def _environments(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = document.get("env") or []
    return [dict(one) for one in (given if isinstance(given, list) else [given])]


def _wandb(document: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": _args(document)["run_name"]} if "run_name" in _args(document) else {}
    return named | dict(_of(document, "wandb"))


def _parallel(document: Mapping[str, Any]) -> dict[str, Any]:
    given = _of(document, "inference", "args")
    return {key: given[flag] for key, flag in PARALLEL.items() if flag in given}


def _filled(**tables: Any) -> dict[str, Any]:
    return {name: table for name, table in tables.items() if table}
