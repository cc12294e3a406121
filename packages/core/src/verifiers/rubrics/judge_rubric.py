"""``JudgeRubric``: rewards from other models' judgement of a response.

The promise: constructing one makes no client and needs no key; a judge that fails, is cut off or gives no readable
verdict leaves the reward *unknown*, never 0; one question is asked once per rollout; calls are repeated by the client's
own retry layer and by nothing else; tokens are counted in ``state["usage"]``.

What a question says and how a verdict is read is in ``judging``. This module does not choose which rollouts to judge.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from verifiers.clients.protocol import OPENAI_BASE_URL, Client, ClientConfig, ClientLike, ModelLike
from verifiers.clients.resolve import as_client, client_and_model
from verifiers.compat import JUDGE_PARAMETERS, rename
from verifiers.data.messages import last_text
from verifiers.errors import ConfigError, RunError, ScoringError
from verifiers.rubrics import judging
from verifiers.rubrics.functions import RewardFunction
from verifiers.rubrics.rubric import Rubric, ScoringOptions
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.sync_async import maybe_await
from verifiers.types import ModelRequest, Response, UserMessage

if TYPE_CHECKING:
    from verifiers.parsers import Parser

ANSWER_SHARE = 0.9
"""Share of ``timeout_s`` one judge may take, so that the others' verdicts still count when one does not answer."""


class JudgeOptions(ScoringOptions, total=False):
    """The parameters of ``JudgeRubric`` but ``parser``, for the constructors of its subclasses."""

    judge_client: ClientLike | Mapping[str, ClientLike] | None
    judge_model: ModelLike
    judge_sampling_args: Mapping[str, Any] | None
    judge_prompt: str
    judge_models: Sequence[ModelLike] | None
    aggregation: judging.Aggregation
    score_range: Sequence[float] | None
    require_all: bool
    funcs: Sequence[Callable[..., Any]] | None
    weights: Sequence[float] | None


