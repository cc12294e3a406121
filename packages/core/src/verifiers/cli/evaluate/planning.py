"""Prepare runs from settings: load the environment, plan the rollouts, name the run directory.

Reports problems before the first rollout: `prepare` sends no request and writes nothing;
`Prepared.connect` checks that the endpoint is reachable. ``Environment.evaluate`` runs the
rollouts.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from verifiers.cli.common.flags import spelling
from verifiers.cli.evaluate.exporting import check_formats
from verifiers.cli.evaluate.models import Choice, price_list
from verifiers.cli.evaluate.options import EvalSettings, Evaluation
from verifiers.cli.evaluate.toml_args import environment_defaults
from verifiers.clients.protocol import CLIENT_TYPES, vendor_of
from verifiers.data.tool_schema import defined_name
from verifiers.environments import registry
from verifiers.environments.base import Environment
from verifiers.environments.keywords import EnvironmentFlags
from verifiers.environments.single_turn import SingleTurnEnv, check_one_turn
from verifiers.errors import ConfigError
from verifiers.runs.entry import check_before_run, warn_of_fewer
from verifiers.runs.options import SharedOptions, check_sampling, parse
from verifiers.runs.plan import Plan
from verifiers.runs.run import Run
from verifiers.runtime.redaction import HIDDEN, redacted
from verifiers.runtime.terminal import escape_control
from verifiers.runtime.values import options_of
from verifiers.storage.configurations import fingerprint
from verifiers.storage.directory import (
    CONFIG_NAME,
    default_root,
    is_complete,
    read_config,
    read_metadata,
    run_path,
    stored_run,
)


@dataclass(slots=True)
class Prepared:
    """An evaluation, ready to run."""

    evaluation: Evaluation
    env: Environment
    choice: Choice
    num_rollouts: int
    num_examples: int
    path: Path | None = None
    """The run directory, once the model is known; None when nothing is saved."""
    in_set: bool = False
    """Whether its set names the run directory (``locate_in``)."""
    checked: bool = field(default=False)
    """Whether the endpoint has already been checked."""

    @property
    def env_id(self) -> str:
        return self.evaluation.env_id

    @property
    def settings(self) -> EvalSettings:
        return self.evaluation.settings

    @property
    def labels(self) -> dict[str, Any]:
        """What names the run in events and in the JSON object."""
        path = None if self.path is None else str(self.path)
        return {"env_id": self.env_id, "model": self.choice.model, "path": path}

    @property
    def varied(self) -> str:
        """The values of an ablation's combination, ``temperature=0.5 env_args.n=3``; else empty."""
        return " ".join(
            f"{name}={value!r}" for name, value in redacted(self.evaluation.combination).items()
        )

    @property
    def label(self) -> str:
        """The name of the run in displays."""
        parts = (self.env_id, self.choice.model or "model of the server", self.varied)
        return escape_control(" · ".join(part for part in parts if part))

    def options(self) -> dict[str, object]:
        """The keyword arguments of ``evaluate``, except those of displays."""
        settings = self.settings
        return {
            **{
                line.name: getattr(settings, line.name)
                for line in dataclasses.fields(SharedOptions)
            },
            "shuffle_seed": settings.order_seed,
            "prices": price_list(settings) if settings.max_cost_usd is not None else None,
            "keep_states": False,
        }

    def locate(self) -> None:
        """Check the run and name its directory. *Raises* ``ConfigError`` when it cannot be written
        or has no run to resume, ``RunMismatch`` for another configuration."""
        settings = self.settings
        if self.choice.model is None:
            return
        run = self._run()
        run.check()
        if not settings.save_results or self.in_set:
            return
        config = run.config()
        if settings.resume:
            self.path = Path(settings.resume)
            if stored_run(self.path, config, settings.accept_changed_code) is None:
                raise ConfigError(
                    f"--resume {self.path}: this folder is not a run directory (no config.json);"
                    " name a run directory, or leave --resume out: an unfinished run is resumed"
                    " without it",
                    path=str(self.path),
                )
            return
        name = self.env.env_id or type(self.env).__name__
        self.path = run_path(
            default_root(name),
            name,
            self.choice.model,
            fingerprint(config),
            output_dir=settings.output_dir,
            resume=not settings.fresh,
            config=config,
            accept_changed_code=settings.accept_changed_code,
        )
        if settings.resume is not None and not self.path.exists():
            raise ConfigError(
                f"--resume: there is no unfinished run of this configuration in"
                f" {self.path.parent}; leave it out"
            )
        _check_writable(self.path)

    def locate_in(self, path: Path) -> None:
        """Take a directory of a set. *Raises* as ``locate``."""
        self.path = path
        stored_run(path, self._run().config(), self.settings.accept_changed_code)
        _check_writable(path)

    def fingerprint(self) -> str:
        """Of the configuration. *Raises* ConfigError when it cannot be saved."""
        return fingerprint(self._run().config())

    async def connect(self) -> str | None:
        """Check the endpoint, unless the run directory exists (then the run does, when rollouts are
        pending).

        Returns a warning when the endpoint does not list the model. *Raises* as
        ``client.preflight``.
        """
        if self.path is not None and self.path.exists():
            return None
        self.checked = True
        warning: str | None = await self.choice.client.preflight(self.choice.model)
        return warning

    def plan_lines(self) -> list[str]:
        """The plan of the run, for ``--dry-run``; control characters are escaped."""
        settings, client = self.settings, self.choice.client
        lines = [self.label, f"  rollouts    {self.num_rollouts} ({self.num_examples} examples × "
                 f"{settings.rollouts_per_example}), {settings.max_concurrent} at a time"]  # fmt: skip
        lines.append(f"  endpoint    {getattr(client, 'base_url', None) or 'in this process'}")
        for name, value in (("env args", settings.env_args), ("sampling", settings.sampling())):
            lines.append(
                f"  {name:<11} {redacted(value) or 'defaults of the environment and the server'}"
            )
        if not settings.save_results:
            lines.append("  saved in    not saved (--no-save)")
        elif self.path is None:
            lines.append("  saved in    depends on the model that the server lists")
        elif not self.path.exists():
            lines.append(f"  saved in    {self.path} (a new run)")
        else:
            state = "complete" if is_complete(self.path) else "resumes"
            lines.append(f"  saved in    {self.path} ({state})")
        if settings.export:
            lines.append(f"  exported as {', '.join(settings.export)}")
        lines += [self._scoring_line(), "", *self._first_prompt_lines(), ""]
        return list(map(escape_control, lines))

    def _scoring_line(self) -> str:
        """The reward functions with their weights, and the metrics."""
        rubric = self.env.rubric
        together = zip(rubric.get_reward_func_names(), rubric.get_reward_weights(), strict=True)
        functions = [
            f"{name} × {weight:g}" if weight else f"{name} (metric)" for name, weight in together
        ]
        if not self.env.score_rollouts:
            functions = ["nothing: this environment does not score"]
        groups = ", the siblings of an example together" if rubric.has_group_rewards else ""
        names = ", ".join(functions) or "no function: every reward is unknown"
        return f"  scored by   {names}{groups}"

    def _first_prompt_lines(self) -> list[str]:
        """The prompt of the first example, and the names of the tools."""
        from verifiers.cli.evaluate.summary import transcript

        example = next(iter(_plan(self.env, self.settings).examples))
        row = {name: example.row.get(name) for name in ("prompt", "answer")}
        output: dict[str, object] = {**row, "completion": [], "error": None}
        tools = [defined_name(tool) for tool in self.env.tool_defs]
        lines = [f"── the first prompt: example {example.example_id} ──", transcript(output)]
        return [*lines, f"tools: {', '.join(tools)}"] if tools else lines

    def _run(self) -> Run:
        plan = _plan(self.env, self.settings)
        options, _ = parse(self.env, self.options())
        sampling = self.settings.sampling()
        return Run(self.env, plan, self.choice.client, self.choice.model or "", sampling, options)


