"""Limits on what a run may spend: reserve the most that a request may cost, send it, then pay what
it did cost.

The promise: what is spent and reserved together never exceeds a limit, so neither does the bill,
whatever is in flight; a request that does not fit waits for others to end, and with none in flight
the run ends as ``BudgetExhausted``. What a request holds, which may be an agent's doing, costs that
request alone: content or numbers without a bound, and a bound above the whole limit or far above
that of others, are refused as ``ModelRefused``. With a ledger (a journal) this holds across kill -9:
a reservation is durable before its request is sent, and one that was never settled counts in full.

Metered is every attempt of a request through a client of this package while a budget is current:
the model's, judges' and those of tools. Not metered is an SDK object that author code calls itself,
and code that runs in another event loop or process. An attempt that the server refused with an HTTP
error is free; an attempt that was lost counts in full.

The bound of a request is one token per byte of its JSON body, ``TEMPLATE_TOKENS`` for what a chat
template adds, ``IMAGE_TOKENS`` for each image, and its ``max_tokens``; so it needs ``max_tokens``,
and what is neither text nor an image, such as audio, cannot be bounded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from verifiers.clients.payload import MAX_TOKENS_ALIASES, encode, to_fields
from verifiers.clients.protocol import PRICE_FIELDS, prices_of
from verifiers.errors import BudgetExhausted, ModelRefused, RunError, VerifiersError
from verifiers.storage.journal import Journal
from verifiers.types import ModelRequest, Response

TEMPLATE_TOKENS = 512
"""Tokens that a chat template may add to the text of a request: roles, a default system prompt,
tool instructions."""
IMAGE_TOKENS = 50_000
"""Most tokens of an image, whatever its size: the largest known rule is that of gpt-4o-mini, 2,833 and
5,667 for each of at most 8 tiles; vLLM's models take at most 16,384."""
_EPSILON = 1e-9
_TEXTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking", "reasoning"))
"""Types of the parts of a message whose tokens are no more than their bytes."""
OUTSIZE = 32
"""A request whose bound is so many times the mean of those before it does not end the run."""
_IMAGES = ("data:image/", "http://", "https://")
"""How the address of an image begins."""

