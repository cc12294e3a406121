"""``MultiAgentEnv``: named roles take turns in one rollout, each with its own view, client and
reward.

A rollout stays one rollout, and its loop is ``rollouts.loop``: each turn belongs to a role. The
prompt of a turn is the **view** of its role: what ``observe`` has shown to that role, and its own
replies. Nothing else reaches it, so what one role was shown stays unknown to the others unless
``observe`` tells them.

A role without a client is played by the model of the run, which training trains; the turns of each
trained role become samples of their own, and their advantages compare the role's rewards among
siblings (``Rollout.of_role``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from verifiers.clients.protocol import Client, ClientLike
from verifiers.clients.resolve import as_client
from verifiers.data.messages import message_text, normalize_chat
from verifiers.data.text import split_reasoning
from verifiers.environments.keywords import MultiTurnOptions
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import Hook, maybe_await, setup, stop
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.runtime.signatures import spell_out
from verifiers.types import Message, Messages, Response, SystemMessage, UserMessage


@dataclass(frozen=True, slots=True)
class Role:
    """One of the roles of a ``MultiAgentEnv``.

    >>> vf.Role("user", system_prompt="You want a refund.", client="local", model="local").name
    'user'
    """

    name: str
    system_prompt: str | None = None
    """The first message of its view; None: the environment's ``system_prompt``."""
    client: ClientLike | None = None
    """Who plays it: a client as ``evaluate`` takes it, such as a ``ClientConfig``. None: the model
    of the run."""
    model: str | None = None
    """The model of ``client``; None: the only one of an endpoint or of this process, else the
    run's."""
    sampling_args: Mapping[str, Any] | None = None
    """Sampling arguments of its turns, over those of the run."""


