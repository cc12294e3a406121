"""``JudgeRubric``: rewards from other models (judges) that assess a response.

The constructor creates no client and needs no key. When a judge fails, is truncated, returns no
parseable verdict or a verdict that may be quoted from the response, the reward is *unknown*, never
0. Equal questions of a rollout share one call; only the client retries calls; judge tokens are
counted in ``state["usage"]``. Prompts and the parsing of verdicts are in ``judging``.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from verifiers.clients.local import find_model
from verifiers.clients.protocol import OPENAI_BASE_URL, Client, ClientConfig, ClientLike, ModelLike
from verifiers.clients.resolve import as_client, client_and_model, is_in_process, is_local
from verifiers.clients.spending import check_metered
from verifiers.compat import JUDGE_PARAMETERS, rename
from verifiers.data.images import image_parts, image_url
from verifiers.errors import ConfigError, MissingKeyError, RunError, ScoringError, message_of
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.state import State
from verifiers.rubrics import judging
from verifiers.rubrics.arguments import RewardFunction
from verifiers.rubrics.rubric import Rubric, ScoringOptions
from verifiers.runtime.redaction import remember_secrets
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import close_match, closest
from verifiers.types import ModelRequest, Response, UserMessage

if TYPE_CHECKING:
    from verifiers.parsers import Parser

ANSWER_SHARE = 0.9
"""Fraction of ``timeout_s`` for a judge, so that the other verdicts count when one judge does not
answer."""

SLOTS = frozenset("question answer response prompt completion fence score_range".split())
"""Slots of ``judge_prompt`` that the rubric fills."""
Images = tuple[Mapping[str, object], ...]
"""Parts of messages that hold images."""
REPLIES = "judge_replies"
"""Column of a rollout: ``judge`` and ``reply`` of each request to a judge, in order."""


class ScoreOptions(ScoringOptions, total=False):
    """Parameters of ``JudgeRubric`` on functions and scores, for the constructors of its
    subclasses."""

    judge_models: Sequence[ModelLike] | None
    aggregation: judging.Aggregation
    score_range: Sequence[float] | None
    require_all: bool
    funcs: Sequence[Callable[..., object]] | None
    weights: Sequence[float] | None
    judge_images: bool


class JudgeRubric(Rubric):
    """Reward functions that receive ``judge``, or the mean of several judges' scores.

    Args:
        judge_client: Anything ``as_client`` accepts, or ``{model: client}``; None is the endpoint
            of OPENAI_API_KEY and OPENAI_BASE_URL, read at the first call, and never the policy or
            the evaluated model; models named ``local`` or ``builtin:…`` run in this process.
        judge_model: Model that ``judge`` asks.
        judge_sampling_args: Sampling arguments of the judges' requests.
        judge_prompt: Prompt of the judges; ``{question}``, ``{answer}`` and ``{response}`` are
            filled in.
        judge_models: Models that score each rollout, for the reward function ``judge_score``.
        aggregation: How the scores of several judges are combined: mean, median, min, max,
            majority, or a callable on the list.
        score_range: Lowest and highest score; scores are mapped to 0…1. None: scores are used as
            they are.
        require_all: The reward is unknown unless every judge gave a score; False uses the available
            scores.
        judge_images: Send the images of the messages that the prompt has a slot for
            (``{question}``, ``{prompt}``, ``{completion}``) after its text, in their order; in the
            text each is ``[image]`` in any case.

    Example, with the author's reward function::

        async def correct(judge, prompt, completion, answer, state) -> float:
            return float(read_yes_no(await judge(prompt, completion, answer, state)))

        rubric = JudgeRubric(judge_client=OpenAI(), judge_model="gpt-4.1-nano", funcs=[correct])

    ``verifiers.rubrics.judging.read_yes_no`` accepts "yes" or "no" and nothing else, so that a
    quotation is no verdict.

    With ``judge_models``, or a prompt by its older name ``template``, and without ``funcs``, it has
    the reward function ``judge_score`` (weight 1): each judge must end with
    ``<score>number</score>``. The raw scores are metrics ``judge_score/<model>``, for the second
    such rubric of a ``RubricGroup`` ``judge_score_2/<model>``.

    Functions receive ``judge judge_client judge_model judge_prompt judge_sampling_args`` by these
    names.

    *Raises* ConfigError for invalid settings.

    >>> from verifiers.testing import ScriptedClient
    >>> rubric = vf.JudgeRubric(judge_client=ScriptedClient("<score>8</score>"), judge_models=["gpt-4.1-nano"])
    >>> state = vf.State(prompt=[vf.UserMessage("Capital of Peru?")], completion=[vf.AssistantMessage("Lima")])
    >>> rubric.score_rollout_sync(state)["reward"], state["metrics"]["judge_score/gpt-4.1-nano"]
    (0.8, 8.0)
    """

    @spell_out(ScoringOptions, Rubric.__init__)
    def __init__(
        self,
        parser: Parser | None = None,
        judge_client: ClientLike | Mapping[str, ClientLike] | None = None,
        judge_model: ModelLike = "gpt-4.1-nano",
        judge_sampling_args: Mapping[str, object] | None = None,
        judge_prompt: str = judging.DEFAULT_JUDGE_PROMPT,
        judge_models: Sequence[ModelLike] | None = None,
        aggregation: judging.Aggregation = "mean",
        score_range: Sequence[float] | None = (0.0, 10.0),
        require_all: bool = True,
        funcs: Sequence[Callable[..., object]] | None = None,
        weights: Sequence[float] | None = None,
        judge_images: bool = False,
        **kwargs: Unpack[ScoringOptions],
    ):
        further: dict[str, Any] = {**kwargs}  # older names of the parameters too
        has_template = any(JUDGE_PARAMETERS.get(name) == "judge_prompt" for name in further)
        scores = funcs is None and (judge_models is not None or has_template)
        explicit = {} if judge_client is None else {"judge_client": judge_client}
        explicit |= (
            {} if judge_prompt == judging.DEFAULT_JUDGE_PROMPT else {"judge_prompt": judge_prompt}
        )
        further = rename(further | explicit, JUDGE_PARAMETERS, type(self).__name__)
        client = further.pop("judge_client", None)
        self.judge_prompt = _checked_prompt(
            further.pop("judge_prompt", self.default_prompt(scores))
        )
        _check_slots(self.judge_prompt)
        self.judge_models = _checked_models(judge_models, judge_model)
        self.judge_model = self.judge_models[0]
        self.judge_client = EnvironmentClient() if client is None else client
        self.judge_sampling_args = dict(judge_sampling_args or {})
        remember_secrets(self.judge_sampling_args)
        self.aggregation = judging.checked_aggregation(aggregation)
        self.score_range = judging.checked_score_range(score_range)
        self.require_all, self.judge_images = require_all, judge_images
        self._clients: dict[Any, tuple[Client, str]] = {}
        self._in_flight = _InFlight()
        self._reported_slots: set[str] = set()
        self._said_images = False
        _check_mapping(self.judge_client, self.judge_models)
        super().__init__(funcs=funcs, weights=weights, parser=parser, **further)
        for name in ("judge", "judge_model", "judge_prompt", "judge_sampling_args"):
            self.add_class_object(name, getattr(self, name))
        self.add_class_object("judge_client", self._client_for(self.judge_model))
        self.add_own_reward(scores)

    def identity(self) -> dict[str, Any]:
        """As ``Rubric``; runs of versions without ``judge_images`` are the same."""
        described = super().identity()
        if not self.judge_images:
            described.pop("judge_images", None)
        return described

    def default_prompt(self, scores: bool) -> str:
        """The prompt used when none is passed; ``scores``: whether the rubric itself
        parses scores."""
        return judging.DEFAULT_SCORE_PROMPT if scores else judging.DEFAULT_JUDGE_PROMPT

    def add_own_reward(self, scores: bool) -> None:
        """Register the reward function of this class."""
        if scores:
            self.add_reward_func(self.judge_score)

    def check_needs(self) -> None:
        """*Raises* ConfigError when no function asks the judge, or when its key or local model is
        missing."""
        if not self.functions:
            model = _label(self.judge_model)
            raise ConfigError(
                f"{type(self).__name__} has no reward function, so the judge {model!r} is never"
                " asked and no reward is known: pass funcs=[…] with functions that take `judge`,"
                f" or judge_models=[{model!r}] for judge_score",
                key="funcs",
            )
        for model in self.judge_models:
            client = self._client_for(model)
            if isinstance(client, EnvironmentClient):
                client.check([model])
            elif check := getattr(self._client_of(model)[0], "check_key", None):
                try:
                    check()
                except MissingKeyError as error:
                    raise ConfigError(
                        f"the judge {_label(model)!r}: {error}", key="judge_client"
                    ) from error

    # --- judge calls

    async def judge(
        self, prompt: Any, completion: Any, answer: Any, state: Any = None, **slots: object
    ) -> str:
        """The first judge's text about one rollout. Other keywords fill other ``{slot}``s of the
        prompt, literally.

        With a ``state``, the text is cached in ``state["judge_response"][model][question]``.

        *Raises* ScoringError when the judge did not answer, and for an answer that is empty or cut.
        """
        question = await self.question(prompt, completion, answer, **slots)
        images = self._images(prompt, completion)
        return await self._ask(self.judge_model, question, state, images)

    async def question(self, prompt: Any, completion: Any, answer: Any, **slots: object) -> str:
        """The text sent to a judge: ``judge_prompt`` with filled slots. The parser runs only for
        ``{response}``."""
        slot_names = judging.slots_in(self.judge_prompt)
        values = {
            "question": judging.question_text(prompt),
            "answer": judging.value_text(answer),
            "prompt": judging.whole_text(prompt),
            "completion": judging.whole_text(completion),
        }
        if "response" in slot_names and "response" not in slots:
            values["response"] = judging.value_text(
                await maybe_await(self.parser.parse_answer(completion))
            )
        values |= {name: judging.value_text(value) for name, value in slots.items()}
        fence = judging.fence_for([text for name, text in values.items() if name in slot_names])
        settings = {"fence": fence, "score_range": judging.range_text(self.score_range)}
        filled = settings | values
        fillable = dict.fromkeys([*filled, "response"])
        for name in sorted(slot_names - filled.keys() - self._reported_slots):
            self._reported_slots.add(name)
            self.logger.warning(
                "judge_prompt has the slot {%s}, which nothing fills, so the judge reads it as it"
                " stands%s; slots: %s",
                name,
                closest(name, fillable),
                ", ".join(f"{{{slot}}}" for slot in fillable),
            )
        return judging.fill_template(self.judge_prompt, filled)

    def _images(self, prompt: Any, completion: object) -> Images:
        """The images that a judge is sent, of the messages that its prompt has slots for."""
        slots = judging.slots_in(self.judge_prompt)
        question = prompt if "prompt" in slots else judging.last_message(prompt, "user")
        messages = [question] if slots & {"question", "prompt"} else []
        messages += [completion] if "completion" in slots else []
        images = tuple(itertools.chain.from_iterable(map(image_parts, messages)))
        if images and not self.judge_images and not self._said_images:
            self._said_images = True
            self.logger.warning(
                "the judge reads %s in place of the images of the rollouts; judge_images=True sends"
                " them to a judge that sees",
                judging.IMAGE,
            )
        return images if self.judge_images else ()

    async def judge_score(self, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        """Combined score of all judges, 0 to 1 with a range; raw scores are written to
        ``state["metrics"]``.

        *Raises* ScoringError when a judge failed (``require_all``) or all judges failed.
        """
        return await self._score_as("judge_score", prompt, completion, answer, state)

    def renamed(self, function: RewardFunction, name: str) -> RewardFunction:
        """A copy with another name, also for its raw metrics: ``judge_score_2/<model>``."""
        is_judge_score = getattr(function.function, "func", function.function) in (
            self.judge_score,
            self._score_as,
        )
        return function.under(
            name, functools.partial(self._score_as, name) if is_judge_score else None
        )

    async def _score_as(
        self,
        metric: str,
        prompt: Iterable[object] | str | None,
        completion: Iterable[object] | str | None,
        answer: object,
        state: MutableMapping[str, Any],
    ) -> float:
        question = await self.question(prompt, completion, answer)
        images = self._images(prompt, completion)
        settings = {"score_range": judging.range_text(self.score_range)}
        verdict = judging.verdict_of(judging.fill_template(self.judge_prompt, settings), question)
        calls = [
            self._score(model, question + verdict.request, state, verdict, images)
            for model in self.judge_models
        ]
        outcomes = dict(
            zip(
                self.judge_models, await asyncio.gather(*calls, return_exceptions=True), strict=True
            )
        )
        failed = {
            model: outcome
            for model, outcome in outcomes.items()
            if isinstance(outcome, BaseException)
        }
        for error in failed.values():
            if not isinstance(error, ScoringError):
                raise error
        scores = {
            model: outcome
            for model, outcome in outcomes.items()
            if not isinstance(outcome, BaseException)
        }
        metrics = state.setdefault("metrics", {})
        for model in self.judge_models:
            metrics[f"{metric}/{_label(model)}"] = scores.get(model, math.nan)
        if failed and (self.require_all or not scores):
            raise next(iter(failed.values()))
        values = [judging.normalised(score, self.score_range) for score in scores.values()]
        combined: float = await maybe_await(self.aggregation(values))
        return combined

    async def _score(
        self,
        model: ModelLike,
        question: str,
        state: MutableMapping[str, object] | None,
        verdict: judging.Verdict,
        images: Images = (),
    ) -> float:
        text = await self._ask(model, question, state, images)
        try:
            return judging.read_score(text, self.score_range, verdict)
        except ScoringError as error:
            raise ScoringError(f"judge {_label(model)!r}: {error}", model=_label(model)) from error

    async def _ask(
        self,
        model: ModelLike,
        question: str,
        state: MutableMapping[str, object] | None,
        images: Images = (),
    ) -> str:
        """A judge's text, from the state's cache or from the judge. *Raises* ScoringError for a
        reply that is truncated or empty: a part of a verdict is none."""
        cache = _cache_of(state, _label(model))
        full_question = "\n".join([question, *map(_digest_of, images)])
        if full_question in cache:
            return cache[full_question]
        content: Any = [{"type": "text", "text": question}, *images] if images else question

        async def call() -> str:
            cache[full_question] = text = await self._call(model, content, state)
            return text

        key = (None if state is None else id(state), _label(model), full_question)
        return await self._in_flight.once(key, call)

    async def _call(
        self,
        model: ModelLike,
        question: str | list[Any],
        state: MutableMapping[str, object] | None,
    ) -> str:
        response = await self._complete(model, question)
        _count_usage(state, response)
        _save_reply(state, _label(model), response.text)
        fault = None
        if response.finish_reason in ("length", "abort"):
            fault = "was truncated before its verdict"
        elif not response.text.strip():
            fault = "wrote no text"
        if fault is not None:
            raise ScoringError(
                f"judge {_label(model)!r} {fault}; raise max_tokens in judge_sampling_args",
                model=_label(model),
            )
        return response.text

    async def _complete(self, model: ModelLike, question: str | list[Any]) -> Response:
        limit_s = None if self.timeout_s is None else ANSWER_SHARE * self.timeout_s
        try:
            client, name = self._client_of(model)
            check_metered(client)
            request = ModelRequest(
                [UserMessage(question)],
                name,
                sampling_args=dict(self.judge_sampling_args),
                timeout_s=limit_s,
                sample="",
            )
            async with asyncio.timeout(limit_s):
                return await client.complete(request)
        except RunError:
            raise
        except Exception as error:  # any failure makes this verdict unknown; the cause is chained
            reason = f"{type(error).__name__}: {message_of(error)}"
            if isinstance(error, TimeoutError) and limit_s is not None:
                reason = f"no answer within {limit_s:g} s"
            judge = _label(model)
            raise ScoringError(f"judge {judge!r} failed: {reason}", model=judge) from error

    def _client_of(self, model: ModelLike) -> tuple[Client, str]:
        """The client and model name of a judge; created at its first call and cached."""
        if model not in self._clients:
            self._clients[model] = client_and_model(self._client_for(model), model)
        return self._clients[model]

    def _client_for(self, model: ModelLike) -> Client:
        if isinstance(self.judge_client, Mapping):
            client = self.judge_client[model]
        else:
            client = self.judge_client
        return EnvironmentClient() if client is None else client


class EnvironmentClient:
    """The client for OPENAI_API_KEY and OPENAI_BASE_URL, or for a model that runs in this process;
    created at the first call."""

    is_metered = True

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    async def complete(self, request: ModelRequest) -> Response:
        """A completion by that client. *Raises* as ``Client.complete``."""
        if is_in_process(request.model):
            where = request.model
        else:
            where = os.environ.get("OPENAI_BASE_URL") or OPENAI_BASE_URL
        if where not in self._clients:
            self._clients[where] = as_client(
                where if is_in_process(where) else ClientConfig(api_base_url=where)
            )
        return await self._clients[where].complete(request)

    def check(self, models: Sequence[object]) -> None:
        """*Raises* ConfigError when a judge has neither an endpoint nor a key, or its model of this
        process is not installed."""
        for name in filter(is_in_process, map(_label, models)):
            try:
                if is_local(name):
                    find_model(name.partition(":")[2] or None)
                else:
                    as_client(name)
            except ConfigError as error:
                raise ConfigError(f"the judge {name!r}: {error}", key="judge_model") from error
        remote = [model for model in models if not is_in_process(_label(model))]
        if remote and not (os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL")):
            raise ConfigError(
                f"the judge {_label(remote[0])!r} has no client: pass judge_client=, or set"
                " OPENAI_API_KEY (and OPENAI_BASE_URL for another server)",
                key="judge_client",
            )


class _InFlight:
    """Questions in flight: equal concurrent questions share one call, cancelled when all callers
    are."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], tuple[asyncio.Task[str], list[None]]] = {}

    async def once(
        self, key: tuple[object, ...], ask: Callable[[], Coroutine[Any, Any, str]]
    ) -> str:
        loop = asyncio.get_running_loop()
        loop_key = (loop, *key)
        task, callers = self._calls.get(loop_key) or (loop.create_task(ask()), [])
        self._calls[loop_key] = (task, callers)
        callers.append(None)
        try:
            return await asyncio.shield(task)
        finally:
            callers.pop()
            if not callers:
                del self._calls[loop_key]
                task.cancel()  # no effect on a finished task


