"""SkyRL: run environments as the generator of its trainer, with the token ids sampled by its engines.

    python -m verifiers_integrations.skyrl_entrypoint export reverse-text data/reverse-text
    python -m verifiers_integrations.skyrl_entrypoint data.train_data="['data/reverse-text/train.parquet']" \\
        data.val_data="['data/reverse-text/eval.parquet']" generator.sampling_params.logprobs=0 ...

Samples are returned in the order of the prompts; tokens of the environment have mask 0. Siblings are run and scored
together, so rubrics may compare them. An unknown reward becomes the mean of its siblings' rewards, with every token
masked and ``vf_unscored`` = 1. A rollout that forked needs ``generator.step_wise_trajectories=true``: each of its token
samples is then a step, and the last step has the reward. ``zero_reward_on_non_stop`` and
``apply_overlong_filtering`` have the semantics of SkyRL's generator.

Tested with skyrl 0.3.0 and 0.4.0: its types, metrics and validator over a real endpoint, on a CPU. Its trainer needs
CUDA and was not run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.clients.payload import explicit
from verifiers.clients.protocol import ClientLike
from verifiers.data.chat_template import rendered
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, RunError
from verifiers.types import ModelRequest, Response, SamplingArgs
from verifiers_integrations.common import (
    ExportSample,
    environment,
    export_samples,
    generate_group,
    group_worth,
    known_metrics,
    row_of,
)
from verifiers_integrations.peers import Peer, beside_trainer
from verifiers_integrations.skyrl_data import KEY, export_dataset, task_of

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# VerifiersGenerator is created on access
__all__ = ["VerifiersGenerator", "environment", "export_dataset", "task_of"]  # noqa: F822

SKYRL = Peer(
    "skyrl",
    "skyrl",
    ("0.3.0", "0.4.0"),
    lambda: beside_trainer("skyrl==0.3.0 skyrl-gym loguru aiohttp ray jaxtyping torchdata"),
)
MODULE = "verifiers_integrations.skyrl"
SAMPLING = frozenset(
    "max_tokens temperature top_p top_k min_p min_tokens stop stop_token_ids seed"
    " repetition_penalty presence_penalty frequency_penalty include_stop_str_in_output".split()
)

log = logging.getLogger(__name__)


# --- the generator --------------------------------------------------------------------------------


class _TokenIdClient:
    """A client that requires token ids and log-probabilities in every response."""

    def __init__(self, base_url: str):
        self._client = OpenAIChatCompletionsClient(base_url=base_url, api_key="none", max_retries=3)

    async def complete(self, request: ModelRequest) -> Response:
        return await self._client.complete(replace(request, require_tokens=True))

    async def aclose(self) -> None:
        await self._client.aclose()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of the rollout of a prompt: token samples, reward, metrics."""

    samples: list[ExportSample]
    reward: float
    stop: str
    metrics: dict[str, float]
    error: str | None


