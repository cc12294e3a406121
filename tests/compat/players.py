"""One scripted model per package of ``packages``: a function of the request, right in some rows and
wrong in others."""

from __future__ import annotations

import re
from typing import Any

import verifiers as vf


def last(request: Any) -> str:
    """The text of the newest user message."""
    return next(
        message["content"] for message in reversed(request.prompt) if message["role"] == "user"
    )


def turns(request: Any) -> int:
    """How often the model has spoken."""
    return sum(message["role"] == "assistant" for message in request.prompt)


def call(name: str, call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    """A message that calls one tool."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [vf.ToolCall(call_id, name, arguments)],
    }


def tagged(answer: str) -> str:
    return f"<think>hm</think><answer>{answer}</answer>"


def boxed_sums(request: Any) -> str:
    """Solves three operands as it was asked to; of two operands it does not think."""
    numbers = [int(number) for number in re.findall(r"\d+", last(request))]
    if len(numbers) == 3:
        return f"<think>let me see</think>So \\boxed{{{numbers[0] - numbers[1] - numbers[2]}}}"
    return f"\\boxed{{{numbers[0] - numbers[1]}}}"


def number_hunt(request: Any) -> str:
    """Halves what is left."""
    low, high = 1, 100
    for message in request.prompt:
        if match := re.match(r"(Higher|Lower) than (\d+)", message["content"]):
            guess = int(match[2])
            low, high = (guess + 1, high) if match[1] == "Higher" else (low, guess - 1)
    return f"<guess>{(low + high) // 2}</guess>"


def capital_guess(request: Any) -> Any:
    """Asks for the letter, guesses wrongly, then right."""
    country = request.prompt[1]["content"].split()[-1].rstrip("?")
    capital = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo"}[country]
    return [call("first_letter", country=country), tagged("Rome"), tagged(capital)][turns(request)]


def shop_tools(request: Any) -> Any:
    """One tool after the other, both at once, and one that fails."""
    question = last(request)
    if "apples" in question:
        return [call("price_of", item="apple"), call("multiply", a=3, b=4), "TOTAL 12"][
            turns(request)
        ]
    if "cheeses" in question:
        both = [
            vf.ToolCall("c1", "price_of", {"item": "cheese"}),
            vf.ToolCall("c2", "multiply", {"a": 11}),
        ]
        return [both, "it is TOTAL 22"][turns(request)]
    return [call("price_of", item="pear"), "TOTAL 5"][turns(request)]


def note_keeper(request: Any) -> Any:
    """Writes the note, counts, ends."""
    text = request.prompt[0]["content"].removeprefix("Note: ")
    return [call("write_note", text=text), call("count_notes"), "done"][turns(request)]


def ledger_game(request: Any) -> Any:
    return call("add", amount=1)


def mixed_tasks(request: Any) -> str:
    """Counts, and writes capitals of three letters only."""
    text = last(request)
    if request.prompt[0]["content"].startswith("Count"):
        return f"<n>{len(text)}</n>"
    return text.upper() if len(text) == 3 else text


def answer_judge(request: Any) -> str:
    return {
        "Which planet is red?": "Mars",
        "How many moons has {Earth}?": "<think>Luna</think>one",
        "Is the sun a star?": "I would say that it certainly is one",
    }[last(request)]


def strict_judge(request: Any) -> str:
    """Says yes when what is given is what is expected, word for word."""
    fields = dict(line.split(": ", 1) for line in last(request).splitlines()[:3])
    return "Yes." if fields["Expected"] == fields["Given"] else "No."


def text_continuation(request: Any) -> str:
    """The next number."""
    return str(int(re.findall(r"\d+", request.prompt)[-1]) + 1)


def few_shot_tags(request: Any) -> str:
    return {
        "4": "<reasoning>2 * 2</reasoning><verdict>No</verdict>",
        "5": "<verdict>yes</verdict>",
        "91": "no, because 7 * 13",
    }[last(request)]


def self_review(request: Any) -> str:
    """Gets cats right the second time, and does not like fog."""
    text = last(request)
    if text.startswith("Review: "):
        return "good" if text.endswith("v2") else "add v2"
    return f"cats v{turns(request) + 1}" if "cats" in request.prompt[0]["content"] else "I give up"
