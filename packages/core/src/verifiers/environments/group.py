"""``EnvGroup``: several environments as one; each row is run and scored by the environment it came
from.

Each member keeps its system prompt, parser, rubric, tools, limits and hooks; the group concatenates
the data and routes each row to a member. The route is stored in the row, in ``info["env_id"]`` and
``task``, so it survives a trainer or a file. Metrics that a member lacks are absent from its
rollouts, not 0.

The runner calls ``for_row`` and continues with the member; this module neither runs nor scores
rollouts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Concatenate, ParamSpec, Unpack

from verifiers.clients.protocol import ClientLike
from verifiers.data.examples import Example, Table
from verifiers.data.row_format import copy_row, format_row
from verifiers.environments.base import Environment
from verifiers.environments.group_rubric import EnvGroupRubric
from verifiers.environments.keywords import RunDefaults
from verifiers.errors import ConfigError, EnvironmentFault
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import closest
from verifiers.storage.identity import Free

P = ParamSpec("P")
OF_THE_GROUP = ("set_kwargs", "set_keep_rows", "set_keep_eval_rows")
"""Setters that do not go to the members as they are: the rows are those of the group."""
OF_THE_MEMBERS = (
    "dataset eval_dataset system_prompt few_shot parser rubric message_type tool_defs sampling_args"
    " max_seq_len timeout_seconds oracle"
).split()


class GroupOptions(RunDefaults, total=False):
    """Parameters of ``Environment`` that apply to the group itself."""

    env_id: str | None
    env_args: Mapping[str, Any] | None
    interleaved_rollouts: bool
    score_rollouts: bool
    pass_threshold: float | None


def _forwarded(
    setter: Callable[Concatenate[Environment, P], None],
) -> Callable[Concatenate[EnvGroup, P], None]:
    """The setter of a group for one of ``Environment``: it sets the group, then each member."""

    @functools.wraps(setter)
    def call(group: EnvGroup, /, *args: P.args, **kwargs: P.kwargs) -> None:
        setter(group, *args, **kwargs)
        group._each(setter.__name__, *args, **kwargs)

    return call


def _forwards(group: type[EnvGroup]) -> type[EnvGroup]:
    """Every setter of ``Environment``, also one that is added to it, reaches the members."""
    for name in dir(Environment):
        if name.startswith("set_") and name not in OF_THE_GROUP:
            setattr(group, name, _forwarded(getattr(Environment, name)))
    return group


@_forwards
class EnvGroup(Environment):
    """Several environments as one dataset and one environment.

    Args:
        envs: The members, which may be groups.
        env_names: Names of the members, which become the column ``task``; default ``env_0``,
            ``env_1``, ….

    ``example_id`` is renumbered and the old id stored in ``src_id``. The rows of nested groups
    carry the names of the path, outermost first. Further parameters are those of ``Environment``
    except those that belong to the members.

    *Raises* ConfigError for an empty list, a wrong number of names or repeated names, and members
    of different message types.

    >>> add = vf.SingleTurnEnv(dataset=[{"question": "1 + 1", "answer": "2"}])
    >>> spell = vf.SingleTurnEnv(dataset=[{"question": "Spell it.", "answer": "i, t"}])
    >>> vf.EnvGroup([add, spell], env_names=["add", "spell"]).get_dataset()["task"][:]
    ['add', 'spell']
    """

    @spell_out(GroupOptions, Environment.__init__)
    def __init__(
        self,
        envs: Sequence[Environment],
        env_names: Sequence[str] | None = None,
        map_kwargs: Annotated[
            Mapping[str, object] | None, Free("accepted for older callers")
        ] = None,
        **parameters: Unpack[GroupOptions],
    ):
        members = list(envs)
        for member in members:
            if not isinstance(member, Environment):
                raise ConfigError(f"EnvGroup takes environments, not {type(member).__name__}")
        if not members:
            raise ConfigError("EnvGroup needs at least one environment")
        if misplaced := [name for name in OF_THE_MEMBERS if parameters.get(name) is not None]:
            raise ConfigError(
                f"EnvGroup takes no {misplaced[0]}: it is a parameter of each member; pass it to"
                " the members",
                key=misplaced[0],
            )
        types = {member.message_type for member in members}
        if len(types) > 1:
            raise ConfigError(
                f"EnvGroup needs members of one message_type, not {' and '.join(sorted(types))}"
            )
        self.envs = members
        self.env_names = _checked_names(env_names, len(members))
        self.env_map = dict(zip(self.env_names, members, strict=True))
        self.columns: dict[str, set[str]] = {}
        """Member name -> columns of its rows; filled when the rows are read."""
        has_train = any(member.train_table is not None for member in members)
        super().__init__(
            dataset=(
                (lambda: list(self._rows([member.train_table for member in members])))
                if has_train
                else None
            ),
            eval_dataset=lambda: list(self._rows([member.eval_table for member in members])),
            rubric=EnvGroupRubric(self),
            message_type=types.pop(),
            map_kwargs=map_kwargs,
            **parameters,
        )

    # --- rows -------------------------------------------------------------------------------------

    def _rows(self, tables: Sequence[Table | None]) -> Iterator[dict[str, object]]:
        for name, member, table in zip(self.env_names, self.envs, tables, strict=True):
            for example in table if table is not None else ():
                self.columns.setdefault(name, set()).update(example.row)
                yield _addressed(copy_row(example.row), name, isinstance(member, EnvGroup))

    def for_row(self, row: Mapping[str, Any]) -> Environment:
        """Return the member that runs a row or a state, through nested groups; the group itself if
        none does."""
        return self.at_path(route_of(row)) or self

    def at_path(self, path: Sequence[str]) -> Environment | None:
        """Return the environment at the names ``path``, outermost first; None if there is none."""
        member = self.env_map.get(path[0]) if path else None
        return member.at_path(path[1:]) if isinstance(member, EnvGroup) else member

    def get_env_for_task(self, task: str) -> Environment:
        """Return the member named ``task``. *Raises* EnvironmentFault when there is none."""
        if task not in self.env_map:
            raise self._no_route(task)
        return self.env_map[task]

    def get_env_for_name(self, name: str) -> Environment:
        """Return the member named ``name``. *Raises* ConfigError when there is none."""
        if name not in self.env_map:
            raise ConfigError(
                f"the group has no environment {name!r}"
                + (closest(name, self.env_names) or self._has())
            )
        return self.env_map[name]

    # --- a rollout --------------------------------------------------------------------------------

    async def init_state(
        self,
        input: Mapping[str, object],
        client: ClientLike | None,
        model: str,
        sampling_args: Mapping[str, object] | None = None,
    ) -> State:
        """Create a state of the member that runs the row. The row may be unformatted."""
        member = self.for_row(input)
        if member is self:
            return await super().init_state(input, client, model, sampling_args)
        return await member.init_state(
            format_row(input, member.row_format), client, model, sampling_args
        )

    def setup_state(self, state: State) -> None:
        """Called only for rows of no member. Always *raises* EnvironmentFault."""
        raise self._no_route(" / ".join(route_of(state)) or "no name at all")

    def _no_route(self, name: str) -> EnvironmentFault:
        return EnvironmentFault(
            f"the row belongs to {name!r}, which the group does not have{self._has()}; routing"
            " reads info['env_id'], then task",
            hook="for_row",
        )

    def _has(self) -> str:
        return f" (it has: {', '.join(self.env_names)})"

    # --- settings, forwarded to the members -------------------------------------------------------

    @property
    def max_branches(self) -> int:
        """The most rollouts of a member's trees."""
        return max(member.max_branches for member in self.envs)

    @property
    def has_reward(self) -> bool:
        """Whether every member has a reward."""
        return all(member.has_reward for member in self.envs)

    def check_definition(self, sample: Sequence[Example]) -> None:
        """Check every member, with its own examples."""
        for member in self.envs:
            member.check_definition(
                [example for example in sample if self.for_row(example.row) is member]
            )

    def set_kwargs(self, **settings: object) -> None:
        """Change settings of the group and of every member; see ``Environment.set_kwargs``."""
        super().set_kwargs(**settings)
        for name in settings:
            if self._setter(name) is None:  # a setter has forwarded it to the members
                self._each("set_kwargs", **{name: settings[name]})

    def _setter(self, name: str) -> Callable[[object], None] | None:
        return super()._setter(name) if hasattr(type(self), f"set_{name}") else None

    def __getattr__(self, name: str) -> Any:
        """A setter that all members have, and the group does not: it sets each of them."""
        members = vars(self).get("env_map", {}) if name.startswith("set_") else {}
        if not any(hasattr(member, name) for member in members.values()):
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=self)
        if lacking := [of for of, member in members.items() if not hasattr(member, name)]:
            raise AttributeError(
                f"{name} is not a method of every member of the group: {', '.join(lacking)} has"
                " none; call it on those that have one (group.get_env_for_name(…))"
            )
        return functools.partial(self._each, name)

    def add_rubric(self, rubric: Rubric) -> None:
        """Add ``rubric`` to every member."""
        self._each("add_rubric", rubric)

    def _each(self, method: str, *args: object, **kwargs: object) -> None:
        for member in self.envs:
            getattr(member, method)(*args, **kwargs)

    async def aclose(self) -> None:
        """Close the group and every member. *Raises* the first failure, after all
        have been closed."""
        failures = []
        for close in [super().aclose, *(member.aclose for member in self.envs)]:
            try:
                await close()
            except Exception as error:  # noqa: BLE001  the others are closed first; then it is raised
                failures.append(error)
        if failures:
            raise failures[0]


