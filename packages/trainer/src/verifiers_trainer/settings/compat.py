"""Tables of alternative setting names, read by ``config`` and the commands; other code uses one
name per setting.

There are four kinds: another name (``RENAMED``), a name whose value is converted (``TRANSLATED``),
a second field of transformers for the same setting (``DUPLICATES``), and a name without effect
(``WITHOUT_EFFECT``). All of them work as keywords and as attributes, read and written.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.errors import ConfigError
from verifiers.runtime.values import Also
from verifiers_trainer.settings.fields import DECLARED, field_names, mark

log = logging.getLogger(__name__)

RENAMED: dict[str, str] = dict(
    sorted((alias, name) for name in DECLARED if (also := mark(name, Also)) for alias in also.names)
)
"""Other name -> canonical name, with the same value: those of the lines in ``fields``."""

INSTEAD: dict[str, str] = {
    "cache_implementation": "the embedded engine has one cache",
    "chat_template_kwargs": 'sampling_args={"extra_body": {"chat_template_kwargs": {…}}}',
    "entropy_coef_delta": "entropy_coef is a constant: no rule adapts it",
    "entropy_coef_max": "entropy_coef is a constant: no rule adapts it",
    "entropy_coef_min": "entropy_coef is a constant: no rule adapts it",
    "entropy_target": "entropy_coef is a constant: no rule adapts it",
    "generation_kwargs": "each sampling argument is a setting (min_p, stop, …), or in sampling_args",
    "importance_sampling_level": 'loss="gspo" weighs sequences, loss="grpo" tokens',
    "log_completions_hub_repo": "rollouts are saved in output_dir (vf-view shows them), and nothing is uploaded",
    "max_tool_calling_iterations": "max_turns of the environment",
    "multi_objective_aggregation": 'advantage="gdpo" normalises each reward function',
    "num_generations_eval": "eval_rollouts_per_example",
    "off_policy_mask_threshold": "opsm_delta",
    "pad_to_multiple_of": "rows are packed; micro_batch_tokens is their length",
    "router_aux_loss_coef": "the loss has no term for the load of experts",
    "sapo_temperature_neg": 'loss_kwargs={"temperature_neg": …} of loss="sapo"',
    "sapo_temperature_pos": 'loss_kwargs={"temperature_pos": …} of loss="sapo"',
    "top_entropy_quantile": "there is no mask of tokens by their entropy",
    "transformers_continuous_batching_config": "the embedded engine decides this itself",
    "trust_remote_code": "model= takes a loaded model, so load it with trust_remote_code=True",
    "use_adaptive_entropy": "entropy_coef is a constant: no rule adapts it",
    "use_bias_correction_kl": "there is none: kl_type chooses the estimate",
    "use_liger_loss": "use_liger",
    "use_transformers_continuous_batching": "the embedded engine decides this itself",
    "use_transformers_paged": "the embedded engine decides this itself",
    "use_vllm": 'inference="vllm"; False is inference="embedded"',
    "vespo_k_neg": 'loss_kwargs={"k_neg": …} of loss="vespo"',
    "vespo_k_pos": 'loss_kwargs={"k_pos": …} of loss="vespo"',
    "vespo_lambda_neg": 'loss_kwargs={"lambda_neg": …} of loss="vespo"',
    "vespo_lambda_pos": 'loss_kwargs={"lambda_pos": …} of loss="vespo"',
    "vllm_device": "vLLM runs as a server of its own (vf-vllm), on its own devices",
    "vllm_dtype": "a flag of vf-vllm: --dtype",
    "vllm_enable_prefix_caching": "a flag of vf-vllm: --enable-prefix-caching",
    "vllm_enable_sleep_mode": "vLLM runs as a server of its own (vf-vllm), on its own devices",
    "vllm_gpu_memory_utilization": "a flag of vf-vllm: --gpu-memory-utilization",
    "vllm_group_port": "the trainer chooses a free port for weights",
    "vllm_importance_sampling_cap": "tis_cap",
    "vllm_importance_sampling_clip_max": "tis_cap",
    "vllm_importance_sampling_clip_min": "tis_cap bounds the weight from above alone",
    "vllm_importance_sampling_correction": "tis_cap sets it, None leaves it out",
    "vllm_importance_sampling_mode": "tis_cap weighs tokens, sequence_mask_cap and geo_mask sequences",
    "vllm_max_model_len": "a flag of vf-vllm: --max-model-len",
    "vllm_max_model_length": "a flag of vf-vllm: --max-model-len",
    "vllm_mode": "vLLM runs as a server of its own: vf-vllm",
    "vllm_model_impl": "a flag of vf-vllm: --model-impl",
    "vllm_server_base_url": "inference=URL",
    "vllm_structured_outputs_regex": "guided_regex",
    "vllm_tensor_parallel_size": "a flag of vf-vllm: --tensor-parallel-size",
}
"""Name of a setting of TRL that is none here -> what to use, or why there is none."""

UNCHANGING: dict[str, object] = {
    "entropy_coef_delta": 0.005,
    "entropy_coef_max": 1.0,
    "entropy_coef_min": 0.0,
    "entropy_target": 0.2,
    "importance_sampling_level": "token",
    "min_p": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "num_completions_to_print": None,
    "pad_to_multiple_of": "auto",
    "router_aux_loss_coef": 0.0,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "top_entropy_quantile": 1.0,
    "trust_remote_code": False,
    "use_adaptive_entropy": False,
    "use_bias_correction_kl": False,
    "use_liger_loss": False,
    "use_transformers_continuous_batching": False,
    "use_transformers_paged": False,
    "use_vllm": False,
    "vespo_k_neg": 3.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_neg": 2.0,
    "vespo_lambda_pos": 3.0,
    "vllm_device": "auto",
    "vllm_dtype": "auto",
    "vllm_enable_prefix_caching": True,
    "vllm_enable_sleep_mode": False,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_group_port": 51216,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_tensor_parallel_size": 1,
}
"""Name of a setting of TRL -> the value that means what happens here without it: TRL's default, or
what switches it off. Accepted in silence (but for ``SHARED_DEVICE``), as None is for a name of ``INSTEAD``."""


SHARED_DEVICE = {"vllm_mode", "vllm_gpu_memory_utilization"}
ONE_CARD = (
    "the embedded engine samples in the trainer's process; vLLM on the same card is a server of its"
    " own, vf-vllm --gpu-memory-utilization 0.4, with inference=URL"
)
"""Of the settings ``SHARED_DEVICE``, whose value of TRL asks for vLLM in the trainer's process."""


