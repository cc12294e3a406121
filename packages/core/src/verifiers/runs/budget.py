"""The budget of a run, with its ledger ``spending.jsonl`` in the run directory. See
``clients.spending``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from verifiers.clients.payload import MAX_TOKENS_ALIASES
from verifiers.clients.protocol import prices_of
from verifiers.clients.spending import Amount, Budget, is_metered
from verifiers.errors import ConfigError
from verifiers.results.run_metadata import Measurements, cost_usd, total_usage
from verifiers.runs.options import RunOptions
from verifiers.storage.directory import RESULTS_NAME, RunDirectory
from verifiers.storage.journal import Journal, read_journal

SPENDING_NAME = "spending.jsonl"
_POLICY, _JUDGE = ("input_tokens", "output_tokens"), ("judge_input_tokens", "judge_output_tokens")


def check_limits(
    options: RunOptions, client: object, model: str, sampling_args: Mapping[str, object]
) -> None:
    """*Raises* ConfigError when the run's own requests have no bound or no price, or are not
    metered."""
    if not options.limits_spending:
        return
    if not is_metered(client):
        raise ConfigError(
            f"max_cost_usd and max_total_tokens cannot limit {type(client).__name__}, which sends"
            " its requests itself; pass OpenAI(), a ClientConfig or another client that as_client"
            " makes"
        )
    if not any(sampling_args.get(name) for name in MAX_TOKENS_ALIASES):
        raise ConfigError(
            "a limit on what is spent needs a bound of each request: set max_tokens (-t)"
        )
    if (
        options.max_cost_usd is not None
        and prices_of(client) is None
        and model not in (options.prices or {})
    ):
        raise ConfigError(
            f"a limit on the cost needs the prices of {model!r}: give usd_per_million_input_tokens and "
            "usd_per_million_output_tokens in the endpoint registry or the ClientConfig, or"
            " --price READ,SAMPLED",
            key="max_cost_usd",
        )


async def open_budget(
    options: RunOptions,
    client: object,
    directory: RunDirectory | None,
    saved: Callable[[], Measurements],
    stack: ExitStack,
) -> Budget | None:
    """The budget of a run until ``stack`` is closed, with what its earlier sessions spent; without
    limits it continues their ledger, and None where there is none.

    ``saved``: the rollouts of earlier sessions, whose tokens open the ledger of a run that had
    none. *Raises* ConfigError when their cost is unknown.
    """
    file = None if directory is None else directory.path / SPENDING_NAME
    is_new = file is not None and not file.exists()
    if not options.limits_spending and (file is None or is_new):
        return None
    usd, tokens = options.spent_elsewhere
    budget = Budget(
        options.max_cost_usd,
        options.max_total_tokens,
        prices=options.prices,
        elsewhere=Amount(tokens, usd),
    )
    if file is not None:
        entries: list[dict[str, object]] = []
        budget.record_in(stack.enter_context(Journal.open(file, entries.append)))
        budget.read(entries)
        if is_new and (before := _spent_before(options, client, saved())) is not None:
            await budget.open_with(before)
    stack.enter_context(budget.current())
    return budget


def _spent_before(options: RunOptions, client: object, saved: Measurements) -> Amount | None:
    usage = total_usage(saved)
    judged = sum(usage.get(name, 0) for name in _JUDGE)
    tokens = judged + sum(usage.get(name, 0) for name in _POLICY)
    if not tokens:
        return None
    usd = cost_usd(prices_of(client), saved)
    if options.max_cost_usd is not None and (usd is None or judged):
        raise ConfigError(
            "what the saved rollouts of this run did cost is unknown (it began without"
            " max_cost_usd, and has judges or no counts of tokens): start a new run (--fresh), or"
            " limit max_total_tokens",
            key="max_cost_usd",
        )
    return Amount(tokens, usd or 0.0)


def spent_in(path: Path, *, is_priced: bool) -> Amount:
    """What the run in a directory has spent: by its ledger, else by the tokens of its rollouts.
    Requests that a kill left open count in full.

    *Raises* ConfigError when it has no ledger and ``is_priced`` although its cost is unknown.
    """
    if (path / SPENDING_NAME).exists():
        budget = Budget()
        budget.read(read_journal(path / SPENDING_NAME))
        return budget.spent
    if not (path / RESULTS_NAME).exists():
        return Amount()
    from verifiers.results.loading import load_results

    metadata = load_results(path).metadata
    tokens = sum(metadata["usage"].get(name, 0) for name in (*_POLICY, *_JUDGE))
    usd = metadata["cost_usd"]
    if is_priced and tokens and (usd is None or any(map(metadata["usage"].get, _JUDGE))):
        raise ConfigError(
            f"what the run in {path} did cost is unknown (it ran without max_cost_usd, and has"
            " judges or no counts of tokens): begin a new set (--new), or limit max_total_tokens",
            key="max_cost_usd",
        )
    return Amount(tokens, usd or 0.0)