_current: ContextVar[Budget | None] = ContextVar("verifiers_budget", default=None)


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens, read and sampled together, and US dollars."""

    tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.usd + other.usd)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.usd - other.usd)


class Budget:
    """What one run has spent and reserved. Belongs to one event loop; ``None`` limits nothing, and
    still records.

    ``prices``: model -> US dollars per million tokens read and sampled, for clients without prices
    of their own. ``elsewhere``: what other runs have spent of the same limits.

    >>> async def spend(budget, client, request):
    ...     with budget.current():
    ...         await client.complete(request)
    ...     return budget.spent
    """

    def __init__(
        self,
        max_cost_usd: float | None = None,
        max_total_tokens: float | None = None,
        *,
        prices: Mapping[str, Sequence[float]] | None = None,
        elsewhere: Amount = Amount(),
    ):
        self.max_cost_usd, self.max_total_tokens = max_cost_usd, max_total_tokens
        self.prices = dict(prices or {})
        self.elsewhere = elsewhere
        self.spent = Amount()
        self.reserved = Amount()
        self.num_requests = 0
        self.num_lost = 0
        """Attempts that count in full, because their real cost is unknown."""
        self._ledger: Journal | None = None
        self._in_flight: dict[int, Amount] = {}
        self._bounds = Amount()
        """Of all requests."""
        self._ids = itertools.count()
        self._waiting: deque[tuple[asyncio.Future[None], Amount, Amount]] = deque()

    # --- ledger

    def read(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take over what earlier sessions spent; their reservations without settlement count in
        full."""
        open_amounts: dict[object, Amount] = {}
        for entry in entries:
            amount = Amount(entry["tokens"], entry["usd"])
            if "reserve" in entry:
                open_amounts[entry["reserve"]] = amount
                self._bounds += amount
                self.num_requests += 1
                self._ids = itertools.count(entry["reserve"] + 1)
                continue
            if "settle" in entry:
                del open_amounts[entry["settle"]]
            self.spent += amount
        for amount in open_amounts.values():
            self.spent += amount
        self.num_lost += len(open_amounts)

    def record_in(self, ledger: Journal) -> None:
        """Make every reservation and settlement durable in ``ledger``, which was read before."""
        self._ledger = ledger

    async def open_with(self, spent: Amount) -> None:
        """Count what was spent before there was a ledger."""
        self.spent += spent
        await self._write({"opening": True, "tokens": spent.tokens, "usd": spent.usd})

    async def _write(self, entry: Mapping[str, object]) -> None:
        if self._ledger is not None:
            await self._ledger.append(entry)

    # --- requests

    @contextmanager
    def current(self) -> Iterator[None]:
        """Meter the requests of this context, and of tasks that start in it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    async def reserve(self, bound: Amount, least: Amount | None = None) -> int:
        """Wait until ``bound`` fits, and reserve it; the number of the reservation. ``least``: of the
        same request without its content. *Raises* BudgetExhausted; ModelRefused."""
        if self._waiting or not self._fits(bound):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, bound, bound if least is None else least))
            self._admit()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self.reserved -= bound  # it was admitted, and is not sent
                self._admit()
                raise
        else:
            self.reserved += bound
        number = next(self._ids)
        self._in_flight[number] = bound
        self._bounds += bound
        self.num_requests += 1
        try:
            await self._write({"reserve": number, "tokens": bound.tokens, "usd": bound.usd})
        except BaseException:  # a cancellation, too: the request is not sent; raised again
            # the entry may be on disk, where it counts in full after a restart
            self._release(number, Amount())
            raise
        return number

    async def settle(self, number: int, amount: Amount) -> None:
        """Replace a reservation by what the request did cost."""
        self._release(number, amount)
        await self._write({"settle": number, "tokens": amount.tokens, "usd": amount.usd})

    def lose(self, number: int) -> None:
        """Count a reservation in full: what the request did cost is unknown."""
        self.num_lost += 1
        self._release(number, self._in_flight[number])

    def _release(self, number: int, amount: Amount) -> None:
        self.reserved -= self._in_flight.pop(number)
        self.spent += amount
        self._admit()

    def _fits(self, bound: Amount) -> bool:
        return not self._exceeds(self.elsewhere + self.spent + self.reserved + bound)

    def _exceeds(self, amount: Amount) -> bool:
        """Whether an amount is above a whole limit."""
        if self.max_total_tokens is not None and amount.tokens > self.max_total_tokens:
            return True
        return self.max_cost_usd is not None and amount.usd > self.max_cost_usd + _EPSILON

    def _admit(self) -> None:
        """Let waiting requests go in order of arrival; refuse them when nothing in flight can make
        room."""
        while self._waiting:
            turn, bound, least = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self._fits(bound):
                self._waiting.popleft()
                self.reserved += bound
                turn.set_result(None)
            elif self.reserved.tokens > 0:
                return
            else:
                self._waiting.popleft()
                turn.set_exception(self._refusal(bound, least))

    def _refusal(self, bound: Amount, least: Amount) -> VerifiersError:
        """The error of a request that cannot fit: its own, if it is above the whole limit or those
        before it were much smaller, and more of them fit; of the first request, one without its
        content."""
        mean = self._bounds.tokens // self.num_requests if self.num_requests else least.tokens
        share = min(1.0, mean / bound.tokens) if bound.tokens else 1.0
        is_outsize = 0 < share * OUTSIZE < 1
        if (is_outsize or self._exceeds(bound)) and self._fits(Amount(mean, bound.usd * share)):
            usual = (
                f"{OUTSIZE} times the {mean:,} of those before it" if is_outsize else "all of it"
            )
            return ModelRefused(
                f"the request may take {bound.tokens:,} tokens, more than is left of the run's limit"
                f" and over {usual}",
                status=413,
            )
        is_cost = self._exceeds(Amount(0, (self.elsewhere + self.spent + bound).usd))
        return BudgetExhausted(
            self._exhausted(bound), limit="max_cost_usd" if is_cost else "max_total_tokens"
        )

    def _exhausted(self, bound: Amount) -> str:
        spent, next_one = self.elsewhere + self.spent, []
        if self.max_total_tokens is not None:
            next_one.append(
                f"{spent.tokens:,} of {self.max_total_tokens:,} tokens are spent, and the next"
                f" request may take {bound.tokens:,} (max_total_tokens, --max-total-tokens)"
            )
        if self.max_cost_usd is not None:
            next_one.append(
                f"${spent.usd:.4f} of ${self.max_cost_usd:.4f} are spent, and the next request may"
                f" cost ${bound.usd:.4f} (max_cost_usd, --max-cost)"
            )
        is_saved = self._ledger is not None
        advice = "Finished rollouts are saved: raise the limit and run the same command again"
        return (
            f"{'; '.join(next_one)}. {advice if is_saved else 'Nothing is saved: raise the limit'}"
        )

    def bound(self, client: object, request: ModelRequest) -> Amount:
        """The most that one attempt may take. *Raises* RunError without ``max_tokens`` or a price;
        ModelRefused for what the request holds."""
        fields = to_fields(request, "max_tokens")
        numbers = {
            name: [
                arguments[name]
                for arguments in (request.sampling_args, fields)
                if arguments.get(name)
            ]
            for name in (*MAX_TOKENS_ALIASES, "n", "best_of")
        }
        if not any(numbers[name] for name in MAX_TOKENS_ALIASES):
            raise RunError(
                f"a request to {request.model!r} has no max_tokens, so that its cost has no bound:"
                " set it in the sampling arguments (of a judge: judge_sampling_args), or leave out"
                " --max-cost and --max-total-tokens"
            )
        for name, values in numbers.items():
            if any(type(value) is not int or value < 1 for value in values):
                raise _unbounded(request, f"{name}={values[-1]!r}")
        if isinstance(fields.get("extra_body"), Mapping):
            raise _unbounded(request, "an extra_body within its extra_body")
        num_images, image_chars = _images(request)
        limit = max(max(numbers[name], default=1) for name in MAX_TOKENS_ALIASES)
        copies = max(max(numbers[name], default=1) for name in ("n", "best_of"))
        read = len(encode(fields)) - image_chars + num_images * IMAGE_TOKENS + TEMPLATE_TOKENS
        sampled = limit * copies
        return Amount(read + sampled, self._usd(client, request.model, read, sampled))

    def cost(self, client: object, request: ModelRequest, response: Response) -> Amount | None:
        """What the server counted; None when it did not."""
        usage = response.usage
        if not usage.prompt_tokens:
            return None
        usd = self._usd(client, request.model, usage.prompt_tokens, usage.completion_tokens)
        return Amount(usage.total_tokens, usd)

    def _usd(self, client: object, model: str, read: int, sampled: int) -> float:
        by_field = prices_of(client)
        if by_field is None:
            prices = self.prices.get(model)
        else:
            prices = [by_field[name] for name in PRICE_FIELDS]
        if prices is not None:
            return (read * prices[0] + sampled * prices[1]) / 1e6
        if self.max_cost_usd is None:
            return 0.0
        raise RunError(
            f"{model!r} at {getattr(client, 'base_url', None) or client!r} has no price, so that"
            " its cost is unknown: give both prices in the endpoint registry or the ClientConfig"
            " (usd_per_million_input_tokens, usd_per_million_output_tokens), or limit"
            " max_total_tokens (--max-total-tokens) instead"
        )

    def summary(self) -> dict[str, object]:
        """``usd tokens requests lost`` so far, and the limits; for the metadata of a run."""
        return {
            "usd": round(self.spent.usd, 9),
            "tokens": self.spent.tokens,
            "requests": self.num_requests,
            "lost": self.num_lost,
            "max_cost_usd": self.max_cost_usd,
            "max_total_tokens": self.max_total_tokens,
        }


def metered(
    client: object, request: ModelRequest, send: Callable[[], Awaitable[Response]]
) -> Callable[[], Awaitable[Response]]:
    """``send``, one attempt of a request, within the current budget; unchanged without a budget."""
    budget = _current.get()
    if budget is None:
        return send

    async def paid() -> Response:
        bound = budget.bound(client, request)
        least = budget.bound(client, replace(request, prompt="", tools=()))
        number = await budget.reserve(bound, least)
        try:
            response = await send()
            amount = budget.cost(client, request, response)
        except VerifiersError as error:
            status = getattr(error, "status", None)
            if status not in (None, 200):  # the server refused it
                await budget.settle(number, Amount())
            else:
                budget.lose(number)
            raise
        except BaseException:  # cancelled, or a fault of the client; raised again
            budget.lose(number)
            raise
        if amount is None:
            budget.lose(number)
        else:
            await budget.settle(number, amount)
        return response

    return paid


def is_metered(client: object) -> bool:
    """Whether the requests of a client are metered: those of this package are, others send theirs
    themselves."""
    members = getattr(client, "members", None)
    if members is not None:
        return all(is_metered(member) for member, _ in members)
    return bool(getattr(client, "is_metered", False))


def check_metered(client: object) -> None:
    """*Raises* RunError when a budget is current and the client is not metered."""
    if _current.get() is not None and not is_metered(client):
        raise RunError(
            f"{type(client).__name__} sends its requests itself, so that max_cost_usd and"
            " max_total_tokens cannot limit them; pass OpenAI(), a ClientConfig or another client"
            " that as_client makes"
        )


def _images(request: ModelRequest) -> tuple[int, int]:
    """(number of images in a request, characters of their addresses). *Raises* ModelRefused for
    what is neither text nor an image."""
    messages = request.prompt if isinstance(request.prompt, list) else ()
    contents = [message.get("content") for message in messages]
    num_images = num_chars = 0
    for part in (part for content in contents if isinstance(content, list) for part in content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXTS:
            continue
        image = part.get("image_url") if kind == "image_url" else None
        url = image.get("url") if isinstance(image, Mapping) else image
        if not isinstance(url, str) or not url.startswith(_IMAGES):
            raise _unbounded(request, "audio, or another part that is neither text nor an image")
        num_images, num_chars = num_images + 1, num_chars + len(url)
    return num_images, num_chars


def _unbounded(request: ModelRequest, what: str) -> ModelRefused:
    return ModelRefused(
        f"a request to {request.model!r} has {what}, whose cost has no bound here: leave out"
        " --max-cost and --max-total-tokens"
    )
