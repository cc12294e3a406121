"""SkyRL: environments as the generator of its trainer, with the ids its engines sampled.

    python -m verifiers_trainer.integrations.skyrl_entrypoint export reverse-text data/reverse-text
    python -m verifiers_trainer.integrations.skyrl_entrypoint data.train_data="['data/reverse-text/train.parquet']" \\
        data.val_data="['data/reverse-text/eval.parquet']" generator.sampling_params.logprobs=0 ...

Promise: rows come back in the order of the prompts, with the environment's tokens under mask 0. Siblings are played and
scored together, so rubrics may compare them, and an unknown reward becomes the mean of its siblings' with every token
masked (``vf_unscored`` counts it). A rollout that forked needs ``generator.step_wise_trajectories=true``: then each of
its token rows is a step, the last one carries the reward. ``zero_reward_on_non_stop`` and ``apply_overlong_filtering``
mean what they mean in SkyRL's own generator.

Run with skyrl 0.3.0: its types, metrics and validator over a real endpoint, on a CPU. Its trainer needs CUDA and was
not run.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError, RunError
from verifiers.types import ModelRequest, Response
from verifiers_trainer.integrations.common import ExportSample, export_samples, generate_group, group_worth, row_of
from verifiers_trainer.integrations.peers import Peer
from verifiers_trainer.integrations.skyrl_data import KEY, export_dataset, task_of

__all__ = ["VerifiersGenerator", "environment", "export_dataset", "task_of"]  # noqa: F822 - made when asked for

SKYRL = Peer(
    "skyrl",
    "skyrl",
    ("0.3.0",),
    "pip install skyrl==0.3.0 skyrl-gym loguru aiohttp ray jaxtyping torchdata verifiers; "
    "pip install --no-deps verifiers-trainer",
)
MODULE = "verifiers_trainer.integrations.skyrl"
SAMPLING = frozenset(
    "max_tokens temperature top_p top_k min_p min_tokens stop stop_token_ids seed repetition_penalty presence_penalty "
    "frequency_penalty include_stop_str_in_output".split()
)
OFF: dict[str, tuple[Any, ...]] = {"top_k": (-1, 0), "min_p": (0.0,), "top_p": (1.0,), "min_tokens": (0,)}
"""Values that mean a sampling argument is not used."""

log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=32)
def environment(env_id: str, env_args: str) -> Environment:
    """One object per id and arguments; a batch may mix several."""
    return load_environment(env_id, **json.loads(env_args))


# --- the generator ----------------------------------------------------------------------------------------------------


class _Tokens:
    """A client whose every answer has token ids and log-probabilities."""

    def __init__(self, base_url: str):
        self._client = OpenAIChatCompletionsClient(base_url=base_url, api_key="none", max_retries=3)

    async def complete(self, request: ModelRequest) -> Response:
        return await self._client.complete(replace(request, require_tokens=True))

    async def aclose(self) -> None:
        await self._client.aclose()


@dataclass(frozen=True, slots=True)
class _Played:
    """One prompt's outcome: its token rows, and what it is worth."""

    rows: list[ExportSample]
    reward: float
    stop: str
    metrics: dict[str, float]
    error: str | None


