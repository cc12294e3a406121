"""What a run says while it goes: to the environment's logger, and to the callbacks of its options.

Each kind of warning about coverage is said once. A callback that raises is logged and changes
nothing: a display must not stop a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from verifiers.parsers import Parser
from verifiers.rollouts.author_code import maybe_await
from verifiers.runs.options import RunOptions
from verifiers.runs.plan import Pending, Plan
from verifiers.runs.store import SERVED_MODELS, RunStore
from verifiers.runtime.calls import num_positional
from verifiers.storage.directory import read_metadata


class Notices:
    """The lines of one run."""

    def __init__(
        self,
        logger: logging.Logger,
        options: RunOptions,
        sampling_args: Mapping[str, object],
        parser: Parser,
    ):
        self._logger, self._options = logger, options
        self._max_tokens, self._parser = sampling_args.get("max_tokens"), parser
        self._asks_for_logprobs = bool(sampling_args.get("logprobs"))
        self._kinds_said: set[str] = set()
        """Kinds of ``Coverage.warnings``."""

    async def log(self, text: str) -> None:
        """A fact, to ``on_log`` alone."""
        await self._call_back("on_log", self._options.on_log, text)

    async def warn(self, text: str) -> None:
        self._logger.warning("%s", text)
        await self.log(text)

    async def start(self, plan: Plan, work: Pending) -> None:
        """``on_start``: the number of pending rollouts, or the rows of the plan and those
        pending."""
        on_start = self._options.on_start
        if on_start is None or num_positional(on_start) < 2:
            await self._call_back("on_start", on_start, len(work))
            return
        counts = zip(plan.examples, plan.siblings, strict=True)
        rows = [example.row for example, count in counts for _ in range(count)]
        await self._call_back("on_start", on_start, rows, [job.example.row for job in work])

    async def opened(self, store: RunStore, num_resumed: int, outside_plan: Sequence[str]) -> None:
        """Say where the run is saved, and what is odd about what is saved there."""
        directory = store.directory
        if directory is None:
            return
        path = directory.path
        if outside_plan:
            await self.warn(
                f"{path} holds {len(outside_plan)} rollouts outside this plan (removed or"
                " edited examples, or a smaller plan); they stay there and are not counted"
            )
        counted = (read_metadata(path) or {}).get("num_rollouts")
        if isinstance(counted, int) and counted > store.num_saved:
            await self.warn(
                f"{path}/results.jsonl has lost rows: metadata.json counted {counted}"
                f" rollouts, the file has {store.num_saved}; the missing ones are generated again"
                " (stop now to restore the file from a copy)"
            )
        done = f"; {num_resumed} of {len(store.plan)} rollouts are done already"
        await self.log(f"results are saved in {path}{done if num_resumed else ''}")
        if self._asks_for_logprobs and "trajectory" not in self._options.state_columns:
            await self.warn(
                "the log-probabilities that sampling_args ask for are not saved: save the turns"
                ' as well, with state_columns=["trajectory"] (vf-eval -C trajectory)'
            )
        if directory.uncompared:
            await self.log(
                f"{path} was saved by an older version or through another kind of client,"
                " so these parts of the configuration are not compared:"
                f" {', '.join(directory.uncompared)}",
            )

    async def generated(self, store: RunStore, model: str) -> None:
        """Warn of what the rollouts lack, and of a model that changed meanwhile."""
        await self.coverage(store)
        await self.missing_logprobs(store)
        await self.changed_model(store, model)

    async def coverage(self, store: RunStore) -> None:
        """Warn of what did not happen in most rollouts."""
        for kind, sentence in store.coverage.warnings(self._max_tokens, self._parser).items():
            if kind not in self._kinds_said:
                self._kinds_said.add(kind)
                await self.warn(sentence)

    async def missing_logprobs(self, store: RunStore) -> None:
        """Warn if turns lack the log-probabilities that were asked for."""
        if self._asks_for_logprobs and store.without_tokens:
            reasons = ", ".join(
                f"{count} x {reason}" for reason, count in store.without_tokens.most_common(4)
            )
            await self.warn(
                f"{store.without_tokens.total()} of {store.num_turns} model turns are saved without"
                f" the log-probabilities that sampling_args ask for: {reasons}"
            )

    async def changed_model(self, store: RunStore, model: str) -> None:
        """Warn if the server answered under several names: a mean is then over several models."""
        served = store.served_models(model)
        if len(served) > 1:
            listed = ", ".join(f"{name} ({count} rollouts)" for name, count in served.items())
            await self.warn(
                f"the server answered as {len(served)} models: {listed}; the statistics are over"
                f" all of them, and each row has its own in {SERVED_MODELS}"
            )

    async def _call_back(
        self, name: str, callback: Callable[..., object] | None, *values: object
    ) -> None:
        if callback is None:
            return
        try:
            await maybe_await(callback(*values))
        except Exception as error:  # noqa: BLE001 - a display must not stop a run; it is logged
            self._logger.warning("%s raised %s: %s", name, type(error).__name__, error)
