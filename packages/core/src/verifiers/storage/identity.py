"""The identity of a component or an environment as JSON.

Guarantees: components with equal parameters have equal identities on every machine and in every
process; components that differ in a parameter have different identities, unless the parameter is
marked as ``Free``. An identity contains no memory address, no secret and no dataset (every row has
a content hash), and computing it never raises.

Complete by default: ``Identified`` records the arguments of every constructor, including those of
authors' subclasses. Construction hashes nothing; the identity is computed once per run.

``described`` has the identity of any other value, ``source_code`` the hashes of source files, and
``configurations`` what all of them are for: is a run the same as before?
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from verifiers import compat
from verifiers.runtime.redaction import digested
from verifiers.storage.described import Free as Free  # for authors, who mark parameters
from verifiers.storage.described import (
    defaults_of,
    describe_members,
    in_progress,
    is_free,
    type_name,
)
from verifiers.storage.source_code import source_hashes

_OLD_SPELLINGS = compat.ENVIRONMENT_PARAMETERS | compat.JUDGE_PARAMETERS


# --- components with an identity ------------------------------------------------------------------


class _ConstructorSignature:
    """The signature of a class for ``help()``: that of its ``__init__``. Python before 3.11.4 shows
    ``__new__``'s."""

    def __get__(self, instance: object, cls: type[object]) -> inspect.Signature:
        if instance is not None:  # an object that can be called has that of ``__call__``
            raise AttributeError("__signature__")
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Identified:
    """Base class of environments, rubrics, parsers and clients: records the constructor arguments.

    The arguments are recorded before ``__init__`` runs, so a subclass with another constructor
    needs no extra code. An attribute with the name of a parameter overrides the recorded argument,
    so that later changes count too.
    """

    _constructor_arguments: _Arguments

    if not TYPE_CHECKING:  # a type checker reads the parameters of ``__init__``

        def __new__(cls, *args: object, **kwargs: object) -> Self:
            self = super().__new__(cls)
            arguments = constructor_of(cls).by_name(args, kwargs)
            object.__setattr__(self, "_constructor_arguments", arguments)
            return self

        __signature__ = _ConstructorSignature()

    def identity(self) -> dict[str, Any]:
        """``class`` and every constructor parameter that is not marked ``Free``, as JSON values
        without secrets.

        Override it to add facts that are not parameters: ``return super().identity() | {"version":
        2}``.
        """
        constructor = constructor_of(type(self))
        arguments: dict[str, object] = {**constructor.defaults, **self._constructor_arguments}
        names = (*constructor.names, *self._constructor_arguments, *self._changed_names())
        values = {
            name: value
            for name in names
            if name not in constructor.free
            and (value := _present(self, name, arguments)) is not _UNKNOWN
        }
        # a rubric may reference its environment
        token = in_progress.set((*in_progress.get(), id(self)))
        try:
            described = describe_members(values)
            # of an attribute that has no stable representation the argument says more
            described |= describe_members(
                {
                    name: arguments[name]
                    for name, description in described.items()
                    if isinstance(description, dict)
                    and description.keys() == {"class"}
                    and arguments.get(name) is not None
                }
            )
        finally:
            in_progress.reset(token)
        return {"class": type_name(type(self))} | described

    def _changed_names(self) -> Iterable[str]:
        """Names of attributes that were set after construction and count as parameters."""
        return ()


class _Arguments(dict[str, Any]):
    """Recorded arguments; dropped when their object is pickled, shared when it is deep-copied."""

    def __reduce__(self) -> tuple[object, ...]:
        return _Arguments, ()

    def __deepcopy__(self, memo: object) -> _Arguments:
        return self


_UNKNOWN: Any = object()
"""Neither an argument nor a default."""


