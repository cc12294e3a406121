"""The rules that the settings of a training run must keep, each one a sentence that says how to mend it.

A check takes a configuration and the number of processes and returns its problems; ``RLConfig.resolve`` and the
commands collect them all. Nothing is changed here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from verifiers.errors import ConfigError
from verifiers.runtime.suggest import closest
from verifiers_trainer.algorithm.advantages import ADVANTAGES
from verifiers_trainer.algorithm.aggregation import AGGREGATIONS
from verifiers_trainer.algorithm.losses import KL_TYPES, LOSSES, loss_parameters
from verifiers_trainer.settings.objective_rules import OBJECTIVE_CHECKS

WEIGHT_SYNCS = ("auto", "lora_dir", "reload", "nccl", "ipc")
INFERENCE = ("auto", "embedded", "vllm")
"""Values of ``inference`` that are no URL."""

Check = Callable[[Any, int], list[str]]

RANGES: dict[str, tuple[float, float]] = {
    "adam_beta1": (0.0, 1.0),
    "batch_size": (1, 10**9),
    "beta": (0.0, 1e9),
    "embedded_page_size": (1, 10**6),
    "epsilon": (1e-9, 1e9),
    "eval_num_examples": (-1, 10**9),
    "eval_rollouts_per_example": (1, 10**6),
    "frequency_penalty": (-2.0, 2.0),
    "gamma": (1e-9, 1.0),
    "generation_timeout": (1e-3, 1e9),
    "learning_rate": (0.0, 1e3),
    "lora_alpha": (1, 10**6),
    "lora_dropout": (0.0, 0.999),
    "lora_rank": (1, 10**6),
    "mask_ratio_high": (0.0, math.inf),
    "mask_ratio_low": (0.0, math.inf),
    "max_concurrent": (1, 10**9),
    "max_error_fraction": (0.0, 1.0),
    "max_grad_norm": (0.0, 1e9),
    "max_off_policy_steps": (0, 16),
    "max_seq_len": (2, 10**9),
    "max_steps": (-1, 10**12),
    "micro_batch_size": (1, 10**9),
    "min_group_fraction": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "no_signal_steps": (0, 10**9),
    "num_completions_to_print": (0, 10**6),
    "num_env_workers": (0, 4096),
    "num_iterations": (1, 10**6),
    "oversample": (1.0, 1000.0),
    "presence_penalty": (-2.0, 2.0),
    "ratio_cap": (0.0, math.inf),
    "ratio_floor": (0.0, math.inf),
    "ref_model_mixup_alpha": (0.0, 1.0),
    "ref_model_sync_steps": (1, 10**9),
    "repetition_penalty": (1e-6, 1e6),
    "rollouts_per_example": (1, 10**6),
    "sync_every": (1, 10**6),
    "sync_timeout": (1e-3, 1e9),
    "temperature": (1e-6, 2.0),
    "top_p": (1e-9, 1.0),
    "vllm_server_port": (1, 65535),
    "vllm_server_timeout": (1e-3, 1e9),
}
"""Field -> smallest and largest value allowed; whole numbers only where the bounds are."""

OPTIONAL_RANGES: dict[str, tuple[float, float]] = {
    "delta": (0.0, math.inf),
    "dual_clip": (1.0 + 1e-9, 1e9),
    "embedded_concurrency": (1, 10**6),
    "embedded_num_blocks": (1, 10**9),
    "embedded_max_batch_tokens": (1, 10**9),
    "embedded_threads": (1, 10**4),
    "epsilon_high": (1e-9, 1e9),
    "keep_every": (1, 10**9),
    "max_completion_len": (1, 10**9),
    "max_concurrent_scoring": (1, 10**9),
    "max_concurrent_tools": (1, 10**9),
    "max_prompt_len": (1, 10**9),
    "max_tokens": (1, 10**9),
    "micro_batch_tokens": (2, 10**9),
    "opsm_delta": (0.0, math.inf),
    "rollout_timeout": (1e-3, 1e9),
    "save_total_limit": (1, 10**9),
    "sequence_mask_cap": (1.0, math.inf),
    "tis_cap": (1e-9, math.inf),
    "top_k": (-1, 10**9),
}
"""As ``RANGES``, of fields that may be None."""

CHOICES: dict[str, tuple[str, ...]] = {
    "aggregation": tuple(AGGREGATIONS),
    "anchor": ("sampler", "recomputed"),
    "credit": ("rollout", "turn"),
    "embedded_mode": ("auto", "padded", "continuous", "deterministic"),
    "env_worker_backend": ("process", "ray"),
    "eval_strategy": tuple(strategy.value for strategy in IntervalStrategy),
    "history": ("template", "exact"),
    "kl_type": tuple(KL_TYPES),
    "master_weights": ("fp32", "model"),
    "overlong": ("mask", "drop"),
    "prompt_overflow": ("skip", "truncate_left"),
    "save_strategy": tuple(strategy.value for strategy in SaveStrategy),
    "stale_policy": ("wait", "drop"),
    "tool_call_parser": ("auto", "hermes", "llama3_json", "none"),
    "truncated_sampling": ("warn", "refuse"),
    "weight_sync": WEIGHT_SYNCS,
    "zero_variance": ("drop", "keep"),
}

TRACKERS = ("wandb", "trackio", "tensorboard")

OPTIONAL_CHOICES = ("prompt_overflow",)
"""Fields of ``CHOICES`` that may be None."""

RESHAPING = frozenset(("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"))
"""Sampling arguments under which the sampled distribution is another than the trained one, on purpose."""
OWN_FIELDS = {*RESHAPING, "max_tokens", "stop", "temperature"}
"""Sampling arguments that are fields of their own."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "auto_find_batch_size": ((False,), "lower micro_batch_tokens instead"),
    "gradient_accumulation_steps": (
        (1,),
        "batch_size counts all rollouts of a step, micro_batch_size splits them; GRPOConfig multiplies them instead",
    ),
    "include_num_input_tokens_seen": ((False, "no"), "metrics.jsonl counts tokens"),
    "label_smoothing_factor": ((0.0,), "there are no labels to smooth"),
    "neftune_noise_alpha": ((None,), "noise makes sampler and trainer disagree"),
    "torch_compile": ((False,), "rows differ in length, so every step would compile anew"),
    "torch_empty_cache_steps": ((None,), "lower micro_batch_tokens instead"),
    "train_sampling_strategy": (("random",), "shuffle_dataset decides the order of the examples"),
}
"""Fields of transformers that this trainer cannot honour: values that ask for nothing, and what to do instead."""


