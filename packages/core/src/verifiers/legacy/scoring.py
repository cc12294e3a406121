"""Older forms of scoring, added to ``Rubric`` when its module is imported: ``adapt_rubrics``.

* Older methods, ``compat.RUBRIC_METHODS``, become methods of ``Rubric``.
* ``score_rollout`` and ``score_group`` also take fields, columns and plain dicts
  (``_of_any_form``).
* A subclass, or an object, whose author replaced ``score_rollout``, ``score_group``,
  ``score_rollouts``, ``cleanup`` or a list of functions is adapted when the class is made or the
  attribute is set (``_adapt``): what the runner calls, ``score_individual`` and
  ``score_group_stage``, then calls the replacement.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType, ModuleType
from typing import Annotated, Any

from verifiers import compat
from verifiers.data.messages import field
from verifiers.data.tool_schema import shortened
from verifiers.errors import ConfigError, ScoringError
from verifiers.legacy.awaited import Finished
from verifiers.legacy.classes import add_methods, add_properties
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.state import State
from verifiers.rollouts.values import number
from verifiers.rubrics.arguments import SINGULAR, rollout_value
from verifiers.rubrics.declarations import Handler
from verifiers.rubrics.outcomes import RolloutScore, RolloutScores
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.running import each
from verifiers.rubrics.scoring import leave_unscored
from verifiers.runtime.calls import blocking, dual
from verifiers.storage.identity import Free

FIELD_ORDER = ("prompt", "completion", "answer", "state", "task", "info")
"""Order of the positional arguments of ``score_rollout(prompt, completion, answer, state)``."""
RESULTS = ("reward", "advantage", "metrics", "error")
"""Keys copied back into a plain dict that was passed as the state."""
MAX_CONCURRENT = 1024
LISTS = ("get_reward_funcs", "get_reward_weights", "get_reward_func_names")
REPLACEABLE = ("score_rollout", "score_group", "score_rollouts", "cleanup")
"""Methods whose replacement by an author is called in the course of scoring, as are those of
``LISTS``."""


# --- adapting classes and objects


def adapt_rubrics(module: ModuleType) -> None:
    """Give ``Rubric`` its older methods and call forms, and adapt each subclass and object from now
    on."""
    add_methods(Rubric, compat.RUBRIC_METHODS)
    add_properties(Rubric, compat.RUBRIC_PROPERTIES)
    _of_any_form(Rubric)
    setattr(Rubric, "__init_subclass__", classmethod(_adapt_class))  # noqa: B010  a method is assigned
    for name in ("score_rollouts", "cleanup"):
        setattr(Rubric, name, _Replaceable(name, vars(Rubric)[name]))


def adapt_group_rubric(module: ModuleType) -> None:
    """Let ``EnvGroupRubric`` take a mapping of names to environments, and give it two older
    attributes."""
    native = module.EnvGroupRubric.__init__
    module.EnvGroupRubric.env_map = property(lambda rubric: rubric.group.env_map)
    module.EnvGroupRubric.all_reward_names = property(
        lambda rubric: sorted(set(rubric.get_reward_func_names()))
    )

    @functools.wraps(native)
    def init(self: Rubric, group: Annotated[object, Free("the members have identities")]) -> None:
        if isinstance(group, Mapping):
            from verifiers.environments.group import EnvGroup

            group = EnvGroup(list(group.values()), env_names=list(group))
        native(self, group)

    module.EnvGroupRubric.__init__ = init


def _adapt_class(cls: type[Rubric], /, **keywords: object) -> None:
    super(Rubric, cls).__init_subclass__(**keywords)
    if _is_ours(cls):
        _of_any_form(cls)
    else:
        _adapt(cls, cls, [name for name in REPLACEABLE if _is_replaced(cls, name)])
        _adapt_lists(cls)


class _Replaceable:
    """A method that may be set on an object, which is then adapted."""

    def __init__(self, name: str, function: Callable[..., object]):
        self.name, self.function = name, function

    def __get__(self, rubric: Rubric | None, cls: type[Rubric]) -> object:
        if rubric is None:
            return self.function
        replacement = _replaced_on(rubric).get(self.name)
        return MethodType(self.function, rubric) if replacement is None else replacement

    def __set__(self, rubric: Rubric, function: Callable[..., object]) -> None:
        _replaced_on(rubric)[self.name] = function
        _adapt(rubric, type(rubric), list(_replaced_on(rubric)))


def _replaced_on(rubric: Rubric) -> dict[str, Callable[..., object]]:
    """Name -> the function that was set on an object in place of its method."""
    functions: dict[str, Callable[..., object]] = vars(rubric).setdefault("_replaced_methods", {})
    return functions


def _adapt(target: Any, cls: type[Rubric], replaced: Sequence[str]) -> None:
    """Let the stages of a class or an object call what replaced its methods."""

    def put(name: str, function: Callable[..., object]) -> None:
        if name == "cleanup_handlers" or not _is_replaced(cls, name):
            setattr(target, name, function if target is cls else MethodType(function, target))

    if "score_rollout" in replaced:
        put("score_individual", _individual_by_score_rollout)
    elif "score_rollouts" in replaced:
        put("score_individual", _individual_by_columns)
    if "score_group" in replaced:
        put("score_group_stage", _group_by_score_group)
    elif "score_rollouts" in replaced:
        put("score_group_stage", _group_by_columns)
    if "cleanup" in replaced:
        put("cleanup_handlers", _handlers_with_cleanup)
    if scoring := [name for name in replaced if name != "cleanup"]:
        target.scores_itself = True
        target.scores_groups = cls.scores_groups or scoring != ["score_rollout"]


def _adapt_lists(cls: type[Rubric]) -> None:
    """Let ``declared`` of a class return the lists that its methods return, under either spelling
    of their names."""
    replaced = {
        name: spelling
        for name in LISTS
        for spelling in (f"_{name}", name)
        if _is_replaced(cls, spelling)
    }
    if not replaced:
        return

    def declared(rubric: Rubric) -> tuple[list[Any], list[float], list[str] | None]:
        lists: dict[str, Any] = dict(zip(LISTS, Rubric.declared(rubric), strict=True))
        lists |= {name: list(getattr(rubric, spelling)()) for name, spelling in replaced.items()}
        return (
            lists["get_reward_funcs"],
            lists["get_reward_weights"],
            lists["get_reward_func_names"],
        )

    setattr(cls, "declared", declared)  # noqa: B010


def _is_replaced(cls: type, name: str) -> bool:
    """Whether the method of a class is an author's."""
    definer = next(base for base in cls.__mro__ if name in vars(base))
    return not _is_ours(definer) and vars(definer)[name] not in ADAPTERS


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("verifiers.")


