"""Prepare all evaluations of a command: load, choose, plan; ask their endpoints; close them at the
end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.cli.common.reader import raise_together
from verifiers.cli.evaluate.display import Display
from verifiers.cli.evaluate.models import Choice, choose
from verifiers.cli.evaluate.options import Evaluation, ModelSettings
from verifiers.cli.evaluate.planning import Prepared, load, prepare
from verifiers.cli.evaluate.sets import CommandSet
from verifiers.errors import UsageError, VerifiersError
from verifiers.runtime.values import options_of


def prepare_all(evaluations: Sequence[Evaluation], runs: CommandSet) -> list[Prepared]:
    """Load, choose and plan every evaluation; sends no request. *Raises* all problems together."""
    prepared: list[Prepared] = []
    problems: list[str | VerifiersError] = []
    choices: dict[str, Choice] = {}
    for evaluation in evaluations:
        settings = evaluation.settings
        endpoint = repr([getattr(settings, name) for name in options_of(ModelSettings)])
        try:
            env = load(evaluation.env_id, settings)
            if endpoint not in choices:
                choices[endpoint] = choose(settings)
            prepared.append(prepare(evaluation, env, choices[endpoint], runs.is_set))
        except UsageError as error:
            problems.append(error)
    raise_together(problems)
    runs.locate(prepared)
    return prepared


async def connect_all(runs: CommandSet, display: Display) -> None:
    """Query every endpoint once: for its model if none was named, and whether it is reachable."""
    prepared = runs.prepared
    answers: dict[int, Any] = {}
    for run in prepared:
        client = run.choice.client
        if run.choice.model is None:
            if id(client) not in answers:
                answers[id(client)] = await run.choice.ask()
                display.note(answers[id(client)].note)
            run.choice = answers[id(client)]
            run.locate()
    if answers:
        runs.locate(prepared)
    connected: set[tuple[int, str | None]] = set()
    for run in prepared:
        endpoint = (id(run.choice.client), run.choice.model)
        if endpoint in connected:
            run.checked = True
            continue
        warning = await run.connect()
        if run.checked:
            connected.add(endpoint)
        if warning:
            display.warn(warning)


async def close_all(prepared: Sequence[Prepared], display: Display) -> None:
    """Run the environments' teardown handlers and close every client's connections."""
    for run in prepared:
        try:
            await run.env.aclose()
        except Exception as error:  # noqa: BLE001 - author code; results are already saved and printed
            display.warn(f"the teardown of {run.env_id} raised {type(error).__name__}: {error}")
    for client in {id(run.choice.client): run.choice.client for run in prepared}.values():
        await client.aclose()
