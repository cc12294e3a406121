"""``EnvGroupRubric``: scores every rollout of an ``EnvGroup`` with the rubric of the environment that played it.

It has no functions of its own: what is added to it is added to every member's rubric, and what it lists is the
members' together, in their order. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from verifiers.errors import ConfigError, EnvironmentFault
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.rubrics.functions import RewardFunction
from verifiers.rubrics.overrides import rollout_call
from verifiers.rubrics.rubric import Semaphore
from verifiers.rubrics.scores import RolloutScore, RolloutScores
from verifiers.rubrics.scoring import Plan, leave_unscored
from verifiers.storage.identity import Free


class EnvGroupRubric(Rubric):
    """The rubric of an ``EnvGroup``; made by it."""

    def __init__(self, group: Annotated[Any, Free("its members tell their identities themselves")]):
        self.group = group
        super().__init__()

    @property
    def rubrics(self) -> list[Rubric]:
        """The members' rubrics, each once."""
        return list({id(member.rubric): member.rubric for member in self.group.envs}.values())

    # --- what the members hold

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The members' functions in order; two members may have functions of one name, which share a metric."""
        return tuple(function for rubric in self.rubrics for function in rubric.functions)

    @property
    def has_group_rewards(self) -> bool:
        return any(rubric.has_group_rewards for rubric in self.rubrics)

    @property
    def has_advantages(self) -> bool:
        return any(rubric.has_advantages for rubric in self.rubrics)

    def get_group_weights(self) -> list[float]:
        """The members' group weights, one after another."""
        return [weight for rubric in self.rubrics for weight in rubric.get_group_weights()]

    def set_group_weights(self, weights: Sequence[float]) -> None:
        """As ``get_group_weights`` lists them. *Raises* ConfigError for another number of them."""
        counts = [len(rubric.get_group_weights()) for rubric in self.rubrics]
        if isinstance(weights, Mapping) or len(weights) != sum(counts):
            raise ConfigError(f"the rubrics of the group have {sum(counts)} group weights; give a list of as many")
        given = iter(weights)
        for rubric, count in zip(self.rubrics, counts, strict=True):
            rubric.set_group_weights([next(given) for _ in range(count)])

    def check_arguments(self, columns: set[str]) -> None:
        """Each member's functions against the columns of its own rows, where these were read.

        *Raises* ConfigError as ``Rubric.check_arguments``.
        """
        of_others = set().union(*self.group.columns.values())
        for name, own in self.group.columns.items():
            self.group.env_map[name].rubric.check_arguments(own | (columns - of_others))

    def add_reward_func(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Added to every member's rubric."""
        self._each("add_reward_func", func, *args, **kwargs)

    def add_class_object(self, name: str, obj: Any) -> None:
        """Added to every member's rubric."""
        self._each("add_class_object", name, obj)

    def add_score_object_provider(self, provider: Callable[[State], Mapping[str, Any]]) -> None:
        """Added to every member's rubric."""
        self._each("add_score_object_provider", provider)

    def add_group_score_object_provider(self, provider: Callable[[list[State]], Mapping[str, Any]]) -> None:
        """Added to every member's rubric."""
        self._each("add_group_score_object_provider", provider)

    def add_cleanup_handler(self, handler: Callable[..., Any], stage: str = "rollout") -> None:
        """Added to every member's rubric."""
        self._each("add_cleanup_handler", handler, stage)

    def plan(self) -> Plan:
        """*Raises* ConfigError: what is scored together depends on who played it."""
        raise ConfigError("the rubric of an EnvGroup cannot be part of a RubricGroup; use group.add_rubric(…)")

    # --- scoring

    async def score_individual(self, state: State, score_sem: Semaphore | None = None) -> None:
        if (member := self._member(state)) is None:
            leave_unscored([state])
        else:
            await member.rubric.score_individual(state, score_sem)

    async def score_group_stage(self, states: Sequence[State], score_sem: Semaphore | None = None) -> None:
        for member, own in self._by_member(states):
            if member is None:
                leave_unscored(own)
            else:
                await member.rubric.score_group_stage(own, score_sem)

    async def score_rollout(self, *args: Any, score_sem: Semaphore | None = None, **kwargs: Any) -> RolloutScore:
        """*Raises* EnvironmentFault for a rollout of no member."""
        call = rollout_call(args, kwargs, score_sem)
        options = {} if call.score_sem is None else {"score_sem": call.score_sem}
        await self._required(call.state).rubric.score_rollout(call.state, **options)
        call.write_back()
        return RolloutScore.of(call.state)

    async def score_group(self, states: Sequence[Any], score_sem: Semaphore | None = None) -> RolloutScores:
        """Rollouts of several members form one group per member. *Raises* EnvironmentFault for those of none."""
        calls = [rollout_call((state,), {}, None) for state in states]
        members = [call.state for call in calls]
        for state in members:
            self._required(state)
        options = {} if score_sem is None else {"score_sem": score_sem}
        for member, own in self._by_member(members):
            await member.rubric.score_group(own, **options)
        for call in calls:
            call.write_back()
        return RolloutScores.of(members)

    async def run_cleanup(self, states: Sequence[State]) -> None:
        for member, own in self._by_member(states):
            if member is not None:
                await member.rubric.run_cleanup(own)

    # --- inside

    def _each(self, method: str, *args: Any, **kwargs: Any) -> None:
        for rubric in self.rubrics:
            getattr(rubric, method)(*args, **kwargs)

    def _member(self, state: State) -> Any:
        member = self.group.for_row(state)
        return None if member is self.group else member

    def _required(self, state: State) -> Any:
        member = self._member(state)
        if member is None:
            raise EnvironmentFault(
                f"the state belongs to no environment of the group ({', '.join(self.group.env_names)}); routing reads "
                "info['env_id'], then task",
                hook="for_row",
            )
        return member

    def _by_member(self, states: Sequence[State]) -> Iterable[tuple[Any, list[State]]]:
        found: dict[int, tuple[Any, list[State]]] = {}
        for state in states:
            member = self._member(state)
            found.setdefault(id(member), (member, []))[1].append(state)
        return found.values()
