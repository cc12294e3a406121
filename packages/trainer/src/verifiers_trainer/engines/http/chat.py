"""Render conversations to prompt tokens, and decode tokens to text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from verifiers.data.chat_template import rendered
from verifiers.data.images import image_bytes, image_parts
from verifiers.data.text import CLOSE, OPEN
from verifiers.errors import ConfigError
from verifiers.runtime.decoding import decode_message
from verifiers_trainer.engines.processing import Images, Processing
from verifiers_trainer.engines.requests import BadRequest as BadRequest

_CACHED_PROMPTS = 1024
_CACHED_BYTES = 16_384
_SHORT_CHARS = 2**16
"""A text that is tokenized without a look at its length."""
OVERLONG = "context_length_exceeded"
"""Code of the error of a prompt that does not fit."""
_LOOK_CHARS = 16
"""Characters for each token of the limit that are looked at first, four times the usual."""
TAGS = (OPEN, CLOSE, "<tool_call>", "</tool_call>", "<|python_tag|>")
"""What reasoning and tool calls are read by; some tokenizers have them as special tokens."""
_USUAL_ROLES = frozenset(("system", "user", "assistant", "tool"))
_MARK = "\u2402vf-role\u2403"
_RESERVED = frozenset(
    "conversation messages tools documents chat_template tokenize tokenizer_kwargs"
    " add_generation_prompt padding continue_final_message truncation max_length return_tensors"
    " return_dict return_assistant_tokens_mask".split()
)
"""Arguments of ``apply_chat_template`` that are not the template's variables."""


def overlong(num_tokens: object, max_seq_len: int) -> BadRequest:
    """The error of a prompt that does not fit, in words that clients recognise."""
    return BadRequest(
        f"This model's maximum context length is {max_seq_len} tokens. However, your prompt has"
        f" {num_tokens} tokens, which leaves no room for a completion. Please reduce its length.",
        "prompt",
        code=OVERLONG,
    )


