"""``vf-rescore``: score saved rollouts again after a change of the rubric, as a new run. Calls no
model but judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.common.command import Call, SmallCommand, one_word
from verifiers.errors import ConfigError
from verifiers.runtime.notations import Table, Text
from verifiers.runtime.values import Count, option

if TYPE_CHECKING:
    from verifiers.environments.base import Environment
    from verifiers.results import GenerateMetadata, GenerateOutputs
    from verifiers.runs.options import RunOptions

ABOUT = """Score the rollouts of a saved run again, with the environment's present rubric, as a new run.

The model is not called; a judge of the rubric is. The environment and its arguments are those of the run unless they
are given; an environment that is not installed must be given. The metadata of the new run names the old run.

\b
  vf-rescore outputs/evals/reverse-text--m/1f00c2a4
  vf-rescore RUN -a unit=word
  vf-rescore RUN --env my-stricter-env
"""


@dataclass(frozen=True)
class RescoreSettings:
    """The flags of ``vf-rescore``."""

    env: str | None = option(
        None, "Environment whose rubric scores [that of the run].", metavar="ID"
    )
    env_args: Table = option(
        {}, "Arguments of its loader, over those of the run.", "-a", metavar="JSON"
    )
    env_dir_path: Text = option("./environments", "Folder of environments not installed.", "-p")
    to: Text | None = option(
        None, "Directory of the new run [beside the runs of the environment].", metavar="DIR"
    )
    max_concurrent: Count = option(32, "Rollouts scored at a time.", "-c")


def run(call: Call, settings: RescoreSettings) -> None:
    """Load, score, save and print. *Raises* ``ConfigError``."""
    from verifiers.cli.evaluate.options import EvalSettings
    from verifiers.cli.evaluate.planning import load
    from verifiers.cli.evaluate.summary import print_summary, run_facts, run_json
    from verifiers.results import load_results
    from verifiers.results.rows import json_ready
    from verifiers.runs.options import RunOptions
    from verifiers.runtime.calls import run_in_private_loop

    path = Path(one_word(call, "one run: vf-rescore RUN"))
    facts = load_results(path, state_columns=()).metadata
    env_id, env_args = _environment(path, facts, settings)
    env = load(env_id, EvalSettings(env_args=env_args, env_dir_path=settings.env_dir_path))
    run_options = RunOptions(
        results_path=settings.to,
        save_results=settings.to is None,
        max_concurrent=settings.max_concurrent,
        on_log=call.note,
    )
    results = run_in_private_loop(lambda: _scored(env, path, run_options))
    numbers, origin = run_facts(results), results.metadata.origin or {}
    call.facts.update(run=run_json(numbers), origin=json_ready(origin))
    if not call.json:
        before = origin["avg_reward"]
        notes = [
            f"scored again from {path}, whose reward was"
            f" {'unknown' if before != before else f'{before:.3f}'}"
        ]
        print_summary(results, numbers, samples=False, notes=notes, stream=call.out)


async def _scored(env: Environment, path: Path, options: RunOptions) -> GenerateOutputs:
    from verifiers.runs.rescoring import rescore

    try:
        return await rescore(env, path, options)
    finally:
        await env.aclose()


def _environment(
    path: Path, facts: GenerateMetadata, settings: RescoreSettings
) -> tuple[str, dict[str, Any]]:
    """The id and the arguments of the environment: those given over those of the run, which may
    name an installed environment alone. *Raises* ``ConfigError``."""
    from verifiers.environments.registry import find_recorded
    from verifiers.runtime.redaction import HIDDEN

    env_id = settings.env or facts.env_id
    if not env_id:
        raise ConfigError("the run does not name its environment; name it: --env ID", key="env")
    if not settings.env:
        find_recorded(env_id, path, f"--env {env_id}", settings.env_dir_path)
    env_args = {**(facts.env_args if env_id == facts.env_id else {}), **settings.env_args}
    if hidden := [name for name, value in env_args.items() if HIDDEN in str(value)]:
        raise ConfigError(
            f"the run does not store secrets: give {hidden[0]!r} again with --env-args",
            key=hidden[0],
        )
    return env_id, env_args


COMMAND = SmallCommand(
    name="vf-rescore",
    about=ABOUT,
    metavar="PATH",
    options=RescoreSettings,
    keys=("run", "origin"),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
