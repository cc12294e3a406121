"""``vf-audit``: is the reward of an environment paid only for solving its task? Needs no model.

With ``-m`` it also measures which rows a model can learn from. The audit itself is in
``checks.audit``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.common.command import Call, SmallCommand, one_word, option
from verifiers.cli.common.streams import CheckFailed
from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.cli.evaluate.options import EvalSettings
    from verifiers.environments.base import Environment

ABOUT = """Look for ways to be paid by an environment without solving its task.

Tries a right answer, some hundred non-solutions in the right format, and a search for more; compares the rows. Needs
no model. With -m it also says which training rows that model solves never, always and sometimes.

\b
  vf-audit reverse-text
  vf-audit ./environments/sums.py -a seed=1
  vf-audit gsm8k --certify                       store the result beside the package
  vf-audit small-tasks -m local --keep useful.jsonl

ENV is an id or a path. The exit code is 1 when a way was found.
"""
KEYS = (
    "environment errors warnings notes success_metric oracle non_solutions best_non_solution"
    " profile num_rows num_rollouts seconds certificate kept rfc_008"
).split()


def run(call: Call) -> None:
    """Audit the environment. *Raises* ``UsageError``; ``CheckFailed`` that names what was found."""
    from dataclasses import replace

    from verifiers.checks import audit_environment
    from verifiers.checks.audit.rfc008 import rfc008
    from verifiers.cli.evaluate.options import EvalSettings, env_args_of
    from verifiers.cli.evaluate.planning import builder

    env_id, options = one_word(call, "one environment: vf-audit ENV"), call.options
    arguments = env_args_of(options["env_args"])
    if options["keep"] and options["model"] is None:
        raise ConfigError("--keep writes the rows that are useful to a model; name it with -m")
    if arguments and options["certify"]:
        raise ConfigError("--certify stores the audit of the default arguments; leave -a out")
    names = "model api_base_url api_key_var env_dir_path max_tokens temperature".split()
    settings = EvalSettings(env_args=arguments, **{name: options[name] for name in names})
    build = builder(env_id, settings)
    report = audit_environment(
        build,
        n=options["num_examples"],
        seed=options["seed"],
        search_steps=options["search"],
        budget_s=options["budget"],
    )
    if settings.model is not None and report.num_rows:
        report = replace(report, profile=_profile(call, build(), settings))
    if options["certify"]:
        from verifiers.checks.audit.certificate import write_certificate

        call.facts["certificate"] = str(write_certificate(report, env_id))
    content = report.to_json()
    call.facts |= {key: content[key] for key in KEYS if key in content}
    call.facts["rfc_008"] = rfc008(report)
    call.say(str(report))
    if path := call.facts.get("certificate"):
        call.note(f"vf-audit: certificate in {path}")
    if codes := [finding.code for finding in report.errors]:
        raise CheckFailed(f"{report.environment}: {', '.join(codes)}", names=codes)


def _profile(call: Call, env: Environment, settings: EvalSettings) -> tuple[Any, ...]:
    """Run the model on the training rows; write the useful rows to ``--keep``."""
    from verifiers.checks.audit.profile import profile_rows, write_useful
    from verifiers.cli.evaluate.models import choose
    from verifiers.runtime.calls import run_in_private_loop

    async def measure() -> Any:
        choice = await choose(settings).ask()
        try:
            return await profile_rows(
                env,
                choice.client,
                choice.model or "",
                num_rows=call.options["rows"],
                rollouts_per_example=call.options["rollouts_per_example"],
                **settings.sampling(),
            )
        finally:
            await env.aclose()
            await choice.client.aclose()

    examples, profiles = run_in_private_loop(measure)
    if call.options["keep"]:
        path = Path(call.options["keep"])
        num_useful = write_useful(path, examples, profiles, env, settings.model)
        call.facts["kept"] = {"path": str(path), "rows": num_useful}
        call.note(
            f"vf-audit: {num_useful} useful rows of {len(examples)} in {path}; vf-eval --keep-rows"
            f" {path} evaluates them, keep_rows = {str(path)!r} in [trainer.args] trains on them"
        )
    return tuple(profiles)


COMMAND = SmallCommand(
    name="vf-audit",
    about=ABOUT,
    metavar="ENV",
    options=[
        option("-a --env-args", "Arguments of the environment's loader.", metavar="JSON"),
        option(
            "-p --env-dir-path",
            "Folder of environments not installed.",
            "./environments",
            metavar="DIR",
        ),
        option("-n --num-examples", "Rows that are tried.", 8, type=click.IntRange(1)),
        option("--seed", "Chooses the rows and the search.", 0),
        option("--search", "Programs that the search tries.", 120, type=click.IntRange(0)),
        option("--budget", "Time limit.", 60.0, type=click.FloatRange(1), metavar="SECONDS"),
        option("--certify", "Store the result beside the package; vf-install --list shows it."),
        option("-m --model", "Also profile the training rows with this model.", metavar="NAME"),
        option("-b --api-base-url", "Endpoint of the model.", metavar="URL"),
        option("-k --api-key-var", "Variable that holds its key.", metavar="NAME"),
        option("--rows", "Training rows that are profiled; -1 = all.", 50, type=click.IntRange(-1)),
        option("-r --rollouts-per-example", "Rollouts of each row.", 8, type=click.IntRange(2)),
        option("-t --max-tokens", "Tokens per response.", type=click.IntRange(1)),
        option("-T --temperature", "Sampling temperature.", 1.0, type=click.FloatRange(0)),
        option("--keep", "Write the rows that are useful to the model.", metavar="FILE"),
    ],
    keys=KEYS,
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
