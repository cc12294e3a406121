"""TRL: run environments in its ``GRPOTrainer``, token-exact over several turns.

    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, args=args, train_dataset=to_dataset(env),
        rollout_func=make_rollout_func(env), reward_funcs=reward_from_rollout,
    )

TRL trains on the sampled ids and log-probabilities; tokens of the environment have ``env_mask`` 0.
TRL excludes a reward of None from the baseline, so an unknown reward is None, and its tokens are
masked. Sampling arguments are those of TRL. Tested with TRL 1.16; its vLLM modes need CUDA and were
not run.

A rollout that forked has several token samples and TRL takes only one: the last is trained, the
others are counted in ``dropped``; ``history="exact"`` avoids forks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verifiers.clients.payload import explicit
from verifiers.clients.protocol import ClientLike
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, RunError
from verifiers.runtime.calls import blocking
from verifiers.runtime.install_lines import install_line
from verifiers.types import SamplingArgs
from verifiers_integrations.common import (
    TokenClient,
    Worth,
    export_samples,
    generate_group,
    group_worth,
    limit,
    row_of,
    score_completion,
)
from verifiers_integrations.peers import Peer
from verifiers_integrations.token_client import served_generate

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

TRL = Peer("trl", "trl", ("1.16.0",), lambda: install_line("verifiers-trainer", "trl"))
ROW = "vf_row"
"""Field of the first message of a prompt with the key of its row: different rows may have the same
prompt."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

log = logging.getLogger(__name__)


def to_dataset(env: Environment, split: str = "train", max_samples: int | None = None) -> Any:
    """Return the rows as a ``datasets.Dataset`` with ``prompt answer info task example_id``;
    ``info`` is JSON text.

    The first message of each prompt has the field ``vf_row``, by which ``make_rollout_func`` looks
    up the row.
    """
    from datasets import Dataset

    rows = []
    for task in _tasks(env, max_samples)[split]:
        if isinstance(task["prompt"], list):
            task["prompt"][0][ROW] = f"{split}:{task['example_id']}"
        columns = {name: task[name] for name in ("answer", "task", "example_id")}
        rows.append({"prompt": task["prompt"], "info": json.dumps(task["info"]), **columns})
    return Dataset.from_list(rows)


def _tasks(env: Environment, max_samples: int | None = None) -> dict[str, list[dict[str, object]]]:
    return dict(zip(("train", "eval"), limit(env, max_samples), strict=True))


def make_rollout_func(
    env: Environment, client: ClientLike | None = None, **options: Any
) -> RolloutFunc:
    """Return a ``rollout_func`` for TRL. ``client=None`` samples from ``trainer.model`` through the
    embedded engine, or from the vLLM server of the trainer; for ``options`` see ``RolloutFunc``."""
    return RolloutFunc(env, client, **options)


class Trainer(Protocol):
    """What is read of TRL's trainer."""

    @property
    def args(self) -> Any: ...

    @property
    def model(self) -> Any: ...

    @property
    def processing_class(self) -> Any: ...

    @property
    def accelerator(self) -> Any: ...

    @property
    def state(self) -> Any: ...