# --- the stages by what an author wrote


async def _individual_by_score_rollout(rubric: Rubric, state: State) -> None:
    """Call a replaced ``score_rollout`` with the parameters it declares; record its score in the
    state.

    It may take the state, or prompt, completion, answer and so on by name, as in older versions.
    """
    declared = inspect.signature(rubric.score_rollout).parameters
    if "prompt" in declared:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in declared.values())
        values = {
            name: rollout_value(state, name) for name in SINGULAR if takes_all or name in declared
        }
        score: Any = await rubric.score_rollout(**values)
    else:
        score = await rubric.score_rollout(state, **_semaphore(declared))
    if isinstance(score, Mapping) and (state["reward"] is None or "prompt" in declared):
        metrics = score.get("metrics")
        state["metrics"].update(metrics if isinstance(metrics, Mapping) else {})
        state["reward"] = number(float(score.get("reward", "nan")))


async def _individual_by_columns(rubric: Rubric, state: State) -> None:
    """Nothing: ``score_rollouts`` scores the whole group, in the group stage."""


async def _group_by_score_group(rubric: Rubric, states: Sequence[State]) -> None:
    try:
        await rubric.score_group(
            list(states), **_semaphore(inspect.signature(rubric.score_group).parameters)
        )
    finally:
        await rubric.run_cleanup(states)


async def _group_by_columns(rubric: Rubric, states: Sequence[State]) -> None:
    """Score a group by a replaced ``score_rollouts``: columns in, rewards and metrics out.

    Versions that had it passed it all rollouts of a run; here it scores one group at a time.
    *Raises* ScoringError when it returns another number of rewards.
    """
    columns: dict[str, object] = {
        f"{name}s": [rollout_value(state, name) for state in states] for name in FIELD_ORDER
    }
    declared = inspect.signature(rubric.score_rollouts).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in declared.values())
    further = {"max_concurrent": -1, "apply_weights": True}
    columns |= {name: value for name, value in further.items() if takes_all or name in declared}
    try:
        scores = await maybe_await(rubric.score_rollouts(**columns))
        rewards, metrics = field(scores, "reward"), field(scores, "metrics") or {}
        if rewards is None or len(rewards) != len(states):
            returned = shortened(rewards)
            raise ScoringError(
                f"score_rollouts returned {returned} for {len(states)} rollouts; return one each"
            )
        for index, state in enumerate(states):
            state["reward"] = number(float(rewards[index]))
            state["metrics"].update((name, values[index]) for name, values in metrics.items())
    finally:
        await rubric.run_cleanup(states)