def _digest_of(image: Mapping[str, object]) -> str:
    return hashlib.sha256(str(image_url(image)).encode()).hexdigest()


def _cache_of(state: object, model: str) -> dict[str, str]:
    """Question -> text that this model answered for a rollout; a new dict when the state cannot
    hold a cache."""
    if not isinstance(state, MutableMapping):
        return {}
    cache = state.get("judge_response")
    if cache is None:
        cache = state["judge_response"] = {}
    return cache.setdefault(model, {}) if isinstance(cache, dict) else {}


def _count_usage(state: object, response: Response) -> None:
    if not isinstance(state, MutableMapping):
        return
    usage = state.setdefault("usage", {})
    usage["judge_input_tokens"] = usage.get("judge_input_tokens", 0) + response.usage.prompt_tokens
    usage["judge_output_tokens"] = (
        usage.get("judge_output_tokens", 0) + response.usage.completion_tokens
    )


def _save_reply(state: object, judge: str, text: str) -> None:
    """Save what a judge wrote with the rollout, above all if it is no verdict."""
    if not isinstance(state, State):
        return
    state.setdefault(REPLIES, []).append({"judge": judge, "reply": text})
    if REPLIES not in state.saved_columns:
        state.saved_columns += (REPLIES,)


def _label(model: object) -> str:
    """A judge's name in metrics and messages."""
    return model if isinstance(model, str) else str(getattr(model, "name_or_path", model))


