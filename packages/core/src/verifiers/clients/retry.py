"""The only retry layer of model calls; SDKs and transports below it do not retry.

The promise: at most ``max_retries`` retries, never earlier than the Retry-After of the server, with
full jitter; a 429 reduces the requests in flight. The final error states the number of attempts and
holds their records.

Retried: ``RateLimited``, ``ModelUnavailable``, ``MalformedResponse``. Other errors propagate
unchanged. HTTP is in ``http`` and classification in ``failures``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

from verifiers.clients.limiter import AdaptiveLimiter
from verifiers.clients.reply import FINISH_REASON, TOKEN_FIELDS
from verifiers.errors import ModelError, ModelUnavailable, RateLimited
from verifiers.types import Attempt, Response

# independent of the global generator, and different in forked workers
_JITTER = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to retry. All times in seconds."""

    max_retries: int = 10
    base_s: float = 0.5
    """Upper bound of the first pause; it doubles with every retry."""
    max_s: float = 30.0
    """Maximum of the upper bound."""
    max_retry_after_s: float = 120.0
    """Longest Retry-After to wait for; beyond it the call fails."""
    max_token_retries: int = 1
    """Retries of a response without token data, or with a finish reason that is not known: a server
    rarely answers otherwise later."""

    def pause_s(self, num_failures: int, retry_after_s: float | None) -> float:
        """Draw the seconds to wait after ``num_failures`` (1 or more), with full jitter."""
        backoff = min(self.max_s, self.base_s * 2.0 ** min(num_failures - 1, 60))
        if retry_after_s is None:
            return _JITTER.uniform(0.0, backoff)
        return retry_after_s + _JITTER.uniform(0.0, max(backoff, min(retry_after_s, self.max_s)))

    def asks_too_much(self, error: ModelError) -> bool:
        """Return whether the server requests a pause above the bound."""
        return error.retry_after_s is not None and error.retry_after_s > self.max_retry_after_s

    def gives_up(self, error: ModelError, num_failures: int) -> bool:
        """Return whether to stop after this number of failures (1 or more)."""
        if not error.retryable:
            return True
        if self.asks_too_much(error):
            return True
        limit = self.max_retries
        if error.field in TOKEN_FIELDS or error.field == FINISH_REASON:
            limit = min(limit, self.max_token_retries)
        return num_failures > limit


async def call_with_retries(
    send: Callable[[], Awaitable[Response]],
    policy: RetryPolicy,
    limiter: AdaptiveLimiter,
    timeout_s: float | None = None,
) -> Response:
    """Return the first success of ``send``, with the failures before it in ``Response.attempts``.

    ``timeout_s`` bounds the whole call, including pauses and the wait for the limiter. Raises: the
    last failure, after the last retry; ``ModelUnavailable`` after the timeout; anything but a
    ``ModelError`` at once.
    """
    attempts: list[Attempt] = []
    started = time.monotonic()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            while True:
                ticket = limiter.enter_now() or await limiter.enter()
                try:
                    response = await send()
                    limiter.succeeded()
                    return replace(response, attempts=tuple(attempts)) if attempts else response
                except ModelError as error:
                    if isinstance(error, RateLimited):
                        limiter.refused(ticket)
                    failure = error
                finally:
                    limiter.leave()
                pause = policy.pause_s(len(attempts) + 1, failure.retry_after_s)
                is_late = timeout_s is not None and time.monotonic() + pause >= started + timeout_s
                if is_late or policy.gives_up(failure, len(attempts) + 1):
                    attempts.append(Attempt(failure.status, _reason(failure), 0.0))
                    if policy.asks_too_much(failure) and not isinstance(failure, RateLimited):
                        failure = RateLimited(
                            f"{failure}; it asks to wait {failure.retry_after_s:g} s",
                            **failure.facts,
                        )
                    raise _final(failure, attempts, started) from failure.__cause__
                attempts.append(Attempt(failure.status, _reason(failure), pause))
                await asyncio.sleep(pause)
    except asyncio.CancelledError as error:  # by the time limit of a rollout, as a rule
        error.attempts = tuple(attempts)  # type: ignore[attr-defined]  # counted by the rollout
        raise
    except TimeoutError as error:
        if not limit.expired():
            raise
        attempts.append(Attempt(None, "out of time", 0.0))
        text = f"no completion within {timeout_s:g} s"
        raise _final(ModelUnavailable(text, elapsed_s=timeout_s), attempts, started) from error


def failed_attempts(outcome: object) -> Counter[str]:
    """The failed attempts behind a response, or behind what ended a call without one, by kind.

    >>> refused = Attempt(429, "HTTP 429", 0.5)
    >>> failed_attempts(ModelUnavailable("down", attempts=(refused, Attempt(503, "HTTP 503", 0.0))))
    Counter({'refused_for_rate': 1, 'server_errors': 1})
    """
    attempts = getattr(outcome, "attempts", None) or ()
    if not attempts and isinstance(outcome, ModelError):  # of a client without this layer
        attempts = (Attempt(outcome.status, str(outcome), 0.0),)
    return Counter(_kind(attempt.status) for attempt in attempts)


def _kind(status: int | None) -> str:
    if status is None:
        return "unanswered"
    if status == 429:
        return "refused_for_rate"
    if status >= 500:
        return "server_errors"
    return "refused" if status >= 400 else "unusable"


def _reason(error: ModelError) -> str:
    return f"HTTP {error.status}" if error.status not in (None, 200) else str(error)


def _final(error: ModelError, attempts: list[Attempt], started: float) -> ModelError:
    text = str(error)
    if len(attempts) > 1:
        text += f" (gave up after {len(attempts)} attempts in {time.monotonic() - started:.1f} s)"
    return type(error)(text, **{**error.facts, "attempts": tuple(attempts)})


def parse_retry_after(milliseconds: str | None, seconds_or_date: str | None) -> float | None:
    """Parse the headers ``retry-after-ms`` and ``Retry-After`` to seconds; None when neither is
    valid.

    Source: RFC 9110, 10.2.3 (a number of seconds or an HTTP date).

    >>> parse_retry_after(None, "7"), parse_retry_after("250", None), parse_retry_after(None, "soon")
    (7.0, 0.25, None)
    """
    for text, scale in ((milliseconds, 0.001), (seconds_or_date, 1.0)):
        if text is None:
            continue
        try:
            seconds = float(text) * scale
        except ValueError:
            continue
        if seconds == seconds:
            return max(0.0, seconds)
    if seconds_or_date is None:
        return None
    try:
        return max(0.0, parsedate_to_datetime(seconds_or_date).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):  # a year, or a zone, that no clock has
        return None