class _Generates:
    """What ``VerifiersGenerator`` does; SkyRL's interface is its base."""

    def __init__(
        self, generator_cfg: Any, tokenizer: Any, inference_engine_client: Any, model: str, *, max_retries: int = 0
    ):
        """``model`` is the name under which the endpoint serves the policy."""
        self.generator_cfg, self.tokenizer, self.model = generator_cfg, tokenizer, model
        self.engines, self.max_retries = inference_engine_client, max_retries

    async def generate(self, input_batch: Mapping[str, Any], disable_tqdm: bool = False) -> dict[str, Any]:
        """A ``GeneratorOutput``. *Raises* RunError when no rollout of a training batch can be trained."""
        asked, is_training = self._sampling(input_batch)
        groups = _groups(input_batch)
        client = _Tokens(self.engines.get_endpoint_url().rstrip("/") + "/v1")
        try:
            played = await asyncio.gather(*(self._play(input_batch, places, client, asked) for places in groups))
        finally:
            await client.aclose()
        by_place = {
            place: one
            for places, ones in zip(groups, played, strict=True)
            for place, one in zip(places, ones, strict=True)
        }
        outcomes = [by_place[place] for place in range(len(input_batch["prompts"]))]
        self._check(outcomes, is_training)
        return self._output(outcomes, input_batch)

    def _sampling(self, input_batch: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """(sampling arguments as the endpoint takes them, whether the batch is for training)."""
        given = dict(input_batch.get("sampling_params") or {})
        phase = getattr(input_batch.get("batch_metadata"), "training_phase", "train")
        if phase == "train" and "logprobs" in given and given["logprobs"] is None:
            raise ConfigError("training needs log-probabilities: set generator.sampling_params.logprobs=0")
        used = {name: value for name, value in given.items() if name in SAMPLING and value is not None}
        return {name: value for name, value in used.items() if value not in OFF.get(name, ())}, phase == "train"

    async def _play(
        self, batch: Mapping[str, Any], places: Sequence[int], client: Any, asked: Mapping[str, Any]
    ) -> list[_Played]:
        """The siblings of one prompt."""
        prompts, extras = batch["prompts"], batch.get("env_extras") or [{}] * len(batch["prompts"])
        tasks = [task_of(prompts[place], extras[place]) for place in places]
        said = extras[places[0]][KEY]
        env = environment(said["environment"], said.get("env_args") or "{}")
        rows = [row_of(task, env.message_type) for task in tasks]
        rollouts = await generate_group(env, rows, client, self.model, asked, self.max_retries)
        temperature = float(asked.get("temperature") or 1.0)
        made = []
        for rollout, found in zip(rollouts, group_worth(rollouts), strict=True):
            samples = export_samples(rollout, temperature) or [self._nothing(rollout, env)]
            samples = [one.masked() for one in samples] if found.is_masked else samples
            metrics = {name: float(value) for name, value in rollout["metrics"].items() if value == value}
            metrics |= {**found.metrics, "vf_error": float(rollout["error"] is not None)}
            failed = rollout["error"]
            error = None if failed is None else f"{failed['error']}: {failed['message']}"
            stop = "length" if rollout["is_truncated"] else "error" if error else "stop"
            made.append(_Played(samples, found.reward, stop, metrics, error))
        return made

    def _nothing(self, rollout: Any, env: Environment) -> ExportSample:
        """Of a rollout without a sampled token: its prompt, and the end token, masked."""
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in rollout["prompt"]],
            tools=env.tool_defs or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return ExportSample(ids, [self.tokenizer.eos_token_id], [0], [0.0], [-1], 1.0, True)

    def _check(self, outcomes: Sequence[_Played], is_training: bool) -> None:
        errors = [one.error for one in outcomes if one.error]
        if errors:
            log.warning(
                "%d of %d rollouts failed and are not trained; the first: %s", len(errors), len(outcomes), errors[0]
            )
        if is_training and not any(any(row.response_mask) for one in outcomes for row in one.rows):
            raise RunError(f"no rollout of this batch can be trained; the first error: {errors[0] if errors else None}")
        forked = next((one for one in outcomes if len(one.rows) > 1), None)
        if forked is not None and not self.generator_cfg.step_wise_trajectories:
            raise ConfigError(
                f"a rollout gave {len(forked.rows)} token rows, because a prompt does not begin with the turns before "
                "it: set generator.step_wise_trajectories=true, or use a chat template that keeps earlier turns"
            )

    def _output(self, outcomes: Sequence[_Played], batch: Mapping[str, Any]) -> dict[str, Any]:
        """The lists that SkyRL takes, a row for each token row."""
        utils = SKYRL.load("train.generators.utils")
        config, ids = self.generator_cfg, batch.get("trajectory_ids")
        flat = [(place, one, row) for place, one in enumerate(outcomes) for row in one.rows]
        rewards = [one.reward if row.is_last else 0.0 for _, one, row in flat]
        masks = [row.response_mask for _, _, row in flat]
        stops = [one.stop for _, one, _ in flat]
        # without env_classes: SkyRL would look ours up among its own environments
        metrics = utils.get_rollout_metrics([row.response_ids for _, _, row in flat], rewards, loss_masks=masks)
        if config.zero_reward_on_non_stop:
            rewards = [reward if stop == "stop" else 0.0 for reward, stop in zip(rewards, stops, strict=True)]
        if config.apply_overlong_filtering:
            masks = [mask if stop == "stop" else [0] * len(mask) for mask, stop in zip(masks, stops, strict=True)]
        step_wise = bool(config.step_wise_trajectories)
        return {
            "prompt_token_ids": [row.prompt_ids for _, _, row in flat],
            "response_ids": [row.response_ids for _, _, row in flat],
            "rewards": rewards,
            "loss_masks": masks,
            "stop_reasons": stops,
            "rollout_metrics": metrics | _means(outcomes),
            "rollout_logprobs": [row.logprobs for _, _, row in flat],
            "trajectory_ids": [ids[place] for place, _, _ in flat] if ids is not None else None,
            "trajectory_generation_times": None,
            "rollout_expert_indices": None,
            "is_last_step": [row.is_last for _, _, row in flat] if step_wise else None,
            "env_metrics": [one.metrics for _, one, _ in flat],
        }


def _groups(batch: Mapping[str, Any]) -> list[list[int]]:
    """Places of the prompts that are siblings, by the trajectory ids; without them each stands alone."""
    ids = batch.get("trajectory_ids")
    groups: dict[Any, list[int]] = {}
    for place in range(len(batch["prompts"])):
        groups.setdefault(place if ids is None else ids[place].instance_id, []).append(place)
    return list(groups.values())


def _means(outcomes: Sequence[_Played]) -> dict[str, float]:
    """``vf/<name>``: mean over the rollouts that have it."""
    names = sorted({name for one in outcomes for name in one.metrics})
    found = {name: [one.metrics[name] for one in outcomes if name in one.metrics] for name in names}
    return {f"vf/{name.removeprefix('vf_')}": sum(values) / len(values) for name, values in found.items()}


@functools.cache
def _generator_class() -> type:
    base = SKYRL.load("train.generators.base").GeneratorInterface
    return type("VerifiersGenerator", (_Generates, base), {"__module__": MODULE, "__doc__": __doc__})


def __getattr__(name: str) -> Any:
    if name == "VerifiersGenerator":
        return _generator_class()
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
