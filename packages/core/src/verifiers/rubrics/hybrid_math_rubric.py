"""``HybridMathRubric``: rule-based verification first, then, when asked for, a judge for what the
rules do not accept.

With ``use_judge_fallback`` the judge is called when the rules reject an answer, cannot verify it in
time or cannot parse the gold answer (in words). A completion that the rules accept needs no judge
call; nor does a completion without an answer, whose reward is 0.0. Judge failures leave the reward
unknown, as in ``JudgeRubric``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar, Unpack

from verifiers.rollouts.author_code import maybe_await
from verifiers.rubrics import judging
from verifiers.rubrics.judge_rubric import JudgeRubric, ScoreOptions
from verifiers.rubrics.math_rubric import boxed_answer_parser, has_answer, unreadable_gold, verified
from verifiers.rubrics.math_verification import MathVerifier, Outcome
from verifiers.runtime.signatures import spell_out
from verifiers.storage.identity import Free

if TYPE_CHECKING:
    from verifiers.clients.protocol import ClientLike, ModelLike
    from verifiers.parsers import Parser
    from verifiers.rollouts.state import State
    from verifiers.types import Messages

T = TypeVar("T")


class HybridMathRubric(JudgeRubric):
    """Three functions: ``math_verify_score`` and ``judge_score`` (weight 0), then
    ``correct_answer`` (weight 1).

    ``judge_score`` is the rules' score unless ``use_judge_fallback`` is on and the rules did not
    accept the answer; then it is the judge's: 1.0 for the letter A, boxed or alone, 0.0 for B and
    C. ``correct_answer`` is either. The state keeps ``math_verify_score``, ``judge_score`` and the
    judge's text, ``judge_result``. Takes the keywords of ``JudgeRubric`` and of ``MathRubric``; a
    ``judge_prompt`` that contains ``<score>`` is answered by ``<score>1</score>`` or
    ``<score>0</score>`` instead of a letter. ``math_verify_timeouts`` is as in ``MathRubric``.

    *Raises* ConfigError when the extra ``math`` is not installed.
    """

    DEFAULT_JUDGE_PARSER: ClassVar[Parser | None] = None
    DEFAULT_JUDGE_MODEL: ClassVar[ModelLike] = "gpt-5-nano"
    DEFAULT_JUDGE_CLIENT: ClassVar[ClientLike | None] = None
    DEFAULT_JUDGE_PROMPT: ClassVar[str] = judging.MATH_VERDICT_PROMPT
    DEFAULT_JUDGE_SAMPLING_ARGS: ClassVar[dict[str, object]] = {}
    DEFAULT_USE_JUDGE_FALLBACK: ClassVar[bool] = False

    @spell_out(ScoreOptions, JudgeRubric.__init__)
    def __init__(
        self,
        parser: Parser | None = None,
        use_judge_fallback: bool | None = None,
        judge_client: ClientLike | None = None,
        judge_model: ModelLike | None = None,
        judge_prompt: str | None = None,
        judge_sampling_args: Mapping[str, object] | None = None,
        timeout_seconds: float = 5,
        max_workers: Annotated[int | None, Free("only how fast")] = None,
        max_verify_chars: int = 50_000,
        **kwargs: Unpack[ScoreOptions],
    ):
        def or_default(value: T | None, default: T) -> T:
            return default if value is None else value

        self.verifier = MathVerifier(timeout_seconds, max_workers, max_verify_chars)
        self.use_judge_fallback = or_default(use_judge_fallback, self.DEFAULT_USE_JUDGE_FALLBACK)
        kwargs.setdefault("score_range", (0.0, 1.0))
        super().__init__(
            parser=or_default(parser, self.DEFAULT_JUDGE_PARSER) or boxed_answer_parser(),
            judge_client=or_default(judge_client, self.DEFAULT_JUDGE_CLIENT),
            judge_model=or_default(judge_model, self.DEFAULT_JUDGE_MODEL),
            judge_prompt=or_default(judge_prompt, self.DEFAULT_JUDGE_PROMPT),
            judge_sampling_args=or_default(judge_sampling_args, self.DEFAULT_JUDGE_SAMPLING_ARGS),
            **kwargs,
        )

    def add_own_reward(self, scores: bool) -> None:
        """Register the three functions."""
        self.add_metric(self.math_verify_score)
        self.add_metric(self.judge_score)
        self.add_reward_func(self.correct_answer)

    def check_needs(self) -> None:
        """As ``JudgeRubric``, where a judge may be asked."""
        if self.use_judge_fallback:
            super().check_needs()

    async def math_verify_score(
        self, parser: Parser, completion: Messages, answer: object, state: State
    ) -> float:
        """1.0 when the rules find the answers equal, else 0.0.

        *Raises* ScoringError when the worker process died, and for an unparseable gold answer where
        no judge reads it.
        """
        response = await maybe_await(parser.parse_answer(completion))
        outcome = await verified(self.verifier, response, answer, state)
        if outcome is Outcome.UNREADABLE_GOLD and not self.use_judge_fallback:
            raise unreadable_gold(answer)
        state["math_verify_score"] = float(outcome is Outcome.EQUAL)
        return float(outcome is Outcome.EQUAL)

    async def judge_score(
        self, prompt: Messages, completion: Messages, answer: object, state: State
    ) -> float:
        """The rules' score, or the judge's where the rules did not accept the answer and a judge
        may be asked.

        *Raises* ScoringError when the judge failed or gave no verdict.
        """
        if "math_verify_score" not in state:  # functions of a rollout may run together
            await self.math_verify_score(self.parser, completion, answer, state)
        score = float(state["math_verify_score"])
        response = await maybe_await(self.parser.parse_answer(completion))
        if score < 1.0 and self.use_judge_fallback and has_answer(response):
            score = await self._verdict(prompt, completion, answer, state)
        state["judge_score"] = score
        return score

    async def correct_answer(
        self, prompt: Messages, completion: Messages, answer: object, state: State
    ) -> float:
        """1.0 when the rules or the judge accept the answer. *Raises* as ``judge_score``."""
        if "judge_score" not in state:
            await self.judge_score(prompt, completion, answer, state)
        return max(float(state["math_verify_score"]), float(state["judge_score"]))

    async def _verdict(
        self, prompt: Messages, completion: Messages, answer: object, state: State
    ) -> float:
        if "<score>" in self.judge_prompt:
            return await super().judge_score(prompt, completion, answer, state)
        question = await self.question(prompt, completion, answer)
        form = judging.letter_verdict_of(self.judge_prompt, question)
        request, images = question + form.request, self._images(prompt, completion)
        texts = await asyncio.gather(
            *(self._ask(model, request, state, images) for model in self.judge_models)
        )
        state["judge_result"] = texts[0]
        letters = [judging.read_letter(text, verdict=form) for text in texts]
        verdict: float = await maybe_await(
            self.aggregation([float(letter == "A") for letter in letters])
        )
        return verdict
