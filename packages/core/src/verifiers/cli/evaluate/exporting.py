"""``vf-eval --export``: write a finished run in other formats, beside its journal.

Each format is one entry of ``FORMATS``. The journal, one JSON object per line, is always written
and is not among them. The packages that a format needs are checked before the first rollout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.runtime.installed import part

if TYPE_CHECKING:
    from verifiers.results.outputs import GenerateOutputs


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its file name in the run directory, its writer, and the package it needs."""

    name: str
    write: Callable[[Any, Path], object]
    needs: tuple[str, str] | None = None
    """(module, how to install it)."""


def _parquet(results: GenerateOutputs, path: Path) -> None:
    results.save(path)


def _dataset(results: GenerateOutputs, path: Path) -> None:
    results.to_dataset().save_to_disk(str(path))


def _atif(results: GenerateOutputs, path: Path) -> None:
    from verifiers.results.loading import load_results

    load_results(path.parent).to_atif(path)  # with the keys by which it is compared and resumed


def _inspect(results: GenerateOutputs, path: Path) -> None:
    _to_inspect()(results, path)


def _to_inspect() -> Any:
    return part("to_inspect", "verifiers-integrations", "--export inspect")


FORMATS = {
    "parquet": Format("results.parquet", _parquet),
    "hf": Format("dataset", _dataset),
    "atif": Format("atif", _atif),
    "inspect": Format("results.eval", _inspect, ("inspect_ai", "pip install inspect-ai")),
}


def check_formats(names: Sequence[str]) -> None:
    """*Raises* ``ConfigError`` for a format whose package is not installed."""
    for name in names:
        if name == "inspect":
            _to_inspect()
        needs = FORMATS[name].needs
        if needs is not None and importlib.util.find_spec(needs[0]) is None:
            raise ConfigError(
                f"--export {name} needs {needs[0]}, which is not installed: {needs[1]}"
            )


def export(results: object, folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Write the results into ``folder``; format -> path. *Raises* ``UsageError`` of a writer."""
    written: dict[str, str] = {}
    with _without_bars():
        for name in names:
            path = folder / FORMATS[name].name
            FORMATS[name].write(results, path)
            written[name] = str(path)
    return written


@contextmanager
def _without_bars() -> Iterator[None]:
    """Disable the progress bars of ``datasets`` within the block."""
    from datasets.utils.logging import (
        disable_progress_bar,
        enable_progress_bar,
        is_progress_bar_enabled,
    )

    was_enabled = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            enable_progress_bar()
