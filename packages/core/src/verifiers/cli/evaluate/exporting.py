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

from verifiers.errors import ConfigError, RunError
from verifiers.runtime.installed import part
from verifiers.storage.files import replacing

if TYPE_CHECKING:
    from verifiers.results.outputs import GenerateOutputs


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its file name in the run directory, its writer, and the package it needs."""

    name: str
    write: Callable[[Any, Path, Path], object]
    """``write(results, path, run directory)``."""
    needs: tuple[str, str] | None = None
    """(module, how to install it)."""


def _parquet(results: GenerateOutputs, path: Path, run: Path) -> None:
    results.save(path)


def _dataset(results: GenerateOutputs, path: Path, run: Path) -> None:
    results.to_dataset().save_to_disk(str(path))


def _atif(results: GenerateOutputs, path: Path, run: Path) -> None:
    from verifiers.results.loading import load_results

    saved = load_results(run)  # with the keys by which it is compared and resumed
    saved.metadata = results.metadata
    saved.to_atif(path)


def _inspect(results: GenerateOutputs, path: Path, run: Path) -> None:
    _to_inspect()(results, path)


def _to_inspect() -> Any:
    return part("to_inspect", "--export inspect")


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


class Exports:
    """Writes a finished run in the formats of ``--export``: the ``on_results`` of the run.

    Each appears whole, in place of an earlier one.
    """

    def __init__(self, env_id: str, names: Sequence[str]):
        self._env_id, self._names = env_id, names
        self.folder = Path()
        """The run directory, once it is known."""
        self.results: GenerateOutputs | None = None
        """The results, once they are to be written."""
        self.written: dict[str, str] | None = None
        """Format -> path, once all are written."""

    def __call__(self, results: GenerateOutputs) -> None:
        """*Raises* RunError; UsageError of a writer."""
        self.results, written = results, {}
        for name in self._names:
            path = self.folder / FORMATS[name].name
            try:
                with _without_bars(), replacing(path) as new:
                    FORMATS[name].write(results, new, self.folder)
            except OSError as error:
                raise RunError(
                    f"{self._env_id}: --export failed: {error}; every rollout is saved, and the"
                    " same command writes what is missing without asking the model"
                ) from error
            written[name] = str(path)
        self.written = written or None


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
