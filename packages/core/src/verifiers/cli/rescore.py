"""``vf-rescore``: score saved rollouts again after a change of the rubric, as a new run. Calls no
model but judges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.common.command import Call, SmallCommand, one_word, option
from verifiers.errors import ConfigError

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


def run(call: Call) -> None:
    """Load, score, save and print. *Raises* ``ConfigError``."""
    from verifiers.cli.evaluate.options import EvalSettings
    from verifiers.cli.evaluate.planning import load
    from verifiers.cli.evaluate.summary import print_summary, run_facts
    from verifiers.results import load_results
    from verifiers.results.rows import json_ready
    from verifiers.runs.options import RunOptions
    from verifiers.runtime.calls import run_in_private_loop

    path, options = Path(one_word(call, "one run: vf-rescore RUN")), call.options
    facts = load_results(path, state_columns=()).metadata
    env_id, env_args = _environment(path, facts, options)
    env = load(env_id, EvalSettings(env_args=env_args, env_dir_path=options["env_dir_path"]))
    run_options = RunOptions(
        results_path=options["to"],
        save_results=options["to"] is None,
        max_concurrent=options["max_concurrent"],
        on_log=call.note,
    )
    results = run_in_private_loop(lambda: _scored(env, path, run_options))
    numbers, origin = run_facts(results), results.metadata.origin or {}
    call.facts.update(run=numbers, origin=json_ready(origin))
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
    path: Path, facts: GenerateMetadata, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The id and the arguments of the environment: those given over those of the run, which may
    name an installed environment alone. *Raises* ``ConfigError``."""
    from verifiers.cli.evaluate.options import env_args_of
    from verifiers.environments.registry import find_recorded
    from verifiers.runtime.redaction import HIDDEN

    env_id = options["env"] or facts.env_id
    if not env_id:
        raise ConfigError("the run does not name its environment; name it: --env ID", key="env")
    if not options["env"]:
        find_recorded(env_id, path, f"--env {env_id}", options["env_dir_path"])
    changes = env_args_of(options["env_args"])
    env_args = {**(facts.env_args if env_id == facts.env_id else {}), **changes}
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
    options=[
        option("--env", "Environment whose rubric scores [that of the run].", metavar="ID"),
        option("-a --env-args", "Arguments of its loader, over those of the run.", metavar="JSON"),
        option("-p --env-dir-path", "Folder of environments not installed.", "./environments"),
        option(
            "--to", "Directory of the new run [beside the runs of the environment].", metavar="DIR"
        ),
        option("-c --max-concurrent", "Rollouts scored at a time.", 32, type=click.IntRange(1)),
    ],
    keys=("run", "origin"),
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
