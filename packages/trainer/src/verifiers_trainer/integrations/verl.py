"""verl: environments as an agent loop of its rollout workers, with the ids that were sampled.

    python -m verifiers_trainer.integrations.verl reverse-text data/reverse-text
    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
        data.train_files=data/reverse-text/train.parquet data.val_files=data/reverse-text/eval.parquet \\
        data.return_raw_chat=True actor_rollout_ref.rollout.calculate_log_probs=True \\
        actor_rollout_ref.rollout.agent.default_agent_loop=verifiers \\
        actor_rollout_ref.rollout.agent.agent_loop_config_path=data/reverse-text/agent_loop.yaml ...

Promise: responses are the sampled ids with the environment's tokens between them under mask 0, and the reward is the
environment's (verl's own reward loop is not used). verl shows a loop one rollout at a time, so an unknown reward
becomes 0.0 with every token masked and ``vf_unscored`` = 1; verl's baseline counts that 0.0. A rollout longer than
``prompt_length`` and ``response_length`` allow is masked as a whole. Environments whose rubric compares siblings need
more than one rollout at a time and are refused.

Run with verl 0.9.1: its ``AgentLoopWorker`` on a CPU. Its trainer and rollout servers need CUDA and were not run.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError
from verifiers_trainer.integrations.common import (
    ExportSample,
    TokenClient,
    Worth,
    export_samples,
    generate_group,
    row_of,
    worth,
)
from verifiers_trainer.integrations.peers import Peer
from verifiers_trainer.integrations.verl_data import MODULE, export_dataset, main

__all__ = ["VerifiersAgentLoop", "environment", "export_dataset"]  # noqa: F822 - made when it is asked for

VERL = Peer(
    "verl",
    "verl",
    ("0.9.1",),
    "pip install verl==0.9.1 cachetools uvicorn fastapi verifiers; pip install --no-deps verifiers-trainer",
)
PEER_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
FORKS = ("error", "list")

log = logging.getLogger(__name__)
_warned: set[str] = set()


# --- the loop ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def environment(env_id: str, env_args: str) -> Environment:
    """The environment of a worker; one object per id and arguments."""
    env = load_environment(env_id, **json.loads(env_args))
    if env.rubric.plan().group:
        raise ConfigError(f"the rubric of {env_id} compares siblings, and verl plays each rollout alone")
    return env


def _warn_once(kind: str, message: str) -> None:
    """The first failure of each kind; what failed is masked, and counted in ``vf_error``."""
    if kind not in _warned:
        _warned.add(kind)
        log.warning("a rollout failed, and is not trained: %s: %s", kind, message)


class _Plays:
    """What ``VerifiersAgentLoop`` adds to verl's base class. Its arguments are those of an entry of agent_loop.yaml.

    metrics: the reward functions to report; of every rollout the same, since verl reads the names off the first row.
    history: "render", or "exact" so that no rollout forks.
    forks: "error" for a worker that takes one output per rollout, "list" for one that takes several.
    max_retries: how often a rollout that failed for a passing reason is played again.
    """

    server_manager: Any
    tokenizer: Any
    rollout_config: Any

    def __init__(
        self,
        *args: Any,
        metrics: Sequence[str] = (),
        history: str = "render",
        forks: str = "error",
        max_retries: int = 0,
        tool_call_parser: str | None = "hermes",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        if forks not in FORKS:
            raise ConfigError(f"forks is {forks!r}; it must be one of {', '.join(FORKS)}", key="forks")
        self.forks, self.max_retries, self.metrics = forks, int(max_retries), tuple(metrics)
        self.client_options: dict[str, Any] = {"history": history, "tool_call_parser": tool_call_parser}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Play one rollout: an ``AgentLoopOutput``, or with ``forks="list"`` and a fork a list of them."""
        if not sampling_params.get("logprobs"):
            raise ConfigError(
                "training needs log-probabilities: set actor_rollout_ref.rollout.calculate_log_probs=True"
            )
        extra = row["extra_info"]
        env = environment(extra["env_id"], extra["env_args"])
        task = row_of(json.loads(extra["task"]), env.message_type)
        began, versions = time.perf_counter(), list[int]()
        client = self._client(sampling_params, versions)
        first = client.prompt_ids(task["prompt"], env.tool_defs or None)
        await self._check_prompt(first, task["prompt"], env)
        asked = {name: sampling_params[name] for name in PEER_SAMPLING if name in sampling_params}
        (rollout,) = await generate_group(env, [task], client, "policy", asked, self.max_retries)
        if rollout["error"] is not None:
            _warn_once(str(rollout["error"]["error"]), str(rollout["error"]["message"]))
        samples = export_samples(rollout, float(sampling_params.get("temperature") or 1.0))
        if len(samples) > 1 and self.forks == "error":
            raise ConfigError(
                f"example {task['example_id']} of {extra['env_id']} gave {len(samples)} token rows, because a prompt "
                "does not begin with the turns before it, and this worker takes one: set history: exact in "
                "agent_loop.yaml (or forks: list for a worker that takes several)"
            )
        found = worth(rollout)
        rows: list[ExportSample | None] = [*samples] or [None]
        spent = time.perf_counter() - began
        made = [self._output(one, first, rollout, found, spent, versions) for one in rows]
        return made[0] if len(made) == 1 else made

    def _client(self, sampling_params: Mapping[str, Any], versions: list[int]) -> TokenClient:
        """A client of the servers; each turn is bounded by what is left of the rollout's lengths."""
        request_id, start = uuid4().hex, list[int]()
        prompt_length, length = self.rollout_config.prompt_length, self.rollout_config.response_length

        async def generate(prompt_ids: list[int], sampling: dict[str, Any]) -> Sequence[Any]:
            if not start:
                start.append(len(prompt_ids))
            room = length - (len(prompt_ids) - start[0])
            most = max(1, min(room, sampling.get("max_tokens", room)))
            given = {**sampling_params, **sampling, "max_tokens": most}
            made = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=given
            )
            step = (made.extra_fields or {}).get("global_steps")
            versions.extend([] if step is None else [int(step)])
            finish = "length" if len(made.token_ids) >= most else "stop"
            return list(made.token_ids), made.log_probs, finish, step

        return TokenClient(generate, self.tokenizer, max_seq_len=prompt_length + length, **self.client_options)

    async def _check_prompt(self, ours: Sequence[int], prompt: Any, env: Environment) -> None:
        """verl renders the first prompt as we do. *Raises* ConfigError at the first difference."""
        if len(ours) > self.rollout_config.prompt_length:
            return  # verl would cut it; here the rollout is masked
        messages = [dict(message) for message in prompt]
        theirs = await self.ct_build_initial_tokens(messages, tools=env.tool_defs or None)  # type: ignore[attr-defined]
        if list(theirs) == list(ours):
            return
        place = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise ConfigError(
            f"verl renders the first prompt otherwise than this client, from token {place} on: "
            f"{self.tokenizer.decode(list(theirs[place : place + 8]))!r} against "
            f"{self.tokenizer.decode(list(ours[place : place + 8]))!r}. Leave "
            "data.apply_chat_template_kwargs empty, and check the model's chat template"
        )

    def _output(
        self,
        sample: ExportSample | None,
        first: list[int],
        rollout: Any,
        found: Worth,
        spent: float,
        versions: list[int],
    ) -> Any:
        """One token row as verl takes it; without a sampled token the end token stands there, masked."""
        peer = VERL.load("experimental.agent_loop.agent_loop")
        prompt_length, length = self.rollout_config.prompt_length, self.rollout_config.response_length
        if sample is None:
            sample = ExportSample(first, [self.tokenizer.eos_token_id], [0], [0.0], [-1], 1.0, True)
        is_overlong = len(sample.prompt_ids) > prompt_length or len(sample.response_ids) > length
        is_masked = found.is_masked or is_overlong or not any(sample.response_mask)
        taken = sample.masked() if is_masked else sample
        known = {} if found.is_unscored else rollout["metrics"]
        info = {name: float(known.get(name, 0.0)) for name in self.metrics}
        info |= {**found.metrics, "vf_error": float(rollout["error"] is not None)}
        info |= {"vf_truncated": float(bool(rollout["is_truncated"])), "vf_overlong": float(is_overlong)}
        steps = versions or [None]  # type: ignore[list-item]
        return peer.AgentLoopOutput(
            prompt_ids=taken.prompt_ids[-prompt_length:],
            response_ids=taken.response_ids[:length],
            response_mask=taken.response_mask[:length],
            response_logprobs=taken.logprobs[:length],
            reward_score=found.reward,
            num_turns=len(rollout["prompt"]) + len(rollout["completion"] or ()),
            metrics=peer.AgentLoopMetrics(generate_sequences=spent),
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
    """The class that agent_loop.yaml names. It does not register itself: that would replace the file's entry."""
    peer = VERL.load("experimental.agent_loop.agent_loop")
    return type("VerifiersAgentLoop", (_Plays, peer.AgentLoopBase), {"__module__": MODULE, "__doc__": __doc__})


def __getattr__(name: str) -> Any:
    if name == "VerifiersAgentLoop":
        return _loop_class()
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


if __name__ == "__main__":
    main()