class JudgeRubric(Rubric):
    """Reward functions that receive ``judge``, or the mean of several judges' scores.

    Example, a reward function of one's own::

        async def correct(judge, prompt, completion, answer, state) -> float:
            return float((await judge(prompt, completion, answer, state)).strip().lower().startswith("yes"))

        rubric = JudgeRubric(judge_client=OpenAI(), judge_model="gpt-4.1-nano", funcs=[correct])

    Given ``judge_models``, or a prompt by its older name ``template``, and no ``funcs``, it has the reward function
    ``judge_score`` (weight 1): each judge must end with ``<score>number</score>`` within ``score_range``, which is
    mapped to 0…1 (raw when the range is None) and combined by ``aggregation``, a name (mean, median, min, max,
    majority) or a callable on the list. ``require_all=False`` takes the judges that answered. The raw numbers are
    metrics ``judge_score/<model>``; of the second such rubric in a ``RubricGroup`` ``judge_score_2/<model>``.

    ``judge_client`` is anything ``as_client`` accepts or ``{model: client}``; None is the endpoint of OPENAI_API_KEY
    and OPENAI_BASE_URL, read at the first call, and never the model that is being trained or measured. Functions
    receive ``judge judge_client judge_model judge_prompt judge_sampling_args`` by these names.

    *Raises* ConfigError for settings that cannot be used.

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
        judge_sampling_args: Mapping[str, Any] | None = None,
        judge_prompt: str = judging.DEFAULT_JUDGE_PROMPT,
        judge_models: Sequence[ModelLike] | None = None,
        aggregation: judging.Aggregation = "mean",
        score_range: Sequence[float] | None = (0.0, 10.0),
        require_all: bool = True,
        funcs: Sequence[Callable[..., Any]] | None = None,
        weights: Sequence[float] | None = None,
        **kwargs: Unpack[ScoringOptions],
    ):
        further: dict[str, Any] = {**kwargs}  # older names of the parameters too
        has_template = any(JUDGE_PARAMETERS.get(name) == "judge_prompt" for name in further)
        scores = funcs is None and (judge_models is not None or has_template)
        given = {} if judge_client is None else {"judge_client": judge_client}
        given |= {} if judge_prompt == judging.DEFAULT_JUDGE_PROMPT else {"judge_prompt": judge_prompt}
        further = rename(further | given, JUDGE_PARAMETERS, type(self).__name__)
        client = further.pop("judge_client", None)
        self.judge_prompt = _checked_prompt(further.pop("judge_prompt", self.default_prompt(scores)))
        self.judge_models = _checked_models(judge_models, judge_model)
        self.judge_model = self.judge_models[0]
        self.judge_client = EnvironmentClient() if client is None else client
        self.judge_sampling_args = dict(judge_sampling_args or {})
        self.aggregation = judging.checked_aggregation(aggregation)
        self.score_range = judging.checked_score_range(score_range)
        self.require_all = require_all
        self._clients: dict[Any, tuple[Client, str]] = {}
        self._in_flight = _InFlight()
        _check_mapping(self.judge_client, self.judge_models)
        super().__init__(funcs=funcs, weights=weights, parser=parser, **further)
        for name in ("judge", "judge_model", "judge_prompt", "judge_sampling_args"):
            self.add_class_object(name, getattr(self, name))
        self.add_class_object("judge_client", self._given_client(self.judge_model))
        self.add_own_reward(scores)

    def default_prompt(self, scores: bool) -> str:
        """The prompt of a rubric that was given none; ``scores``: it reads scores itself."""
        return judging.DEFAULT_SCORE_PROMPT if scores else judging.DEFAULT_JUDGE_PROMPT

    def add_own_reward(self, scores: bool) -> None:
        """Register what this class rewards by itself."""
        if scores:
            self.add_reward_func(self.judge_score)

    def check_arguments(self, columns: set[str]) -> None:
        """As ``Rubric``; *raises* ConfigError also when the judge's endpoint needs a key that is not set."""
        super().check_arguments(columns)
        if self.functions and isinstance(self.judge_client, EnvironmentClient):
            self.judge_client.check(self.judge_models)

    # --- asking

    async def judge(self, prompt: Any, completion: Any, answer: Any, state: Any = None, **slots: Any) -> str:
        """The first judge's text on one rollout. Further keywords fill further ``{slot}``s of the prompt, literally.

        With a ``state`` the answer is kept in ``state["judge_response"][model][question]`` and not asked for again.
        *Raises* ScoringError when the judge did not answer.
        """
        question = await self.question(prompt, completion, answer, **slots)
        return await self._ask(self.judge_model, question, state)

    async def question(self, prompt: Any, completion: Any, answer: Any, **slots: Any) -> str:
        """What a judge is sent: ``judge_prompt`` with its slots filled. The parser runs only for ``{response}``."""
        wanted = judging.slots_in(self.judge_prompt)
        values = {
            "question": last_text(prompt, "user") or "",
            "answer": judging.value_text(answer),
            "prompt": judging.whole_text(prompt),
            "completion": judging.whole_text(completion),
        }
        if "response" in wanted and "response" not in slots:
            values["response"] = judging.value_text(await maybe_await(self.parser.parse_answer(completion)))
        values |= {name: judging.value_text(value) for name, value in slots.items()}
        fence = judging.fence_for([text for name, text in values.items() if name in wanted])
        settings = {"fence": fence, "score_range": judging.range_text(self.score_range)}
        return judging.fill_template(self.judge_prompt, settings | values)

    async def judge_score(self, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        """All judges' scores of one rollout combined, 0 to 1 with a range; raw scores go to ``state["metrics"]``.

        *Raises* ScoringError when a judge failed (``require_all``), or all did.
        """
        return await self._score_as("judge_score", prompt, completion, answer, state)

    def renamed(self, function: RewardFunction, name: str) -> RewardFunction:
        """The raw numbers move with the score: ``judge_score_2/<model>``."""
        own = getattr(function.function, "func", function.function) in (self.judge_score, self._score_as)
        return function.under(name, functools.partial(self._score_as, name) if own else None)

    async def _score_as(self, metric: str, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        question = await self.question(prompt, completion, answer)
        asked = [self._score(model, question, state) for model in self.judge_models]
        outcomes = dict(zip(self.judge_models, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        failed = {model: outcome for model, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        for error in failed.values():
            if not isinstance(error, ScoringError):
                raise error
        scores = {model: outcome for model, outcome in outcomes.items() if not isinstance(outcome, BaseException)}
        metrics = state.setdefault("metrics", {})
        for model in self.judge_models:
            metrics[f"{metric}/{_label(model)}"] = scores.get(model, math.nan)
        if failed and (self.require_all or not scores):
            raise next(iter(failed.values()))
        values = [judging.normalised(score, self.score_range) for score in scores.values()]
        combined: float = await maybe_await(self.aggregation(values))
        return combined

    async def _score(self, model: Any, question: str, state: Any) -> float:
        text = await self._ask(model, question, state, whole=True)
        try:
            return judging.read_score(text, self.score_range)
        except ScoringError as error:
            raise ScoringError(f"judge {_label(model)!r}: {error}", model=_label(model)) from error

    async def _ask(self, model: Any, question: str, state: Any, whole: bool = False) -> str:
        """A judge's text, from the state's cache or from the judge. ``whole``: text that was cut off is a failure."""
        known = _cache_of(state, _label(model))
        if question in known:
            return known[question]
        key = (None if state is None else id(state), _label(model), question, whole)
        return await self._in_flight.once(key, lambda: self._call(model, question, state, known, whole))

    async def _call(self, model: Any, question: str, state: Any, known: dict[str, str], whole: bool) -> str:
        response = await self._complete(model, question)
        _count_usage(state, response)
        if whole and response.finish_reason in ("length", "abort"):
            raise ScoringError(
                f"judge {_label(model)!r} was cut off before its verdict; raise max_tokens in judge_sampling_args",
                model=_label(model),
            )
        known[question] = response.text
        return response.text

    async def _complete(self, model: Any, question: str) -> Response:
        limit_s = None if self.timeout_s is None else ANSWER_SHARE * self.timeout_s
        try:
            client, name = self._client_of(model)
            request = ModelRequest(
                [UserMessage(question)], name, sampling_args=dict(self.judge_sampling_args), timeout_s=limit_s
            )
            async with asyncio.timeout(limit_s):
                return await client.complete(request)
        except RunError:
            raise
        except Exception as error:  # whatever failed, this verdict is unknown; the cause is chained
            raise _failure(_label(model), error, limit_s) from error

    def _client_of(self, model: Any) -> tuple[Client, str]:
        """The client and model name of a judge; made at its first call and kept."""
        if model not in self._clients:
            self._clients[model] = client_and_model(self._given_client(model), model)
        return self._clients[model]

    def _given_client(self, model: Any) -> Any:
        given = self.judge_client[model] if isinstance(self.judge_client, Mapping) else self.judge_client
        return EnvironmentClient() if given is None else given


class EnvironmentClient:
    """The client that OPENAI_API_KEY and OPENAI_BASE_URL describe, or the local model; made at the first call."""

    def __init__(self) -> None:
        self._made: dict[str, Client] = {}

    async def complete(self, request: ModelRequest) -> Response:
        """One completion by that client; see ``Client.complete`` for what it raises."""
        if _is_local(request.model):
            where = request.model
        else:
            where = os.environ.get("OPENAI_BASE_URL") or OPENAI_BASE_URL
        if where not in self._made:
            self._made[where] = as_client(where if _is_local(where) else ClientConfig(api_base_url=where))
        return await self._made[where].complete(request)

    def check(self, models: Sequence[Any]) -> None:
        """*Raises* ConfigError when a judge would have to be asked without an endpoint or key."""
        remote = [model for model in models if not _is_local(_label(model))]
        if remote and not (os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL")):
            raise ConfigError(
                f"the judge {_label(remote[0])!r} has no client: pass judge_client=, or set OPENAI_API_KEY "
                "(and OPENAI_BASE_URL for another server)",
                key="judge_client",
            )


class _InFlight:
    """Questions being asked: equal ones at one time share one call, which ends when nobody waits for it any more."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Any, ...], tuple[asyncio.Task[str], list[None]]] = {}

    async def once(self, key: tuple[Any, ...], ask: Callable[[], Coroutine[Any, Any, str]]) -> str:
        loop = asyncio.get_running_loop()
        place = (loop, *key)
        task, waiting = self._asked.get(place) or (loop.create_task(ask()), [])
        self._asked[place] = (task, waiting)
        waiting.append(None)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.pop()
            if not waiting:
                del self._asked[place]
                task.cancel()  # does nothing to one that is done


def _cache_of(state: Any, model: str) -> dict[str, str]:
    """The questions this model has answered for a rollout; a throw-away dict where there is nothing to keep them in."""
    if not isinstance(state, MutableMapping):
        return {}
    cache = state.get("judge_response")
    if cache is None:
        cache = state["judge_response"] = {}
    return cache.setdefault(model, {}) if isinstance(cache, dict) else {}


def _count_usage(state: Any, response: Response) -> None:
    if not isinstance(state, MutableMapping):
        return
    usage = state.setdefault("usage", {})
    usage["judge_input_tokens"] = usage.get("judge_input_tokens", 0) + response.usage.prompt_tokens
    usage["judge_output_tokens"] = usage.get("judge_output_tokens", 0) + response.usage.completion_tokens


def _failure(judge: str, error: Exception, limit_s: float | None) -> ScoringError:
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError) and limit_s is not None:
        said = f"no answer within {limit_s:g} s"
    return ScoringError(f"judge {judge!r} failed: {said}", model=judge)


def _label(model: Any) -> str:
    """A judge's name in metrics and messages."""
    return model if isinstance(model, str) else str(getattr(model, "name_or_path", model))


def _is_local(name: str) -> bool:
    return name == "local" or name.startswith("local:")


def _checked_prompt(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise ConfigError(f"judge_prompt must be text, not {type(prompt).__name__}", key="judge_prompt")
    return prompt


def _checked_models(models: Sequence[Any] | None, model: Any) -> tuple[Any, ...]:
    if isinstance(models, str):
        raise ConfigError(f"judge_models must be a list; write [{models!r}]", key="judge_models")
    chosen = (model,) if models is None else tuple(models)
    if not chosen:
        raise ConfigError("judge_models is empty; name at least one judge, or leave it out", key="judge_models")
    if len({_label(one) for one in chosen}) < len(chosen):
        raise ConfigError(f"judge_models names a judge twice: {', '.join(map(_label, chosen))}", key="judge_models")
    return chosen


def _check_mapping(client: Any, models: Sequence[Any]) -> None:
    absent = [_label(model) for model in models if isinstance(client, Mapping) and model not in client]
    if absent:
        raise ConfigError(
            f"judge_client has no client for the judge {absent[0]!r}; it has {', '.join(map(_label, client)) or 'none'}"
            " (name the judges with judge_models)",
            key="judge_client",
        )