def defaults_of(
    env_id: str, env_dir: str, problems: list[Any]
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], None]]:
    """(the environment's default settings, a function that checks loader arguments).

    The function imports the environment and builds nothing; it raises as ``load_environment`` does
    for a broken package and for invalid arguments. *Raises* ``UnknownEnvironment``.
    """
    location = registry.find(env_id, env_dir)

    def check(env_args: Mapping[str, object]) -> None:
        registry.check_arguments(env_id, registry.import_loader(env_id, location), env_args)

    return environment_defaults(location, problems), check


def builder(env_id: str, settings: EvalSettings) -> Callable[[], Environment]:
    """`load` for a check, which names what it builds."""

    def build() -> Environment:
        return load(env_id, settings)

    build.__qualname__ = env_id
    return build


def load(env_id: str, settings: EvalSettings) -> Environment:
    """Load the environment and apply its settings. *Raises* as its loader and ``set_kwargs``."""
    env = registry.load(env_id, settings.env_args, settings.env_dir_path)
    changes: dict[str, Mapping[str, Any]] = {"--extra-env-kwargs": settings.extra_env_kwargs}
    for name in options_of(EnvironmentFlags):
        if (value := getattr(settings, name)) is not None:
            changes[spelling(EvalSettings, name)] = {name: value}
    if settings.keep_rows is not None:
        changes["--keep-rows"] = {"keep_eval_rows": os.path.abspath(settings.keep_rows)}
    for flag, values in changes.items():
        try:
            if "max_turns" in values and isinstance(env, SingleTurnEnv):
                check_one_turn(values["max_turns"])
            env.set_kwargs(**values)
        except ConfigError as error:
            raise ConfigError(f"{flag}: {error}", **error.facts) from error
    return env


