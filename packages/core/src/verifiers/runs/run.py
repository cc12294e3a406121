"""``Run``: a plan with one model in one environment, from the run directory to the results.

A ``Run`` opens the run directory, compares the plan with the rollouts saved there (by content hash
and sibling), generates and scores the pending rollouts, and returns the results::

    run = Run(env, plan, client, model, sampling_args, options)
    results = await run.execute(given_client)

An unreachable endpoint, an unwritable directory and a directory that holds another configuration
are found before the first request. Secrets are not written to disk.

``entry`` makes the plan, ``description`` says what the run is, ``runner`` generates, scores and
stores rollouts, ``notices`` says what is worth saying; this module does not read conversations.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import TYPE_CHECKING

from verifiers.clients.cache import CompletionCache, check_cacheable
from verifiers.errors import BudgetExhausted, JournalError
from verifiers.results import GenerateOutputs
from verifiers.runs.budget import check_limits, open_budget
from verifiers.runs.copies import hand_over
from verifiers.runs.description import RunDescription
from verifiers.runs.notices import Notices
from verifiers.runs.plan import Pending, pending
from verifiers.runs.preflight import num_at_a_time, preflight
from verifiers.runs.rollout import GenerateJob, Progress, RunContext, groups_are_units, slots
from verifiers.runs.runner import Runner, generate_then_score, job_generator
from verifiers.runs.stopping import StoppingRule, rule_of
from verifiers.runs.store import RunStore, is_large
from verifiers.runtime.gc import fewer_collections
from verifiers.runtime.worker_threads import workers
from verifiers.storage.directory import is_complete

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike


class Run(RunDescription):
    """Run a plan with one model in one environment. ``execute`` runs it once.

    The arguments are those of ``RunDescription``.
    """

    @functools.cached_property
    def notices(self) -> Notices:
        """What it says while it goes."""
        return Notices(self.env.logger, self.options, self.sampling, self.env.parser)

    async def execute(self, given_client: ClientLike | None = None) -> GenerateOutputs:
        """Return when every rollout is durable (at once when all are) and its copies are written:
        then it is complete. ``given_client`` is the client in the authors' state; None = the
        resolved client."""
        if self.env.max_workers is not None:
            workers().max_threads = self.env.max_workers
        # 1. refuse what cannot work, before anything is written
        self.check()
        with fewer_collections(), ExitStack() as stack:
            # 2. open the directory and read what is saved there: all other rollouts are pending
            store = self._open(stack)
            work = await self._pending(store, stack)
            # 3. open what meters requests, and what answers those that were answered before
            self.budget = await open_budget(
                self.options, self.client, store.directory, store.measurements, stack
            )
            if self.options.cache_dir is not None:
                self.cache = CompletionCache(self.options.cache_dir)
                stack.enter_context(self.cache.current())
            was_complete = not len(work) and self.path is not None and is_complete(self.path)
            try:
                # 4. generate, score and store what is pending
                await self.notices.start(self.plan, work)
                if len(work):
                    store.write_metadata(self.metadata(store, store.measurements(), "running"))
                    await self._generate(work, store, given_client)
                    await self.notices.generated(store, self.model)
                # 5. hand the results over; that the run is complete is written last
                outputs = self._results(store, "complete")
                await hand_over(outputs, self.options)
                store.write_metadata(outputs.metadata)
                return outputs
            except BaseException as error:  # raised again
                if not was_complete:
                    stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
                    stopped |= isinstance(error, BudgetExhausted) and error.is_of_options
                    self._note_end(store, "interrupted" if stopped else "failed")
                raise

    def check(self) -> None:
        """Find what is refused before the first request; *raises* ConfigError."""
        self.stopping = rule_of(self.options, self.plan, self.is_scored, self.for_comparison)
        check_limits(self.options, self.client, self.model, self.sampling)
        if self.options.cache_dir is not None:
            check_cacheable(self.client)

    def generator(self, context: RunContext) -> AbstractAsyncContextManager[GenerateJob]:
        """What makes the rollout of each job; a subclass may take saved rollouts."""
        return job_generator(self.env, context, self.options)

    def _open(self, stack: ExitStack) -> RunStore:
        """Where finished rollouts go; those of a large run that is saved are not held in memory.
        *Raises* as ``open_directory``."""
        options, kind = self.options, RunStore
        directory = self.open_directory(stack)
        if self.stopping is None and is_large(self.plan, directory, options.keep_states):
            from verifiers.runs.large_store import LargeRunStore

            kind = LargeRunStore
        return kind(
            self.plan,
            self.metadata,
            self.env.logger,
            directory,
            state_columns=options.state_columns,
            keep_states=options.keep_states,
            fills_advantages=not options.independent_scoring,
            on_progress=options.on_progress,
            on_first=self.notices.coverage,
        )

    async def _pending(self, store: RunStore, stack: ExitStack) -> Pending:
        """Read the saved rollouts into ``store``; return the pending jobs."""
        store.open(stack)
        scored_together = self.is_scored and not self.options.independent_scoring
        whole_groups = groups_are_units(self.env, scored_together)
        store.work = work = pending(
            self.plan,
            store,
            store.take,
            whole_groups=whole_groups,
            retry_errors=self.options.retry_errors,
        )
        self.num_resumed, self.outside_plan = len(self.plan) - len(work), store.outside()
        await self.notices.opened(store, self.num_resumed, self.outside_plan)
        return work

    async def _generate(
        self, work: Pending, store: RunStore, given_client: ClientLike | None
    ) -> None:
        """Generate, score and store the pending rollouts."""
        env, options = self.env, self.options
        await preflight(self.client, self.model, options, self.notices)
        context = self._context(given_client)
        limit = await num_at_a_time(self.client, len(work), options, self.notices)
        progress = options.progress or Progress()
        progress.total = len(self.plan)
        progress.done = progress.resumed = self.num_resumed
        async with self.generator(context) as generate_one:
            if context.score and not options.interleave_scoring:
                jobs, abort = list(work), options.abort_after
                await generate_then_score(
                    env, context, store, jobs, limit, abort, progress, generate_one
                )
                return
            runner = Runner(
                env,
                context,
                store,
                concurrency=limit,
                abort_after=options.abort_after,
                progress=progress,
                generate=generate_one,
            )
            if self.stopping is None:
                await runner.run(work)
            else:
                await runner.run(self.stopping.until_decided(work, store.rows))
                await self._conclude(self.stopping, store, progress)

    def _context(self, given_client: ClientLike | None) -> RunContext:
        options = self.options
        return RunContext(
            client=self.client,
            model=self.model,
            sampling_args=self.sampling_args,
            score=self.is_scored,
            independent_scoring=options.independent_scoring,
            seed=options.seed,
            rollout_timeout_s=options.rollout_timeout_s,
            max_retries=options.max_retries,
            generation_slot=slots(options.max_concurrent_generation),
            scoring_slot=slots(options.max_concurrent_scoring),
            tool_slot=slots(options.max_concurrent_tools),
            given_client=given_client,
            is_cached=self.cache is not None,
        )

    async def _conclude(self, stopping: StoppingRule, store: RunStore, progress: Progress) -> None:
        """Say what ended the run early, or that nothing did. *Raises* RunError."""
        decision = stopping.conclude(store.rows)
        if decision.is_decided:
            progress.total = progress.done
            await self.notices.log(decision.sentence())
        else:
            await self.notices.warn(decision.sentence())

    def _results(self, store: RunStore, status: str) -> GenerateOutputs:
        outputs = store.outputs()
        outputs.metadata = self.metadata(store, outputs.measurements(), status)
        return outputs

    def _note_end(self, store: RunStore, status: str) -> None:
        """Write how the run ended; the failure that ended it is raised, not that of writing it."""
        try:
            store.write_metadata(self._results(store, status).metadata)
        except JournalError as error:
            self.env.logger.warning("%s", error)
