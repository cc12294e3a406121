"""``vf-audit``: is the reward of an environment paid only for solving its task? Needs no model.

With ``-m`` it also measures which rows a model can learn from. The audit itself is in
``checks.audit``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verifiers.cli.common.command import Call, SmallCommand, one_word
from verifiers.cli.common.streams import CheckFailed
from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.checks.audit.report import AuditReport
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
    " profile num_rows num_rollouts seconds certificate kept"
).split()


def run(call: Call) -> None:
    """Audit the environment. *Raises* ``UsageError``; ``CheckFailed`` that names what was found."""
    from dataclasses import replace

    from verifiers.checks import audit_environment
    from verifiers.cli.evaluate.options import EvalSettings, env_args_of
    from verifiers.cli.evaluate.planning import load

    env_id, options = one_word(call, "one environment: vf-audit ENV"), call.options
    arguments = env_args_of(options["env_args"])
    if options["keep"] and options["model"] is None:
        raise ConfigError("--keep writes the rows that are useful to a model; name it with -m")
    if arguments and options["certify"]:
        raise ConfigError("--certify stores the audit of the default arguments; leave -a out")
    settings = EvalSettings(
        model=options["model"],
        api_base_url=options["api_base_url"],
        api_key_var=options["api_key_var"],
        env_args=arguments,
        env_dir_path=options["env_dir_path"],
        max_tokens=options["max_tokens"],
        temperature=options["temperature"],
    )

    def build() -> Environment:
        return load(env_id, settings)

    build.__qualname__ = env_id
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
    _show(call, report)
    if not report.ok:
        codes = ", ".join(finding.code for finding in report.errors)
        raise CheckFailed(
            f"{report.environment}: {codes}", names=[finding.code for finding in report.errors]
        )


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


def _show(call: Call, report: AuditReport) -> None:
    content = report.to_json()
    call.facts |= {key: content[key] for key in KEYS if key in content}
    call.say(str(report))
    if path := call.facts.get("certificate"):
        call.note(f"vf-audit: certificate in {path}")


def _option(*names: str, **settings: Any) -> click.Option:
    return click.Option(list(names), **settings)


COMMAND = SmallCommand(
    name="vf-audit",
    about=ABOUT,
    metavar="ENV",
    options=[
        _option("-a", "--env-args", metavar="JSON", help="Arguments of the environment's loader."),
        _option("-p", "--env-dir-path", default="./environments", metavar="DIR",
                help="Folder of environments not installed."),
        _option("-n", "--num-examples", type=click.IntRange(1), default=8, help="Rows that are tried [8]."),
        _option("--seed", type=int, default=0, help="Chooses the rows and the search [0]."),
        _option("--search", type=click.IntRange(0), default=120, help="Programs that the search tries [120]."),
        _option("--budget", type=click.FloatRange(1), default=60.0, metavar="SECONDS", help="Time limit [60]."),
        _option("--certify", is_flag=True, help="Store the result beside the package; vf-install --list shows it."),
        _option("-m", "--model", metavar="NAME", help="Also profile the training rows with this model."),
        _option("-b", "--api-base-url", metavar="URL", help="Endpoint of the model."),
        _option("-k", "--api-key-var", metavar="NAME", help="Variable that holds its key."),
        _option("--rows", type=click.IntRange(-1), default=50, help="Training rows that are profiled; -1 = all [50]."),
        _option("-r", "--rollouts-per-example", type=click.IntRange(2), default=8, help="Rollouts of each row [8]."),
        _option("-t", "--max-tokens", type=click.IntRange(1), help="Tokens per response."),
        _option("-T", "--temperature", type=click.FloatRange(0), default=1.0, help="Sampling temperature [1]."),
        _option("--keep", metavar="FILE", help="Write the rows that are useful to the model."),
    ],
    keys=KEYS,
    action=run,
)  # fmt: skip
main = COMMAND.main

if __name__ == "__main__":
    main()
