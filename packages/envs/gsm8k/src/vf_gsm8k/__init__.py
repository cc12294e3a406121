r"""gsm8k: grade-school word problems with a final answer in ``\boxed{}``. One turn, no network, no
download.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from verifiers.runtime.values import CountOrAll, check_arguments
from vf_gsm8k.generator import generate_rows
from vf_gsm8k.public import GSM8K, GSM_SYMBOLIC, PublishedRows, SymbolicRows

__all__ = ["load_environment"]

NUM_TRAIN, NUM_EVAL = 1000, 100
"""Default numbers of generated problems."""


@check_arguments
def load_environment(
    num_train_examples: CountOrAll = -1,
    num_eval_examples: CountOrAll = -1,
    seed: int = 0,
    dataset_name: str | None = None,
    system_prompt: str | None = vf.BOXED_SYSTEM_PROMPT,
    strict: bool = True,
) -> vf.Environment:
    r"""The gsm8k environment.

    Args:
        num_train_examples: Training problems; -1: 1,000 that are generated, or all that a dataset
            has.
        num_eval_examples: Held-out problems; -1: 100 that are generated, or all that a dataset has.
        seed: Determines the problems; equal arguments give equal problems on every machine.
        dataset_name: Source other than the generator: "openai/gsm8k" (or "gsm8k"), the published
            set, loaded on first use, needs a network unless cached; or "gsm_symbolic", a generator
            of Reasoning Gym (extra ``offline``).
        system_prompt: System message of every problem; "" or None sends none. Default: reason, then
            answer in a box.
        strict: Refuse lists, sums that are not worked out, false equations, and boxes in thinking
            without an end. False scores as older versions did.

    Raises:
        ConfigError: An invalid argument, by name.
        DatasetError: On first use of the rows, when the dataset cannot be loaded.
    """
    train, held_out = _sources(dataset_name, seed, num_train_examples, num_eval_examples)
    return vf.SingleTurnEnv(
        dataset=train,
        eval_dataset=held_out,
        system_prompt=system_prompt or None,
        rubric=_make_rubric(strict),
    )


def _sources(dataset_name: str | None, seed: int, num_train: int, num_eval: int) -> tuple[Any, Any]:
    if dataset_name in GSM8K:
        published = PublishedRows(seed, num_train, num_eval)
        return published.train, published.held_out
    num_train = NUM_TRAIN if num_train < 0 else num_train
    num_eval = NUM_EVAL if num_eval < 0 else num_eval
    if dataset_name == GSM_SYMBOLIC:
        symbolic = SymbolicRows(seed, num_train, num_eval)
        return symbolic.train, symbolic.held_out
    if dataset_name is not None:
        names = ", ".join(map(repr, (*GSM8K, GSM_SYMBOLIC)))
        raise vf.ConfigError(
            f"dataset_name must be one of {names}, or be left out, not {dataset_name!r}"
        )
    return (
        lambda: _generated(num_train, seed, False, "num_train_examples"),
        lambda: _generated(num_eval, seed, True, "num_eval_examples"),
    )


def _generated(count: int, seed: int, held_out: bool, name: str) -> list[dict[str, object]]:
    try:
        return generate_rows(count, seed, held_out)
    except ValueError as error:
        raise vf.DatasetError(f"{name}={count} is more than can be generated: {error}") from error


def _make_rubric(strict: bool) -> vf.Rubric:
    async def format_reward(completion: vf.Messages, parser: vf.Parser) -> float:
        return float(bool(parser.parse_answer(completion)))

    rubric = vf.MathRubric(strict=strict)
    rubric.add_metric(format_reward)
    return rubric
