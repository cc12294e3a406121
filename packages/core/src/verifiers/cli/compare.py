"""``vf-compare``: is a run better than another, by how much, and how sure. Reads runs only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.common.command import Call, SmallCommand, one_word
from verifiers.cli.common.streams import HAS_FINDINGS
from verifiers.errors import ConfigError
from verifiers.runtime.notations import Names
from verifiers.runtime.values import Finite, Limit, option

if TYPE_CHECKING:
    from verifiers.results.agreement import Agreement
    from verifiers.results.comparison import Measured

ABOUT = """Compare evaluations example by example: each RUN with the first one of its environment.

RUN is a run's folder or a results file. Two folders of runs, NIGHT1 and NIGHT2, are compared run by run: those of the
same environment, arguments, model and sampling. An example counts once, as the mean over its rollouts. The interval
is 95%; p is adjusted for the number of comparisons (Holm).

\b
  vf-compare outputs/evals/reverse-text--a/1f00 outputs/evals/reverse-text--b/2c11
  vf-compare BASE NEW --metrics reward,exact_match
  vf-compare BASE NEW --fail-if-worse        exit code 1 when NEW is worse, for CI
  vf-compare NIGHT1 NIGHT2 --fail-if-worse   each run of a folder with its partner in the other
  vf-compare SET --last --fail-if-worse      a set of runs with the newest complete one before it
  vf-compare outputs/rates                   trainings: seeds of each setting against those of the first
  vf-compare RUN --labels info.human         how far a judge is to be trusted
