"""``RubricGroup``: several rubrics scored in one pass, each with a group weight.

The reward is the sum over children of group weight times the child's reward; functions keep the
parser and objects of their own rubric. ``scoring`` runs the functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from verifiers.errors import ConfigError
from verifiers.rollouts.state import State
from verifiers.rubrics.arguments import RewardFunction, finite_weight, free_name
from verifiers.rubrics.declarations import Handler
from verifiers.rubrics.rubric import Rubric, ScoringOptions
from verifiers.rubrics.scoring import Plan
from verifiers.runtime.signatures import spell_out

if TYPE_CHECKING:
    from verifiers.parsers import Parser

logger = logging.getLogger("verifiers.rubrics")


class RubricGroup(Rubric):
    """Several rubrics as one.

    Args:
        rubrics: The members. The reward is the weighted sum of theirs, and every metric is
            recorded.
        weights: Weight of each member; default 1.
        names: Names of the members, for weights by name; default ``rubric_0``, ``rubric_1``, ….

    *Raises* ConfigError for an empty list, invalid weights or names, or two ``@advantage`` methods.

    >>> group = vf.RubricGroup([vf.Rubric(), vf.Rubric()], weights=[1.0, 0.2], names=["truth", "style"])
    >>> group.set_group_weights({"style": 0.5})
    >>> group.get_group_weights()
    [1.0, 0.5]
    """

    @spell_out(ScoringOptions, Rubric.__init__)
    def __init__(
        self,
        rubrics: Sequence[Rubric],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        **kwargs: Unpack[ScoringOptions],
    ):
        if not rubrics:
            raise ConfigError("RubricGroup needs at least one rubric")
        for rubric in rubrics:
            if not isinstance(rubric, Rubric):
                raise ConfigError(f"RubricGroup takes rubrics, not {type(rubric).__name__}")
        self.rubrics = list(rubrics)
        self.names = _checked_names(names, len(self.rubrics))
        super().__init__(**kwargs)
        self._group_weights = [1.0] * len(self.rubrics)
        self.set_group_weights([1.0] * len(self.rubrics) if weights is None else weights)
        renamed = {f.name for f in self.functions} - {
            f.name for child in self.rubrics for f in child.functions
        }
        if renamed:
            logger.info(
                "functions with the same name in several rubrics were renamed: %s",
                ", ".join(sorted(renamed)),
            )
        if (
            len([child for child in self.rubrics if child.has_advantages])
            + (self._advantage is not None)
            > 1
        ):
            raise ConfigError("two rubrics of the group have an @advantage method; keep one")

    def __repr__(self) -> str:
        weighed = zip(self.get_group_weights(), self.rubrics, strict=True)
        children = [
            repr(child) if weight == 1 else f"{weight:g} * {child!r}" for weight, child in weighed
        ]
        return f"{type(self).__name__}([{', '.join(children)}])"

    @property
    def parser(self) -> Parser:
        """The first child's parser."""
        return self.rubrics[0].parser

    @parser.setter
    def parser(self, parser: Parser) -> None:
        self.rubrics[0].parser = parser

    def add_reward_func(self, func: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Add a function to the first child; its metric gets a distinct name if another child uses
        the name."""
        self.rubrics[0].add_reward_func(func, *args, **kwargs)

    def add_class_object(self, name: str, obj: object) -> None:
        """Add an object to the first child."""
        self.rubrics[0].add_class_object(name, obj)

    def add_score_object_provider(self, provider: Callable[[State], Mapping[str, object]]) -> None:
        """Add a provider to the first child."""
        self.rubrics[0].add_score_object_provider(provider)

    def add_group_score_object_provider(
        self, provider: Callable[[list[State]], Mapping[str, object]]
    ) -> None:
        """Add a provider to the first child."""
        self.rubrics[0].add_group_score_object_provider(provider)

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The children's functions in order; duplicates of a name become ``name_2``, ``name_3``."""
        by_child = _distinct([child.functions for child in self.rubrics])
        return tuple(function for functions in by_child for function in functions)

    @property
    def funcs(self) -> Sequence[Callable[..., object]]:
        """The children's functions; those of a child are changed there."""
        return tuple(f.function for f in self.functions)

    @funcs.setter
    def funcs(self, funcs: Sequence[Callable[..., object]]) -> None:
        raise ConfigError(
            "funcs are those of several rubrics; assign them to a rubric of the group", key="funcs"
        )

    @property
    def weights(self) -> Sequence[float]:
        """The children's weights."""
        return tuple(f.weight for f in self.functions)

    @weights.setter
    def weights(self, weights: Sequence[float]) -> None:
        raise ConfigError(
            "weights are those of several rubrics; assign them to a rubric of the group",
            key="weights",
        )

    def check_needs(self) -> None:
        """Check every child."""
        for child in self.rubrics:
            child.check_needs()

    @property
    def advantage_function(self) -> RewardFunction | None:
        functions = [self._advantage, *(child.advantage_function for child in self.rubrics)]
        return next((function for function in functions if function is not None), None)

    def get_group_weights(self) -> list[float]:
        """A weight per child, as a new list."""
        return list(self._group_weights)

    def set_group_weights(self, weights: Sequence[float] | Mapping[str, float]) -> None:
        """Set all weights by a list, or some by child name. *Raises* ConfigError for a wrong
        length, name or number."""
        if isinstance(weights, Mapping):
            if unknown := weights.keys() - set(self.names):
                raise ConfigError(
                    f"unknown rubric name {sorted(unknown)[0]!r}; available:"
                    f" {', '.join(self.names)}"
                )
            new = [
                weights.get(name, old)
                for name, old in zip(self.names, self._group_weights, strict=True)
            ]
        else:
            new = list(weights)
        if len(new) != len(self.rubrics):
            raise ConfigError(
                f"{len(self.rubrics)} rubrics and {len(new)} group weights; give one per rubric"
            )
        self._group_weights = [
            finite_weight(weight, name) for weight, name in zip(new, self.names, strict=True)
        ]

    def plan(self) -> Plan:
        """The children's plans combined; ``success`` is that of the group, else of the first child
        that names a metric."""
        plans = [child.plan() for child in self.rubrics]
        by_child = _distinct([plan.functions for plan in plans])
        weights: dict[str, float] = {}
        success = None
        for plan, renamed, factor in zip(plans, by_child, self._group_weights, strict=True):
            names = {f.name: new.name for f, new in zip(plan.functions, renamed, strict=True)}
            if factor != 0:
                weights |= {names[name]: factor * weight for name, weight in plan.weights.items()}
            if success is None and plan.success is not None:
                success = names[plan.success]
        functions = [function for renamed in by_child for function in renamed]
        if isinstance(self.success, str):
            success = self.success_among(functions)
        return Plan(
            functions,
            weights,
            all(plan.parallel for plan in plans),
            self.advantage_function,
            success,
        )

    def cleanup_handlers(self) -> list[Handler]:
        """The children's handlers, then its own."""
        return [
            pair for child in self.rubrics for pair in child.cleanup_handlers()
        ] + super().cleanup_handlers()

    async def teardown(self) -> None:
        """Run the ``@teardown`` methods of the children, then its own."""
        for child in self.rubrics:
            await child.teardown()
        await super().teardown()


def _distinct(by_child: Sequence[Sequence[RewardFunction]]) -> list[list[RewardFunction]]:
    """The functions of each child; those whose name a child before has are renamed: ``name_2``,
    ``name_3``."""
    used: set[str] = set()
    distinct: list[list[RewardFunction]] = []
    for functions in by_child:
        distinct.append(
            [
                f if f.name not in used else f.rubric.renamed(f, free_name(f.name, used))
                for f in functions
            ]
        )
        used.update(f.name for f in distinct[-1])
    return distinct


def _checked_names(names: Sequence[str] | None, count: int) -> list[str]:
    checked = [f"rubric_{index}" for index in range(count)] if names is None else list(names)
    if len(checked) != count:
        raise ConfigError(f"{count} rubrics and {len(checked)} names; give one name per rubric")
    if len(set(checked)) != count:
        raise ConfigError("two rubrics of the group have the same name; names must differ")
    return checked