class MultiAgentEnv(MultiTurnEnv):
    """An environment of several roles; subclasses may define ``next_role``, ``observe`` and
    ``after_turn``.

    ``roles``: ``Role`` objects or names, in the order in which they act. ``trained_roles``: names
    of the roles that training trains; default: those without a client.

    A reward function with the name of a role gives that role's reward: a metric, ``reward/<role>``
    in training. A role without a reward has the reward of the rollout. ``completion`` is the record
    of all turns, each message with the ``name`` of its role; ``state["views"][role]`` is what a
    role saw and said.

    *Raises* ConfigError for fewer than two roles, two of one name, and a trained role with a
    client.

    >>> from verifiers.testing import ScriptedClient
    >>> asker = vf.Role("asker", client=ScriptedClient(["Is it red?", "Is it blue?"]))
    >>> env = vf.MultiAgentEnv([asker, "knower"], max_turns=4, dataset=[{"question": "Guess the colour."}])
    >>> output = env.evaluate(ScriptedClient(["No.", "Yes."]), "m").outputs[0]
    >>> [(message.name, message.content) for message in output.completion]
    [('asker', 'Is it red?'), ('knower', 'No.'), ('asker', 'Is it blue?'), ('knower', 'Yes.')]
    """

    @spell_out(MultiTurnOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        roles: Sequence[Role | str],
        trained_roles: Sequence[str] | None = None,
        **parameters: Unpack[MultiTurnOptions],
    ):
        super().__init__(**parameters)
        if self.message_type != "chat":
            raise ConfigError(
                'roles talk in messages: MultiAgentEnv needs message_type="chat"',
                key="message_type",
            )
        self.roles = {role.name: role for role in (_as_role(role) for role in roles)}
        if len(self.roles) < 2 or len(self.roles) != len(roles):
            raise ConfigError(
                "MultiAgentEnv needs at least two roles, with different names", key="roles"
            )
        with_client = [role.name for role in self.roles.values() if role.client is not None]
        if trained_roles is None:
            trained_roles = [name for name in self.roles if name not in with_client]
        for name in trained_roles:
            if name not in self.roles or name in with_client:
                if name in with_client:
                    why = "has a client of its own"
                else:
                    why = f"is none of {', '.join(self.roles)}"
                raise ConfigError(f"trained_roles has {name!r}, which {why}", key="trained_roles")
        self.trained_roles = tuple(trained_roles)
        self._clients: dict[str, Client] = {}

    # --- methods to override ----------------------------------------------------------------------

    def next_role(self, state: State) -> Any:
        """Return the name of the role that acts next, None when the rollout is over. Default: in
        the order of roles.

        Called before each turn. Sync or async.
        """
        names = list(self.roles)
        return names[len(state["trajectory"]) % len(names)]

    def observe(self, state: State, role: str) -> Any:
        """Return what ``role`` is shown before its turn, beyond its view so far: messages, text, or
        None.

        Default: at first the row's prompt, and always the texts of the other roles since its last
        turn, each after the name of its role where there are more than two. Sync or async.
        """
        messages: list[Message] = []
        turns = [number for number, step in enumerate(state["trajectory"]) if role_of(step) == role]
        if not turns:
            messages += [message for message in state["prompt"] if message["role"] != "system"]
        for step in state["trajectory"][turns[-1] + 1 if turns else 0 :]:
            _, text = split_reasoning(message_text(step["completion"][0]))
            messages.append(
                UserMessage(f"{role_of(step)}: {text}" if len(self.roles) > 2 else text)
            )
        return messages

    def after_turn(self, state: State, role: str, message: Message) -> Any:
        """Called with the reply of ``role``, after it was recorded. Sync or async."""

    # --- one rollout ------------------------------------------------------------------------------

    @setup(priority=100)
    def open_views(self, state: State) -> None:
        """Give each role its view, which begins with its system prompt."""
        state["views"] = {}
        for role in self.roles:
            self.open_view(state, role)

    def open_view(self, state: State, role: str) -> None:
        """Give ``role`` a new view: its next turn begins a conversation."""
        role_prompt = self.roles[role].system_prompt
        prompt = self.system_prompt if role_prompt is None else role_prompt
        state["views"][role] = [SystemMessage(prompt)] if prompt else []

    @stop(priority=-100)
    async def no_next_role(self, state: State) -> bool:
        """Whether no role acts next. Keeps the role that does as ``state["role"]``."""
        role = await maybe_await(self.next_role(state))
        if role is not None and role not in self.roles:
            raise ConfigError(f"next_role returned {role!r}; the roles are {', '.join(self.roles)}")
        state["role"] = role
        return role is None

    async def get_prompt_messages(self, state: State) -> Messages:
        """The view of the role that acts next, with what ``observe`` returns for it."""
        role = state["role"]
        with Hook(state, "observe", timing=None):
            observed = await maybe_await(self.observe(state, role))
            if observed is not None:
                state["views"][role] += normalize_chat(observed)
        view: Messages = list(state["views"][role])
        return view

    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        client: ClientLike | None = None,
        model: str | None = None,
        tool_defs: Sequence[Mapping[str, object]] | None = None,
        sampling_args: Mapping[str, object] | None = None,
    ) -> Response:
        """A completion by the client of the role that acts, with its model and its sampling
        arguments."""
        role = self.roles[state["role"]]
        if client is None and role.client is not None:
            if role.name not in self._clients:
                self._clients[role.name] = as_client(role.client)
            client = self._clients[role.name]
            model = model or role.model or getattr(client, "model", None)
        arguments = {**(role.sampling_args or {}), **(sampling_args or {})}
        return await super().get_model_response(
            state, prompt, client, model or role.model, tool_defs, arguments
        )

    def acting_role(self, state: State) -> str | None:
        """The role that acts, also in the request (``ModelRequest.role``)."""
        role: str | None = state["role"]
        return role

    def continued_step(self, state: State) -> TrajectoryStep | None:
        """The newest step of the role that acts; its conversation continues no other."""
        return next(
            (step for step in reversed(state["trajectory"]) if role_of(step) == state["role"]), None
        )

    def add_trajectory_step(self, state: State, step: TrajectoryStep) -> Any:
        """Append ``step`` with its role, and whether it is trained."""
        role = state["role"]
        is_trained = role in self.trained_roles
        step["extras"] |= {"role": role, "is_trained": is_trained} | (
            {"rewarded_role": role} if is_trained else {}
        )
        return super().add_trajectory_step(state, step)

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: Response
    ) -> None:
        """Record the turn, add the reply to the role's view, and call ``after_turn``."""
        await super().add_model_response(state, prompt_messages, response)
        state["views"][state["role"]].append(response.message)
        with Hook(state, "after_turn", timing=None):
            await maybe_await(self.after_turn(state, state["role"], response.message))

    def render_completion(self, state: State) -> Any:
        """Set ``state["completion"]``: the reply of each turn in order, with the name
        of its role."""
        final = state["final_env_response"]
        replies = [
            Message({**step["completion"][0], "name": role_of(step)})
            for step in state["trajectory"]
        ]
        state["completion"] = replies + (normalize_chat(final) if final is not None else [])
        for step in state["trajectory"]:
            step.settle()


def role_of(step: TrajectoryStep) -> str:
    """The role that took a turn; "" if there are none."""
    role: str = step["extras"].get("role", "")
    return role


def _as_role(role: Role | str) -> Role:
    if isinstance(role, str):
        role = Role(role)
    if not isinstance(role, Role) or not role.name:
        raise ConfigError(f"roles takes vf.Role objects and names, not {role!r}", key="roles")
    return role