class Tokenizer(Protocol):
    """What rendering and reading of texts need of a tokenizer of transformers."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any: ...

    def __len__(self) -> int: ...

    @property
    def decode(self) -> Callable[..., Any]: ...

    @property
    def apply_chat_template(self) -> Callable[..., Any]: ...

    @property
    def convert_tokens_to_ids(self) -> Callable[..., Any]: ...

    @property
    def get_vocab(self) -> Callable[[], dict[str, int]]: ...

    @property
    def all_special_tokens(self) -> list[str]: ...

    @property
    def eos_token(self) -> Any: ...


class Prompt(NamedTuple):
    """What a model is asked: int32 [P], and the files of the images whose placeholders are in it."""

    ids: np.ndarray
    images: Images = ()


class ChatFormat:
    """Renders prompts and decodes completions for the endpoint.

    Siblings of a group send the same prompt, so rendered prompts are cached by the bytes of the
    request. Threads may render and decode at the same time. ``max_seq_len``: of the model; a text
    that is longer for certain is refused without reading all of it, which takes seconds and
    gigabytes. ``processing``: of a model that sees; without it, images are refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_seq_len: int | None = None,
        processing: Processing | None = None,
    ):
        self._tokenizer, self._max_seq_len = tokenizer, max_seq_len
        self._processing = processing
        self.piece = lru_cache(maxsize=None)(lambda token: str(tokenizer.decode([token])))
        """The text of a single token."""
        self._cached_prompt = lru_cache(maxsize=_CACHED_PROMPTS)(self._render)

    @property
    def never(self) -> tuple[int, ...]:
        """Ids that a model may not sample: the placeholders of images."""
        return () if self._processing is None else self._processing.never

    def prompt(
        self,
        messages: bytes,
        tools: bytes | None,
        template_kwargs: bytes = b"null",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        is_truncated: bool = False,
    ) -> Prompt:
        """The prompt of the JSON of ``messages``, ``tools`` and the template's
        variables.

        Its ids end with the generation prompt, unless ``add_generation_prompt`` is off, or with
        ``continue_final_message`` inside the last message. ``is_truncated``: the caller takes a part
        of them. Raises BadRequest when the template fails.
        """
        is_long = len(messages) + len(tools or b"") + len(template_kwargs) > _CACHED_BYTES
        render = self._render if is_long else self._cached_prompt
        ends = add_generation_prompt, continue_final_message
        return render(messages, tools, template_kwargs, *ends, is_truncated)

    def prompt_ids(self, messages: bytes, tools: bytes | None) -> np.ndarray:
        """The ids of `prompt`, int32 [P], with the generation prompt."""
        return self.prompt(messages, tools).ids

    def with_images(self, ids: np.ndarray, urls: Sequence[str]) -> Prompt:
        """A prompt of token ids with the images of these data URLs. Raises BadRequest unless the
        ids have their placeholders."""
        if self._processing is None:
            raise BadRequest("this model takes no images", "images")
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        images = self.images_of([{"role": "user", "content": parts}])
        self._processing.check(ids, images)
        return Prompt(ids, images)

    def encode(self, text: str, is_truncated: bool = False) -> np.ndarray:
        """int32 [P] of plain text, with the special tokens the tokenizer puts around it."""
        self._check_length(text, is_truncated)
        return np.array(self._tokenizer(text)["input_ids"], np.int32)

    def _check_length(self, text: str, is_truncated: bool) -> None:
        """Raises BadRequest for a text that has too many tokens for certain: it is longer than so many
        of the longest, or its beginning alone has twice as many."""
        limit = self._max_seq_len
        if limit is None or len(text) <= _SHORT_CHARS:
            return
        if len(text) > limit * self._longest_token:
            raise overlong(f"more than {len(text) // self._longest_token}", limit)
        beginning = text[: limit * _LOOK_CHARS]
        if not is_truncated and len(beginning) < len(text):
            num_tokens = len(self._tokenizer(beginning, add_special_tokens=False)["input_ids"])
            if num_tokens > 2 * limit:
                raise overlong(f"more than {num_tokens}", limit)

    @cached_property
    def _longest_token(self) -> int:
        """Characters."""
        return max(map(len, self._tokenizer.get_vocab()))

    def decode(
        self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True
    ) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_tags(self) -> dict[int, str]:
        """Token id -> tag, of the ``TAGS`` that decoding leaves out as special tokens."""
        ids = self._tokenizer.convert_tokens_to_ids(list(TAGS))
        return {
            token: tag
            for token, tag in zip(ids, TAGS, strict=True)
            if token is not None
            and self.decode([token], skip_special_tokens=False) == tag
            and self.decode([token]) == ""
        }

    def decode_with_tags(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens, but for the tags of reasoning and calls."""
        tags, pieces, start = self.special_tags, [], 0
        if tags:
            for index, token in enumerate(token_ids):
                if token in tags:
                    pieces += [self.decode(token_ids[start:index]), tags[token]]
                    start = index + 1
        return "".join([*pieces, self.decode(token_ids[start:])])

    def opens_thought(self, prompt_ids: np.ndarray) -> bool:
        """Whether the prompt ends inside a ``<think>`` block opened by the template."""
        return (
            self.decode(prompt_ids[-8:].tolist(), skip_special_tokens=False).rstrip().endswith(OPEN)
        )

    def _render(
        self,
        messages_json: bytes,
        tools_json: bytes | None,
        kwargs_json: bytes,
        answer: bool,
        unfinished: bool,
        is_truncated: bool,
    ) -> Prompt:
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise BadRequest(
                "the tokenizer has no chat template; set tokenizer.chat_template", "messages"
            )
        messages = _list_of_objects(messages_json, "messages")
        images = self.images_of(messages)
        messages = [plain_message(message, self._processing) for message in messages]
        tools = _list_of_objects(tools_json, "tools") if tools_json is not None else None
        variables = _template_variables(kwargs_json)
        if unfinished and answer:
            raise BadRequest(
                "continue_final_message needs add_generation_prompt=false", "continue_final_message"
            )
        text = rendered_text(
            self._tokenizer,
            messages,
            variables,
            tools=tools or None,
            add_generation_prompt=answer,
            continue_final_message=unfinished,
        )
        self._check_length(text, is_truncated)
        return Prompt(ids_of(text, images, self._tokenizer, self._processing), images)

    def images_of(self, messages: list[Any]) -> Images:
        """`images_of`; none for a model of text."""
        return () if self._processing is None else images_of(messages)


def images_of(messages: Sequence[Mapping[str, object]]) -> Images:
    """The files of the images in messages. *Raises* BadRequest for one that is not here."""
    try:
        return tuple(map(image_bytes, image_parts(messages)))
    except ConfigError as error:
        raise BadRequest(str(error), "messages") from error


def ids_of(
    text: str, images: Images, tokenizer: Tokenizer, processing: Processing | None
) -> np.ndarray:
    """int32 [P] of a rendered text, the placeholders of its images expanded."""
    if processing is not None:
        return processing.ids(text, images)
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def rendered_text(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    variables: Mapping[str, object] | None = None,
    **options: object,
) -> str:
    """A conversation as text; a ``developer`` is the system of a template that has none.

    Raises BadRequest when the template fails, and when it leaves out all messages of a role.
    """
    for role in {message.get("role") for message in messages} - _USUAL_ROLES:
        if not shows_role(tokenizer, role):
            instead = "system" if role == "developer" else None
            if instead is None or not shows_role(tokenizer, instead):
                raise BadRequest(
                    f"the chat template leaves out messages of the role {role!r}: use system, user,"
                    " assistant or tool, or another template",
                    "messages",
                )
            messages = [
                {**message, "role": instead} if message.get("role") == role else message
                for message in messages
            ]
    try:
        text: str = rendered(tokenizer, messages, tokenize=False, **options, **(variables or {}))
    except Exception as error:  # a template is a program and may raise anything
        message = f"the chat template refuses these messages: {type(error).__name__}: {error}"
        raise BadRequest(message, "messages") from error
    return text


def shows_role(tokenizer: Tokenizer, role: object) -> bool:
    """Whether the chat template renders the text of a message of this role."""
    talk = [{"role": role, "content": _MARK}, {"role": "user", "content": "Well?"}]
    try:
        return _MARK in rendered(tokenizer, talk, tokenize=False, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  a template is a program and may raise anything
        return False


def template_source(tokenizer: object) -> str | None:
    """The text of the chat template, of several the one for tools; None without a template."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    return template


def shows_tools(tokenizer: Tokenizer) -> bool | None:
    """Whether the chat template renders tools: the prompts with and without a tool differ.

    None without a template, or when it fails on this conversation.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    function = {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {}},
    }
    messages = [{"role": "user", "content": "Look."}]
    try:
        with_tool, without = (
            rendered_text(tokenizer, messages, tools=tools, add_generation_prompt=True)
            for tools in ([{"type": "function", "function": function}], None)
        )
    except BadRequest:
        return None
    return with_tool != without


def _decoded(encoded: bytes, field: str) -> Any:
    try:
        return decode_message(encoded)
    except ValueError as error:
        raise BadRequest(f"{field} cannot be read: {error}", field) from error


def _template_variables(encoded: bytes) -> dict[str, object]:
    variables = _decoded(encoded, "chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise BadRequest("chat_template_kwargs must be an object", "chat_template_kwargs")
    if reserved := sorted(_RESERVED & variables.keys()):
        raise BadRequest(
            f"chat_template_kwargs must not set {', '.join(reserved)}", "chat_template_kwargs"
        )
    return variables


def _list_of_objects(encoded: bytes, field: str) -> list[dict]:
    value = _decoded(encoded, field)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise BadRequest(f"{field} must be a list of objects", field)
    if field == "messages" and not value:
        raise BadRequest("messages must not be empty", field)
    return value


def plain_message(message: dict, processing: Processing | None = None) -> dict:
    """A message for templates: content as text, or as parts for a model that sees, tool-call
    arguments as objects."""
    plain = {key: value for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise BadRequest("each of messages needs a role", "messages")
    to_plain = _plain_text if processing is None else processing.content
    plain["content"] = to_plain(plain.get("content", ""))
    if "tool_calls" in plain:
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _plain_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    if len(texts) != len(parts):
        raise BadRequest(
            "messages hold content that is not text, and only text is taken here: by a model of"
            " text, and by history='exact' on a vLLM server",
            "messages",
        )
    return "\n".join(texts)  # as vLLM, and as rewards read them (data.messages.message_text)


def _plain_call(call: dict) -> dict:
    function = dict(call.get("function") or {})
    try:
        arguments = decode_message(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = function["arguments"]  # invalid JSON from the model is rendered unchanged
    return {**call, "function": {**function, "arguments": arguments}}