def prepare(
    evaluation: Evaluation, env: Environment, choice: Choice, in_set: bool = False
) -> Prepared:
    """Read the data, check the rubric, name the directory; writes nothing. *Raises* UsageError."""
    check_formats(evaluation.settings.export)
    plan = _plan(env, evaluation.settings)
    prepared = Prepared(evaluation, env, choice, len(plan), len(plan.examples), in_set=in_set)
    options, _ = parse(env, prepared.options())
    settings = evaluation.settings
    check_sampling(settings.sampling())
    warn_of_fewer(env, settings.num_examples)
    check_before_run(env, plan, options)
    prepared.locate()
    return prepared


def _plan(env: Environment, settings: EvalSettings) -> Plan:
    examples = env.eval_table.take(settings.num_examples, settings.order_seed)
    return Plan(examples, [settings.rollouts_per_example] * len(examples))


class _Noted(msgspec.Struct):
    """What a run's ``config.json`` says of the settings that are restored."""

    model: str | None = None
    base_url: str | None = None
    client: object = None
    num_examples: int | None = None
    rollouts_per_example: int | None = None
    env_args: dict[str, object] = {}
    sampling_args: dict[str, object] = {}
    shuffle_seed: int | None = None
    seed: int | None = None


def from_run(settings: EvalSettings, explicit: Mapping[str, object]) -> EvalSettings:
    """Settings with the model, the counts, the sampling and the arguments of the run of
    ``--resume``, unless ``explicit`` has them. Tables with a secret, which no file holds, are not
    restored: the run then says what differs."""
    if not settings.resume:
        return settings
    stored = read_config(settings.resume)
    if stored is None:
        return settings
    try:
        noted = msgspec.convert({**stored["config"], **stored.get("noted", {})}, _Noted)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{settings.resume}/{CONFIG_NAME} is damaged ({error}); restore it"
        ) from None
    metadata = read_metadata(settings.resume) or {}
    from_file: dict[str, Any] = {
        "num_examples": metadata.get("num_examples", noted.num_examples),
        "rollouts_per_example": metadata.get("rollouts_per_example", noted.rollouts_per_example),
    }
    # they go over -t and -T
    sampling = {name: value for name, value in noted.sampling_args.items() if name not in explicit}
    tables = {"env_args": noted.env_args, "sampling_args": sampling}
    from_file |= {name: table for name, table in tables.items() if HIDDEN not in json.dumps(table)}
    if not explicit.keys() & {"shuffle", "until_half_width", "until_decided"}:
        from_file["shuffle_seed"] = noted.shuffle_seed
    from_file["seed"] = noted.seed
    if "model" not in explicit:
        model, base_url = noted.model, noted.base_url
        if base_url and "api_base_url" not in explicit:
            _check_endpoint(base_url, settings.resume)
        # the local model is recorded by the name of its weights
        is_local = isinstance(noted.client, Mapping) and "local_model" in noted.client
        in_process = {"model": "local" if is_local else model}
        from_file |= {"model": model, "api_base_url": base_url} if base_url else in_process
    return dataclasses.replace(
        settings, **{k: v for k, v in from_file.items() if v is not None and k not in explicit}
    )


def _check_endpoint(base_url: str, run: str) -> None:
    """*Raises* ConfigError for an endpoint that a saved run alone names: the key of the user would
    be sent there."""
    from verifiers.runtime.http_clients import is_loopback_url

    vendors = {vendor_of(kind) for kind in CLIENT_TYPES}
    usual = {vendor.base_url for vendor in vendors}
    usual |= {os.environ[v.base_url_var] for v in vendors if v.base_url_var in os.environ}
    if base_url not in usual and not is_loopback_url(base_url):
        raise ConfigError(
            f"{run} names the endpoint {base_url}, and a saved run does not choose where prompts and"
            f" keys are sent: name it yourself (-b {base_url})",
            key="api_base_url",
        )


def _check_writable(path: Path) -> None:
    """Check that the directory can be created, without creating it. *Raises* ``ConfigError``."""
    nearest = next(
        folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
    )
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    reason = f"{nearest} cannot be written to" if nearest.is_dir() else f"{nearest} is a file"
    raise ConfigError(
        f"results cannot be saved in {path}: {reason}. Choose another folder with --output-dir, or"
        " run with --no-save.",
        path=str(path),
    )
