"""``History``: the metrics of a training run as rows, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import read_file
from verifiers_trainer.run.metrics_files import METRICS, read_metrics

PICTURE = "learning-curve.png"


class History:
    """The lines of a run's ``metrics.jsonl``, read anew at each use: one dict per step, evaluation
    or skipped batch."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All lines; empty before the first step."""
        file = self.folder / METRICS
        return read_metrics(file) if file.is_file() else []

    def __len__(self) -> int:
        return len(self.rows)

    def to_pandas(self) -> Any:
        """The lines as a ``pandas.DataFrame``, one column per metric; NaN if a line has no such
        metric."""
        import pandas

        return pandas.DataFrame(self.rows)

    def plot(self, picture: str | Path | None = None) -> Picture:
        """Draw the learning curve into ``picture`` (PNG; default: ``learning-curve.png`` in the
        run's folder).

        *Raises* ConfigError before the first step, and where matplotlib is not installed.
        """
        if not any("reward/mean" in row for row in self.rows):
            raise ConfigError(f"{self.folder / METRICS} holds no step yet: train first")
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                "a plot needs matplotlib, which is not installed: pip install matplotlib"
            ) from error
        from verifiers_trainer.run.plot import draw_learning_curve

        target = self.folder / PICTURE if picture is None else Path(picture)
        draw_learning_curve(self.folder / METRICS, target, self.folder.name)
        return Picture(target)

    def __repr__(self) -> str:
        return f"History({str(self.folder)!r}, {len(self)} lines)"


class Picture:
    """A PNG file that a notebook shows."""

    def __init__(self, path: Path):
        self.path = path

    def __repr__(self) -> str:
        return f"Picture({str(self.path)!r})"

    def _repr_png_(self) -> bytes:
        return read_file(self.path)
