"""``HybridMathRubric``: rule-based verification first, then a judge for completions that the rules do not accept.

The judge is called when the rules reject an answer, cannot verify it in time or cannot parse the gold answer (in
words). A completion that the rules accept needs no judge call; nor does one without an answer, whose reward is 0.0.
Judge failures leave the reward unknown, as in ``JudgeRubric``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Unpack

from verifiers.rubrics.judge_rubric import JudgeOptions, JudgeRubric
from verifiers.rubrics.judging import MATH_JUDGE_PROMPT
from verifiers.rubrics.math_rubric import boxed_answer_parser, has_answer, verified
from verifiers.rubrics.math_verification import MathVerifier, Outcome
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.sync_async import maybe_await
from verifiers.storage.identity import Free

if TYPE_CHECKING:
    from verifiers.parsers import Parser


class HybridMathRubric(JudgeRubric):
    """The reward function ``correct_answer`` (weight 1), beside the author's functions.

    Takes the keywords of ``JudgeRubric`` and of ``MathRubric``; ``score_range`` is (0, 1), and a ``judge_prompt`` must
    request ``<score>1</score>`` or ``<score>0</score>``. Metrics: ``math_verify_score`` (the result of the rules),
    ``math_verify_timeouts``, and ``judge_score/<model>`` where a judge was called.

    *Raises* ConfigError when the extra ``math`` is not installed.
    """

    @spell_out(JudgeOptions, JudgeRubric.__init__)
    def __init__(
        self,
        *,
        timeout_seconds: float = 5,
        max_workers: Annotated[int | None, Free("only how fast")] = None,
        max_verify_chars: int = 50_000,
        parser: Parser | None = None,
        **kwargs: Unpack[JudgeOptions],
    ):
        self.verifier = MathVerifier(timeout_seconds, max_workers, max_verify_chars)
        kwargs.setdefault("score_range", (0.0, 1.0))
        super().__init__(parser=parser or boxed_answer_parser(), **kwargs)

    def default_prompt(self, scores: bool) -> str:
        """Prompt of a judge that compares two answers."""
        return MATH_JUDGE_PROMPT

    def add_own_reward(self, scores: bool) -> None:
        """Register ``correct_answer``."""
        self.add_reward_func(self.correct_answer)

    async def correct_answer(self, parser: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        """1.0 when the rules find the answers equal, else the judges' combined score; 0.0 for a completion without one.

        *Raises* ScoringError when the worker process died, or as ``judge_score`` when judges are called.
        """
        response = await maybe_await(parser.parse_answer(completion))
        outcome = await verified(self.verifier, response, answer, state)
        state["metrics"]["math_verify_score"] = float(outcome is Outcome.EQUAL)
        if outcome is Outcome.EQUAL or not has_answer(response):
            return float(outcome is Outcome.EQUAL)
        return await self.judge_score(prompt, completion, answer, state)
