"""``TeacherContext``: which teacher scores a rollout, and the prompt that it reads.

The context of ``algorithm.contexts`` is rendered once more with the messages of the first prompt of
a sample, by the chat template; what follows the first prompt stays token by token as it was
sampled. A prompt that the template does not render to the very tokens that were sampled from is
refused: the teacher would read another text than the policy, beside the context.

Contexts are derived from the rollouts whenever a batch is built, and are in no checkpoint: a
function that gives another context for the same group makes a resumed batch another.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verifiers.clients.payload import chat_messages
from verifiers.data.messages import message_text, normalize_messages
from verifiers.errors import ConfigError
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.contexts import CONTEXTS
from verifiers_trainer.algorithm.group import Group
from verifiers_trainer.algorithm.registry import call, name_and_position
from verifiers_trainer.algorithm.samples import RolloutSamples, Sample
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat, Tokenizer
from verifiers_trainer.engines.processing import Processing
from verifiers_trainer.pipeline import subclass_hooks
from verifiers_trainer.settings.config import RLConfig


class TeacherContext:
    """The ``TeacherPrompts`` of these settings; ``room``: the most tokens that a teacher may read."""

    def __init__(
        self,
        config: RLConfig,
        tokenizer: Tokenizer,
        processing: Processing | None = None,
        room: int | None = None,
    ):
        self._tasks = list(config.teachers)
        self._function: Callable[..., object] | None = None
        if config.teacher_context is not None:
            self._function = CONTEXTS.resolve(config.teacher_context)
        sampling = config.sampling_args
        extra_body = {**sampling, **(sampling.get("extra_body") or {})}
        self._variables = json.dumps(extra_body.get("chat_template_kwargs") or {}).encode()
        self._chat, self._room = ChatFormat(tokenizer, processing=processing), room

    @classmethod
    def of(
        cls,
        config: RLConfig,
        tokenizer: Tokenizer,
        processing: Processing | None = None,
        room: int | None = None,
    ) -> TeacherContext | None:
        """None where one teacher reads what the policy read."""
        if config.teacher_context is None and not isinstance(config.teacher, dict):
            return None
        return cls(config, tokenizer, processing, room)

    def __call__(
        self, group: Group, number: int, turns: Sequence[Turn], samples: RolloutSamples
    ) -> RolloutSamples:
        """The ``samples`` of ``turns``, with their teacher and the prompt that it reads.

        Raises ConfigError for a task without a teacher, and for a context that cannot be used.
        """
        rollout = group.rollouts[number]
        teacher = self._teacher_of(group, rollout.row)
        arguments = {"row": rollout.row, "group": group, "rollout": rollout}
        context = self._context(arguments) if samples.samples else None
        tools = rollout.tool_defs or None
        scored = tuple(
            replace(
                sample,
                teacher=teacher,
                teacher_prompt=self._prompt(sample, turns, context, tools) if context else None,
            )
            for sample in samples.samples
        )
        return replace(samples, samples=scored)

    def _teacher_of(self, group: Group, row: Mapping[str, object]) -> int:
        if self._tasks == [""]:
            return 0
        task = row.get("task", "")
        for name in (task, group.env):
            if name in self._tasks:
                return self._tasks.index(name)
        raise ConfigError(
            f"the example {group.example_id} has the task {task!r}, and teacher has"
            f" {', '.join(self._tasks)}: add a teacher for it",
            key="teacher",
        )

    def _context(self, arguments: Mapping[str, object]) -> Any:
        """The messages or the text of the author's function. Raises ConfigError."""
        if self._function is None:
            return None
        function = self._function
        positional, keywords = subclass_hooks.arguments_for(function, arguments)
        value = call("teacher_context", function, *positional, **keywords)
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()
            raise ConfigError(
                f"the teacher_context {name_and_position(function)} is async, and it is called while"
                " a batch is built: let the rubric ask the judge and write its words to the state,"
                " and return them from a plain function",
                key="teacher_context",
            )
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, Sequence):
            return normalize_messages(list(value)) if len(value) else None
        raise ConfigError(
            f"the teacher_context {name_and_position(function)} returned"
            f" {type(value).__name__}: return messages, a text, or None",
            key="teacher_context",
        )

    def _prompt(
        self, sample: Sample, turns: Sequence[Turn], context: object, tools: object
    ) -> np.ndarray | None:
        """int32 [P], the first prompt of a sample with its context."""
        if sample.images:
            raise ConfigError(
                "teacher_context is for prompts of text, and this prompt has images: leave it out",
                key="teacher_context",
            )
        prompt = turns[sample.turns[0][0]].prompt
        if isinstance(prompt, str):
            if not isinstance(context, str):
                raise ConfigError(
                    "teacher_context returned messages, and the prompt is plain text: return a"
                    " text, which stands before it",
                    key="teacher_context",
                )
            plain, longer = self._chat.encode(prompt), self._chat.encode(context + prompt)
        else:
            messages = list(chat_messages(prompt))
            plain = self._rendered(messages, tools)
            longer = self._rendered(with_context(messages, context), tools)
        sampled = sample.token_ids[: sample.num_prompt]
        if not np.array_equal(plain, sampled):
            raise ConfigError(
                "teacher_context cannot be put before a prompt that the trainer's chat template"
                f" renders to other tokens ({len(plain)}) than it was sampled from"
                f" ({len(sampled)}): sample with the trainer's template and tokenizer, without"
                " cutting prompts",
                key="teacher_context",
            )
        length = sample.num_tokens - len(sampled) + len(longer)
        if self._room is not None and length > self._room:
            raise ConfigError(
                f"the teacher would read {length} tokens with its context, and has positions for"
                f" {self._room}: return a shorter context, or lower max_seq_len",
                key="teacher_context",
            )
        return longer

    def _rendered(self, messages: list[object], tools: Any) -> np.ndarray:
        encoded = None if tools is None else json.dumps(list(tools)).encode()
        try:
            return self._chat.prompt(json.dumps(messages).encode(), encoded, self._variables).ids
        except BadRequest as error:
            raise ConfigError(
                f"teacher_context made a prompt that cannot be rendered: {error}",
                key="teacher_context",
            ) from error


def with_context(messages: list[Any], context: Any) -> list[Any]:
    """The messages of a prompt with a context: messages stand before those that are not of the
    system, a text ends the last one.

    >>> with_context([{"role": "user", "content": "2 + 2"}], "It is 4.")
    [{'role': 'user', 'content': '2 + 2\\n\\nIt is 4.'}]
    """
    if isinstance(context, str):
        last = messages[-1]
        text = message_text(last)
        return [*messages[:-1], {**last, "content": f"{text}\n\n{context}" if text else context}]
    num_system = 0
    while num_system < len(messages) and messages[num_system]["role"] in ("system", "developer"):
        num_system += 1
    return [*messages[:num_system], *context, *messages[num_system:]]