"""


@dataclass(frozen=True)
class CompareSettings:
    """The flags of ``vf-compare``."""

    metrics: Names = option(("reward",), "What to compare; all: everything [reward].")
    detect: Limit = option(0.05, "Difference to plan examples for.")
    labels: str | None = option(
        None, "Compare a judge in one run with labels, for example info.human.", metavar="COLUMN"
    )
    threshold: Finite = option(0.5, "Value that is a yes.")
    anyway: bool = option(False, "Compare runs with other settings or rewards too; noted.")
    last: bool = option(False, "Compare a set of runs with the newest complete one before it.")
    fail_if_worse: bool = option(False, "Exit with 1 when a run is worse than its baseline.")


def run(call: Call, settings: CompareSettings) -> None:
    """Compare the runs and print every difference. *Raises* ``ConfigError``."""
    from verifiers.results.comparison import compare_runs
    from verifiers.results.sets import compare_sets

    metrics = list(settings.metrics)
    if settings.labels is not None:
        _compare_with_labels(call, settings.labels, metrics, settings.threshold)
        return
    sizes: Any = {"detect": settings.detect, "anyway": settings.anyway}
    words = _with_last(call) if settings.last else call.words
    if not words:
        return
    if trainings := _trainings(words):
        _compare_trainings(call, settings, trainings)
        if evaluations := _evaluations_beside(words, trainings):
            call.note(
                "vf-compare: the trainings alone were compared, not the evaluations beside them"
                f" (name those to compare them): {', '.join(map(str, evaluations[:3]))}"
                + (f" and {len(evaluations) - 3} more" if len(evaluations) > 3 else "")
            )
        return
    sets = _sets(words)
    runs = _load(words if sets is None else [word for words in sets for word in words])
    if metrics == ["all"]:
        metrics = list(dict.fromkeys(name for evaluation in runs for name in evaluation.values))
    if sets is None:
        comparison = compare_runs(runs, metrics, **sizes)
    else:
        before, after = runs[: len(sets[0])], runs[len(sets[0]) :]
        one_sided = settings.fail_if_worse
        comparison = compare_sets(before, after, metrics, one_sided=one_sided, **sizes)
    call.facts.update(comparison.to_dict())
    call.say(str(comparison))
    if not comparison.differences or (settings.fail_if_worse and comparison.refused):
        refused = comparison.refused[0]
        raise ConfigError(
            f"{refused.run} and {refused.baseline} were not compared: {refused.sentence()}"
            " (--anyway compares runs that share examples)"
        )
    worse = [d for d in comparison.differences if d.verdict in ("worse", "lower")]
    if settings.fail_if_worse and worse:
        call.exit_code = HAS_FINDINGS
        call.note(
            f"vf-compare: {len(worse)} of {len(comparison.differences)} comparisons are worse"
        )


def _trainings(words: list[str]) -> list[Path]:
    """The trainings that the words name, or the folders above them. *Raises* ``ConfigError`` where
    only some words hold trainings."""
    from verifiers.storage.directory import trainings_below

    below = [trainings_below(word) for word in words]
    if any(below) and not all(below):
        training, evaluation = words[list(map(bool, below)).index(True)], words[below.index([])]
        raise ConfigError(
            f"{training} holds trainings and {evaluation} holds none: compare trainings with"
            " trainings, and evaluations with evaluations"
        )
    return [path for paths in below for path in paths]


def _evaluations_beside(words: list[str], trainings: list[Path]) -> list[Path]:
    """The evaluations below the words that are no part of a training."""
    from verifiers.storage.directory import evaluations_below

    below = {run for word in words for run in evaluations_below(word)}
    return [run for run in sorted(below) if not any(map(run.is_relative_to, trainings))]


def _compare_trainings(call: Call, settings: CompareSettings, folders: list[Path]) -> None:
    """Compare the seeds of every setting with those of the first. *Raises* ``ConfigError``."""
    from verifiers.results.trainings import Training, by_settings, compare_seeds

    by_place = {folder.resolve(): folder for folder in reversed(folders)}
    trainings = [Training.read(folder) for folder in reversed(by_place.values())]
    unfinished = [t for t in trainings if t.max_steps is not None and t.step < t.max_steps]
    if unfinished and not settings.anyway:
        first = unfinished[0]
        raise ConfigError(
            f"{first.name} has {first.step} of {first.max_steps} steps: go on with it, or compare"
            " it as it is with --anyway"
        )
    metric, groups = by_settings(trainings)
    if len(groups) < 2:
        raise ConfigError(
            f"the {len(trainings)} trainings have the same settings but for their seeds: name"
            " trainings of two settings or more"
        )
    differences = compare_seeds(groups)
    call.facts.update(
        runs=[{"name": t.name, **t.rewards} for t in trainings],
        differences=[difference.to_dict() for difference in differences],
    )
    width = max(len(seeds.name) for seeds in groups)
    call.say(f"{metric}: means over the seeds ± their standard deviation; each seed")
    for seeds in groups:
        call.say(f"{seeds.name:{width}}  {seeds.summary}")
    call.say(f"difference to {groups[0].name}, by Welch's t test over the seeds")
    for difference in differences:
        call.say(f"{difference.seeds.name:{width}}  {difference}")
    worse = [difference for difference in differences if difference.verdict == "worse"]
    if settings.fail_if_worse and worse:
        call.exit_code = HAS_FINDINGS
        call.note(f"vf-compare: {len(worse)} of {len(differences)} settings are worse")


def _with_last(call: Call) -> list[str]:
    """The newest complete set before the one that is named, and that set: the newest one of a
    folder of sets. Empty, with a note, when there is none before it. *Raises* ``ConfigError``."""
    from verifiers.storage.sets import newest_complete_before, sets_below

    word = one_word(call, "one set of runs with --last: vf-compare outputs/sets/nightly --last")
    sets = sets_below(word)
    if not sets:
        raise ConfigError(
            f"{word} has no set of runs (set.json): vf-eval writes them to outputs/sets"
        )
    names = sorted({run_set.name for run_set in sets})
    if len(names) > 1:
        raise ConfigError(f"{word} has sets of several names, {', '.join(names)}: name one folder")
    newest = sets[-1]
    before = newest_complete_before(newest)
    call.facts["sets"] = [str(before.path) if before else None, str(newest.path)]
    if not newest.is_complete:
        counts = f"{newest.num_complete} of {len(newest.runs)}"
        call.note(f"vf-compare: {newest.label} is not complete: {counts} runs are")
    if before is None:
        call.note(f"vf-compare: no complete set precedes {newest.label}; nothing is compared")
        return []
    call.say(f"{before.label} and {newest.label}")
    return [str(before.path), str(newest.path)]


def _sets(words: list[str]) -> tuple[list[str], list[str]] | None:
    """The runs of two sets; None unless a word is a folder of runs. *Raises* ``ConfigError`` for a
    set beside other than one set or run."""
    from verifiers.storage.directory import RESULTS_NAME, evaluations_below

    sets = []
    for word in words:
        is_run = Path(word).is_file() or Path(word, RESULTS_NAME).is_file()
        sets.append([word] if is_run else [str(path) for path in evaluations_below(word)] or [word])
    if all(runs == [word] for runs, word in zip(sets, words, strict=True)):
        return None
    if len(words) != 2:
        folder = next(word for runs, word in zip(sets, words, strict=True) if runs != [word])
        raise ConfigError(
            f"{folder} is a folder of runs, and two of those are compared: vf-compare NIGHT1 NIGHT2"
        )
    return sets[0], sets[1]


def _load(words: list[str]) -> list[Measured]:
    """The runs of the command line, each with a name of its own."""
    from verifiers.results import load_results
    from verifiers.results.outputs import measured
    from verifiers.storage.directory import saved_config

    if len(words) < 2:
        raise ConfigError("name two or more runs: vf-compare RUN RUN")
    names = [word.rstrip("/") for word in words]
    if len(set(names)) < len(names):
        raise ConfigError("a run is named twice; a run compared with itself shows nothing")
    paths = [Path(word) for word in words]
    folders = [path if path.is_dir() else path.parent for path in paths]
    return measured(
        [
            (name, load_results(path), saved_config(folder))
            for name, path, folder in zip(names, paths, folders, strict=True)
        ]
    )


def _compare_with_labels(call: Call, column: str, metrics: list[str], threshold: float) -> None:
    """Compare a judge's metrics of a run with labels. *Raises* ``ConfigError``."""
    from verifiers.results import load_results

    word = one_word(call, "one run with --labels: vf-compare RUN --labels info.human")
    results = load_results(word)
    agreements = [results.agreement(column, metric, threshold) for metric in metrics]
    call.facts["agreement"] = [agreement.to_dict() for agreement in agreements]
    for agreement in agreements:
        call.say("\n".join(_agreement_lines(agreement)))