class RolloutFunc:
    """Generates the rollouts of a step: one completion per prompt, siblings scored together.

    history: "render", or "exact" to keep sampled ids as the prefix of the next prompt (not with
    ``client``).
    max_seq_len: maximum sequence length of the embedded engine; default: that of the model.
    max_retries: retries of a rollout after a transient error.
    """

    def __init__(
        self,
        env: Environment,
        client: ClientLike | None = None,
        *,
        history: str = "render",
        max_seq_len: int | None = None,
        max_retries: int = 0,
    ):
        if client is not None and history != "render":
            raise ConfigError(
                'history="exact" needs the engine\'s ids: leave client out', key="history"
            )
        self.env, self.client, self.history = env, client, history
        self.max_seq_len, self.max_retries = max_seq_len, max_retries
        self.engine: Any = None
        self.dropped = 0  # token rows of forked rollouts that were not trained
        self._rows = {
            f"{split}:{task['example_id']}": task
            for split, rows in _tasks(env).items()
            for task in rows
        }
        self._by_text: dict[str, list[str]] = {}
        for key, task in self._rows.items():
            self._by_text.setdefault(_text_of(task["prompt"]), []).append(key)

    def __call__(self, prompts: Sequence[object], trainer: Trainer) -> dict[str, list[Any]]:
        """Return the fields of TRL. *Raises* RunError when every token of the step is masked."""
        TRL.load()
        client, model = self._client(trainer, len(prompts))
        groups: dict[str, list[int]] = {}
        for position, prompt in enumerate(prompts):
            groups.setdefault(self._key(prompt), []).append(position)
        sampling = sampling_of(trainer.args)
        rollouts_by_group = blocking(lambda: self._generate(groups, client, model, sampling))
        fields: list[Any] = [None] * len(prompts)
        for positions, rollouts in zip(groups.values(), rollouts_by_group, strict=True):
            for position, rollout, worth in zip(
                positions, rollouts, group_worth(rollouts), strict=True
            ):
                fields[position] = self._fields(rollout, worth, trainer.processing_class, sampling)
        if not any(any(field["env_mask"]) for field in fields):
            first = rollouts_by_group[0][0]
            raise RunError(
                f"every token of this step is masked; the first rollout ended with {_end_of(first)}"
            )
        return {name: [field[name] for field in fields] for name in fields[0]}

    async def _generate(
        self,
        groups: Mapping[str, Sequence[int]],
        client: ClientLike,
        model: str,
        sampling: Mapping[str, object],
    ) -> list[Any]:
        rows = {key: row_of(self._rows[key], self.env.message_type) for key in groups}
        return await asyncio.gather(
            *(
                generate_group(
                    self.env,
                    [rows[key]] * len(positions),
                    client,
                    model,
                    sampling,
                    self.max_retries,
                )
                for key, positions in groups.items()
            )
        )

    def _fields(
        self,
        rollout: Mapping[str, Any],
        worth: Worth,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Mapping[str, Any],
    ) -> dict[str, object]:
        samples = export_samples(rollout, float(sampling.get("temperature") or 1.0))
        self.dropped += max(0, len(samples) - 1)
        extra = {
            "vf_reward": None if worth.is_unscored else worth.reward,
            "vf_metrics": dict(rollout["metrics"]),
        }
        if not samples:  # no token was sampled: return one masked token
            end = tokenizer.eos_token_id
            return {
                "prompt_ids": [end],
                "completion_ids": [end],
                "logprobs": [0.0],
                "env_mask": [0],
                **extra,
            }
        last = samples[-1].masked() if worth.is_masked else samples[-1]
        tokens = {"prompt_ids": last.prompt_ids, "completion_ids": last.response_ids}
        return {**tokens, "logprobs": last.logprobs, "env_mask": last.response_mask, **extra}

    def _key(self, prompt: object) -> str:
        key = prompt[0].get(ROW) if isinstance(prompt, list) and prompt else None
        keys = [key] if key in self._rows else self._by_text.get(_text_of(prompt), [])
        if not keys:
            raise ConfigError(
                "a prompt of the trainer is not in the environment; create its dataset with"
                " to_dataset"
            )
        tasks = [self._rows[row_key] for row_key in keys]
        if len({json.dumps(task["info"], default=str) + str(task["answer"]) for task in tasks}) > 1:
            raise ConfigError(
                f"rows {', '.join(keys[:3])} have the same prompt and different answers: create the"
                " dataset with to_dataset, which marks each prompt with its row"
            )
        return keys[0]

    def _client(self, trainer: Trainer, count: int) -> tuple[Any, str]:
        if self.client is not None:
            return self.client, getattr(self.client, "model", None) or "policy"
        if getattr(trainer, "use_vllm", False):
            generate = _vllm_generate(trainer)
            history: Any = self.history  # checked by the client
            return TokenClient(generate, trainer.processing_class, history=history), "policy"
        if self.engine is None:
            self.engine = self._open_engine(trainer, count)
        self.engine.check_shared()
        self.engine.set_version(trainer.state.global_step)
        return self._engine_client, self.engine.served_model

    def _open_engine(self, trainer: Trainer, count: int) -> Any:
        from verifiers_trainer.engines import EmbeddedEngine
        from verifiers_trainer.engines.inference import policy_client

        model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
        length = self.max_seq_len or model.config.get_text_config().max_position_embeddings
        engine = EmbeddedEngine(model, tokenizer, max_seq_len=length, concurrency=count)
        engine.start()
        self._engine_client: Any = policy_client(engine)
        if self.history == "exact":
            generate = served_generate(engine.base_url, engine.api_key, engine.served_model)
            self._engine_client = TokenClient(
                generate, tokenizer, history="exact", model=engine.served_model
            )
        return engine

    def close(self) -> None:
        """Stop the embedded engine, if it is running."""
        if self.engine is not None:
            self.engine.stop()
            self.engine = None


