"""What a request says of sampling: every argument that a server has a default of its own for, and
which arguments make the sampled distribution another than the trained distribution.

A vLLM server takes what a request leaves out from the model's ``generation_config.json`` (top_p 0.8
and top_k 20 of Qwen2.5), so requests of the policy in training leave nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.clients.payload import NEUTRAL
from verifiers_trainer.settings.fields import RESHAPING

CONSTRAINS = frozenset(
    "allowed_token_ids bad_words logit_bias logits_processors min_tokens response_format"
    " structured_outputs thinking_token_budget vllm_xargs".split()
)
"""Further arguments that exclude or favour tokens; so do all that begin with ``guided_``."""


def is_reshaping(name: str, value: object) -> bool:
    """Whether a sampling argument makes the sampled distribution another than the model's at the
    temperature.

    >>> is_reshaping("top_p", 0.95), is_reshaping("top_p", 1), is_reshaping("guided_json", "{}")
    (True, False, True)
    >>> is_reshaping("tool_choice", "required"), is_reshaping("tool_choice", "auto")
    (True, False)
    """
    if name == "tool_choice":  # a forced call is written under a grammar
        return value not in (None, "auto", "none")
    if name == "response_format" and isinstance(value, Mapping):
        return value.get("type", "text") != "text"
    if value in NEUTRAL.get(name, ()):
        return False
    may_reshape = name in RESHAPING or name in CONSTRAINS or name.startswith("guided_")
    return may_reshape and value is not None and value not in ([], {}, "")


def reshaping_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """The names of the arguments of a request that reshape, those of its ``extra_body`` too."""
    flat = {**arguments, **(arguments.get("extra_body") or {})}
    return sorted(name for name, value in flat.items() if is_reshaping(name, value))


def unreshaped(arguments: Mapping[str, Any]) -> dict[str, object]:
    """The arguments of a request without those that reshape on purpose: neutral, or left out.

    >>> unreshaped({"temperature": 0.7, "top_p": 0.9, "min_tokens": 3, "min_p": 0.0})
    {'temperature': 0.7, 'top_p': 1.0, 'min_tokens': 0, 'min_p': 0.0}
    """
    plain: dict[str, object] = {}
    for name, value in arguments.items():
        if name == "extra_body":
            plain[name] = unreshaped(value or {})
        elif not is_reshaping(name, value):
            plain[name] = value
        elif name in NEUTRAL:
            plain[name] = NEUTRAL[name][0]
    return plain


def plain(temperature: float) -> dict[str, float]:
    """The arguments of a request for the model's own distribution at the temperature, whatever the
    server's defaults are."""
    return {"temperature": temperature, **{name: NEUTRAL[name][0] for name in sorted(RESHAPING)}}
