"""``RunMethods``: the part of an environment that runs it: ``evaluate``, ``generate``, ``rollout``.

Each has three forms: ``evaluate`` blocks, or returns an awaitable under a running loop;
``evaluate_sync`` always blocks; ``a_evaluate`` is a coroutine. The modules that do the work are
imported by the first call, so that constructing an environment loads none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from verifiers.rollouts.author_code import maybe_await
from verifiers.runs.keywords import EvaluateOptions, GenerateOptions
from verifiers.runs.options import RunOptions
from verifiers.runtime.calls import blocking_form, dual, either
from verifiers.runtime.signatures import spell_out

if TYPE_CHECKING:
    from datasets import Dataset

    from verifiers.clients.protocol import ClientLike, ModelLike
    from verifiers.data.sources import DatasetLike
    from verifiers.results import GenerateOutputs
    from verifiers.results.rows import RolloutOutput
    from verifiers.runs.rollout import RunEnvironment

    class SyncOrAsyncOutputs(Awaitable[GenerateOutputs], GenerateOutputs):
        """Return type of ``evaluate`` and ``generate`` for type checkers: results that may also be
        awaited.

        At run time it is ``GenerateOutputs`` where no event loop runs, else an awaitable of it; a
        static type cannot express the difference.
        """

    def _outputs_form(
        method: Callable[Concatenate[Env, P], Coroutine[Any, Any, GenerateOutputs]],
    ) -> Callable[Concatenate[Env, P], SyncOrAsyncOutputs]: ...

else:
    _outputs_form = either

P = ParamSpec("P")
Env = TypeVar("Env")
DEFAULTS = asdict(RunOptions())


class RunMethods:
    """A base class of ``Environment``: runs of many rollouts, of one, and what is made of them."""

    @spell_out(EvaluateOptions, DEFAULTS)
    async def a_evaluate(
        self: RunEnvironment,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, object] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> GenerateOutputs:
        """Run and score the evaluation set: ``num_examples`` (-1 = all), ``rollouts_per_example``
        rollouts of each.

        ``evaluate`` blocks and returns ``GenerateOutputs``; inside a running event loop it returns
        an awaitable of it. ``evaluate_sync`` always blocks, ``a_evaluate`` is a coroutine. Options
        are those of ``verifiers.runs.options.RunOptions``; sampling arguments (``temperature=…``)
        may be given by name.

        *Raises* ConfigError for invalid arguments, before the first request; RunMismatch when the
        run directory holds another configuration; RunError when no rollout can succeed.
        """
        from verifiers.runs.entry import evaluate

        return await evaluate(
            self, client, model, sampling_args, num_examples, rollouts_per_example, options
        )

    evaluate, evaluate_sync = _outputs_form(a_evaluate), blocking_form(a_evaluate)

    @spell_out(GenerateOptions, DEFAULTS)
    async def a_generate(
        self: RunEnvironment,
        inputs: DatasetLike | None = None,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, object] | None = None,
        n_samples: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateOutputs:
        """Run and score ``inputs`` (rows; default: the training set); ``n_samples`` rollouts wrap
        around the rows.

        Rows of equal ``example_id`` are siblings. Its three forms are those of ``evaluate``.
        """
        from verifiers.runs.entry import generate

        return await generate(self, inputs, client, model, sampling_args, n_samples, options)

    generate, generate_sync = _outputs_form(a_generate), blocking_form(a_generate)

    def rollout(self: RunEnvironment, *args: Any, **keywords: Any) -> Any:
        """``rollout(input, client, model, sampling_args=None) -> State``: run the row ``input``
        without scoring it.

        Its three forms are those of ``evaluate``. An override, sync or async, replaces the rollout
        loop.
        """
        from verifiers.runs.rollout import single_rollout

        return dual(lambda: single_rollout(self, *args, **keywords))

    async def a_rollout(self: RunEnvironment, *args: Any, **keywords: Any) -> Any:
        """``rollout`` as a coroutine."""
        return await maybe_await(self.rollout(*args, **keywords))

    rollout_sync = blocking_form(a_rollout)

    async def run_rollout(
        self: RunEnvironment,
        input: Mapping[str, object],
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, object] | None = None,
        *,
        max_retries: int = 0,
        state_columns: Sequence[str] = (),
    ) -> RolloutOutput:
        """Run and score one rollout of the row ``input``; records its failure."""
        from verifiers.results.rows import state_to_output
        from verifiers.runs.rollout import scored_rollout

        state = await scored_rollout(
            self, input, client, model, sampling_args, max_retries=max_retries
        )
        return state_to_output(state, state_columns)

    async def run_group(
        self: RunEnvironment,
        group_inputs: Sequence[Mapping[str, object]],
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, object] | None = None,
        *,
        max_retries: int = 0,
        state_columns: Sequence[str] = (),
    ) -> list[RolloutOutput]:
        """Run and score siblings of an example, with advantages; records the failure
        of a rollout."""
        from verifiers.results.rows import state_to_output
        from verifiers.runs.rollout import scored_group

        states = await scored_group(
            self, group_inputs, client, model, sampling_args, max_retries=max_retries
        )
        return [state_to_output(state, state_columns) for state in states]

    def make_dataset(self, results: GenerateOutputs, *args: Any, **options: Any) -> Dataset:
        """``results`` as a ``datasets.Dataset``; see ``verifiers.make_dataset``."""
        from verifiers.results import make_dataset

        return make_dataset(results, *args, **options)

    def process_env_results(self, *args: Any, **options: Any) -> Any:
        """Convert columns of rollouts to token rows; see
        ``verifiers.results.process_env_results``."""
        from verifiers.results import process_env_results

        return process_env_results(*args, **options)