def route_of(row: Mapping[str, object]) -> list[str]:
    """Return the member names of a row, outermost first: ``info["env_id"]`` (one or several), else
    ``task``."""
    info = row.get("info")
    if isinstance(info, str):
        info = decode_json(info)
    route = info.get("env_id") if isinstance(info, Mapping) else None
    if route is None:
        route = row.get("task")
    names = [route] if isinstance(route, str) else route if isinstance(route, list | tuple) else []
    return [name for name in names if isinstance(name, str)]


def _addressed(row: dict[str, Any], name: str, is_of_group: bool) -> dict[str, object]:
    """Turn the row of a member into a row of the group: store the route, and the replaced task as
    ``src_task``."""
    info, task = row["info"], row["task"]
    if is_of_group:
        info["env_id"] = [name, *route_of(row)]
    else:
        info["env_id"] = name
        if task != name:
            info["src_task"] = task
    row["task"] = name
    row.setdefault("src_id", row.pop("example_id"))
    return row


def _checked_names(names: Sequence[str] | None, count: int) -> list[str]:
    checked = [f"env_{index}" for index in range(count)] if names is None else list(names)
    if len(checked) != count:
        raise ConfigError(
            f"{count} environments and {len(checked)} env_names; give one name per environment"
        )
    for name in checked:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"env_names takes text, not {name!r}")
    if repeated := [name for name in checked if checked.count(name) > 1]:
        raise ConfigError(f"two environments are called {repeated[0]!r}; names must differ")
    return checked