def _handlers_with_cleanup(rubric: Rubric) -> list[Handler]:
    """The handlers of a rubric with a ``cleanup(state)`` of its author.

    It stands for those of rollouts, which its ``super().cleanup(state)`` runs.
    """
    handlers = _native_handlers(rubric)
    if any(handler == rubric.cleanup for handler, _ in handlers):
        return handlers
    return [(rubric.cleanup, "rollout"), *(pair for pair in handlers if pair[1] == "group")]


def _native_handlers(rubric: Rubric) -> list[Handler]:
    methods = (vars(base).get("cleanup_handlers") for base in type(rubric).__mro__)
    native = next(method for method in methods if method is not None and method not in ADAPTERS)
    handlers: list[Handler] = native(rubric)
    return handlers


def _semaphore(declared: Mapping[str, object]) -> dict[str, Any]:
    """A semaphore that never blocks, for methods that declare a semaphore: the caller already holds
    the real semaphore."""
    return {"score_sem": nullcontext()} if "score_sem" in declared else {}


ADAPTERS = (
    _individual_by_score_rollout,
    _individual_by_columns,
    _group_by_score_group,
    _group_by_columns,
    _handlers_with_cleanup,
)


# --- older call forms


def _of_any_form(cls: type[Rubric]) -> None:
    """Let the two methods of a class also take their older arguments."""
    for name, wrap in (("score_rollout", _score_rollout), ("score_group", _score_group)):
        if name in vars(cls):
            setattr(cls, name, _Replaceable(name, wrap(vars(cls)[name])))


def _score_rollout(native: Callable[..., Awaitable[RolloutScore]]) -> Callable[..., object]:
    """``score_rollout`` that also takes a plain dict, or prompt, completion, answer, state by
    position or keyword."""

    @functools.wraps(native)
    async def score_rollout(
        rubric: Rubric, *args: object, score_sem: object = None, **fields: object
    ) -> RolloutScore:
        state, original, score_sem = _read(args, fields, score_sem)
        score = await native(rubric, state, score_sem)
        _copy_back(state, original)
        return score

    return score_rollout


def _score_group(native: Callable[..., Awaitable[RolloutScores]]) -> Callable[..., object]:
    """``score_group`` that also takes plain dicts, which receive the results."""

    @functools.wraps(native)
    async def score_group(
        rubric: Rubric, states: Sequence[Any], score_sem: object = None
    ) -> RolloutScores:
        members = [state if isinstance(state, State) else State(state) for state in states]
        scores = await native(rubric, members, score_sem)
        for member, original in zip(members, states, strict=True):
            _copy_back(member, original)
        return scores

    return score_group


# --- older methods


class FinishedScores(RolloutScores, Finished):
    """The scores of a blocking call, which older code may also await."""

    __slots__ = ()


async def clean_up(rubric: Rubric, state: Mapping[str, object]) -> None:
    """Run the cleanup handlers of ``rubric`` for a rollout, once.

    Called from an override, run those that it stands for; a decorated override stands for itself
    alone.
    """
    states = [state if isinstance(state, State) else State(state)]
    if not _is_replaced(type(rubric), "cleanup") and "cleanup" not in _replaced_on(rubric):
        await rubric.run_cleanup(states)
        return
    handlers = _native_handlers(rubric)
    if all(handler != rubric.cleanup for handler, _ in handlers):
        await rubric.call_cleanup_handlers(
            [pair for pair in handlers if pair[1] != "group"], states
        )