def _checked_prompt(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise ConfigError(
            f"judge_prompt must be text, not {type(prompt).__name__}", key="judge_prompt"
        )
    return prompt


def _check_slots(prompt: str) -> None:
    """*Raises* ConfigError for a slot that is nearly one of the rubric's: ``{reponse}``. Any other
    name may be a keyword of an author's call of ``judge``."""
    for slot in sorted(judging.slots_in(prompt) - SLOTS):
        meant = close_match(slot, SLOTS)
        if meant and slot != f"{meant}s":  # a list of an author's own
            raise ConfigError(
                f"judge_prompt has the slot {{{slot}}}, which nothing fills; did you mean"
                f" {{{meant}}}?",
                key="judge_prompt",
            )


def _checked_models(models: Sequence[object] | None, model: object) -> tuple[Any, ...]:
    if isinstance(models, str):
        raise ConfigError(f"judge_models must be a list; write [{models!r}]", key="judge_models")
    judges = (model,) if models is None else tuple(models)
    if not judges:
        raise ConfigError(
            "judge_models is empty; name at least one judge, or leave it out", key="judge_models"
        )
    if len({_label(judge) for judge in judges}) < len(judges):
        raise ConfigError(
            f"judge_models names a judge twice: {', '.join(map(_label, judges))}",
            key="judge_models",
        )
    return judges


def _check_mapping(
    client: ClientLike | Mapping[str, ClientLike] | None, models: Sequence[object]
) -> None:
    if not isinstance(client, Mapping):
        return
    if absent := [_label(model) for model in models if model not in client]:
        raise ConfigError(
            f"judge_client has no client for the judge {absent[0]!r}; it has"
            f" {', '.join(map(_label, client)) or 'none'} (name the judges with judge_models)",
            key="judge_client",
        )