@dataclass(frozen=True, slots=True)
class Constructor:
    """The parameters of a constructor, and of the base constructors that its ``**kwargs`` reach."""

    positional: tuple[str, ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    """Of the class itself; it determines the arguments of its base constructors."""
    free: AbstractSet[str]

    def by_name(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> _Arguments:
        """Arguments by name, without free ones: recording does not keep a dataset alive."""
        arguments = _Arguments(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional):
            arguments["args"] = args[len(self.positional) :]
        for name, value in kwargs.items():
            if name not in self.names and _OLD_SPELLINGS.get(name) in self.names:
                name = _OLD_SPELLINGS[name]
            arguments[name] = value
        for name in self.free & arguments.keys():
            del arguments[name]
        return arguments


_constructors: weakref.WeakKeyDictionary[type, Constructor] = weakref.WeakKeyDictionary()


def constructor_of(cls: type) -> Constructor:
    """The ``Constructor`` of a class, cached."""
    constructor = _constructors.get(cls)
    if constructor is None:
        constructor = _constructors[cls] = _read_constructor(cls)
    return constructor


def _read_constructor(cls: type) -> Constructor:
    names: dict[str, None] = {}
    free: set[str] = set()
    positional: tuple[str, ...] = ()
    defaults: dict[str, object] = {}
    is_first = has_kwargs = True
    for base in cls.__mro__:
        free |= {name for name, annotation in _annotations(base).items() if is_free(annotation)}
        init = vars(base).get("__init__")
        if not inspect.isfunction(init):
            continue
        annotations = _annotations(init)
        free |= {name for name, annotation in annotations.items() if is_free(annotation)}
        if not has_kwargs:
            continue
        code = init.__code__
        num_arguments = code.co_argcount + code.co_kwonlyargcount
        positional_names = code.co_varnames[1 : code.co_argcount]
        if is_first:
            positional, defaults = positional_names, defaults_of(init)
        names |= dict.fromkeys(positional_names)
        names |= dict.fromkeys(code.co_varnames[code.co_argcount : num_arguments])
        is_first, has_kwargs = False, bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return Constructor(positional, tuple(names), defaults, frozenset(free))


def _present(part: Identified, name: str, arguments: Mapping[str, object]) -> object:
    """The value of a parameter now: its attribute, or its argument where there is none."""
    attribute = vars(part).get(name, _UNKNOWN)
    if attribute is _UNKNOWN and _is_our_property(type(part), name):
        attribute = getattr(part, name)
    if attribute is _UNKNOWN or attribute is None:
        return arguments.get(name, attribute)
    return attribute


def _annotations(owner: Callable[..., object]) -> Mapping[str, object]:
    try:
        return inspect.get_annotations(owner)
    except Exception:  # noqa: BLE001  Python 3.14 evaluates annotations here; names may not be imported
        return {}


def _is_our_property(cls: type, name: str) -> bool:
    """Whether ``name`` is a property of a library class: an author's may not be cheap."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None or not isinstance(vars(owner)[name], property):
        return False
    return owner.__module__.partition(".")[0] in compat.SAVED_PACKAGES


# --- environments ---------------------------------------------------------------------------------


class RubricParts(Protocol):
    """What the identity of a rubric is made of."""

    def get_reward_func_names(self) -> list[str]: ...

    def get_reward_funcs(self) -> list[Callable[..., object]]: ...

    def get_reward_weights(self) -> list[float]: ...

    def get_group_weights(self) -> list[float]: ...


class EnvironmentParts(Protocol):
    """What the identity of an environment is made of."""

    env_id: str
    env_args: dict[str, Any]
    env_version: str
    message_type: str
    system_prompt: str | None
    max_turns: int
    max_seq_len: int | None
    max_total_completion_tokens: int
    timeout_seconds: float | None

    @property
    def rubric(self) -> RubricParts: ...

    def identity(self) -> dict[str, Any]:
        """Its constructor parameters as JSON."""
        ...


def identity_of(env: EnvironmentParts) -> dict[str, object]:
    """The identity of an environment, without secrets: equal identities generate and score alike.

    Every version has stored the first entries; ``environment``, ``parser`` and ``rubric`` hold all
    other constructor parameters.
    """
    rubric, described = env.rubric, env.identity()
    base = {
        "env_id": env.env_id,
        "env_class": f"{type(env).__module__}.{type(env).__qualname__}",
        "env_version": env.env_version,
        "env_args": digested(env.env_args),
        "message_type": env.message_type,
        "system_prompt": env.system_prompt,
        "reward_functions": rubric.get_reward_func_names(),
        "reward_weights": rubric.get_reward_weights(),
        "group_weights": rubric.get_group_weights(),
        "max_turns": env.max_turns,
        "max_seq_len": env.max_seq_len,
        "max_total_completion_tokens": env.max_total_completion_tokens,
        "timeout_seconds": env.timeout_seconds,
    }
    parts = {name: described.pop(name) for name in ("parser", "rubric") if name in described}
    # class is env_class; a run may override the others
    excluded = "class", "sampling_args", "score_rollouts"
    further = {name: v for name, v in described.items() if name not in (*base, *excluded)}
    return base | {"environment": further} | parts


def code_of(env: EnvironmentParts) -> dict[str, str]:
    """Hashes of an environment's source files: of its class, rubric, parser, functions, tools."""
    members = getattr(env, "envs", ())  # of a group of environments
    environments = [env, *(members if isinstance(members, list | tuple) else ())]
    tools = [tool for member in environments for tool in getattr(member, "tools", ()) or ()]
    rubrics = [member.rubric for member in environments]
    functions = [function for rubric in rubrics for function in rubric.get_reward_funcs()]
    parsers = [getattr(member, "parser", None) for member in environments]
    digests: dict[str, str] = {}
    for member in environments:
        digests |= getattr(member, "source_digests", {})
    return source_hashes([*environments, *parsers, *rubrics, *functions, *tools], digests)
