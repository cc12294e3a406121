"""``vf-eval --detect X``: how many rows and rollouts show a difference of X between two runs. Sends
no request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from verifiers.cli.evaluate.planning import Prepared
from verifiers.errors import ConfigError, VerifiersError
from verifiers.results import load_results
from verifiers.results.comparison import DETECT, largest_difference
from verifiers.results.outputs import measured
from verifiers.results.planning import ASSUMED, Spread, detectable, sizes
from verifiers.runtime.terminal import escape_control
from verifiers.storage.directory import RESULTS_NAME


def detect_lines(prepared: Sequence[Prepared], difference: float) -> Iterator[str]:
    """The table of each evaluation. *Raises* ConfigError for a difference of 0."""
    if not difference > 0:
        raise ConfigError(
            f"--detect is {difference:g}; it must be a difference above 0, for example {DETECT}"
        )
    for evaluation in prepared:
        yield from map(escape_control, _lines(evaluation, difference))


def _lines(prepared: Prepared, difference: float) -> Iterator[str]:
    spread, largest, origin = _spread(prepared)
    yield f"{prepared.label}: to show a difference of {difference:g} between two runs"
    yield "  (at 5%, with probability 80%; both runs have the same rows)"
    yield (
        f"  spread    {spread.between:.3f} between rows, {spread.within:.3f} between rollouts of a"
        f" row; {origin}"
    )
    yield "  rollouts per row    rows, if both find the same rows hard … if not"
    for size in sizes(spread, difference):
        yield f"  {size.siblings:>16}    {size.at_least:,} … {size.at_most:,}"
    siblings, rows = prepared.settings.rollouts_per_example, len(prepared.env.eval_table)
    low, high = detectable(spread, rows, siblings)
    differences = f"a difference of {low:.3f} … {high:.3f}"
    if largest < low:
        differences = f"no difference: those of rewards from 0 to {largest:g} are too small"
    elif largest < high:
        differences = f"a difference of {low:.3f} or more, if both find the same rows hard"
    yield f"  all {rows:,} rows × {siblings} show {differences}"
    yield ""


def _spread(prepared: Prepared) -> tuple[Spread, float, str]:
    """The spread and `largest_difference` of the largest saved run of this environment and model,
    else an assumption; and where they are from."""
    best: tuple[int, Spread, float, str] | None = None
    folder = prepared.path.parent if prepared.path is not None else None
    for file in sorted(folder.glob(f"*/{RESULTS_NAME}")) if folder is not None else ():
        try:
            results = load_results(file.parent)
        except VerifiersError:  # a damaged run says nothing about the spread
            continue
        (run,) = measured([(str(file.parent), results, {})])
        spread = Spread.of(run.values["reward"])
        if spread is not None and (best is None or len(results) > best[0]):
            largest = largest_difference(chain.from_iterable(run.values["reward"].values()))
            best = len(results), spread, largest, f"from {file.parent}"
    if best is not None:
        return best[1:]
    return (
        ASSUMED,
        1.0,
        "assumed for a reward of 0 or 1: no saved run of this model has several rollouts per row",
    )
