"""A run of ours as prime-rl's files, of either age, and the command that starts it there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.cli.prime_rl_files import (
    GPUS,
    LORA,
    OPTIM,
    PARALLEL,
    SAMPLING,
    SERVER,
    SERVER_MODEL,
    WANDB,
    is_prime_rl,
    read,
)

ERAS = ("v0.4", "2025")
_SAME = ("max_steps", "batch_size", "rollouts_per_example")
ORCHESTRATOR_2025 = {name: name for name in (*_SAME, "micro_batch_size", "mask_truncated_completions")} | {
    "seq_len": "max_seq_len"
}
ORCHESTRATOR_V04 = {
    "batch_size": "batch_size",
    "rollouts_per_example": "rollouts_per_example",
    "oversampling_factor": "oversample",
    "max_async_level": "max_off_policy_steps",
}
TOP_V04 = {"max_steps": "max_steps", "seq_len": "max_seq_len"}
NAMED = (*OPTIM.values(), *SAMPLING, *LORA.values())
ELSEWHERE = ("save_steps", "run_name", "use_lora", "use_liger", "gradient_checkpointing")
"""Settings that stand in other tables than those of numbers."""
OFF = ("mask_truncated_completions", "zero_truncated_completions", "gradient_checkpointing")
"""Settings that prime-rl has no key for, or none any more, and that say nothing when they are false."""
LEFT_OUT = {"micro_batch_size": "it fills micro batches up to seq_len", "bf16": "it always computes in bf16"}
"""Settings that do not change what is learned, and why prime-rl does without them."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """The files that were written, and what starts the run."""

    paths: tuple[Path, ...]
    command: str


def emit(run: Mapping[str, Any] | str | Path, era: str = "v0.4", out_dir: str | Path = ".") -> Emitted:
    """Write a run's files for prime-rl and print the command that starts it.

    ``run`` is a document as ``read`` gives, or the path of a ``vf-train`` file. Where ours trains an adapter and
    prime-rl would train all weights, the adapter and its learning rate are written out. Era "2025" writes
    ``orch.toml``, ``train.toml`` and ``infer.toml``; "v0.4" (also v0.3) one ``rl.toml``. *Raises* ConfigError that
    names every setting prime-rl has no key for.
    """
    import click
    import tomli_w

    if era not in ERAS:
        raise ConfigError(f"era is {era!r}; it must be one of {', '.join(ERAS)}", key="era")
    document = _complete(dict(run) if isinstance(run, Mapping) else _document(Path(run)))
    for name in _check(document, era):
        click.echo(f"left out: trainer.args.{name} ({LEFT_OUT[name]})", err=True)
    files = _files_2025(document) if era == "2025" else {"rl.toml": _tables_v04(document)}
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tables in files.items():
        (folder / name).write_text(tomli_w.dumps(tables), encoding="utf-8")
    command = _command_2025(document, folder) if era == "2025" else f"uv run rl @ {(folder / 'rl.toml').as_posix()}"
    click.echo(command)
    return Emitted(tuple(folder / name for name in files), command)


def _document(path: Path) -> dict[str, Any]:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    return read(path) if is_prime_rl(document) else document


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    """With the adapter that our run trains and prime-rl would not, unless the document says how it trains."""
    args = _args(document)
    if "model" not in document or args.get("use_lora") is False:
        return document
    from verifiers_trainer.settings.config import RLConfig

    told = {name: args.get(name, RLConfig.default_of(name)) for name in ("use_lora", "lora_rank", "lora_alpha")}
    told["learning_rate"] = args.get("learning_rate") or 1e-5  # of RLConfig with an adapter
    return document | {"trainer": {**_of(document, "trainer"), "args": {**args, **told}}}


def _check(document: Mapping[str, Any], era: str) -> list[str]:
    """The settings that are left out. *Raises* ConfigError for those that prime-rl would need and has no key for."""
    numbers = ORCHESTRATOR_2025 if era == "2025" else ORCHESTRATOR_V04 | TOP_V04
    known = {*numbers.values(), *NAMED, *ELSEWHERE}
    left = {name: value for name, value in _args(document).items() if name not in known}
    silent = {name for name, value in left.items() if name in LEFT_OUT or (name in OFF and value is False)}
    unknown = [f"trainer.args.{name}" for name in left if name not in silent]
    flags = set(_of(document, "inference", "args")) - {*PARALLEL.values(), *SERVER, *SERVER_MODEL}
    unknown += [f"inference.args.{name}" for name in sorted(flags)]
    unknown += [name for name in document if name not in ("model", "env", "trainer", "inference", "wandb")]
    unknown += [f"wandb.{name}" for name in _of(document, "wandb") if name not in WANDB]
    if unknown:
        raise ConfigError(f"prime-rl {era} has no key for {', '.join(unknown)}; leave them out, or write them there")
    if str(document.get("model", "")).startswith("builtin:"):
        raise ConfigError(
            f"prime-rl cannot load {document['model']!r}, a model of this project: name another", key="model"
        )
    if era == "2025" and len(_environments(document)) > 1:
        raise ConfigError('the files of 2025 hold one environment; write several with era="v0.4"')
    return sorted(silent & LEFT_OUT.keys())


def _files_2025(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    model = {"name": document["model"]} if "model" in document else {}
    (environment,) = _environments(document) or [{}]
    orchestrator = {
        **_chosen(document, ORCHESTRATOR_2025),
        **_filled(
            model=model,
            environment={name: environment[name] for name in ("id", "args") if environment.get(name)},
            sampling=_chosen(document, {name: name for name in SAMPLING}),
            wandb=_wandb(document),
            ckpt=_chosen(document, {"interval": "save_steps"}),
        ),
    }
    trained = model | _filled(**_trained(document), experimental=_filled(lora=_lora(document)))
    trainer = _filled(model=trained, optim=_chosen(document, OPTIM))
    inference = _filled(model=model | _served(document, SERVER_MODEL), parallel=_parallel(document))
    return {"orch.toml": orchestrator, "train.toml": trainer, "infer.toml": inference | _served(document, SERVER)}


def _command_2025(document: Mapping[str, Any], folder: Path) -> str:
    flags = {"trainer": "train.toml", "orchestrator": "orch.toml", "inference": "infer.toml"}
    words = [f"--{role} @ {(folder / name).as_posix()}" for role, name in flags.items()]
    gpus = [(role, _of(document, role).get("gpus")) for role in ("trainer", "inference")]
    return " ".join(["uv run rl", *words, *(f"--{role}-gpus {count}" for role, count in gpus if count)])


def _tables_v04(document: Mapping[str, Any]) -> dict[str, Any]:
    top = _chosen(document, TOP_V04)
    first = 0
    for key, role in GPUS.items():
        count = _of(document, role).get("gpus") or 0
        if count:
            top[key] = list(range(first, first + count))
        first += count
    lora = _lora(document)
    orchestrator = _chosen(document, ORCHESTRATOR_V04) | ({"lora_name": _name(document)} if lora else {})
    orchestrator |= _filled(
        env=[_filled(**one) for one in _environments(document)],
        sampling=_chosen(document, {name: name for name in SAMPLING}),
    )
    trainer = _filled(model=_filled(**_trained(document), lora=lora), optim=_chosen(document, OPTIM))
    inference = _served(document, SERVER)
    inference |= _filled(model=_served(document, SERVER_MODEL), parallel=_parallel(document))
    return top | _filled(
        model={"name": document["model"]} if "model" in document else {},
        wandb=_wandb(document),
        ckpt=_chosen(document, {"interval": "save_steps"}),
        orchestrator=orchestrator,
        trainer=trainer,
        inference=inference,
    )


def _lora(document: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's table; empty when all weights are trained."""
    return _chosen(document, LORA) if _args(document).get("use_lora") else {}


def _name(document: Mapping[str, Any]) -> str:
    """What the adapter is called: as the run, or its first environment."""
    environments = _environments(document)
    fallback = str(environments[0]["id"]).rpartition("/")[2] if environments else "policy"
    return str(_wandb(document).get("name") or fallback)


def _trained(document: Mapping[str, Any]) -> dict[str, Any]:
    """How the trainer loads the model."""
    args = _args(document)
    made: dict[str, Any] = {}
    if "use_liger" in args:
        made["impl"] = "liger_kernel" if args["use_liger"] else "hf"
    if args.get("gradient_checkpointing"):
        made["ac"] = {"freq": 1}
    return made


def _served(document: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    given = _of(document, "inference", "args")
    return {name: given[name] for name in names if name in given}


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
