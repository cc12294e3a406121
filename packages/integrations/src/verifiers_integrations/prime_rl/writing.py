"""Write a run as files of prime-rl, of 2025 or of v0.4, and print the command that starts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.runtime.decoding import read_toml
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
from verifiers_trainer.settings.fields import Settings

ERAS = ("v0.4", "2025")
_SAME = ("max_steps", "batch_size", "rollouts_per_example")
ORCHESTRATOR_2025 = {
    name: name
    for name in (*_SAME, "micro_batch_size", "max_concurrent", "mask_truncated_completions")
} | {"seq_len": "max_seq_len"}
ORCHESTRATOR_V04 = {
    "batch_size": "batch_size",
    "rollouts_per_example": "rollouts_per_example",
    "oversampling_factor": "oversample",
    "max_async_level": "max_off_policy_steps",
}
TOP_V04 = {"max_steps": "max_steps", "seq_len": "max_seq_len"}
SETTING_NAMES = (*OPTIM.values(), *SAMPLING, *LORA.values())
ELSEWHERE = ("save_steps", "run_name", "use_lora", "use_liger", "gradient_checkpointing")
"""Settings that are written to other tables."""
OFF = ("mask_truncated_completions", "zero_truncated_completions", "gradient_checkpointing")
"""Settings without a key in prime-rl, or in its newer files, that have no effect when false."""
LEFT_OUT = {
    "micro_batch_size": "it fills micro batches up to seq_len",
    "bf16": "it always computes in bf16",
    "max_concurrent": "it bounds its own concurrency",
}
"""Settings that do not change what is learned -> why prime-rl has no key for them."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """Paths of the files, and the command that starts the run."""

    paths: tuple[Path, ...]
    command: str


def emit(
    run: Mapping[str, object] | str | Path, era: str = "v0.4", out_dir: str | Path = "."
) -> Emitted:
    """Write the files of a run for prime-rl and print the command that starts it.

    ``run`` is a document from ``read``, or the path of a ``vf-train`` file. Where ``vf-train``
    trains an adapter by default and prime-rl all weights, the adapter and its learning rate are
    written explicitly. Era "2025" writes ``orch.toml``, ``train.toml`` and ``infer.toml``; "v0.4"
    (also v0.3) one ``rl.toml``. *Raises* ConfigError with all settings without a key in prime-rl.
    """
    import click
    import tomli_w

    if era not in ERAS:
        raise ConfigError(f"era is {era!r}; it must be one of {', '.join(ERAS)}", key="era")
    if isinstance(run, Mapping):
        document = dict(run)
    elif is_prime_rl(document := read_toml(Path(run))):
        document = read(Path(run))
    document = _complete(document)
    for name in _check(document, era):
        click.echo(f"left out: trainer.args.{name} ({LEFT_OUT[name]})", err=True)
    files = _files_2025(document) if era == "2025" else {"rl.toml": _tables_v04(document)}
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tables in files.items():
        (folder / name).write_text(tomli_w.dumps(tables), encoding="utf-8")
    if era == "2025":
        command = _command_2025(document, folder)
    else:
        command = f"uv run rl @ {(folder / 'rl.toml').as_posix()}"
    click.echo(command)
    return Emitted(tuple(folder / name for name in files), command)


def _complete(document: dict[str, object]) -> dict[str, object]:
    """Add the default adapter of ``vf-train``, unless the document trains all weights."""
    args = _args(document)
    if "model" not in document or args.get("use_lora") is False:
        return document
    adapter = {
        name: args.get(name, getattr(Settings, name))
        for name in ("use_lora", "lora_rank", "lora_alpha")
    }
    # default of RLConfig with an adapter
    adapter["learning_rate"] = args.get("learning_rate") or 1e-5
    return document | {"trainer": {**_of(document, "trainer"), "args": {**args, **adapter}}}


def _check(document: Mapping[str, object], era: str) -> list[str]:
    """Return the settings that are left out. *Raises* ConfigError for settings without a key in
    prime-rl."""
    numbers = ORCHESTRATOR_2025 if era == "2025" else ORCHESTRATOR_V04 | TOP_V04
    names = {*numbers.values(), *SETTING_NAMES, *ELSEWHERE}
    unmapped = {name: value for name, value in _args(document).items() if name not in names}
    ignored = {
        name
        for name, value in unmapped.items()
        if name in LEFT_OUT or (name in OFF and value is False)
    }
    unknown = [f"trainer.args.{name}" for name in unmapped if name not in ignored]
    flags = set(_of(document, "inference", "args")) - {*PARALLEL.values(), *SERVER, *SERVER_MODEL}
    unknown += [f"inference.args.{name}" for name in sorted(flags)]
    unknown += [
        name for name in document if name not in ("model", "env", "trainer", "inference", "wandb")
    ]
    unknown += [f"wandb.{name}" for name in _of(document, "wandb") if name not in WANDB]
    if unknown:
        raise ConfigError(
            f"prime-rl {era} has no key for {', '.join(unknown)}; remove them, or edit its files"
        )
    if str(document.get("model", "")).startswith("builtin:"):
        raise ConfigError(
            f"prime-rl cannot load {document['model']!r}, a builtin model of this package: name"
            " another",
            key="model",
        )
    if era == "2025" and len(_environments(document)) > 1:
        raise ConfigError('the files of 2025 have one environment; use era="v0.4" for several')
    return sorted(ignored & LEFT_OUT.keys())


def _files_2025(document: Mapping[str, object]) -> dict[str, dict[str, object]]:
    model = {"name": document["model"]} if "model" in document else {}
    (environment,) = _environments(document) or [{}]
    orchestrator = {
        **_values(document, ORCHESTRATOR_2025),
        **_nonempty(
            model=model,
            environment={
                name: environment[name] for name in ("id", "args") if environment.get(name)
            },
            sampling=_values(document, {name: name for name in SAMPLING}),
            wandb=_wandb(document),
            ckpt=_values(document, {"interval": "save_steps"}),
        ),
    }
    trainer_model = model | _nonempty(
        **_model_loading(document), experimental=_nonempty(lora=_lora(document))
    )
    trainer = _nonempty(model=trainer_model, optim=_values(document, OPTIM))
    inference = _nonempty(
        model=model | _server_flags(document, SERVER_MODEL), parallel=_parallel(document)
    )
    return {
        "orch.toml": orchestrator,
        "train.toml": trainer,
        "infer.toml": inference | _server_flags(document, SERVER),
    }


def _command_2025(document: Mapping[str, object], folder: Path) -> str:
    flags = {"trainer": "train.toml", "orchestrator": "orch.toml", "inference": "infer.toml"}
    words = [f"--{role} @ {(folder / name).as_posix()}" for role, name in flags.items()]
    gpus = [(role, _of(document, role).get("gpus")) for role in ("trainer", "inference")]
    return " ".join(
        ["uv run rl", *words, *(f"--{role}-gpus {count}" for role, count in gpus if count)]
    )


def _tables_v04(document: Mapping[str, object]) -> dict[str, Any]:
    top = _values(document, TOP_V04)
    first = 0
    for key, role in GPUS.items():
        count = _of(document, role).get("gpus") or 0
        if count:
            top[key] = list(range(first, first + count))
        first += count
    lora = _lora(document)
    orchestrator = _values(document, ORCHESTRATOR_V04) | (
        {"lora_name": _name(document)} if lora else {}
    )
    orchestrator |= _nonempty(
        env=[_nonempty(**environment) for environment in _environments(document)],
        sampling=_values(document, {name: name for name in SAMPLING}),
    )
    trainer = _nonempty(
        model=_nonempty(**_model_loading(document), lora=lora), optim=_values(document, OPTIM)
    )
    inference = _server_flags(document, SERVER)
    inference |= _nonempty(
        model=_server_flags(document, SERVER_MODEL), parallel=_parallel(document)
    )
    return top | _nonempty(
        model={"name": document["model"]} if "model" in document else {},
        wandb=_wandb(document),
        ckpt=_values(document, {"interval": "save_steps"}),
        orchestrator=orchestrator,
        trainer=trainer,
        inference=inference,
    )


def _lora(document: Mapping[str, object]) -> dict[str, Any]:
    """Return the table of the adapter; empty when all weights are trained."""
    return _values(document, LORA) if _args(document).get("use_lora") else {}


def _name(document: Mapping[str, object]) -> str:
    """Return the name of the adapter: that of the run, or of its first environment."""
    environments = _environments(document)
    fallback = str(environments[0]["id"]).rpartition("/")[2] if environments else "policy"
    return str(_wandb(document).get("name") or fallback)


def _model_loading(document: Mapping[str, object]) -> dict[str, Any]:
    """Return the keys for loading the model in the trainer."""
    args = _args(document)
    keys: dict[str, object] = {}
    if "use_liger" in args:
        keys["impl"] = "liger_kernel" if args["use_liger"] else "hf"
    if args.get("gradient_checkpointing"):
        keys["ac"] = {"freq": 1}
    return keys


def _server_flags(document: Mapping[str, object], names: Sequence[str]) -> dict[str, Any]:
    args = _of(document, "inference", "args")
    return {name: args[name] for name in names if name in args}


def _args(document: Mapping[str, object]) -> Mapping[str, object]:
    return _of(document, "trainer", "args")


def _of(document: Mapping[str, object], *names: str) -> Mapping[str, Any]:
    table: Mapping[str, Any] = document
    for name in names:
        table = table.get(name) or {}
    return table


def _values(document: Mapping[str, object], names: Mapping[str, str]) -> dict[str, Any]:
    """Return key of prime-rl -> value, for the settings that the document has; ``names`` maps keys
    to settings."""
    args = _args(document)
    return {key: args[name] for key, name in names.items() if name in args}


def _environments(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    tables = document.get("env") or []
    return [dict(table) for table in (tables if isinstance(tables, list) else [tables])]


def _wandb(document: Mapping[str, object]) -> dict[str, Any]:
    run_name = {"name": _args(document)["run_name"]} if "run_name" in _args(document) else {}
    return run_name | dict(_of(document, "wandb"))


def _parallel(document: Mapping[str, object]) -> dict[str, Any]:
    args = _of(document, "inference", "args")
    return {key: args[flag] for key, flag in PARALLEL.items() if flag in args}


def _nonempty(**tables: object) -> dict[str, Any]:
    return {name: table for name, table in tables.items() if table}