def score_rollouts(
    rubric: Rubric,
    prompts: Sequence[object],
    completions: Sequence[object],
    answers: Sequence[object],
    states: Sequence[object],
    tasks: Sequence[str] | None = None,
    infos: Sequence[object] | None = None,
    max_concurrent: int = -1,
    group_size: int | None = None,
    **columns: Sequence[object],
) -> RolloutScores | Awaitable[RolloutScores]:
    """Score rollouts given as columns; returns the scores, or an awaitable of them under a running
    loop.

    With ``group_size``, every ``group_size`` consecutive rollouts form a group; without it there
    are no groups. At most ``max_concurrent`` groups (or rollouts) are scored at a time; -1 means
    1,024.
    """
    lists = {
        "prompt": prompts,
        "completion": completions,
        "answer": answers,
        "task": tasks,
        "info": infos,
    } | columns
    members = _states_of(lists, states)
    return dual(lambda: _score_all(rubric, members, group_size, max_concurrent))


def score_rollouts_sync(rubric: Rubric, *args: object, **kwargs: object) -> RolloutScores:
    """``score_rollouts``, always blocking."""

    async def scores() -> RolloutScores:
        result: RolloutScores = await rubric.score_rollouts(*args, **kwargs)
        return result

    return blocking(scores)


def score_nothing(rubric: Rubric, state: State) -> None:
    """Leave a rollout unscored: reward unknown, no metrics."""
    leave_unscored([state])


async def dummy_score_rollout(rubric: Rubric, state: State) -> RolloutScore:
    """Leave a rollout unscored and return its score."""
    leave_unscored([state])
    return RolloutScore.of(state)


async def dummy_score_group(rubric: Rubric, states: Sequence[State]) -> RolloutScores:
    """Leave a group unscored and return its scores."""
    leave_unscored(states)
    return RolloutScores.of(states)


async def _score_all(
    rubric: Rubric, states: list[State], group_size: int | None, max_concurrent: int
) -> RolloutScores:
    if group_size is not None and (group_size < 1 or len(states) % group_size):
        raise ConfigError(
            f"{len(states)} rollouts cannot be divided into groups of group_size={group_size}"
        )
    size = group_size or 1
    groups = iter([states[i : i + size] for i in range(0, len(states), size)])

    async def score_groups() -> None:
        for group in groups:
            await (rubric.score_group(group) if group_size else rubric.score_rollout(group[0]))

    limit = max_concurrent if max_concurrent > 0 else MAX_CONCURRENT
    await each(score_groups() for _ in range(min(limit, len(states))))
    return FinishedScores.of(states)


def _read(
    args: Sequence[Any], fields: Mapping[str, object], score_sem: object
) -> tuple[State, object, object]:
    """The state to score, the state object of the caller, and the semaphore."""
    if args and isinstance(args[0], Mapping):
        if len(args) > 2 or fields:
            raise ConfigError("score_rollout(state, score_sem=None) takes no further arguments")
        original, score_sem = args[0], args[1] if len(args) == 2 else score_sem
        return original if isinstance(original, State) else State(original), original, score_sem
    if len(args) > len(FIELD_ORDER):
        raise ConfigError(
            f"score_rollout takes {', '.join(FIELD_ORDER)}, not {len(args)} positional arguments"
        )
    fields = dict(zip(FIELD_ORDER, args, strict=False)) | dict(fields)
    original = fields.pop("state", {})
    if not fields:
        return original if isinstance(original, State) else State(original), original, score_sem
    if "prompt" not in fields or "completion" not in fields:
        raise ConfigError(
            "score_rollout needs a state, or prompt= and completion= (with answer= and state=)"
        )
    return _state_with(original, fields), original, score_sem


def _copy_back(state: State, original: object) -> None:
    if isinstance(original, dict) and not isinstance(original, State):
        original.update((key, state[key]) for key in RESULTS)


def _states_of(
    columns: Mapping[str, Sequence[object] | None], states: Sequence[object]
) -> list[State]:
    """A state per row of the columns; None columns are skipped. *Raises* ConfigError for
    different lengths."""
    present = {name: values for name, values in columns.items() if values is not None}
    for name, values in present.items():
        if len(values) != len(states):
            raise ConfigError(
                f"score_rollouts received {len(values)} values of {name!r} and {len(states)} states"
            )
    return [
        _state_with(state, {name: values[i] for name, values in present.items()})
        for i, state in enumerate(states)
    ]


def _state_with(original: Any, fields: Mapping[str, object]) -> State:
    """The ``State`` itself with the fields set, or a new state that copies a plain mapping."""
    state = original if isinstance(original, State) else State(original or {})
    for name, value in fields.items():
        if name == "info" and value is None:
            continue
        if name in State.RESERVED:
            state[name] = value
        else:
            dict.pop(state, name, None)
            state["input"][name] = value
    return state