def _end_of(rollout: Mapping[str, Any]) -> str:
    """Return why a rollout ended, in at most 200 characters."""
    error = rollout["error"]
    reason = rollout["stop_condition"] if error is None else f"{error['error']}: {error['message']}"
    return textwrap.shorten(str(reason), 200, placeholder=" …")


def sampling_of(args: Any) -> SamplingArgs:
    """Return the sampling arguments of a ``GRPOConfig``, disabled arguments too: a server would
    use a default of its own for what is left out."""
    values = {"max_tokens": args.max_completion_length}
    values |= {name: explicit(name, getattr(args, name, None)) for name in SAMPLING}
    sent = {name: value for name, value in values.items() if value is not None}
    return sent | dict(getattr(args, "generation_kwargs", None) or {})


def reward_from_rollout(*, vf_reward: Sequence[float | None], **_: object) -> list[float | None]:
    """Reward function for ``reward_funcs``: the rewards of the environment; None where unknown."""
    return list(vf_reward)


def as_reward_func(env: Environment) -> Any:
    """Return a reward function that scores completions of TRL in a single-turn environment; None
    where unknown.

    *Raises* ConfigError for an environment of several turns.
    """
    if env.max_turns != 1:
        raise ConfigError(
            "as_reward_func scores single turns; use make_rollout_func for multi-turn environments"
        )

    async def score(
        prompts: Sequence[object], completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> list[Any]:
        async def score_rollout(index: int) -> float | None:
            row = {
                name: values[index]
                for name, values in columns.items()
                if name in ("answer", "info", "task")
            }
            task = {"prompt": _plain(prompts[index]), "example_id": index, **row}
            value = await score_completion(env, task, completions[index])
            return None if math.isnan(value) else value

        return list(await asyncio.gather(*map(score_rollout, range(len(completions)))))

    def reward(
        prompts: Sequence[object], completions: Sequence[object], **columns: object
    ) -> list[float | None]:
        return blocking(lambda: score(prompts, completions, columns))

    reward.__name__ = f"verifiers_{env.env_id or 'reward'}"
    return reward


def _plain(prompt: object) -> Any:
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt
    return [
        {name: value for name, value in m.items() if name != ROW and value is not None}
        for m in prompt
    ]


def _text_of(prompt: object) -> str:
    return json.dumps(_plain(prompt), sort_keys=True, default=str)


def _vllm_generate(trainer: object) -> Any:
    """Return token-in/token-out over TRL's vLLM client, by its documented signature; not run
    without CUDA."""
    client = getattr(getattr(trainer, "vllm_generation", trainer), "vllm_client", None)
    if client is None:
        raise ConfigError(
            "vLLM runs inside the trainer (colocate); use vllm_mode='server', or give client="
        )

    async def generate(prompt_ids: list[int], sampling: Mapping[str, Any]) -> Any:
        output = await asyncio.to_thread(client.generate, [prompt_ids], **sampling)
        ids, logprobs = output["completion_ids"][0], [entry[0] for entry in output["logprobs"][0]]
        return ids, logprobs, "length" if len(ids) >= sampling["max_tokens"] else "stop"

    return generate
