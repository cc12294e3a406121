"""Classify HTTP error responses of providers as exceptions of ``errors``.

The promise: the words of a server are read before its status (``WORDS``, one row per server); every
status and message maps to exactly one class; the text has the server's words, names the endpoint
and the correction, and contains no key or header value (`Endpoint.redact`). An error that every
request would meet ends a run only while nothing has succeeded (`Standing`); an account
without money ends it at any time.

This module sends nothing and repeats nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Container, Iterator, Mapping
from dataclasses import dataclass, field

from verifiers.clients.reply import excerpt
from verifiers.clients.retry import parse_retry_after
from verifiers.errors import (
    AuthenticationFailed,
    BudgetExhausted,
    EndpointUnreachable,
    MalformedResponse,
    ModelNotFound,
    ModelRefused,
    ModelUnavailable,
    OverlongPromptError,
    RateLimited,
    VerifiersError,
)
from verifiers.runtime.decoding import decode_message
from verifiers.types import Response

WORDS: dict[str, tuple[tuple[str, str], ...]] = {
    "quota": (
        (
            "OpenAI",
            "insufficient_quota|exceeded your current quota|billing_(hard_limit|not_active)",
        ),
        ("DeepSeek, Zhipu, Moonshot", "insufficient (account )?balance|in arrears|余额不足"),
        ("Anthropic, SiliconFlow", "balance is (too low|insufficient)|specified API usage limits"),
        ("OpenRouter, xAI", "(insufficient|more|out of|used all available|have any) credits"),
        ("OpenRouter, Together", "(key|credit) limit exceeded"),
        ("Moonshot, Fireworks", "exceeded_current_quota|monthly spending limit"),
        ("DashScope, LiteLLM", "Arrearage|budget_exceeded"),
    ),
    "rate": (
        ("OpenAI, Groq", r"rate.?limit|(tokens|requests) per (min|day|second)|\b(TPM|RPM)\b"),
        ("Google", "RESOURCE_EXHAUSTED"),
        ("AWS, DashScope, proxies", "throttl|too many requests|too many tokens, please wait"),
    ),
    "limit": (
        ("Anthropic", r"max_tokens: \d+ > \d+"),
        ("DeepSeek, Groq", "max_tokens`? (value|must be less than)"),
        ("OpenAI", r"max_tokens is too large: \d+\. This model supports"),
        ("DashScope", "range of max_tokens should be"),
    ),
    "overlong": (
        ("OpenAI, vLLM", "maximum context length|context.?length.?exceeded"),
        ("OpenAI", "reduce the length of the|string_above_max_length|exceeds the context window"),
        ("vLLM", r"must be at least 1, got -\d|than the maximum model length"),
        (
            "SGLang",
            r"(longer|larger|greater) than the (model'?s )?(maximum )?(context|allowed tok)",
        ),
        ("llama.cpp", r"exceed_context_size|context shift is disabled|n_keep.{0,20}>= n_ctx"),
        ("llama.cpp, Ollama", r"exceeds? (the |available |model'?s? )*(maximum )?context"),
        ("LM Studio", "context (the )?overflows|reached context length of"),
        ("TGI, Together", r"inputs`? (must have less|tokens \+)"),
        ("TensorRT-LLM", r"prompt length.{0,60}(exceed|max_seq_len|max_num_tokens)"),
        ("LMDeploy", "INPUT_LENGTH_ERROR|exceeds? session_len"),
        ("TabbyAPI", "(longer|larger|greater) than max_seq_len"),
        ("Anthropic, AWS", "(prompt|input|messages?|request) (is|are|was) too long"),
        ("Anthropic", "exceed context limit|prompt_too_long"),
        ("Ollama", "prompt too long; exceeded max context"),
        ("Google", "token count.{0,40}(exceeds the max|but model only supports)"),
        ("Cohere", "too many (input |prompt )?tokens"),
        ("Mistral", "too large for model with"),
        ("xAI", r"maximum prompt length is \d+"),
        ("Moonshot", "exceeded model token limit"),
        ("Zhipu", "prompt ?(超长|exceeds max length)"),
        ("DashScope", "range of input length should be"),
        ("MiniMax", "context window exceeds limit|token limit exceeded"),
        ("GitHub", "tokens_limit_reached|max_prompt_tokens_exceeded"),
        ("LiteLLM", "ContextWindowExceeded"),
        ("Qianfan", "(prompt|input) tokens too long|max length of current question"),
        ("Volcengine", "exceed max message tokens"),
        ("any", "context (window|size|length) (is |has been )?(exceeded|limit|of)"),
        ("any", "tokens.{0,60}exceeds? (the )?(token |model )?(limit|maximum)"),
        ("any", "exceeds? max(imum)?[_ ](model|input|context|seq)"),
        ("any", "(输入|上下文|tokens?).{0,12}(过长|超长|超过最大|超过模型)"),
    ),
    "filtered": (
        ("Azure", "content.?filter|content management policy|ResponsibleAIPolicy"),
        ("OpenAI", "content_policy_violation|our (usage policy|safety system)"),
        ("OpenRouter", "your input was flagged|requires moderation"),
        ("xAI", "violates? .{0,20}(guidelines|polic)"),
        ("Google", "PROHIBITED_CONTENT|blocked.{0,30}safety|prompt was blocked"),
        ("DashScope", "data_?inspection_?failed|inappropriate content"),
        ("Zhipu, Volcengine", "sensitive_?content|敏感内容"),
        ("Moonshot", "considered high risk"),
        ("MiniMax", "(input|output) new_sensitive"),
        ("DeepSeek, StepFun", "content exists risk|censorship_blocked"),
        ("AWS", "blocked by.{0,30}guardrail"),
        ("Cloudflare, AWS WAF", "you have been blocked|request blocked"),
        ("any", "(flagged|blocked|rejected).{0,60}(moderation|safety|polic)"),
    ),
    "key": (
        ("OpenAI, xAI", "(incorrect|invalid) (api|x-api).?key|invalid_api_key"),
        ("Google", "api key not valid|API_KEY_INVALID"),
    ),
    "feature": (
        ("OpenRouter", "no endpoints (found|available) (that support|matching)"),
        ("Ollama, OpenAI", "(does not|doesn't) support|is not a multimodal model"),
        ("llama.cpp", "(input|param) is not supported|requires? --jinja"),
        ("OpenAI", "is not supported with this model"),
        ("vLLM", r"requires --enable-auto-tool-choice|at most 0 [\w()]+ may be provided"),
    ),
    "model": (
        ("OpenAI, AWS", "model_not_found|(not|n't) have access to (the )?model"),
        ("vLLM, xAI, Groq, DeepSeek", "model.{0,200}(does not exist|not exist|not served)"),
        ("Ollama, Google", "model.{0,200}(not found|is not available)"),
        ("Anthropic", "not_found_error model:"),
        ("OpenRouter", "no endpoints found|not a valid model"),
        ("Mistral", "(unknown|invalid|no such) model"),
        ("AWS", "model identifier is invalid|model version has reached the end"),
        ("Groq, Cohere", "model.{0,200}(has been decommissioned|was removed)"),
        ("Hugging Face, FastChat", "model_not_supported|allowed now, your model"),
        ("any", "unsupported model:? ?[`'\"]"),
        ("Together", "unable to access model"),
        ("Moonshot", "not found the model"),
        ("Zhipu", "模型不存在"),
        ("Azure, Volcengine", "DeploymentNotFound|EndpointOrModel.?NotFound|ModelNotOpen"),
    ),
    "path": (("LM Studio", "unexpected endpoint or method"),),
}
"""What the words of an error mean -> (the servers that say so, a regular expression of the words).
The first meaning that matches is taken."""
_MEANINGS = {
    meaning: re.compile("|".join(words for _, words in rows), re.IGNORECASE | re.DOTALL)
    for meaning, rows in WORDS.items()
}
_SPEAKS_OF_LENGTH = re.compile(
    r"(?=.{0,120}(tokens?\b|length))(?=.{0,120}(prompt|input|context|sequence|request|message))"
    r"(?=.{0,120}(max|limit|exceed|too (long|large|many)|longer|greater|window))(?=.{0,120}\d\d)",
    re.IGNORECASE | re.DOTALL,
)
"""The rest of the servers: a number, tokens or a length, and a limit near each other."""
_SPEAKS_OF_OUTPUT = re.compile(
    r"max_((?!total|input|num)\w{1,40}_)?tokens|(output|completion) tokens", re.IGNORECASE
)
_PASSES = re.compile(r"(retry|try again) (in|after)|PerMinute", re.IGNORECASE)
"""In the words of a quota that is only a rate."""
_ECHOES = frozenset(
    ("input", "flagged_input", "prompt", "messages", "body", "failed_generation", "request")
)
"""Fields of an error that repeat the request or the model's text, whose words mean nothing."""
_MESSAGES = frozenset(("error", "message", "detail", "msg"))
"""Fields of an error that hold its message, or what contains it."""
_HOLDS_REPLY = re.compile(rb'"(choices|content|output)"\s*:\s*[\[{"]\s*[^\]}"\s]')
"""A field of a reply that is not empty: the words of what the model wrote mean nothing."""
_LIMIT_ALONE_TOO_LARGE = (
    re.compile(
        r"is too large: (?P<requested>\d++).{0,300}?maximum context length is (?P<room>\d+)",
        re.IGNORECASE | re.DOTALL,
    ),
    re.compile(
        r"context length is (?P<room>\d++).{0,300}?(?P<requested>\d++) in the completion",
        re.IGNORECASE | re.DOTALL,
    ),
)
_OVER_THE_RATE_ALONE = re.compile(
    r"limit:? (?P<room>\d+), (used:? \d+, )?requested:? (?P<requested>\d+)", re.IGNORECASE
)
"""OpenAI's and Groq's words of a rate of tokens; waiting does not help a request above the whole of
it."""
_UNKNOWN_ARGUMENT = re.compile(
    r"unsupported|not supported|unrecogni[sz]ed|unknown|unexpected|not permitted|not"
    r" allowed|forbidden|extra|invalid",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The description of an endpoint in error messages."""

    url: str
    """The base URL without secrets."""
    key_name: str
    """The source of the key, for example "the variable OPENAI_API_KEY"."""
    api_key_var: str | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    has_key: bool = True
    """Whether requests hold a key."""

    def redact(self, text: str) -> str:
        """The text without any key or secret header value."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def meaning_of(text: str) -> str | None:
    """Return what the words of an error mean, a key of ``WORDS`` or "above the rate"; None if they
    say nothing known."""
    if limit_alone_too_large(text):
        return "limit"
    if (rate := _OVER_THE_RATE_ALONE.search(text)) and int(rate["requested"]) > int(rate["room"]):
        return "above the rate"
    for meaning, words in _MEANINGS.items():
        if words.search(text):
            return "rate" if meaning == "quota" and _PASSES.search(text) else meaning
    if _SPEAKS_OF_LENGTH.search(text) and not _SPEAKS_OF_OUTPUT.search(text):
        return "overlong"
    return None


def is_overlong(text: str) -> bool:
    """Return whether an error text reports a prompt longer than the context."""
    return meaning_of(text) == "overlong"


def limit_alone_too_large(text: str) -> bool:
    """Return whether an error text reports that max_tokens alone is as long as the context or
    longer."""
    return any(
        (m := pattern.search(text)) and int(m["requested"]) >= int(m["room"])
        for pattern in _LIMIT_ALONE_TOO_LARGE
    )


def refuses_argument(status: int, body: bytes, name: str) -> bool:
    """Return whether a response reports that the endpoint does not support this argument."""
    if status not in (400, 422):
        return False
    text = excerpt(body, 2000)
    return name in text and bool(_UNKNOWN_ARGUMENT.search(text)) and not is_overlong(text)


def failure(
    status: int,
    body: bytes,
    endpoint: Endpoint,
    model: str,
    retry_after: tuple[str | None, str | None] = (None, None),
) -> VerifiersError:
    """Return the error of a response with a status other than 200.

    ``retry_after``: the headers retry-after-ms and Retry-After.
    """
    text, words, message = _read(body)
    detail = f": {endpoint.redact(message)[:300]}" if message else ""
    url = endpoint.url
    facts = {"url": url, "status": status, "body": endpoint.redact(text)}
    retry_after_s = parse_retry_after(*retry_after)
    meaning = None if status in (401, 408) or 300 <= status < 400 else meaning_of(words)
    if status == 402 or meaning == "quota":
        message = (
            f"{url} reports that the account of {endpoint.key_name} has no money or quota left"
            f" (HTTP {status}){detail}"
        )
        return ModelRefused(message, limit="quota", **facts)
    if meaning == "above the rate":
        return ModelRefused(
            f"{url} limits the tokens per minute to fewer than this request needs, so it can never"
            f" be served: lower max_tokens, shorten the prompt or raise the account's limit{detail}",
            **facts,
        )
    if status == 429 or meaning == "rate":
        wait = f", asking to wait {retry_after_s:g} s" if retry_after_s is not None else ""
        message = f"{url} limits the rate of requests (HTTP {status}{wait}){detail}"
        return RateLimited(message, retry_after_s=retry_after_s, **facts)
    if meaning == "overlong":
        return OverlongPromptError(
            f"the prompt does not fit the context of {model}{detail}", model=model, **facts
        )
    if meaning == "limit":
        return ModelRefused(
            f"max_tokens alone fills the context of {model}, lower it{detail}", **facts
        )
    if meaning == "filtered":
        return ModelRefused(
            f"{url} filtered this request by its content (HTTP {status}){detail}", **facts
        )
    if status == 401 or meaning == "key":
        message = f"{url} {_of_key(endpoint)} (HTTP {status}){detail}"
        return AuthenticationFailed(message, api_key_var=endpoint.api_key_var, **facts)
    if meaning == "feature":
        return ModelRefused(
            f"{url} cannot serve {model} with what this request needs (HTTP {status}){detail}",
            **facts,
        )
    if meaning == "model" and status < 500:
        return ModelNotFound(
            f"{url} does not serve the model {model!r}{detail}", model=model, **facts
        )
    status = 404 if meaning == "path" else status
    return _by_status(status, detail, endpoint, retry_after_s, facts)


def without_reply(
    error: MalformedResponse, body: bytes, endpoint: Endpoint, model: str
) -> VerifiersError:
    """Return the error of a body with status 200 that cannot be read: of one that holds no reply,
    what its words say."""
    _, words, message = _read(body)
    detail = ""
    if not _HOLDS_REPLY.search(body):
        if meaning_of(words):
            return failure(200, body, endpoint, model)
        detail = f": {message[:300]}" if error.body is None and message else ""
    facts = error.facts | ({"body": endpoint.redact(error.body)} if error.body else {})
    return type(error)(endpoint.redact(f"{error}{detail}"), **facts)


def _of_key(endpoint: Endpoint) -> str:
    if endpoint.has_key:
        return f"refused the key in {endpoint.key_name}"
    return f"needs a key, and none was sent, because {endpoint.key_name} is not set"


def _by_status(
    status: int,
    detail: str,
    endpoint: Endpoint,
    retry_after_s: float | None,
    facts: Mapping[str, object],
) -> VerifiersError:
    """The error of a response whose words mean nothing that is known."""
    url = endpoint.url
    if status in (408, 409, 424, 425) or status >= 500:
        return ModelUnavailable(
            f"{url} failed with HTTP {status}{detail}", retry_after_s=retry_after_s, **facts
        )
    if status == 403:
        about = "if it does so for every request, check the key in {}"
        about = about if endpoint.has_key else "no key was sent, because {} is not set"
        message = f"{url} denies access (HTTP 403; {about.format(endpoint.key_name)}){detail}"
        return AuthenticationFailed(message, api_key_var=endpoint.api_key_var, **facts)
    if status in (404, 405):
        message = (
            f"{url} answered HTTP {status}: unless its words say otherwise it has no completions"
            f" endpoint there; correct the base URL, which usually ends in /v1{detail}"
        )
        return EndpointUnreachable(message, **facts)
    if status < 400:
        return EndpointUnreachable(
            f"{url} redirects (HTTP {status}): use the final URL as base URL{detail}", **facts
        )
    return ModelRefused(f"{url} refused the request (HTTP {status}){detail}", **facts)


def _read(body: bytes) -> tuple[str, str, str]:
    """The start of a body as one line, the words that say what failed, and what to show of them."""
    text = excerpt(body, 2000)
    try:
        content = decode_message(body)
    except ValueError:
        return text, text, text
    if "\\u" in text:  # words in another script are escaped
        text = excerpt(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"), 2000)
    texts = list(dict.fromkeys(_strings(content, first=_MESSAGES)))
    more = f" ({', '.join(texts[1:])})" if texts[1:] else ""
    message = " ".join(f"{texts[0]}{more}".split()) if texts else text
    return text, " ".join(_strings(content))[:4000], message


def _strings(content: object, first: Container[str] = ()) -> Iterator[str]:
    """The texts in a body without those that repeat the request. With ``first`` the fields that it
    names come first in their object, and numbers count too: codes."""
    if isinstance(content, Mapping):
        for name, value in sorted(content.items(), key=lambda item: item[0] not in first):
            if name not in _ECHOES:
                yield from _strings(value, first)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value, first)
    elif isinstance(content, str) or (first and type(content) in (int, float)):
        yield str(content)


def of_account(refused: ModelRefused) -> BudgetExhausted | None:
    """Return what ends the run when the account of an endpoint has no money; None for another
    refusal."""
    if refused.limit != "quota":
        return None
    return BudgetExhausted(
        f"{refused}. Every further request would end so (ModelRefused); finished rollouts are saved:"
        " add credit to the account, or raise its limit, and run the same command again",
        **refused.facts,
    )


class Standing:
    """What the requests with one key at one endpoint say about its models. Belongs to one
    event loop.

    An error that every request would meet (key, model, URL) ends the run only while nothing has
    succeeded there with that model: it is held until a request in flight succeeds or all of them
    have failed so. Afterwards it is the error of its request. A refusal for want of money ends the
    run at any time: no later request is served either.
    """

    def __init__(self) -> None:
        self._succeeded: set[str] = set()
        self._in_flight: Counter[str] = Counter()
        self._held: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    async def call(self, model: str, attempt: Awaitable[Response]) -> Response:
        """Await one request. Raises what it raises, ``ModelRefused`` for an error that only this
        request meets, and ``BudgetExhausted`` for an account without money."""
        self._in_flight[model] += 1
        try:
            response = await attempt
            self._succeeded.add(model)
            return response
        except ModelRefused as error:
            raise of_account(error) or error from error.__cause__
        except (AuthenticationFailed, ModelNotFound, EndpointUnreachable) as error:
            await self._verdict(model)
            if model not in self._succeeded:
                raise
            message = f"{error} (other requests succeeded there)"
            facts = {name: error.facts.get(name) for name in ("url", "status", "body")}
            raise ModelRefused(message, **facts) from error
        finally:
            self._in_flight[model] -= 1
            self._settle(model)

    async def _verdict(self, model: str) -> None:
        """Return when a request has succeeded, or when none in flight still may."""
        held = self._held[model]
        verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.add(verdict)
        self._settle(model)
        try:
            await verdict
        finally:
            held.discard(verdict)

    def _settle(self, model: str) -> None:
        held = self._held[model]
        if model in self._succeeded or len(held) == self._in_flight[model]:
            for verdict in held:
                if not verdict.done():
                    verdict.set_result(None)
