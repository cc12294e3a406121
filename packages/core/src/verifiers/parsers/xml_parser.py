"""``XMLParser``: fields in tags, ``<reasoning>…</reasoning><answer>…</answer>``, without an XML
engine.

Reasoning in ``<think>`` is the field ``think``; the other fields are read from what follows it.
Tags are matched literally and by plain search, so text is never executed as a pattern and 1 MB of
nested or unclosed tags costs milliseconds. Attributes, entities and nesting are not understood:
this is a convention for models, not XML.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from verifiers.data.messages import field as message_field
from verifiers.data.messages import message_text
from verifiers.data.text import CLOSE, OPEN, split_reasoning
from verifiers.errors import ConfigError
from verifiers.parsers.parser import Parser, identity

THINK = "think"


class XMLParser(Parser):
    """Reads ``fields`` from tags. A field is a name, or a tuple of alternatives of which the first
    is canonical.

    Args:
        fields: Names of the tags. A field is a name, or a tuple of alternatives of which the first
            is canonical.
        answer_field: The field that ``parse_answer`` returns.
        extract_fn: Function from the text of the answer to the answer; default: the text itself.
        last: ``parse_answer`` takes the last answer of a message, with which a model corrects
            itself. False: the first, as older versions did.

    Raises: ``ConfigError`` for an empty or a repeated name; ``TypeError`` for a name that is no
    string.

    >>> parser = XMLParser(["reasoning", ("answer", "result")])
    >>> parser.parse("<reasoning>two twos</reasoning><result> 4 </result>")
    namespace(reasoning='two twos', answer=None, result='4')
    >>> parser.parse_answer([{"role": "assistant", "content": "<answer>4</answer>"}])
    '4'
    >>> print(parser.get_format_str())
    <reasoning>
    ...
    </reasoning>
    <[ answer | result ]>
    ...
    </[ answer | result ]>
    """

    def __init__(
        self,
        fields: Sequence[str | tuple[str, ...]],
        answer_field: str = "answer",
        extract_fn: Callable[[str], object] = identity,
        last: bool = False,
    ):
        super().__init__(extract_fn)
        self.last = last
        if isinstance(fields, str):
            raise TypeError(f"XMLParser fields must be a list of names; write [{fields!r}]")
        self.field_sets: tuple[tuple[str, ...], ...] = tuple(
            _alternatives(field) for field in fields
        )
        self.answer_field = answer_field
        names = [name for names in self.field_sets for name in names]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ConfigError(
                f"XMLParser fields repeat {', '.join(sorted(repeated))}; every name may stand once"
            )

    def parse(self, text: str, strip: bool = True, last: bool = False) -> SimpleNamespace:
        """A namespace with one attribute per alternative: the content of its first occurrence, None
        when absent.

        ``last`` takes the last occurrence instead; ``strip=False`` keeps surrounding white space.
        """
        find = _last_content if last else _first_content
        _, reply = self._split(text)
        contents = {
            name: find(text if name == THINK else reply, name)
            for names in self.field_sets
            for name in names
        }
        if strip:
            contents = {name: content and content.strip() for name, content in contents.items()}
        return SimpleNamespace(**contents)

    def parse_answer(self, completion: Any) -> Any:
        """``extract_fn`` of the ``answer_field``: the last content in a text, the first in the
        newest message with the field, after its reasoning. None when nothing has it."""
        is_last = self.last or isinstance(completion, str)
        for message in reversed(self.get_assistant_messages(completion)):
            fields = self.parse(message_text(message), last=is_last)
            if (answer := getattr(fields, self.answer_field, None)) is not None:
                return self.extract_fn(answer)
        return None

    def _split(self, text: str) -> tuple[str, str]:
        """(Reasoning, where the fields other than ``think`` are read): a reply that begins with
        fields, and reasons after them, is read as it is."""
        reasoning, reply = split_reasoning(text)
        has_fields = any(map(reply.__contains__, self._tags))
        if not reasoning or text.lstrip().startswith(OPEN) or has_fields:
            return reasoning, reply
        return ("", text) if OPEN in text[: len(text) - len(reply)] else (reasoning, reply)

    @functools.cached_property
    def _tags(self) -> list[str]:
        """The opening tags of the fields other than ``think``."""
        return [f"<{name}>" for names in self.field_sets for name in names if name != THINK]

    def get_fields(self) -> list[str]:
        """The canonical field names, in order."""
        return [names[0] for names in self.field_sets]

    def get_format_str(self) -> str:
        """The format to show a model in a prompt; alternatives stand as ``[ a | b ]``."""
        tags = (
            names[0] if len(names) == 1 else f"[ {' | '.join(names)} ]" for names in self.field_sets
        )
        return "\n".join(f"<{tag}>\n...\n</{tag}>" for tag in tags)

    def format(self, **values: object) -> str:
        """The text that parses to ``values``, in canonical tags. Raises: ``ValueError`` for a
        missing or unknown field.

        >>> XMLParser(["answer"]).format(answer=4)
        '<answer>\\n4\\n</answer>'
        """
        blocks = []
        for names in self.field_sets:
            present = [name for name in names if name in values]
            if not present:
                raise ValueError(f"format() misses {' or '.join(map(repr, names))}")
            blocks.append(f"<{names[0]}>\n{values.pop(present[0])}\n</{names[0]}>")
        if values:
            raise ValueError(
                f"format() does not know {', '.join(map(repr, values))}; the fields are"
                f" {self.get_fields()}"
            )
        return "\n".join(blocks)

    def format_reward(self, completion: Any) -> float:
        """Mean over assistant messages of 0.4 · share of fields + 0.2 for a tag + 0.2 first + 0.2
        last.

        *Share*: of the fields with an opening or a closing tag; 0 unless any of them is complete.
        *First*: the text starts with a tag of the first field; *last*: it ends with a closing tag
        of the last. A message without any tag gets 0.0, and so does a completion without messages.
        If a field is named ``think``, ``reasoning_content`` counts as that field, at the start.
        """
        return self._mean_over_assistant_messages(completion, self._message_reward)

    def _message_reward(self, message: object) -> float:
        text = message_text(message).strip()
        reasoning, reply = self._split(text)
        if not any(THINK in names for names in self.field_sets):
            text = reply
        elif message_field(message, "reasoning_content") or (
            reasoning and not text.startswith(OPEN) and any(map(reply.__contains__, self._tags))
        ):  # the server has taken the block out, or the template has opened it
            text = f"{OPEN}{CLOSE}{reply}"

        def has_tag(name: str) -> bool:
            where = text if name == THINK else reply
            return f"<{name}>" in where or f"</{name}>" in where

        tagged = [any(map(has_tag, names)) for names in self.field_sets]
        if not any(tagged):
            return 0.0
        contents = vars(self.parse(text, strip=False)).values()
        is_complete = any(content is not None for content in contents)
        first = any(text.startswith(f"<{name}>") for name in self.field_sets[0])
        last = any(text.endswith(f"</{name}>") for name in self.field_sets[-1])
        return (4 * is_complete * sum(tagged) / len(tagged) + 2 + 2 * first + 2 * last) / 10


def _alternatives(field: object) -> tuple[str, ...]:
    names = tuple(field) if isinstance(field, tuple | list) else (field,)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"XMLParser field names are strings; found {name!r} ({type(name).__name__})"
            )
    if not names or not all(names):
        raise ConfigError(
            "XMLParser field names must not be empty: give a name, or a tuple of at least one name"
        )
    return names


def _first_content(text: str, tag: str) -> str | None:
    """What stands between the first opening tag and the closing tag next after it."""
    start = text.find(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    end = text.find(f"</{tag}>", start)
    return text[start:end] if end >= 0 else None


def _last_content(text: str, tag: str) -> str | None:
    """The same for the last of the contents that follow each other: an opening tag inside a content
    is part of it."""
    content, end = None, 0
    while (start := text.find(f"<{tag}>", end)) >= 0 and (
        close := text.find(f"</{tag}>", start)
    ) >= 0:
        content = text[start + len(tag) + 2 : close]
        end = close + len(tag) + 3
    return content
