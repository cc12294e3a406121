"""verl: run environments as an agent loop of its rollout workers, with the sampled token ids.

    python -m verifiers_integrations.verl reverse-text data/reverse-text
    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
        data.train_files=data/reverse-text/train.parquet data.val_files=data/reverse-text/eval.parquet \\
        data.return_raw_chat=True actor_rollout_ref.rollout.calculate_log_probs=True \\
        actor_rollout_ref.rollout.agent.default_agent_loop=verifiers \\
        actor_rollout_ref.rollout.agent.agent_loop_config_path=data/reverse-text/agent_loop.yaml ...

Responses are the sampled ids with the tokens of the environment between them under mask 0, and the reward is that of
the environment (verl's reward loop is not used). verl passes a loop one rollout at a time, so an unknown reward becomes
0.0 with every token masked and ``vf_unscored`` = 1; verl's baseline counts that 0.0. A rollout longer than
``prompt_length`` and ``response_length`` allow is masked completely. Environments whose rubric compares siblings are
refused.

Tested with verl 0.9.1: its ``AgentLoopWorker`` on a CPU. Its trainer and rollout servers need CUDA and were not run.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError
from verifiers_integrations.common import (
    ExportSample,
    TokenClient,
    Worth,
    export_samples,
    generate_group,
    row_of,
    worth,
)
from verifiers_integrations.peers import Peer, beside_trainer
from verifiers_integrations.verl_data import MODULE, export_dataset, main

__all__ = ["VerifiersAgentLoop", "environment", "export_dataset"]  # noqa: F822 - created on access

VERL = Peer(
    "verl", "verl", ("0.9.1",), lambda: beside_trainer("verl==0.9.1 cachetools uvicorn fastapi")
)
PEER_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
FORKS = ("error", "list")

log = logging.getLogger(__name__)
_warned: set[str] = set()


# --- the loop -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def environment(env_id: str, env_args: str) -> Environment:
    """Load the environment of a worker, once per id and arguments."""
    env = load_environment(env_id, **json.loads(env_args))
    if any(function.is_group for function in env.rubric.plan().functions):
        raise ConfigError(
            f"the rubric of {env_id} compares siblings, but verl runs each rollout separately"
        )
    return env


def _warn_once(kind: str, message: str) -> None:
    """Log the first error of each kind; failed rollouts are masked and counted in ``vf_error``."""
    if kind not in _warned:
        _warned.add(kind)
        log.warning("a rollout failed and is masked: %s: %s", kind, message)


class _AgentLoop:
    """Implementation of ``VerifiersAgentLoop``, mixed with verl's base class. Its arguments are set
    in agent_loop.yaml.

    metrics: reward functions to report; the same for every rollout, since verl reads the names of
    the first rollout.
    history: "render", or "exact" so that no rollout forks.
    forks: "error" for a worker that takes one output per rollout, "list" for a worker that takes
    several.
    max_retries: retries of a rollout after a transient error.
    """

    server_manager: Any
    tokenizer: Any
    rollout_config: Any

    def __init__(
        self,
        *args: object,
        metrics: Sequence[str] = (),
        history: str = "render",
        forks: str = "error",
        max_retries: int = 0,
        tool_call_parser: str | None = "hermes",
        **kwargs: object,
    ):
        super().__init__(*args, **kwargs)
        if forks not in FORKS:
            raise ConfigError(
                f"forks is {forks!r}; it must be one of {', '.join(FORKS)}", key="forks"
            )
        self.forks, self.max_retries, self.metrics = forks, int(max_retries), tuple(metrics)
        self.client_options: dict[str, Any] = {
            "history": history,
            "tool_call_parser": tool_call_parser,
        }

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Run one rollout; return an ``AgentLoopOutput``, or a list of them for a fork with
        ``forks="list"``."""
        if not sampling_params.get("logprobs"):
            raise ConfigError(
                "training needs log-probabilities: set"
                " actor_rollout_ref.rollout.calculate_log_probs=True"
            )
        extra = row["extra_info"]
        env = environment(extra["env_id"], extra["env_args"])
        task = row_of(json.loads(extra["task"]), env.message_type)
        start, versions = time.perf_counter(), list[int]()
        client = self._client(sampling_params, versions)
        first = client.prompt_ids(task["prompt"], env.tool_defs or None)
        await self._check_prompt(first, task["prompt"], env)
        sampling = {
            name: sampling_params[name] for name in PEER_SAMPLING if name in sampling_params
        }
        (rollout,) = await generate_group(env, [task], client, "policy", sampling, self.max_retries)
        if rollout["error"] is not None:
            _warn_once(str(rollout["error"]["error"]), str(rollout["error"]["message"]))
        samples = export_samples(rollout, float(sampling_params.get("temperature") or 1.0))
        if len(samples) > 1 and self.forks == "error":
            raise ConfigError(
                f"example {task['example_id']} of {extra['env_id']} has {len(samples)} token"
                " samples, because a prompt does not start with the earlier turns, and this worker"
                " takes one: set history: exact in agent_loop.yaml (or forks: list for a worker"
                " that takes several)"
            )
        value = worth(rollout)
        seconds = time.perf_counter() - start
        slots: list[ExportSample | None] = [*samples] or [None]
        outputs = [self._output(slot, first, rollout, value, seconds, versions) for slot in slots]
        return outputs[0] if len(outputs) == 1 else outputs

    def _client(self, sampling_params: Mapping[str, object], versions: list[int]) -> TokenClient:
        """Return a client of the servers that bounds each turn by the remaining length of the
        rollout."""
        request_id, first_lengths = uuid4().hex, list[int]()
        prompt_length = self.rollout_config.prompt_length
        length = self.rollout_config.response_length

        async def generate(prompt_ids: list[int], sampling: Mapping[str, object]) -> Sequence[Any]:
            if not first_lengths:
                first_lengths.append(len(prompt_ids))
            remaining = length - (len(prompt_ids) - first_lengths[0])
            max_tokens = max(1, min(remaining, sampling.get("max_tokens", remaining)))
            args = {**sampling_params, **sampling, "max_tokens": max_tokens}
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=args
            )
            step = (output.extra_fields or {}).get("global_steps")
            versions.extend([] if step is None else [int(step)])
            finish = "length" if len(output.token_ids) >= max_tokens else "stop"
            return list(output.token_ids), output.log_probs, finish, step

        return TokenClient(
            generate, self.tokenizer, max_seq_len=prompt_length + length, **self.client_options
        )

    async def _check_prompt(
        self, prompt_ids: Sequence[int], prompt: Iterable[Mapping[str, object]], env: Environment
    ) -> None:
        """Check that verl renders the first prompt equally. *Raises* ConfigError with the first
        difference."""
        if len(prompt_ids) > self.rollout_config.prompt_length:
            return  # verl would truncate it; here the rollout is masked
        messages = [dict(message) for message in prompt]
        verl_ids = await self.ct_build_initial_tokens(messages, tools=env.tool_defs or None)  # type: ignore[attr-defined]
        if list(verl_ids) == list(prompt_ids):
            return
        pairs = enumerate(zip(prompt_ids, verl_ids, strict=False))
        index = next((n for n, (a, b) in pairs if a != b), min(len(prompt_ids), len(verl_ids)))
        raise ConfigError(
            f"verl and this client render the first prompt differently, from token {index} on: "
            f"{self.tokenizer.decode(list(verl_ids[index : index + 8]))!r} against "
            f"{self.tokenizer.decode(list(prompt_ids[index : index + 8]))!r}. Leave "
            "data.apply_chat_template_kwargs empty, and check the model's chat template"
        )

    def _output(
        self,
        sample: ExportSample | None,
        first: list[int],
        rollout: Mapping[str, Any],
        value: Worth,
        seconds: float,
        versions: list[int],
    ) -> Any:
        """Convert a token sample to an output of verl; without sampled tokens it has a masked end
        token."""
        peer = VERL.load("experimental.agent_loop.agent_loop")
        prompt_length = self.rollout_config.prompt_length
        length = self.rollout_config.response_length
        if sample is None:
            sample = ExportSample(first, [self.tokenizer.eos_token_id], [0], [0.0], [-1], 1.0, True)
        is_overlong = len(sample.prompt_ids) > prompt_length or len(sample.response_ids) > length
        is_masked = value.is_masked or is_overlong or not any(sample.response_mask)
        sample = sample.masked() if is_masked else sample
        metrics = {} if value.is_unscored else rollout["metrics"]
        info = {name: float(metrics.get(name, 0.0)) for name in self.metrics}
        info |= {**value.metrics, "vf_error": float(rollout["error"] is not None)}
        info |= {
            "vf_truncated": float(bool(rollout["is_truncated"])),
            "vf_overlong": float(is_overlong),
        }
        steps = versions or [None]  # type: ignore[list-item]
        return peer.AgentLoopOutput(
            prompt_ids=sample.prompt_ids[-prompt_length:],
            response_ids=sample.response_ids[:length],
            response_mask=sample.response_mask[:length],
            response_logprobs=sample.logprobs[:length],
            reward_score=value.reward,
            num_turns=len(rollout["prompt"]) + len(rollout["completion"] or ()),
            metrics=peer.AgentLoopMetrics(generate_sequences=seconds),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": info,
                "min_global_steps": min(steps),
                "max_global_steps": max(steps),
            },
        )


@functools.cache
def _loop_class() -> type:
    """Create the class that agent_loop.yaml names. It is not registered: that would replace the
    entry of the file."""
    peer = VERL.load("experimental.agent_loop.agent_loop")
    return type(
        "VerifiersAgentLoop",
        (_AgentLoop, peer.AgentLoopBase),
        {"__module__": MODULE, "__doc__": __doc__},
    )


def __getattr__(name: str) -> Any:
    if name == "VerifiersAgentLoop":
        return _loop_class()
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


if __name__ == "__main__":
    main()
