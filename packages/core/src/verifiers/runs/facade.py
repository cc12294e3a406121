"""The run methods of an environment: ``evaluate``, ``generate``, ``rollout``, with blocking and coroutine forms.

``Runs`` is a base class of ``Environment``. Each method imports the module that does the work (``run``,
``single_rollouts``) when it is called, so that constructing an environment loads none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Unpack, cast

from verifiers import compat
from verifiers.clients.protocol import ClientLike, ModelLike
from verifiers.data.sources import DatasetLike
from verifiers.runs.options import EvaluateOptions, GenerateOptions, RunOptions
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.sync_async import blocking, dual, maybe_await

if TYPE_CHECKING:
    from verifiers.results import GenerateOutputs

    class SyncOrAsyncOutputs(GenerateOutputs, Awaitable[GenerateOutputs]):
        """Return type of ``evaluate`` and ``generate`` for type checkers: results that may also be awaited.

        At run time it is ``GenerateOutputs`` where no event loop runs, else an awaitable of it; a static type cannot
        express the difference.
        """


DEFAULTS = asdict(RunOptions())


class Runs:
    """``evaluate``, ``generate`` and ``rollout``, each also as a blocking and a coroutine form; single groups."""

    @spell_out(EvaluateOptions, DEFAULTS)
    def evaluate(
        self,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> SyncOrAsyncOutputs:
        """Run and score the evaluation set: ``num_examples`` (-1 = all), ``rollouts_per_example`` rollouts of each.

        Blocks and returns ``GenerateOutputs``; inside a running event loop returns an awaitable of it. Options are
        those of ``verifiers.runs.options.RunOptions``; sampling arguments (``temperature=…``) may be given by name.

        *Raises* ConfigError for invalid arguments, before the first request; RunMismatch when the run directory holds
        another configuration; RunError when no rollout can succeed.
        """
        outputs = dual(
            lambda: self.a_evaluate(client, model, sampling_args, num_examples, rollouts_per_example, **options)
        )
        return cast("SyncOrAsyncOutputs", outputs)

    @spell_out(EvaluateOptions, DEFAULTS)
    def evaluate_sync(
        self,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> GenerateOutputs:
        """``evaluate``, always blocking."""
        return blocking(
            lambda: self.a_evaluate(client, model, sampling_args, num_examples, rollouts_per_example, **options)
        )

    @spell_out(EvaluateOptions, DEFAULTS)
    async def a_evaluate(
        self,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> GenerateOutputs:
        """``evaluate`` as a coroutine."""
        from verifiers.runs.run import evaluate

        env: Any = self
        return await evaluate(env, client, model, sampling_args, num_examples, rollouts_per_example, options)

    @spell_out(GenerateOptions, DEFAULTS)
    def generate(
        self,
        inputs: DatasetLike | None = None,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        n_samples: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> SyncOrAsyncOutputs:
        """Run and score ``inputs`` (rows; default: the training set); ``n_samples`` rollouts wrap around the rows.

        Rows of equal ``example_id`` are siblings. Blocks, or returns an awaitable inside a running loop.
        """
        outputs = dual(lambda: self.a_generate(inputs, client, model, sampling_args, n_samples, **options))
        return cast("SyncOrAsyncOutputs", outputs)

    @spell_out(GenerateOptions, DEFAULTS)
    def generate_sync(
        self,
        inputs: DatasetLike | None = None,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        n_samples: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateOutputs:
        """``generate``, always blocking."""
        return blocking(lambda: self.a_generate(inputs, client, model, sampling_args, n_samples, **options))

    @spell_out(GenerateOptions, DEFAULTS)
    async def a_generate(
        self,
        inputs: DatasetLike | None = None,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        n_samples: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateOutputs:
        """``generate`` as a coroutine."""
        from verifiers.runs.run import generate

        env: Any = self
        return await generate(env, inputs, client, model, sampling_args, n_samples, options)

    def rollout(self, *args: Any, **keywords: Any) -> Any:
        """Run one rollout without scoring it; blocks, or returns an awaitable inside a running loop.

        ``rollout(input, client, model, sampling_args=None) -> State``, where ``input`` is a row; or
        ``rollout(client=…, model=…, prompt=…, answer=…, **sampling) -> (completion, state)``.
        """
        return dual(lambda: _run_one(self, args, keywords))

    def rollout_sync(self, *args: Any, **keywords: Any) -> Any:
        """``rollout``, always blocking."""
        return blocking(lambda: self.a_rollout(*args, **keywords))

    async def a_rollout(self, *args: Any, **keywords: Any) -> Any:
        """``rollout`` as a coroutine."""
        if self.has_own_loop:
            return await maybe_await(self.rollout(*args, **keywords))
        return await _run_one(self, args, keywords)

    async def run_rollout(self, input: Any, client: Any = None, model: Any = None, *args: Any, **keywords: Any) -> Any:
        """Run and score one rollout; records its failure. Takes present and older keywords (``single_rollouts``)."""
        from verifiers.runs.single_rollouts import run_rollout

        env: Any = self
        return await run_rollout(env, input, client, model, *args, **keywords)

    async def run_group(
        self, group_inputs: Any, client: Any = None, model: Any = None, *args: Any, **keywords: Any
    ) -> list[Any]:
        """Run and score siblings of one example, with advantages; records the failure of a rollout."""
        from verifiers.runs.single_rollouts import run_group

        env: Any = self
        return await run_group(env, group_inputs, client, model, *args, **keywords)

    @property
    def has_own_loop(self) -> bool:
        """Whether a subclass overrides ``rollout``, which then replaces the rollout loop."""
        return type(self).rollout is not Runs.rollout

    def make_dataset(self, results: Any, *args: Any, **options: Any) -> Any:
        """``results`` as a ``datasets.Dataset``; see ``verifiers.make_dataset``."""
        from verifiers.results import make_dataset

        return make_dataset(results, *args, **options)

    def process_env_results(self, *args: Any, **options: Any) -> Any:
        """Convert columns of rollouts to token rows; see ``verifiers.results.process_env_results``."""
        from verifiers.results import process_env_results

        return process_env_results(*args, **options)

    process_env_results_vllm = process_env_results


compat.legacy_methods(Runs, compat.ENVIRONMENT_METHODS)


async def _run_one(env: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    from verifiers.runs.single_rollouts import rollout

    return await rollout(env, *args, **keywords)