def check_batch(config: Any, world_size: int) -> list[str]:
    """Divisibility and group size."""
    found = []
    group, batch, per_device = config.rollouts_per_example, config.batch_size, config.micro_batch_size
    if not all(isinstance(number, int) for number in (group, batch, per_device)):
        return []  # reported by check_ranges
    if group < 2 and config.advantage != "none":
        found.append(f"rollouts_per_example is {group}: a group baseline needs at least 2 siblings")
    divisors = {"rollouts_per_example": group, "micro_batch_size x processes": per_device * world_size}
    broken = [f"{name} = {d}" for name, d in divisors.items() if d > 0 and batch > 0 and batch % d]
    if broken:
        step = math.lcm(*(d for d in divisors.values() if d > 0))
        below, above = batch // step * step, (batch // step + 1) * step
        near = f"{below} or {above}" if below else f"{above}"
        said = f"batch_size {batch}{config.batch_is} is not divisible by {' and '.join(broken)}"
        found.append(f"{said}; the nearest that are: {near}")
    if isinstance(config.max_concurrent, int) and 0 < config.max_concurrent < group:
        found.append(
            f"max_concurrent {config.max_concurrent} is below rollouts_per_example = {group}, but the siblings of an "
            f"example are begun together; use at least {group}"
        )
    return found


def check_ranges(config: Any, world_size: int) -> list[str]:
    """Types, ranges and choices."""
    bounds = list(RANGES.items())
    bounds += [(name, bound) for name, bound in OPTIONAL_RANGES.items() if getattr(config, name) is not None]
    found = []
    for name, (low, high) in bounds:
        value = getattr(config, name)
        whole = isinstance(low, int)
        numeric = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not numeric or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            found.append(f"{name} is {value!r}; it must be {kind} in [{low:g}, {high:g}]")
    for name in ("max_steps", "eval_num_examples"):
        if getattr(config, name) == 0:
            found.append(f"{name} is 0; it must be -1 or at least 1")
    return found + [problem for name in CHOICES if (problem := choice_problem(name, getattr(config, name)))]


def choice_problem(name: str, value: Any) -> str | None:
    """Why the field ``name`` of ``CHOICES`` cannot be ``value``; None when it can."""
    said, allowed = getattr(value, "value", value), CHOICES[name]
    if said in allowed or (said is None and name in OPTIONAL_CHOICES):
        return None
    return f"{name} is {said!r}{closest(str(said), allowed)}; it must be one of {', '.join(allowed)}"


def check_objective(config: Any, world_size: int) -> list[str]:
    """The loss with its parameters, the advantage, and bounds that must lie on the right sides of each other."""
    found = []
    for name, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        try:
            registry.resolve(getattr(config, name))
        except ConfigError as error:
            found.append(f"{name} cannot be used: {error}")
    if not any(problem.startswith("loss ") for problem in found):
        taken = loss_parameters(config.loss)
        for name in [name for name in config.loss_kwargs if taken is not None and name not in taken]:
            found.append(
                f"loss_kwargs has {name!r}, which the loss {config.loss} does not take{closest(name, taken or ())}; it "
                f"takes {', '.join(sorted(taken or ())) or 'none'}"
            )
    return found + _check_bounds(config)


