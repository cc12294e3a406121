"""``vf-audit``: is the reward of an environment paid only for solving its task? Needs no model.

With ``-m`` it also measures which rows a model can learn from. The audit itself is in
``checks.audit``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from verifiers.cli.common.command import Call, SmallCommand, one_word
from verifiers.cli.common.streams import CheckFailed
from verifiers.errors import ConfigError
from verifiers.runtime.notations import NotNegative, Table, Text, Variable
from verifiers.runtime.values import Count, Number, Range, option

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


@dataclass(frozen=True)
class AuditSettings:
    """The flags of ``vf-audit``."""

    env_args: Table = option({}, "Arguments of the environment's loader.", "-a", metavar="JSON")
    env_dir_path: Text = option(
        "./environments", "Folder of environments not installed.", "-p", metavar="DIR"
    )
    num_examples: Count = option(8, "Rows that are tried.", "-n")
    seed: int = option(0, "Chooses the rows and the search.")
    search: Number = option(120, "Programs that the search tries.")
    budget: Annotated[float, Range(ge=1)] = option(60.0, "Time limit.", metavar="SECONDS")
    certify: bool = option(
        False, "Store the result beside the package; vf-install --list shows it."
    )
    model: Text | None = option(
        None, "Also profile the training rows with this model.", "-m", metavar="NAME"
    )
    api_base_url: Text | None = option(None, "Endpoint of the model.", "-b", metavar="URL")
    api_key_var: Variable | None = option(None, "Variable that holds its key.", "-k")
    rows: Annotated[int, Range(ge=-1)] = option(50, "Training rows that are profiled; -1 = all.")
    rollouts_per_example: Annotated[int, Range(ge=2)] = option(8, "Rollouts of each row.", "-r")
    max_tokens: Count | None = option(None, "Tokens per response.", "-t")
    temperature: NotNegative = option(1.0, "Sampling temperature.", "-T")
    keep: Text | None = option(None, "Write the rows that are useful to the model.", metavar="FILE")


def run(call: Call, settings: AuditSettings) -> None:
    """Audit the environment. *Raises* ``UsageError``; ``CheckFailed`` that names what was found."""
    from verifiers.checks import audit_environment
    from verifiers.checks.audit.rfc008 import rfc008
    from verifiers.cli.evaluate.options import EvalSettings
    from verifiers.cli.evaluate.planning import builder

    env_id = one_word(call, "one environment: vf-audit ENV")
    if settings.keep and settings.model is None:
        raise ConfigError("--keep writes the rows that are useful to a model; name it with -m")
    if settings.env_args and settings.certify:
        raise ConfigError("--certify stores the audit of the default arguments; leave -a out")
    shared = "env_args model api_base_url api_key_var env_dir_path max_tokens temperature".split()
    evaluation = EvalSettings(**{name: getattr(settings, name) for name in shared})
    build = builder(env_id, evaluation)
    report = audit_environment(
        build,
        n=settings.num_examples,
        seed=settings.seed,
        search_steps=settings.search,
        budget_s=settings.budget,
    )
    if settings.model is not None and report.num_rows:
        report = replace(report, profile=_profile(call, build(), settings, evaluation))
    if settings.certify:
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


def _profile(
    call: Call, env: Environment, settings: AuditSettings, evaluation: EvalSettings
) -> tuple[Any, ...]:
    """Run the model on the training rows; write the useful rows to ``--keep``."""
    from verifiers.checks.audit.profile import profile_rows, write_useful
    from verifiers.cli.evaluate.models import choose
    from verifiers.runtime.calls import run_in_private_loop

    async def measure() -> Any:
        choice = await choose(evaluation).ask()
        try:
            return await profile_rows(
                env,
                choice.client,
                choice.model or "",
                num_rows=settings.rows,
                rollouts_per_example=settings.rollouts_per_example,
                **evaluation.sampling(),
            )
        finally:
            await env.aclose()
            await choice.client.aclose()

    examples, profiles = run_in_private_loop(measure)
    if settings.keep:
        path = Path(settings.keep)
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
    options=AuditSettings,
    keys=KEYS,
    action=run,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