class _Generator:
    """Implementation of ``VerifiersGenerator``, mixed with SkyRL's interface."""

    def __init__(
        self,
        generator_cfg: Any,
        tokenizer: PreTrainedTokenizerBase,
        inference_engine_client: Any,
        model: str,
        *,
        max_retries: int = 0,
    ):
        """``model`` is the name of the policy at the endpoint."""
        self.generator_cfg, self.tokenizer, self.model = generator_cfg, tokenizer, model
        self.engines, self.max_retries = inference_engine_client, max_retries

    async def generate(
        self, input_batch: Mapping[str, Any], disable_tqdm: bool = False
    ) -> dict[str, Any]:
        """Return a ``GeneratorOutput``. *Raises* RunError when every token of a training batch is
        masked."""
        sampling, is_training = self._sampling(input_batch)
        groups = _groups(input_batch)
        client = _TokenIdClient(self.engines.get_endpoint_url().rstrip("/") + "/v1")
        try:
            results = await asyncio.gather(
                *(self._run_group(input_batch, indices, client, sampling) for indices in groups)
            )
        finally:
            await client.aclose()
        by_index = {
            index: outcome
            for indices, outcomes_of_group in zip(groups, results, strict=True)
            for index, outcome in zip(indices, outcomes_of_group, strict=True)
        }
        outcomes = [by_index[index] for index in range(len(input_batch["prompts"]))]
        self._check(outcomes, is_training)
        return self._output(outcomes, input_batch)

    def _sampling(self, input_batch: Mapping[str, Any]) -> tuple[SamplingArgs, bool]:
        """Return (sampling arguments for the endpoint, whether the batch is for training)."""
        args = dict(input_batch.get("sampling_params") or {})
        phase = getattr(input_batch.get("batch_metadata"), "training_phase", "train")
        if phase == "train" and "logprobs" in args and args["logprobs"] is None:
            raise ConfigError(
                "training needs log-probabilities: set generator.sampling_params.logprobs=0"
            )
        sampling = {
            name: value
            for name, configured in args.items()
            if name in SAMPLING and (value := explicit(name, configured)) is not None
        }
        return sampling, phase == "train"

    async def _run_group(
        self,
        batch: Mapping[str, Any],
        indices: Sequence[int],
        client: ClientLike,
        sampling: Mapping[str, Any],
    ) -> list[_Outcome]:
        """Run and score the siblings of a prompt."""
        prompts, extras = batch["prompts"], batch.get("env_extras") or [{}] * len(batch["prompts"])
        tasks = [task_of(prompts[index], extras[index]) for index in indices]
        column = extras[indices[0]][KEY]
        env = environment(column["environment"], column.get("env_args") or "{}")
        rows = [row_of(task, env.message_type) for task in tasks]
        rollouts = await generate_group(env, rows, client, self.model, sampling, self.max_retries)
        temperature = float(sampling.get("temperature") or 1.0)
        outcomes = []
        for rollout, worth in zip(rollouts, group_worth(rollouts), strict=True):
            samples = export_samples(rollout, temperature) or [self._empty_sample(rollout, env)]
            samples = [sample.masked() for sample in samples] if worth.is_masked else samples
            metrics = known_metrics(rollout) | worth.metrics
            metrics |= {"vf_error": float(rollout["error"] is not None)}
            details = rollout["error"]
            error = None if details is None else f"{details['error']}: {details['message']}"
            stop = "length" if rollout["is_truncated"] else "error" if error else "stop"
            outcomes.append(_Outcome(samples, worth.reward, stop, metrics, error))
        return outcomes

    def _empty_sample(self, rollout: Mapping[str, Any], env: Environment) -> ExportSample:
        """Return the sample of a rollout without sampled tokens: its prompt, and a masked end
        token."""
        text = rendered(
            self.tokenizer,
            [dict(message) for message in rollout["prompt"]],
            tools=env.tool_defs or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ExportSample(ids, [self.tokenizer.eos_token_id], [0], [0.0], [-1], 1.0, True)

    def _check(self, outcomes: Sequence[_Outcome], is_training: bool) -> None:
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            log.warning(
                "%d of %d rollouts failed and are masked; first error: %s",
                len(errors),
                len(outcomes),
                errors[0],
            )
        if is_training and not any(
            any(sample.response_mask) for outcome in outcomes for sample in outcome.samples
        ):
            raise RunError(
                f"every token of this batch is masked; first error: {errors[0] if errors else None}"
            )
        forked = next((outcome for outcome in outcomes if len(outcome.samples) > 1), None)
        if forked is not None and not self.generator_cfg.step_wise_trajectories:
            raise ConfigError(
                f"a rollout has {len(forked.samples)} token samples, because a prompt does not"
                " start with the earlier turns: set generator.step_wise_trajectories=true, or use"
                " a chat template that keeps earlier turns"
            )

    def _output(self, outcomes: Sequence[_Outcome], batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the lists of SkyRL, one entry per token sample."""
        utils = SKYRL.load("train.generators.utils")
        config, ids = self.generator_cfg, batch.get("trajectory_ids")
        flat = [
            (index, outcome, sample)
            for index, outcome in enumerate(outcomes)
            for sample in outcome.samples
        ]
        rewards = [outcome.reward if sample.is_last else 0.0 for _, outcome, sample in flat]
        masks = [sample.response_mask for _, _, sample in flat]
        stops = [outcome.stop for _, outcome, _ in flat]
        # without env_classes: SkyRL would look them up among its own environments
        metrics = utils.get_rollout_metrics(
            [sample.response_ids for _, _, sample in flat], rewards, loss_masks=masks
        )
        if config.zero_reward_on_non_stop:
            rewards = [
                reward if stop == "stop" else 0.0
                for reward, stop in zip(rewards, stops, strict=True)
            ]
        if config.apply_overlong_filtering:
            masks = [
                mask if stop == "stop" else [0] * len(mask)
                for mask, stop in zip(masks, stops, strict=True)
            ]
        step_wise = bool(config.step_wise_trajectories)
        return {
            "prompt_token_ids": [sample.prompt_ids for _, _, sample in flat],
            "response_ids": [sample.response_ids for _, _, sample in flat],
            "rewards": rewards,
            "loss_masks": masks,
            "stop_reasons": stops,
            "rollout_metrics": metrics | _means(outcomes),
            "rollout_logprobs": [sample.logprobs for _, _, sample in flat],
            "trajectory_ids": [ids[index] for index, _, _ in flat] if ids is not None else None,
            "trajectory_generation_times": None,
            "rollout_expert_indices": None,
            "is_last_step": [sample.is_last for _, _, sample in flat] if step_wise else None,
            "env_metrics": [outcome.metrics for _, outcome, _ in flat],
        }


def _groups(batch: Mapping[str, Any]) -> list[list[int]]:
    """Group the indices of the prompts by trajectory id; without ids each prompt is a group."""
    ids = batch.get("trajectory_ids")
    groups: dict[object, list[int]] = {}
    for index in range(len(batch["prompts"])):
        groups.setdefault(index if ids is None else ids[index].instance_id, []).append(index)
    return list(groups.values())


def _means(outcomes: Sequence[_Outcome]) -> dict[str, float]:
    """Return ``vf/<name>``: the mean of each metric over the rollouts that have it."""
    names = sorted({name for outcome in outcomes for name in outcome.metrics})
    values_by_name = {
        name: [outcome.metrics[name] for outcome in outcomes if name in outcome.metrics]
        for name in names
    }
    return {
        f"vf/{name.removeprefix('vf_')}": sum(values) / len(values)
        for name, values in values_by_name.items()
    }


@functools.cache
def _generator_class() -> type:
    base = SKYRL.load("train.generators.base").GeneratorInterface
    return type(
        "VerifiersGenerator", (_Generator, base), {"__module__": MODULE, "__doc__": __doc__}
    )


def __getattr__(name: str) -> Any:
    if name == "VerifiersGenerator":
        return _generator_class()
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