def changing(settings: Mapping[str, object], owner: str) -> dict[str, object]:
    """Leave out the settings of TRL whose value changes nothing here.

    *Raises* ``ConfigError`` for another value of a setting that is none here, with what to use.

    >>> changing({"use_vllm": False, "temperature": 0.9}, "GRPOConfig")
    {'temperature': 0.9}
    """
    remaining = {
        name: value
        for name, value in settings.items()
        if not (
            (name in INSTEAD and value is None)
            or (name in UNCHANGING and value == UNCHANGING[name])
        )
    }
    for name in sorted(SHARED_DEVICE & settings.keys() - remaining.keys()):
        if settings[name] is not None:
            log.warning("%s has no effect: %s", name, ONE_CARD)
    if elsewhere := [name for name in remaining if name in INSTEAD]:
        ways = "; ".join(f"{name}: {INSTEAD[name]}" for name in elsewhere)
        raise ConfigError(f"{owner} has another way for {ways}", key=elsewhere[0])
    return remaining


Current = Callable[[str], Any]
"""Returns the current value of a canonical setting."""
Translation = Callable[[Any, Current], dict[str, Any]]

ADVANTAGES = {
    True: "mean_std",
    "group": "mean_std",
    "batch": "batch_reward_std",
    False: "mean",
    "none": "mean",
}
"""Values of ``scale_rewards`` -> ``advantage``."""


def _scale_rewards(value: object, current: Current) -> dict[str, object]:
    if not isinstance(value, (bool, str)) or value not in ADVANTAGES:
        raise ConfigError(
            f"scale_rewards is {value!r}; it must be True, False, 'group', 'batch' or 'none'"
        )
    return {"advantage": ADVANTAGES[value]}


def _max_prompt_length(value: object, current: Current) -> dict[str, object]:
    # in older versions this name implied it
    truncates = value is not None and current("prompt_overflow") is None
    return {"max_prompt_len": value, **({"prompt_overflow": "truncate_left"} if truncates else {})}


TRANSLATED: dict[str, tuple[str, Translation]] = {
    "generation_batch_size": (
        "max_concurrent",
        lambda value, current: (
            {} if value is None else {"max_concurrent": min(value, current("max_concurrent"))}
        ),
    ),
    "max_prompt_length": ("max_prompt_len", _max_prompt_length),
    "ppo_mini_batch_size": (
        "updates_per_batch",
        lambda value, current: {},
    ),  # when the batch is known: ``config``
    "reward_weights": (
        "reward_weights_schedule",
        lambda value, current: (
            {} if value is None else {"reward_weights_schedule": {"default": value}}
        ),
    ),
    "scale_rewards": ("advantage", _scale_rewards),
    "steps_per_generation": (
        "updates_per_batch",
        lambda value, current: {} if value is None else {"updates_per_batch": value},
    ),
}
"""Name -> (canonical setting, function that converts the value into canonical settings)."""

DUPLICATES: tuple[tuple[str, str], ...] = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("micro_batch_size", "per_device_train_batch_size"),
    ("use_liger", "use_liger_kernel"),
)
"""Pairs of fields that are one setting and always have the same value. The second is
transformers'."""