def _agreement_lines(agreement: Agreement) -> list[str]:
    yes, no = agreement.true_yes, agreement.true_no
    low, high = agreement.low, agreement.high
    if math.isnan(agreement.corrected_mean):
        why = "the labels are of one kind only, or the judge is no better than chance"
        corrected = f"unknown: {why}"
    else:
        corrected = f"{agreement.corrected_mean:.3f}, 95% from {low:.3f} to {high:.3f}"
    labelled = f"{agreement.num_labelled} of {agreement.num_rollouts} rollouts are labelled"
    stderr = f"{agreement.kappa_stderr:.3f} (standard error)"
    return [
        f"{agreement.metric} against {agreement.labels}: {labelled}",
        f"  kappa        {agreement.kappa:.3f} ± {stderr}, agreement {agreement.accuracy:.3f}",
        f"  of the yes   {agreement.sensitivity:.3f} called yes ({yes} of {yes + agreement.false_no})",
        f"  of the no    {agreement.specificity:.3f} called no ({no} of {no + agreement.false_yes})",
        f"  judged mean  {agreement.judged_mean:.3f} over all rollouts",
        f"  corrected    {corrected}",
    ]


COMMAND = SmallCommand(
    name="vf-compare",
    about=ABOUT,
    metavar="PATH PATH ...",
    options=CompareSettings,
    keys=("sets", "runs", "differences", "refused", "settings", "without_partner", "agreement"),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
