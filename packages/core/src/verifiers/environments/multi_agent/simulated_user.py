"""``SimulatedUserEnv``: an assistant talks to a user that a model simulates, who knows what it must
find out.

The design of tau-bench (Yao et al. 2024): the row has private instructions for the user, the
conversation ends when the user writes an agreed mark, and a rubric looks at what the assistant
achieved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from verifiers.data.messages import message_text
from verifiers.data.text import split_reasoning
from verifiers.environments.keywords import MultiTurnOptions
from verifiers.environments.multi_agent.env import MultiAgentEnv, Role, role_of
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import setup
from verifiers.rollouts.state import State
from verifiers.runtime.signatures import spell_out
from verifiers.types import Message, Messages, SystemMessage, UserMessage

USER_PROMPT = """\
You are a user who talks to an assistant. Your situation: {instructions}
Write one short message at a time, as the user. Do not repeat your situation at once: answer what you are asked, and \
make up nothing that it does not contain. When the matter is settled, or cannot be, reply with {end_mark} alone."""

FIRST_REQUEST = "Begin the conversation."
"""What the simulated user is asked for its first message; most chat templates need a user message
there."""


class SimulatedUserEnv(MultiAgentEnv):
    """A user, played by a client, and an assistant, which is trained: ``roles`` in this order.

    A row has ``info["instructions"]``, which the user alone sees. Its prompt, where it has a user
    message, is the user's first message; otherwise the user writes it. The conversation ends with a
    reply of the user that contains ``end_mark``, or after ``max_turns`` turns of both. Override
    ``user_prompt`` for another kind of user.

    *Raises* ConfigError for other than two roles and an empty ``end_mark``; a row without
    instructions is an error of its rollout.

    >>> from verifiers.testing import ScriptedClient
    >>> user = vf.Role("user", client=ScriptedClient(["To Rome, please.", "[END]"]))
    >>> rows = [{"question": "Book me a train.", "info": {"instructions": "You want to go to Rome."}}]
    >>> env = vf.SimulatedUserEnv([user, "assistant"], dataset=rows, max_turns=8)
    >>> output = env.evaluate(ScriptedClient(["Where to?", "Booked: Rome."]), "m").outputs[0]
    >>> [(message.name, message.content) for message in output.completion]
    [('assistant', 'Where to?'), ('user', 'To Rome, please.'), ('assistant', 'Booked: Rome.'),
    ('user', '[END]')]
    """

    @spell_out(MultiTurnOptions, MultiAgentEnv.__init__)
    def __init__(
        self,
        roles: Sequence[Role | str] = ("user", "assistant"),
        trained_roles: Sequence[str] | None = None,
        *,
        end_mark: str = "[END]",
        **parameters: Unpack[MultiTurnOptions],
    ):
        super().__init__(roles, trained_roles, **parameters)
        if len(self.roles) != 2:
            raise ConfigError("roles takes two: the user, then the assistant", key="roles")
        if not end_mark.strip():
            raise ConfigError(
                "end_mark is empty, which every reply contains: use a text such as [END]",
                key="end_mark",
            )
        self.user, self.assistant = self.roles
        self.end_mark = end_mark
        # a user without a client is the same model, and still not what is trained
        if trained_roles is None:
            self.trained_roles = tuple(
                name for name in self.trained_roles if name == self.assistant
            )

    def user_prompt(self, row: Mapping[str, Any]) -> str:
        """Return the system prompt of the simulated user: its role's own, or ``USER_PROMPT``, with
        the instructions."""
        instructions = (row.get("info") or {}).get("instructions")
        if not instructions:
            raise ValueError(f'the row has no info["instructions"] for the role {self.user!r}')
        prompt = self.roles[self.user].system_prompt or USER_PROMPT
        return prompt.replace("{instructions}", instructions).replace("{end_mark}", self.end_mark)

    # --- one rollout ------------------------------------------------------------------------------

    @setup(priority=90)
    def open_conversation(self, state: State) -> None:
        """Give the user its instructions, and the first message if the row has any."""
        first = [message for message in state["prompt"] if message["role"] == "user"]
        state["user_begins"] = not first
        view = [SystemMessage(self.user_prompt(state)), UserMessage(FIRST_REQUEST)]
        state["views"][self.user] = view + [
            Message({**message, "role": "assistant"}) for message in first
        ]

    def next_role(self, state: State) -> str | None:
        """User and assistant in turn, until the user ends the conversation."""
        turns = state["trajectory"]
        if not turns:
            return self.user if state["user_begins"] else self.assistant
        if role_of(turns[-1]) == self.assistant:
            return self.user
        _, spoken_text = split_reasoning(message_text(turns[-1]["completion"][0]))
        return None if self.end_mark in spoken_text else self.assistant

    def observe(self, state: State, role: str) -> Messages | str | None:
        """The user is shown what the assistant says, never the row's prompt."""
        if role == self.user and not state["trajectory"]:
            return None
        if role == self.user:
            return split_reasoning(message_text(state["trajectory"][-1]["completion"][0]))[1]
        messages: Messages = super().observe(state, role)
        return messages