NO_SHARDED_GENERATION = "generation does not run inside a sharded model"
PADDED_CACHE = (
    "the embedded engine's cache has no blocks; embedded_concurrency and max_seq_len bound it"
)
WITHOUT_EFFECT: dict[str, str] = {
    "async_max_queue_size": "max_off_policy_steps bounds how many rollouts wait",
    "cast_lm_head_to_fp32": "log-probabilities are computed in float32 always",
    "ds3_gather_for_generation": NO_SHARDED_GENERATION,
    "embedded_num_blocks": PADDED_CACHE,
    "embedded_page_size": PADDED_CACHE,
    "gae_lambda": "there is no critic, so no generalised advantage estimation",
    "log_multimodal": "what is logged of a rollout is its text",
    "max_data_workers": "rollouts run on one event loop; max_concurrent bounds them",
}
"""Name -> why it has no effect."""

SPELLINGS = frozenset({*RENAMED, *TRANSLATED, *WITHOUT_EFFECT})
"""Keywords of ``RLConfig`` that are not fields."""
_COMMON = frozenset(
    "lr epochs num_epochs warmup_ratio max_new_tokens group_size kl_coef kl_loss_coef entropy_coeff"
    " ppo_mini_batch_size".split()
)
"""Spellings of trainers with other objectives."""
GRPO_NAMES = (SPELLINGS - _COMMON) | {"gradient_accumulation_steps", "per_device_train_batch_size"}
"""Names that select ``GRPOConfig``, and so its objective, when a settings file has them."""

PAGE: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("Settings of the trainer by another name", RENAMED),
    (
        "Settings of the trainer whose value is converted",
        {name: field for name, (field, _) in TRANSLATED.items()},
    ),
    ("Settings of the trainer with two fields", dict(DUPLICATES)),
    ("Settings of the trainer without effect", WITHOUT_EFFECT),
)
"""(title, table) in the order of the reference page, ``docs/compat_page.py``."""

_DUPLICATE_OF = {name: alias for pair in DUPLICATES for name, alias in (pair, pair[::-1])}


@functools.cache
def known_names() -> frozenset[str]:
    """Every keyword of ``RLConfig``, other spellings included."""
    return field_names() | SPELLINGS


def settings_of(name: str, value: object, current: Current) -> dict[str, Any]:
    """Return the fields, with their values, that ``name=value`` sets; a name in no table sets the
    field of that name.

    >>> settings_of("num_generations", 16, {}.get), settings_of("temperature", 1.0, {}.get)
    ({'rollouts_per_example': 16}, {'temperature': 1.0})
    """
    if name in RENAMED:
        return {RENAMED[name]: value}
    if name in TRANSLATED:
        return TRANSLATED[name][1](value, current)
    if name in WITHOUT_EFFECT:
        warn_without_effect(name)
        return {}
    return {name: value, _DUPLICATE_OF[name]: value} if name in _DUPLICATE_OF else {name: value}


@functools.cache
def warn_without_effect(name: str) -> None:
    """Warn, once in a process, of a setting of ``WITHOUT_EFFECT``."""
    log.warning("%s has no effect: %s", name, WITHOUT_EFFECT[name])


def is_unset_warmup(name: str, settings: Mapping[str, object]) -> bool:
    """Whether ``name`` is a length of the warm-up that is 0, TRL's default, beside the other
    spelling, which decides then.

    >>> is_unset_warmup("warmup_steps", {"warmup_steps": 0, "warmup_ratio": 0.1})
    True
    """
    spellings = {"warmup_steps": "warmup_ratio", "warmup_ratio": "warmup_steps"}
    return name in spellings and settings[name] == 0 and bool(settings.get(spellings[name]))


def canonical(settings: Mapping[str, object], defaults: Current) -> dict[str, Any]:
    """Rename keywords to canonical names.

    *Raises* ``ConfigError`` when two names of a setting have different values.

    >>> canonical({"group_size": 4, "num_epochs": 3}, {}.get)
    {'rollouts_per_example': 4, 'num_train_epochs': 3}
    """
    fields: dict[str, object] = {}
    origin: dict[str, str] = {}
    # translated names last: they read the values of others
    for name in sorted(settings, key=TRANSLATED.__contains__):
        if is_unset_warmup(name, settings):
            continue

        def current(field: str) -> Any:
            return fields.get(field, defaults(field))

        for field, value in settings_of(name, settings[name], current).items():
            if field in fields and name not in TRANSLATED and fields[field] != value:
                raise ConfigError(
                    f"{name} is another name of {origin[field]}, and their values differ: give one"
                )
            fields[field], origin[field] = value, name
    return fields


def read(name: str, values: Mapping[str, object], current: Current) -> Any:
    """Return the value of another spelling: from ``values`` where it was set, else from its
    canonical setting."""
    if name in RENAMED:
        return current(RENAMED[name])
    if name in values:
        return values[name]
    return current(TRANSLATED[name][0]) if name in TRANSLATED else None
