"""Check a rubric: its functions can be called, and their rewards are informative.

Before the rollouts: the functions and their parameters. After them: the rewards of scripted (or
real) completions. Runs no rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from verifiers.checks.policies import PLAIN_TEXT
from verifiers.checks.report import Findings, place_of, raised_at
from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, MissingKeyError, ModelError, ScoringError
from verifiers.parsers import MaybeThinkParser, Parser
from verifiers.rollouts.error_info import error_chain
from verifiers.rollouts.state import State
from verifiers.types import AssistantMessage

EQUAL = 1e-12
"""Rewards closer than this are equal."""
SERVICE_ERRORS = (ModelError, MissingKeyError, ConfigError)
"""A missing key, a model endpoint or the configuration caused the error."""
_BY_DESIGN = (Parser.format_reward, MaybeThinkParser.format_reward)


def check_functions(env: Environment, examples: Sequence[Example], findings: Findings) -> set[str]:
    """Check the functions' parameters; returns the names of functions that cannot be called."""
    rubric = env.rubric
    if not any(rubric.plan().weights.values()) and not rubric.scores_itself:
        findings.warn(
            "no-reward-function",
            "no reward function has a weight other than 0, so every reward is unknown: nothing is"
            " measured or learned",
            place_of(type(rubric)),
            "pass the environment rubric=vf.Rubric(funcs=[…]), with a weight other than 0",
        )
    columns = set.intersection(*(set(example.row) for example in examples)) if examples else set()
    broken = [(f, *missing) for f in rubric.functions for missing in f.missing(columns).items()]
    for function, parameter, message in broken:
        findings.error(
            "reward-parameter-that-cannot-be-injected",
            message,
            place_of(function.function),
            f"rename {parameter!r}, give it a default, or supply it:"
            f" rubric.add_class_object({parameter!r}, …)",
        )
    if not broken and examples:
        try:
            rubric.check_arguments(columns)
        except ConfigError as error:  # a subclass that overrides check_arguments
            findings.error(
                "reward-parameter-that-cannot-be-injected",
                str(error),
                place_of(type(rubric)),
                "declare only parameters that the run can supply",
            )
    _check_format_of_parser(env, findings)
    return {function.name for function, _, _ in broken}


def _check_format_of_parser(env: Environment, findings: Findings) -> None:
    parser = env.parser
    is_inherited = (
        getattr(parser.get_format_reward_func, "__func__", None) is Parser.get_format_reward_func
    )
    if getattr(type(parser), "format_reward", None) in _BY_DESIGN and is_inherited:
        return
    try:
        earned = parser.get_format_reward_func()([AssistantMessage(PLAIN_TEXT)])
    except Exception as error:  # noqa: BLE001  an author's parser may raise anything; it is reported
        findings.error(
            "hook-raises-or-returns-a-wrong-type",
            f"the parser's format reward raised {type(error).__name__}: {error}",
            raised_at(error, place_of(type(parser))),
            "a parser must not raise for any completion: return 0.0",
        )
        return
    if isinstance(earned, int | float) and earned > 0:
        what = f"the format reward of {type(parser).__name__}"
        _plain_text_earns(what, earned, place_of(type(parser)), findings)


def _plain_text_earns(what: str, earned: float, location: str, findings: Findings) -> None:
    findings.warn(
        "plain-text-earns-format-reward",
        f"{what} gives {earned:g} to {PLAIN_TEXT!r}, which has no format",
        location,
        "return 0.0 when the format is absent, else replies without an answer are rewarded",
    )


# --- after the rollouts ---------------------------------------------------------------------------


def check_rewards(
    env: Environment, states: Sequence[State], is_scripted: bool, findings: Findings
) -> None:
    """Check the rewards of finished rollouts as a whole."""
    numbers = (state["reward"] for state in states)
    rewards = [float(n) for n in numbers if isinstance(n, int | float) and math.isfinite(n)]
    functions = env.rubric.functions
    location = place_of(functions[0].function if len(functions) == 1 else type(env.rubric))
    if outside := [reward for reward in rewards if abs(reward) > 1 + EQUAL]:
        findings.warn(
            "reward-outside-range",
            f"rewards reach {max(outside, key=abs):g}, outside [-1, 1]",
            location,
            "scale the functions or their weights: thresholds and learning rates assume rewards of"
            " about this size",
        )
    counts = any(function.weight for function in functions) or env.rubric.scores_itself
    if counts and len(rewards) > 1 and max(rewards) - min(rewards) <= EQUAL:
        tried = "all"
        if is_scripted:
            solution = "" if env.oracle is None else ", the oracle's solution"
            answer = "the row's answer in the expected format"
            tried = f"silence, plain text, an echo{solution} and {answer}"
        findings.warn(
            "constant-reward",
            f"{tried} earned the same reward, {rewards[0]:g}, in {len(rewards)} rollouts: a group"
            " with zero reward variance gives no training signal",
            location,
            "make the reward distinguish good completions from bad ones; for a hard task, pass"
            " client= with a model",
        )


def check_format_rewards(env: Environment, plain: Sequence[State], findings: Findings) -> None:
    """Check that functions named after the format give no reward to plain text."""
    for function in env.rubric.functions:
        earned = [state["metrics"].get(function.name, 0.0) for state in plain]
        if "format" in function.name and function.weight and any(value > 0 for value in earned):
            location = place_of(function.function)
            _plain_text_earns(repr(function.name), max(earned), location, findings)


def check_scoring(env: Environment, state: State, broken: set[str], findings: Findings) -> None:
    """Report the reward functions that failed on a rollout, but the reported ``broken``."""
    error = state["error"]
    functions = {function.name: function for function in env.rubric.functions}
    failed: dict[str, ScoringError | None] = {}
    if isinstance(error, ScoringError):
        failed = {name: None for name in functions if math.isnan(state["metrics"].get(name, 0.0))}
        failed[error.function or "the rubric"] = error
    for name, cause in failed.items():
        if name in broken:
            continue
        location = place_of(functions[name].function if name in functions else type(env.rubric))
        if cause is not None and any(isinstance(e, SERVICE_ERRORS) for e in error_chain(cause)):
            findings.warn(
                "reward-not-known-here",
                str(cause),
                location,
                "run the check with the keys and endpoints that the function needs",
            )
            continue
        innermost = cause.__cause__ if cause is not None else None
        failed_too = f"reward function {name!r} failed too, so its value is unknown"
        findings.error(
            "reward-function-fails",
            str(cause) if cause is not None else failed_too,
            raised_at(innermost, location) if innermost is not None else location,
            "return a finite number for every completion, including an empty one and one without an"
            " answer",
        )
