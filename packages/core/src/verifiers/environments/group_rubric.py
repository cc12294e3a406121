"""``EnvGroupRubric``: scores each rollout of an ``EnvGroup`` with the rubric of the member that ran
it.

It has no functions itself: additions go to the rubric of every member, and its lists concatenate
those of the members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from verifiers.errors import ConfigError, EnvironmentFault
from verifiers.rollouts.state import State
from verifiers.rubrics import RolloutScore, RolloutScores, Rubric, RubricGroup
from verifiers.rubrics.arguments import RewardFunction
from verifiers.rubrics.rubric import Semaphore
from verifiers.rubrics.scoring import Plan, leave_unscored
from verifiers.storage.identity import Free


class EnvGroupRubric(Rubric):
    """The rubric of an ``EnvGroup``, which creates it."""

    def __init__(self, group: Annotated[Any, Free("the members have identities")]):
        self.group = group
        super().__init__()

    @property
    def rubrics(self) -> list[Rubric]:
        """The distinct rubrics of the members."""
        return list({id(member.rubric): member.rubric for member in self.group.envs}.values())

    # --- declarations

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The functions of the members in order; functions of the same name share a metric."""
        return tuple(function for rubric in self.rubrics for function in rubric.functions)

    funcs, weights = RubricGroup.funcs, RubricGroup.weights

    @property
    def has_group_rewards(self) -> bool:
        return any(rubric.has_group_rewards for rubric in self.rubrics)

    @property
    def success(self) -> str | None:
        """The name that every member's rubric has; assigned, it is that of every member."""
        names = {rubric.success for rubric in self.rubrics}
        return names.pop() if len(names) == 1 else None

    @success.setter
    def success(self, success: str | None) -> None:
        for rubric in self.rubrics:
            rubric.success = success

    @property
    def success_metric(self) -> str | None:
        """The name that all members share, else "success", the metric that each of them fills; None
        without any."""
        names = {rubric.success_metric for rubric in self.rubrics} - {None}
        return names.pop() if len(names) == 1 else "success" if names else None

    @property
    def has_advantages(self) -> bool:
        return any(rubric.has_advantages for rubric in self.rubrics)

    def get_group_weights(self) -> list[float]:
        """The group weights of the members, concatenated."""
        return [weight for rubric in self.rubrics for weight in rubric.get_group_weights()]

    def set_group_weights(self, weights: Sequence[float]) -> None:
        """Set the weights that ``get_group_weights`` lists. *Raises* ConfigError for another number
        of weights."""
        counts = [len(rubric.get_group_weights()) for rubric in self.rubrics]
        if isinstance(weights, Mapping) or len(weights) != sum(counts):
            raise ConfigError(
                f"the rubrics of the group have {sum(counts)} group weights; give a list of as many"
            )
        remaining = iter(weights)
        for rubric, count in zip(self.rubrics, counts, strict=True):
            rubric.set_group_weights([next(remaining) for _ in range(count)])

    def check_arguments(self, columns: set[str]) -> None:
        """Check the functions of each member against the columns of its rows, where these were
        read.

        *Raises* ConfigError as ``Rubric.check_arguments``.
        """
        member_columns = set().union(*self.group.columns.values())
        for name, names in self.group.columns.items():
            self.group.env_map[name].rubric.check_arguments(names | (columns - member_columns))

    def check_needs(self) -> None:
        """Check the rubric of every member."""
        self._each("check_needs")

    def add_reward_func(self, func: Callable[..., object], *args: object, **kwargs: object) -> None:
        """Add to the rubric of every member."""
        self._each("add_reward_func", func, *args, **kwargs)

    def add_class_object(self, name: str, obj: object) -> None:
        """Add to the rubric of every member."""
        self._each("add_class_object", name, obj)

    def add_score_object_provider(self, provider: Callable[[State], Mapping[str, object]]) -> None:
        """Add to the rubric of every member."""
        self._each("add_score_object_provider", provider)

    def add_group_score_object_provider(
        self, provider: Callable[[list[State]], Mapping[str, object]]
    ) -> None:
        """Add to the rubric of every member."""
        self._each("add_group_score_object_provider", provider)

    def add_cleanup_handler(self, handler: Callable[..., object], stage: str = "rollout") -> None:
        """Add to the rubric of every member."""
        self._each("add_cleanup_handler", handler, stage)

    def plan(self) -> Plan:
        """*Raises* ConfigError: which functions apply depends on the member that ran
        the rollout."""
        raise ConfigError(
            "the rubric of an EnvGroup cannot be part of a RubricGroup; use group.add_rubric(…)"
        )

    # --- scoring

    async def score_individual(self, state: State) -> None:
        """By the rubric of the member; a rollout of no member stays unscored."""
        for rubric, _ in self._by_rubric([state]):
            await rubric.score_individual(state)

    async def score_group_stage(self, states: Sequence[State]) -> None:
        """By member: rollouts of two members are never compared."""
        for rubric, members in self._by_rubric(states):
            await rubric.score_group_stage(members)

    async def score_rollout(self, state: State, score_sem: Semaphore | None = None) -> RolloutScore:
        """By the rubric of the member. *Raises* EnvironmentFault for a rollout of no member."""
        ((rubric, _),) = self._by_rubric([state], is_strict=True)
        # a member's own method may take none
        slot = {} if score_sem is None else {"score_sem": score_sem}
        return await rubric.score_rollout(state, **slot)

    async def score_group(
        self, states: Sequence[State], score_sem: Semaphore | None = None
    ) -> RolloutScores:
        """By member. *Raises* EnvironmentFault for a rollout of no member, before any is scored."""
        slot = {} if score_sem is None else {"score_sem": score_sem}
        for rubric, members in self._by_rubric(states, is_strict=True):
            await rubric.score_group(members, **slot)
        return RolloutScores.of(states)

    async def run_cleanup(self, states: Sequence[State]) -> None:
        """The handlers of each member with its rollouts."""
        for rubric, members in self._by_rubric(states):
            await rubric.run_cleanup(members)

    # --- private

    def _by_rubric(
        self, states: Sequence[State], is_strict: bool = False
    ) -> list[tuple[Rubric, list[State]]]:
        """The rollouts of each member with its rubric; those of no member are refused or left
        unscored."""
        by_member: dict[int, tuple[Any, list[State]]] = {}
        for state in states:
            member = self.group.for_row(state)
            by_member.setdefault(id(member), (member, []))[1].append(state)
        _, unrouted = by_member.pop(id(self.group), (None, []))
        if unrouted and is_strict:
            raise EnvironmentFault(
                "the state belongs to no environment of the group"
                f" ({', '.join(self.group.env_names)}); routing reads info['env_id'], then task",
                hook="for_row",
            )
        leave_unscored(unrouted)
        return [(member.rubric, members) for member, members in by_member.values()]

    def _each(self, method: str, *args: object, **kwargs: object) -> None:
        for rubric in self.rubrics:
            getattr(rubric, method)(*args, **kwargs)
