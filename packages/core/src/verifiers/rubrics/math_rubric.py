r"""``MathRubric``: 1.0 for a final answer in ``\boxed{…}`` that equals the gold answer
mathematically, else 0.0.

Model text is never evaluated in this process and cannot block it. A model's answer that cannot be
verified in time is rewarded 0.0 and counted in a metric; failures that the model did not cause (a
worker process that died, an unparseable gold answer) leave the reward unknown. Thread-safe. The
comparison is in ``math_verification``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Annotated, Any, Unpack

from verifiers.data.text import OPEN, extract_boxed_answer
from verifiers.errors import ScoringError
from verifiers.parsers import MaybeThinkParser, Parser
from verifiers.rollouts.author_code import maybe_await
from verifiers.rubrics.math_verification import MathVerifier, Outcome
from verifiers.rubrics.rubric import Rubric, ScoringOptions
from verifiers.runtime.signatures import spell_out
from verifiers.storage.identity import Free

TIMEOUTS = "math_verify_timeouts"


class MathRubric(Rubric):
    r"""The reward function ``correct_answer`` (weight 1), beside the author's ``funcs`` and
    ``weights``.

    Args:
        timeout_seconds: Time limit of a comparison.
        max_workers: Worker processes; default: one per core, two to eight.
        max_verify_chars: Longer answers count as wrong.
        strict: Refuse what the engine alone accepts: several values beside a single gold answer
            (``[A, A]``), a sum that is not worked out beside a plain number, a false equation
            (``A + 1 = A``), tiny numbers that are equal by rounding alone, and a box inside thinking
            that has no end; read usual spellings that it does not know (``8√3``, ``90°``, ``1e-7``).
            False scores as older versions did.

    The default parser takes the last ``\boxed{…}`` after any thinking; unboxed answers do not
    count. The result of another parser is compared unchanged.

    Metric ``math_verify_timeouts``: 1.0 if the model's answer could not be verified in time.

    *Raises* ConfigError when the extra ``math`` is not installed.

    Example (needs the extra ``math``)::

        rubric = MathRubric()  # rewards \\boxed{1/2} where the answer is 0.5
        env = SingleTurnEnv(dataset=rows, system_prompt=vf.BOXED_SYSTEM_PROMPT, rubric=rubric)
    """

    @spell_out(ScoringOptions, Rubric.__init__)
    def __init__(
        self,
        funcs: Sequence[Callable[..., object]] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        timeout_seconds: float = 5,
        max_workers: Annotated[int | None, Free("only how fast")] = None,
        max_verify_chars: int = 50_000,
        strict: bool = True,
        **kwargs: Unpack[ScoringOptions],
    ):
        self.verifier = MathVerifier(timeout_seconds, max_workers, max_verify_chars, strict)
        super().__init__(
            funcs=funcs, weights=weights, parser=parser or boxed_answer_parser(strict), **kwargs
        )
        self.add_reward_func(self.correct_answer)

    async def correct_answer(
        self, parser: Parser, completion: Any, answer: Any, state: Any = None
    ) -> float:
        """1.0 when the parsed answer equals ``answer``, else 0.0.

        *Raises* ScoringError for an unparseable gold answer, and when the worker process died.
        """
        response = await maybe_await(parser.parse_answer(completion))
        outcome = await verified(self.verifier, response, answer, state)
        if outcome is Outcome.UNREADABLE_GOLD:
            raise unreadable_gold(answer)
        return float(outcome is Outcome.EQUAL)


def boxed_answer_parser(strict: bool = True) -> MaybeThinkParser:
    r"""The last ``\boxed{…}`` after any thinking; ``""`` without a box, and if strict also where
    thinking has no end."""
    extract = functools.partial(extract_boxed_answer, strict=True)
    return MaybeThinkParser(functools.partial(_finished, extract) if strict else extract)


def _finished(extract: Callable[[str], str], text: str) -> str:
    return "" if OPEN in text else extract(text)


def has_answer(response: object) -> bool:
    """Whether a parser found an answer."""
    return response is not None and response != ""


async def verified(
    verifier: MathVerifier, response: object, answer: object, state: MutableMapping[str, Any] | None
) -> Outcome:
    """Compare a parsed answer with the gold answer; record in the state's metrics whether the
    comparison timed out."""
    outcome = (
        await verifier.compare(answer, str(response)) if has_answer(response) else Outcome.DIFFERENT
    )
    if state is not None:
        state.setdefault("metrics", {})[TIMEOUTS] = float(outcome is Outcome.TIMED_OUT)
    return outcome


def unreadable_gold(answer: object) -> ScoringError:
    """The error for a gold answer that cannot be parsed as mathematics."""
    text = repr(answer)
    text = text if len(text) <= 80 else text[:77] + "…"
    return ScoringError(
        f"the dataset's answer {text} cannot be parsed as mathematics; correct the row, or judge it"
        " with a JudgeRubric"
    )
