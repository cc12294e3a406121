"""How an environment is run, under its public names: every call here is one line into the modules that do it.

``Runs`` is the part of ``Environment`` that plays rollouts. The modules above it (``generate``, ``single``) are
imported when they are called, so that describing an environment loads none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers import compat
from verifiers.runtime.sync_async import blocking, dual, maybe_await


class Runs:
    """``evaluate``, ``generate``, ``rollout`` with their twins, ``run_rollout`` and ``run_group``."""

    def evaluate(
        self,
        client: Any = None,
        model: Any = None,
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int | None = None,
        **options: Any,
    ) -> Any:
        """Play and score the evaluation set: ``num_examples`` (-1 = all), ``rollouts_per_example`` siblings of each.

        Blocks and returns ``GenerateOutputs``; inside a running event loop returns an awaitable of it. Options are
        those of ``verifiers.runs.options.RunOptions``; sampling arguments (``temperature=…``) may be given by name.
        """
        return dual(
            lambda: self.a_evaluate(client, model, sampling_args, num_examples, rollouts_per_example, **options)
        )

    def evaluate_sync(self, *args: Any, **options: Any) -> Any:
        """``evaluate``, always blocking."""
        return blocking(lambda: self.a_evaluate(*args, **options))

    async def a_evaluate(
        self,
        client: Any = None,
        model: Any = None,
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int | None = None,
        **options: Any,
    ) -> Any:
        """``evaluate`` as a coroutine."""
        from verifiers.runs.run import evaluate

        env: Any = self
        return await evaluate(env, client, model, sampling_args, num_examples, rollouts_per_example, options)

    def generate(
        self,
        inputs: Any = None,
        client: Any = None,
        model: Any = None,
        sampling_args: Mapping[str, Any] | None = None,
        n_samples: int | None = None,
        **options: Any,
    ) -> Any:
        """Play and score ``inputs`` (rows; default: the training set); ``n_samples`` rollouts wrap round over them.

        Rows of equal ``example_id`` are siblings. Blocks, or returns an awaitable inside a running loop.
        """
        return dual(lambda: self.a_generate(inputs, client, model, sampling_args, n_samples, **options))

    def generate_sync(self, *args: Any, **options: Any) -> Any:
        """``generate``, always blocking."""
        return blocking(lambda: self.a_generate(*args, **options))

    async def a_generate(
        self,
        inputs: Any = None,
        client: Any = None,
        model: Any = None,
        sampling_args: Mapping[str, Any] | None = None,
        n_samples: int | None = None,
        **options: Any,
    ) -> Any:
        """``generate`` as a coroutine."""
        from verifiers.runs.run import generate

        env: Any = self
        return await generate(env, inputs, client, model, sampling_args, n_samples, options)

    def rollout(self, *args: Any, **keywords: Any) -> Any:
        """One rollout, not scored; blocks, or returns an awaitable inside a running loop.

        ``rollout(input, client, model, sampling_args=None) -> State``, where ``input`` is a row; or
        ``rollout(client=…, model=…, prompt=…, answer=…, **sampling) -> (completion, state)``.
        """
        return dual(lambda: _play_one(self, args, keywords))

    def rollout_sync(self, *args: Any, **keywords: Any) -> Any:
        """``rollout``, always blocking."""
        return blocking(lambda: self.a_rollout(*args, **keywords))

    async def a_rollout(self, *args: Any, **keywords: Any) -> Any:
        """``rollout`` as a coroutine."""
        if self.has_own_loop:
            return await maybe_await(self.rollout(*args, **keywords))
        return await _play_one(self, args, keywords)

    async def run_rollout(self, input: Any, client: Any = None, model: Any = None, *args: Any, **keywords: Any) -> Any:
        """One rollout, scored; never raises for its own failure. Keywords of either age (``single.run_rollout``)."""
        from verifiers.runs.single_rollouts import run_rollout

        env: Any = self
        return await run_rollout(env, input, client, model, *args, **keywords)

    async def run_group(
        self, group_inputs: Any, client: Any = None, model: Any = None, *args: Any, **keywords: Any
    ) -> list[Any]:
        """Siblings of one example, scored, with advantages; never raises for a rollout's own failure."""
        from verifiers.runs.single_rollouts import run_group

        env: Any = self
        return await run_group(env, group_inputs, client, model, *args, **keywords)

    @property
    def has_own_loop(self) -> bool:
        """Whether the author wrote ``rollout``, which then runs in place of the loop."""
        return type(self).rollout is not Runs.rollout

    def make_dataset(self, results: Any, *args: Any, **options: Any) -> Any:
        """``results`` as a ``datasets.Dataset``; see ``verifiers.make_dataset``."""
        from verifiers.results import make_dataset

        return make_dataset(results, *args, **options)

    def process_env_results(self, *args: Any, **options: Any) -> Any:
        """Token rows of rollouts given as columns; see ``verifiers.results.process_env_results``."""
        from verifiers.results import process_env_results

        return process_env_results(*args, **options)

    process_env_results_vllm = process_env_results


compat.legacy_methods(Runs, compat.ENVIRONMENT_METHODS)


async def _play_one(env: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    from verifiers.runs.single_rollouts import rollout

    return await rollout(env, *args, **keywords)