def _check_bounds(config: Any) -> list[str]:
    named = ("mask_ratio_low", "mask_ratio_high", "ratio_cap", "ratio_floor", "epsilon")
    values = [getattr(config, name) for name in named]
    values += [value for value in (config.epsilon_high, config.delta) if value is not None]
    if not all(isinstance(value, (int, float)) for value in values):
        return []  # reported by check_ranges
    found = []
    if not config.mask_ratio_low < 1 < config.mask_ratio_high:
        found.append(
            f"mask_ratio_low {config.mask_ratio_low} and mask_ratio_high {config.mask_ratio_high} must lie on both "
            "sides of 1"
        )
    if config.ratio_cap < max(1, config.ratio_floor):
        found.append(f"ratio_cap is {config.ratio_cap}; it must be at least 1 and not below ratio_floor")
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    if config.delta is not None and config.delta <= 1 + high:
        found.append(f"delta is {config.delta}; it must be above 1 + epsilon_high = {1 + high:g}")
    return found


def check_combinations(config: Any, world_size: int) -> list[str]:
    """Settings that exclude each other, and inherited ones that cannot be honoured."""
    found = []
    if config.deterministic and config.embedded_mode not in ("auto", "deterministic"):
        found.append(f"deterministic=True needs embedded_mode='deterministic', not {config.embedded_mode!r}")
    if config.skip_solved and config.difficulty_schedule:
        found.append("skip_solved and difficulty_schedule both decide which examples are played: use one of them")
    length, tokens = config.max_seq_len, config.max_tokens
    if isinstance(tokens, int) and isinstance(length, int) and tokens >= length:
        found.append(
            f"max_tokens {tokens} leaves no room for a prompt in max_seq_len {length}: lower one or raise the other"
        )
    found += _check_lengths(config)
    if config.guided_regex is not None and config.server_url is None:
        found.append("guided_regex needs a server that constrains its sampling, and the embedded engine does not")
    if config.truncated_sampling == "refuse" and (reshaping := sorted(config.sampling().keys() & RESHAPING)):
        found.append(
            f"truncated_sampling='refuse' and {', '.join(reshaping)}: tokens would be sampled from another "
            "distribution than the one trained"
        )
    for name in sorted(OWN_FIELDS & config.sampling_args.keys()):
        found.append(f"sampling_args has {name!r}, which training must know: set the field {name} instead")
    for tracker in trackers(config.report_to):
        if tracker not in TRACKERS:
            known = (*TRACKERS, "auto", "none")
            found.append(f"report_to has {tracker!r}{closest(tracker, known)}; it may have {', '.join(known)}")
    for name, (neutral, instead) in REFUSED.items():
        if (value := getattr(config, name)) not in neutral:
            found.append(f"{name} is {value!r}, which this trainer cannot honour: {instead}")
    return found


def check_inference(config: Any, world_size: int) -> list[str]:
    """Where rollouts are sampled, and how weights get there."""
    found = []
    named, url = config.inference, config.inference_base_url
    if named not in INFERENCE and not _is_url(named):
        found.append(
            f"inference is {named!r}{closest(str(named), INFERENCE)}; it must be {', '.join(INFERENCE)} or the URL of "
            "a server, such as http://127.0.0.1:8000/v1"
        )
    if url is not None and not _is_url(url):
        found.append(f"inference_base_url is {url!r}; it must be a URL, such as http://127.0.0.1:8000/v1")
    if url is not None and named not in ("auto", "vllm"):
        found.append(f"inference is {named!r} and inference_base_url {url!r}: give one of them")
    if config.deterministic and config.server_url is not None:
        found.append(
            "deterministic=True needs the embedded engine (inference='embedded'): a server's draws depend on what else "
            "it computes"
        )
    every, lag = config.sync_every, config.max_off_policy_steps
    if isinstance(every, int) and isinstance(lag, int) and every > lag + 1:
        found.append(
            f"sync_every is {every}, so that rollouts would be older than max_off_policy_steps = {lag} allows; use at "
            f"most {lag + 1}"
        )
    return found


def _is_url(text: Any) -> bool:
    """Whether it is one or several addresses, with commas between them."""
    return isinstance(text, str) and all(
        part.strip().startswith(("http://", "https://")) for part in text.split(",") if part.strip()
    )


def _check_lengths(config: Any) -> list[str]:
    length, found = config.max_seq_len, []
    if not isinstance(length, int):
        return []  # reported by check_ranges
    for name in ("max_prompt_len", "max_completion_len"):
        value = getattr(config, name)
        if isinstance(value, int) and value >= length:
            found.append(
                f"{name} {value} leaves no room for the rest in max_seq_len {length}: lower one or raise the other"
            )
    return found


def trackers(report_to: Any) -> list[str]:
    """The names in ``report_to``; "auto" is wandb where it is installed and configured, and else none."""
    named = [report_to] if isinstance(report_to, str) else list(report_to or ())
    configured = bool({"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys()) and find_spec("wandb") is not None
    named = ["wandb" if name == "auto" and configured else name for name in named]
    return [name for name in named if name not in ("none", "auto")]


CHECKS: tuple[Check, ...] = (
    *(check_batch, check_ranges, check_objective, *OBJECTIVE_CHECKS),
    *(check_combinations, check_inference),
)
