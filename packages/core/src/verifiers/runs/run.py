"""``Run``: a plan with one model in one environment, from the run directory to the results.

A ``Run`` opens the run directory, compares the plan with the rollouts saved there (by content hash
and sibling), generates and scores the pending rollouts, and returns the results::

    run = Run(env, plan, client, model, sampling_args, options)
    results = await run.execute(given_client)

An unreachable endpoint, an unwritable directory and a directory that holds another configuration
are found before the first request. Secrets are not written to disk.

``entry`` makes the plan, ``runner`` generates, scores and stores rollouts, ``notices`` says what
is worth saying; this module does not read conversations.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verifiers
from verifiers.clients.cache import CompletionCache, is_cacheable
from verifiers.clients.protocol import prices_of
from verifiers.clients.spending import Budget
from verifiers.errors import ConfigError, JournalError, RunError
from verifiers.results import GenerateMetadata, GenerateOutputs, make_dataset
from verifiers.results.comparison import Measured
from verifiers.results.run_metadata import Measurements
from verifiers.results.statistics import equal_groups
from verifiers.runs.budget import SPENDING_NAME, check_limits, open_budget
from verifiers.runs.notices import Notices
from verifiers.runs.options import DEFAULT_CONCURRENCY, RunOptions
from verifiers.runs.plan import Pending, Plan, pending
from verifiers.runs.rollout import (
    GenerateJob,
    Progress,
    RunContext,
    RunEnvironment,
    groups_are_units,
    slots,
)
from verifiers.runs.runner import Runner, generate_then_score, job_generator
from verifiers.runs.stopping import StoppingRule
from verifiers.runs.store import RunStore, is_large
from verifiers.runtime.gc import fewer_collections
from verifiers.runtime.redaction import digested, redacted, redacted_text
from verifiers.runtime.worker_threads import call_in_thread, workers
from verifiers.storage.configurations import fingerprint
from verifiers.storage.described import CODE, describe
from verifiers.storage.directory import (
    RunDirectory,
    default_root,
    is_complete,
    read_config,
    read_metadata,
    run_path,
)
from verifiers.storage.identity import code_of, identity_of
from verifiers.storage.provenance import environment_facts, provenance

if TYPE_CHECKING:
    from verifiers.clients.protocol import Client, ClientLike


class Run:
    """Run a plan with one model in one environment. ``execute`` runs it once.

    The arguments are not changed; ``client`` must be resolved (``clients.resolve.client_for``).
    """

    def __init__(
        self,
        env: RunEnvironment,
        plan: Plan,
        client: Client,
        model: str,
        sampling_args: Mapping[str, Any],
        options: RunOptions,
    ):
        self.env, self.plan, self.client, self.model = env, plan, client, model
        self.sampling_args, self.options = sampling_args, options
        self._sampling = {**env.sampling_args, **sampling_args}
        self._asks_for_logprobs = bool(self._sampling.get("logprobs"))
        # the second: the first may go backwards
        self.started, self._clock = time.time(), time.monotonic()
        self.path: Path | None = None
        """The run directory, once it is open."""
        self.num_resumed = 0
        """Rollouts that were durable before this run began."""
        self.outside_plan: list[str] = []
        """Keys of saved rollouts outside this plan: left in the directory and not counted."""
        self.changed_code: list[str] = []
        """Files and functions that were changed between two sessions of the run, and accepted."""
        self.cache: CompletionCache | None = None
        self.budget: Budget | None = None
        """What the run has spent, where that is limited."""
        self.stopping: StoppingRule | None = None
        """Ends the run before its plan does, once it is decided."""
        self.notices = Notices(env.logger, options)
        self._config: dict[str, Any] | None = None
        self._provenance: dict[str, Any] | None = None
        self._fingerprint: str | None = None

    async def execute(self, given_client: ClientLike | None = None) -> GenerateOutputs:
        """Return when every rollout is durable (at once when all are) and its copies are written:
        then it is complete. ``given_client`` is the client in the authors' state; None = the
        resolved client."""
        if self.env.max_workers is not None:
            workers().max_threads = self.env.max_workers
        self.check()
        with fewer_collections(), ExitStack() as stack:
            directory = self._open(stack)
            store = self._store(directory)
            work = await self._pending(store, directory, stack)
            if self.options.limits_spending or (
                directory is not None and (directory.path / SPENDING_NAME).exists()
            ):
                self.budget = await open_budget(
                    self.options, self.client, directory, store.measurements, stack
                )
            if self.options.cache_dir is not None:
                self.cache = CompletionCache(self.options.cache_dir)
                stack.enter_context(self.cache.current())
            if self.budget is not None:
                stack.enter_context(self.budget.current())
            was_complete = not len(work) and self.path is not None and is_complete(self.path)
            try:
                await self.notices.start(self.plan, work)
                if len(work):
                    store.write_metadata(self.metadata(store, store.measurements(), "running"))
                    await self._generate(work, store, given_client)
                    await self._tell_coverage(store)
                    if self._asks_for_logprobs:
                        await self.notices.missing_logprobs(store)
                    await self.notices.changed_model(store, self.model)
                outputs = self._results(store, "complete")
                await self._copy(outputs)
                store.write_metadata(outputs.metadata)
                return outputs
            except BaseException as error:  # raised again
                if not was_complete:
                    stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
                    self._note_end(store, "interrupted" if stopped else "failed")
                raise

    def check(self) -> None:
        """Find what is refused before the first request; *raises* ConfigError."""
        self.stopping = self._stopping_rule()
        check_limits(self.options, self.client, self.model, self._sampling)
        if self.options.cache_dir is not None and not is_cacheable(self.client):
            raise ConfigError(
                f"cache_dir cannot hold the replies of {type(self.client).__name__}: only those of"
                " a server over HTTP, reached by OpenAI() or a ClientConfig, are cached"
            )

    # --- identity ---------------------------------------------------------------------------------

    @property
    def is_scored(self) -> bool:
        """Whether rewards are computed."""
        setting = self.options.score_rollouts
        return self.env.score_rollouts if setting is None else setting

    def config(self) -> dict[str, Any]:
        """The configuration that all rollouts of a run share, without secrets; computed once."""
        if self._config is None:
            self._config = identity_of(self.env) | {
                "model": self.name,
                "sampling_args": digested(self._sampling),
                "seed": self.options.seed,
                "score_rollouts": self.is_scored,
                "independent_scoring": self.options.independent_scoring,
            }
            if self.options.shuffle_seed is not None:  # it decides which rows are the first
                self._config["shuffle_seed"] = self.options.shuffle_seed
            if code := code_of(self.env):
                self._config[CODE] = code
            if hasattr(self.client, "identity"):  # a client without identity() is not compared
                self._config["client"] = describe(self.client)
        return self._config

    def fingerprint(self) -> str | None:
        """Hash of the configuration; None when it has no JSON representation and the run is not
        saved."""
        if self._fingerprint is None:
            try:
                self._fingerprint = fingerprint(self.config())
            except ConfigError:
                if self.path is not None:
                    raise
        return self._fingerprint

    def metadata(self, store: RunStore, measured: Measurements, status: str) -> GenerateMetadata:
        """Statistics of rollouts and facts of the run; ``status`` is running, complete, interrupted
        or failed."""
        env, local_model = self.env, getattr(self.client, "local_model", None)
        record = self.provenance()
        decision = None if self.stopping is None else self.stopping.decision()
        ended = self.stopping is not None and status == "complete"
        return GenerateMetadata.of(
            measured,
            env_id=env.env_id,
            env_args=redacted(env.env_args),
            env_version=env.env_version,
            model=self.name,
            base_url=self._base_url,
            num_examples=len(set(measured.examples)) if ended else len(self.plan.examples),
            rollouts_per_example=max(self.plan.siblings),
            sampling_args=redacted(dict(self.sampling_args)),
            date=datetime.datetime.fromtimestamp(self.started, datetime.UTC).isoformat(
                timespec="seconds"
            ),
            time=time.monotonic() - self._clock,
            success_metric=env.rubric.success_metric,
            pass_threshold=env.pass_threshold,
            state_columns=list(self.options.state_columns),
            path_to_save=str(self.path) if self.path is not None else None,
            tools=list(env.tool_defs),
            version_info={
                "vf_version": record["packages"]["verifiers"],
                "vf_commit": _sha(record["commit"]),
                "env_version": env.env_version,
                "env_commit": _sha(record["environment"]["commit"]),
            },
            provenance=record,
            fingerprint=self.fingerprint(),
            status=status,
            seed=self.options.seed,
            resumed=self.num_resumed,
            outside_plan=self.outside_plan,
            changed_code=self.changed_code,
            served_models=store.served_models(self.model),
            local_model=None if local_model is None else local_model.describe(),
            prices=prices_of(self.client),
            cached=None if self.cache is None else self.cache.summary(),
            spent=None if self.budget is None else self.budget.summary(),
            stopped=None if decision is None else dataclasses.asdict(decision),
            coverage=store.coverage.counts() | equal_groups(measured.rewards, measured.examples),
        )

    def provenance(self) -> dict[str, Any]:
        """Where the run's numbers come from, see ``storage.provenance``; made once."""
        if self._provenance is None:
            saved = (read_metadata(self.path) or {}) if self.path is not None else {}
            local_model = getattr(self.client, "local_model", None)
            facts = {
                "environment": environment_facts(self.env),
                "code": self.config().get(CODE),
                "engine": type(self.client).__name__,
                "processes": max(1, self.options.num_workers),
                "settings": self.options.described(),
                "weights": None if local_model is None else local_model.weights(),
            }
            facts |= self.options.provenance or {}
            self._provenance = provenance(saved.get("provenance"), **facts)
        return self._provenance

    @property
    def name(self) -> str:
        """The model's name in results."""
        return self.options.model_name or self.model

    @property
    def _base_url(self) -> str:
        """A local server has none before it runs."""
        return redacted_text(str(getattr(self.client, "base_url", "") or ""))

    # --- open, pending, generate, finish ----------------------------------------------------------

    def _open(self, stack: ExitStack) -> RunDirectory | None:
        """The run directory, new or to be resumed. *Raises* RunMismatch, RunBusy, ConfigError."""
        options, env = self.options, self.env
        if options.results_path is None and not options.save_results:
            return None
        config = self.config()
        if options.results_path is None:
            name = env.env_id or type(env).__name__
            location = (default_root(name), name, self.name, fingerprint(config))
            path = run_path(
                *location,
                resume=options.resume,
                config=config,
                accept_changed_code=options.accept_changed_code,
            )
        else:
            path = Path(options.results_path)
            if not options.resume and read_config(path) is not None:
                raise ConfigError(
                    f"{path} already holds a run and resume=False; choose another directory",
                    path=str(path),
                )
        self.path = path
        notes = {
            "num_examples": len(self.plan.examples),
            "rollouts_per_example": max(self.plan.siblings),
            "base_url": self._base_url,
            "verifiers_version": verifiers.__version__,
        }
        directory = stack.enter_context(
            RunDirectory.create_or_resume(
                path, config, notes, accept_changed_code=options.accept_changed_code
            )
        )
        self.changed_code = directory.changed_code
        # the stored run's: an older version hashed fewer fields
        self._fingerprint = directory.fingerprint
        return directory

    def _store(self, directory: RunDirectory | None) -> RunStore:
        """Where finished rollouts go; those of a large run that is saved are not held in memory."""
        options, kind = self.options, RunStore
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
            on_first=self._tell_coverage,
        )

    async def _pending(
        self, store: RunStore, directory: RunDirectory | None, stack: ExitStack
    ) -> Pending:
        """Read the saved rollouts into ``store``; return the pending jobs."""
        store.open(stack)
        by_group = (
            groups_are_units(self.env.rubric)
            and self.is_scored
            and not self.options.independent_scoring
        )
        retry_errors = self.options.retry_errors
        work = store.work = pending(
            self.plan, store, store.take, whole_groups=by_group, retry_errors=retry_errors
        )
        self.num_resumed, self.outside_plan = len(self.plan) - len(work), store.outside()
        if self.outside_plan:
            await self.notices.warn(
                f"{self.path} holds {len(self.outside_plan)} rollouts outside this plan (removed or"
                " edited examples, or a smaller plan); they stay there and are not counted"
            )
        saved = (read_metadata(self.path) or {}) if self.path is not None else {}
        counted = saved.get("num_rollouts")
        if isinstance(counted, int) and counted > store.num_saved:
            await self.notices.warn(
                f"{self.path}/results.jsonl has lost rows: metadata.json counted {counted}"
                f" rollouts, the file has {store.num_saved}; the missing ones are generated again"
                " (stop now to restore the file from a copy)"
            )
        if directory is not None:
            if self.num_resumed:
                done = f"; {self.num_resumed} of {len(self.plan)} rollouts are done already"
            else:
                done = ""
            await self.notices.log(f"results are saved in {self.path}{done}")
            if self._asks_for_logprobs and "trajectory" not in self.options.state_columns:
                await self.notices.warn(
                    "the log-probabilities that sampling_args ask for are not saved: save the turns"
                    ' as well, with state_columns=["trajectory"] (vf-eval -C trajectory)'
                )
            if directory.uncompared:
                await self.notices.log(
                    f"{self.path} was saved by an older version or through another kind of client,"
                    " so these parts of the configuration are not compared:"
                    f" {', '.join(directory.uncompared)}",
                )
        return work

    async def _generate(self, work: Pending, store: RunStore, given_client: object) -> None:
        """Generate, score and store the pending rollouts."""
        env, options, client = self.env, self.options, self.client
        preflight = getattr(client, "preflight", None)
        if options.preflight and preflight is not None and (note := await preflight(self.model)):
            await self.notices.warn(note)
        context = RunContext(
            client=client,
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
        limit = min(
            DEFAULT_CONCURRENCY if options.max_concurrent == -1 else options.max_concurrent,
            len(work),
        )
        if preflight is not None:
            limit = await self._within_open_files(limit)
        progress = options.progress or Progress()
        progress.total = len(self.plan)
        progress.done = progress.resumed = self.num_resumed
        async with self.generator(context) as generate_one:
            if context.score and not options.interleave_scoring:
                await generate_then_score(
                    env,
                    context,
                    store,
                    list(work),
                    limit,
                    options.abort_after,
                    progress,
                    generate_one,
                )
            else:
                runner = Runner(
                    env,
                    context,
                    store,
                    concurrency=limit,
                    abort_after=options.abort_after,
                    progress=progress,
                    generate=generate_one,
                )
                jobs = (
                    work if self.stopping is None else self.stopping.until_decided(work, store.rows)
                )
                await runner.run(jobs)
                await self._tell_decision(store, progress)

    def generator(self, context: RunContext) -> AbstractAsyncContextManager[GenerateJob]:
        """What makes the rollout of each job; a subclass may take saved rollouts."""
        return job_generator(self.env, context, self.options)

    def _stopping_rule(self) -> StoppingRule | None:
        options = self.options
        if options.until_half_width is None and options.until_decided is None:
            return None
        if not self.is_scored:
            raise ConfigError(
                "score_rollouts=False leaves every reward unknown, so that none can stop the run"
            )
        low, high = options.reward_range
        against = None if options.until_decided is None else str(options.until_decided)
        present = Measured("this run", self.env.env_id, {}, self.name, self.config())
        return StoppingRule(
            self.plan,
            (low, high),
            half_width=options.until_half_width,
            against=against,
            run=present,
        )

    async def _tell_decision(self, store: RunStore, progress: Progress) -> None:
        """Log what ended the run early. *Raises* RunError when its rewards are
        outside their range."""
        if self.stopping is None:
            return
        self.stopping.update(store.rows)
        if self.stopping.problem is not None:
            raise RunError(self.stopping.problem)
        if (decision := self.stopping.decision()) is not None:
            progress.total = progress.done
            await self.notices.log(decision.sentence())
        else:
            await self.notices.warn(self.stopping.so_far().sentence())

    async def _tell_coverage(self, store: RunStore) -> None:
        await self.notices.coverage(store, self._sampling.get("max_tokens"), self.env.parser)

    async def _copy(self, outputs: GenerateOutputs) -> None:
        """Publish the results, and hand them to ``on_results``. A copy that was begun is ended, also
        when this task is cancelled: nothing is left writing."""
        options = self.options
        copies: list[Callable[[GenerateOutputs], Any]] = []
        if options.push_to_hub:
            copies.append(lambda results: make_dataset(results, None, True, options.hub_name))
        if options.on_results is not None:
            copies.append(options.on_results)
        for copy in copies:
            is_async = inspect.iscoroutinefunction(copy)
            call = copy(outputs) if is_async else call_in_thread(copy, outputs)
            copying = asyncio.ensure_future(call)
            try:
                await asyncio.shield(copying)
            except asyncio.CancelledError:
                await asyncio.wait([copying])
                raise

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

    async def _within_open_files(self, limit: int) -> int:
        """``limit``, or the number of connections that this process may open, with a warning."""
        from verifiers.clients.http import connection_room, open_file_limit

        room = connection_room()
        if limit <= room:
            return limit
        await self.notices.warn(
            f"{room} rollouts run at a time instead of {limit}: this process may open"
            f" {open_file_limit()} files; raise the limit (ulimit -n) or lower max_concurrent"
        )
        return room


def _sha(commit: Mapping[str, Any] | None) -> str | None:
    return None if commit is None else str(commit["sha"])
