"""``vf-eval ENV --replay RUN:EXAMPLE[:ROLLOUT]``: one saved rollout again, with its saved replies
and today's code; the first difference is shown.

The comparison is in ``testing.replaying``. Everything runs in this process and on its main loop, so
that a breakpoint of the environment's code is a breakpoint of this command.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.common.flags import spelling
from verifiers.cli.common.reader import Fields, raise_together
from verifiers.cli.evaluate.arguments import CommandLine
from verifiers.cli.evaluate.entries import resolve
from verifiers.cli.evaluate.options import EnvironmentSettings, EvalSettings, Evaluation, layered
from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.results.outputs import GenerateOutputs
    from verifiers.results.rows import RolloutOutput
    from verifiers.testing.replaying import Replay

OF_ENVIRONMENT = Fields.of(EnvironmentSettings).attributes
"""Settings that a replay reads; the model, its sampling and the row are those of the run."""
_REFERENCE = re.compile(r"(?P<run>.+?):(?P<example>[^:/\\]+?)(?::(?P<sibling>\d+))?")


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """What ``--replay`` names."""

    reference: str
    rollout: RolloutOutput
    facts: Mapping[str, Any]
    """The metadata of its run."""

    @classmethod
    def of(cls, reference: str) -> SavedRollout:
        """Read ``RUN:EXAMPLE[:ROLLOUT]``. *Raises* ConfigError."""
        from verifiers.results.loading import load_results

        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise ConfigError(
                f"--replay is RUN:EXAMPLE or RUN:EXAMPLE:ROLLOUT, such as outputs/evals/my-env:3,"
                f" not {reference!r}",
                key="replay",
            )
        run, sibling = Path(match["run"]).expanduser(), int(match["sibling"] or 0)
        results = load_results(run)
        rollout = _rollout(results, match["example"], sibling, reference)
        if "run_path" in rollout:
            raise ConfigError(
                f"--replay {reference}: {run} holds several runs; name one, such as"
                f" {run / rollout['run_path']}:{match['example']}",
                key="replay",
            )
        return cls(reference, rollout, results.metadata)

    def evaluation(self, line: CommandLine) -> Evaluation:
        """The environment of the command with the run's arguments below those of the command.
        *Raises* ConfigError."""
        from verifiers.runtime.redaction import HIDDEN

        if line.files or len(line.targets) > 1:
            line.problems.append(
                "--replay runs one rollout: name its environment, vf-eval ENV_ID --replay RUN:EXAMPLE"
            )
        raise_together(line.problems)
        of_run = {"env_args": self.facts.get("env_args") or {}}
        line.dotted = layered(of_run, line.dotted)
        (evaluation,) = resolve(line)
        values = evaluation.settings.env_args
        if hidden := [name for name, value in values.items() if HIDDEN in str(value)]:
            raise ConfigError(
                f"the run does not store secrets: give {hidden[0]!r} again with --env-args",
                key=hidden[0],
            )
        return evaluation


def _rollout(results: GenerateOutputs, example: str, sibling: int, reference: str) -> RolloutOutput:
    ids = {str(example_id): example_id for example_id in results["example_ids"]}
    try:
        if example not in ids:
            raise KeyError(f"the run has no example {example}; it has {_some(ids)}")
        return results.rollout(ids[example], sibling)
    except (KeyError, IndexError) as error:
        raise ConfigError(f"--replay {reference}: {error.args[0]}", key="replay") from None


def _some(ids: Mapping[str, object]) -> str:
    first_ids = list(ids)[:5]
    return ", ".join(first_ids) + (f" and {len(ids) - 5:,} more" if len(ids) > 5 else "")


def _without_effect(settings: Iterable[str]) -> tuple[str, ...]:
    """A note about the flags, by setting, that change nothing in a replay."""
    names = [spelling(EvalSettings, key) for key in settings if key not in OF_ENVIRONMENT]
    if not names:
        return ()
    return (
        f"without effect: {', '.join(names)} (the saved replies take the place of a model, and the"
        " row is that of the run)",
    )


async def replayed(
    saved: SavedRollout, evaluation: Evaluation, flags: Iterable[str] = ()
) -> Replay:
    """Load the environment, replay, close it. ``flags``: settings from the command's flags."""
    from verifiers.cli.evaluate.planning import load
    from verifiers.testing.replaying import a_replay

    env = load(evaluation.env_id, evaluation.settings)
    try:
        replay = await a_replay(
            env,
            saved.rollout,
            model=saved.facts.get("model") or "saved",
            sampling_args=saved.facts.get("sampling_args") or {},
        )
        return replace(replay, notes=(*replay.notes, *_without_effect(flags)))
    finally:
        await env.aclose()
