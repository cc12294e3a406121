"""The identity of a component or an environment as JSON, hashes of its source files, and the
fingerprint of all.

Guarantees: components with equal parameters have equal identities on every machine and in every
process; components that differ in a parameter have different ones, unless the parameter is marked
as ``Free``. An identity contains no memory address, no secret and no dataset (every row has a
content hash), and computing one never raises.

Complete by default: ``Identified`` records the arguments of every constructor, including those of
authors' subclasses. Construction hashes nothing; the identity is computed once per run.

``runs.run`` assembles the configuration of a run; ``directory`` compares it with the stored one.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import math
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

from verifiers import compat
from verifiers.errors import ConfigError
from verifiers.runtime.bounded import open_file, read_file
from verifiers.runtime.json import canonical_json
from verifiers.runtime.redaction import digested, is_secret_name, without_digest
from verifiers.runtime.syntax import parse_python

NOT_SET = "<not set>"
"""Value in ``config_differences`` of a key that one of the two configurations lacks."""

CODE = "code"
"""Section of a configuration with the hashes of source files, and key of a function's code hash."""
PARTS = ("client", CODE, "environment", "parser", "rubric")
"""Sections of a configuration that are compared only when both runs have them: version 0.2.0 stored
none of them, and a client without ``identity()`` has none."""

MAX_STORED_CHARS = 10_000
"""Longer arguments (a corpus, a word list) are stored as hashes; prompts are shorter."""

_OUR_PACKAGES = ("verifiers", "verifiers_agents", "verifiers_trainer")
_OLD_SPELLINGS = compat.ENVIRONMENT_PARAMETERS | compat.JUDGE_PARAMETERS
_FREE = re.compile(r"\bFree\(")
_PYTHON = f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}"
_CODE = re.compile(r"([a-z]+-\d+\.\d+):[0-9a-f]{16}")
_in_progress: ContextVar[tuple[int, ...]] = ContextVar("verifiers_identity", default=())


# --- a configuration and its fingerprint ----------------------------------------------------------


def fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256 in hex of a configuration's canonical JSON; 1 and 1.0 are equal.

    *Raises* ``ConfigError`` naming the key whose value JSON cannot hold.
    """
    return hashlib.sha256(canonical_json(frozen_config(config))).hexdigest()


def rollout_key(example_hash: str, sibling: int) -> str:
    """The key of a rollout in every run of its dataset: 32 hex digits from the hash of its row and
    the sibling."""
    return hashlib.sha256(f"{example_hash}:{sibling}".encode()).hexdigest()[:32]


def config_differences(
    stored: Mapping[str, Any], present: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (stored, new) for every setting that differs.

    >>> config_differences({"model": "a", "env_args": {"n": 1}}, {"model": "a", "env_args": {"n": 2}})
    {'env_args.n': (1, 2)}
    """
    before, now = dict(_leaves(frozen_config(stored))), dict(_leaves(frozen_config(present)))
    differences = {
        key: (before.get(key, NOT_SET), now.get(key, NOT_SET))
        for key in sorted(before.keys() | now.keys())
        if key not in before
        or key not in now
        or canonical_json(before[key]) != canonical_json(now[key])
    }
    empty_values = [
        key for key, pair in differences.items() if NOT_SET in pair and ([] in pair or {} in pair)
    ]
    for key in empty_values:  # redundant when members differ: ``tools[0].function`` was <not set>
        if any(difference.startswith((f"{key}[", f"{key}.")) for difference in differences):
            del differences[key]
    return differences


def resume_differences(
    stored: Mapping[str, Any], present: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """``config_differences`` of the comparable parts: what prevents ``given`` from resuming
    ``stored``.

    Not compared: sections of ``PARTS`` that only one of the two has, and the bytecode of functions
    across versions of Python, which compile the same source differently.

    >>> resume_differences({"model": "a"}, {"model": "a", "parser": {"class": "verifiers.Parser"}})
    {}
    """
    uncompared = uncompared_parts(stored, present)
    # 0.2.0: some in clear
    before = digested({key: value for key, value in stored.items() if key not in uncompared})
    if before.get("env_class") in compat.ENVIRONMENT_CLASSES:
        before["env_class"] = compat.ENVIRONMENT_CLASSES[before["env_class"]]
    now = {key: value for key, value in present.items() if key not in uncompared}
    differences = config_differences(before, now)
    return {
        key: pair
        for key, pair in differences.items()
        if not _is_code_of_two_pythons(key, *pair) and not _is_secret_without_digest(*pair)
    }


def changed_code(differences: Mapping[str, object]) -> list[str]:
    """What changed when code is all that differs: files, else functions by their place; empty when
    more differs.

    >>> changed_code({"code.sums.py": ("a", "b"), "rubric.funcs[0].code": ("c", "d")})
    ['sums.py']
    >>> changed_code({"code.sums.py": ("a", "b"), "model": ("m", "n")})
    []
    """
    files = [key.removeprefix(f"{CODE}.") for key in differences if key.startswith(f"{CODE}.")]
    functions = [key.removesuffix(f".{CODE}") for key in differences if key.endswith(f".{CODE}")]
    return (files or functions) if len(files) + len(functions) == len(differences) else []


def uncompared_parts(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """The sections of ``PARTS`` that only one of two configurations has."""
    return [part for part in PARTS if (part in stored) is not (part in present)]


def frozen_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration after a round trip through JSON, with whole floats as integers. *Raises*
    ConfigError."""
    for key, value in _leaves(config):
        try:
            canonical_json(value)
        except TypeError as error:
            raise ConfigError(
                f"a run with {key}={value!r:.80} cannot be saved: {error}, so a later run could not"
                " be compared with it. Pass a name or a number instead, or run without saving.",
                key=key,
            ) from error
    frozen: dict[str, Any] = _whole_numbers(json.loads(canonical_json(config)))
    return frozen


def _whole_numbers(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _whole_numbers(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key -> value; members of a list of mappings by index, ``tools[0].function``."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(member, Mapping) and member for member in value)
        ):
            for index, member in enumerate(value):
                yield from _leaves(member, f"{name}[{index}].")
        else:
            yield name, value


def _is_code_of_two_pythons(key: str, before: object, now: object) -> bool:
    if key.rpartition(".")[2] != CODE or not isinstance(before, str) or not isinstance(now, str):
        return False
    matches = _CODE.fullmatch(before), _CODE.fullmatch(now)
    return matches[0] is not None and matches[1] is not None and matches[0][1] != matches[1][1]


def _is_secret_without_digest(before: object, now: object) -> bool:
    return before in (without_digest(now), now) or now == without_digest(before)


# --- components with an identity ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Free:
    """Mark a constructor parameter that a resumed run may change: ``Annotated[int | None,
    Free("only how fast")]``.

    Every other parameter belongs to the identity. An annotated class attribute marks a keyword that
    no constructor names.

    >>> from typing import Annotated
    >>> class Lenient(vf.Parser):
    ...     def __init__(self, tolerance: float, cache_size: Annotated[int, Free("only how fast")] = 8):
    ...         super().__init__()
    >>> Lenient(0.1).identity() == Lenient(0.1, cache_size=99).identity(), Lenient(0.2).identity()["tolerance"]
    (True, 0.2)
    """

    reason: str


class _ConstructorSignature:
    """The signature of a class for ``help()``: that of its ``__init__``. Python before 3.11.4 shows
    ``__new__``'s."""

    def __get__(self, instance: object, cls: type[Any]) -> inspect.Signature:
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

        def __new__(cls, *args: object, **kwargs: object) -> Any:
            self = super().__new__(cls)
            object.__setattr__(
                self, "_constructor_arguments", constructor_of(cls).by_name(args, kwargs)
            )
            return self

        __signature__ = _ConstructorSignature()

    def identity(self) -> dict[str, Any]:
        """``class`` and every constructor parameter that is not marked ``Free``, as JSON values
        without secrets.

        Override it to add facts that are not parameters: ``return super().identity() | {"version":
        2}``.
        """
        constructor = constructor_of(type(self))
        described: dict[str, Any] = {"class": type_name(type(self))}
        names = dict.fromkeys(
            (*constructor.names, *self._constructor_arguments, *self._changed_names())
        )
        # a rubric may reference its environment
        token = _in_progress.set((*_in_progress.get(), id(self)))
        try:
            values = {
                name: _parameter(self, name, constructor)
                for name in names
                if name not in constructor.free
            }
        finally:
            _in_progress.reset(token)
        return described | {name: value for name, value in values.items() if value is not _UNKNOWN}

    def _changed_names(self) -> Iterable[str]:
        """Names of attributes that were set after construction and count as parameters."""
        return ()


class _Arguments(dict[str, Any]):
    """Recorded arguments; dropped when their object is pickled, shared when it is deep-copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arguments, ()

    def __deepcopy__(self, memo: object) -> _Arguments:
        return self


class _Unknown:
    """Type of ``_UNKNOWN``: neither an argument nor a default."""


_UNKNOWN: Any = _Unknown()


@dataclass(frozen=True, slots=True)
class Constructor:
    """The parameters of a constructor, and of the base constructors that its ``**kwargs`` reach."""

    positional: tuple[str, ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    """Of the class itself; it determines the arguments of its base constructors."""
    free: AbstractSet[str]

    def by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Arguments:
        """Arguments by name, without free ones, so that recording does not keep a dataset alive."""
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
    defaults: dict[str, Any] = {}
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
        positional_names = code.co_varnames[1 : code.co_argcount]
        keyword_only_names = code.co_varnames[
            code.co_argcount : code.co_argcount + code.co_kwonlyargcount
        ]
        if is_first:
            positional, defaults = positional_names, _defaults(init)
        names |= dict.fromkeys((*positional_names, *keyword_only_names))
        is_first, has_kwargs = False, bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return Constructor(positional, tuple(names), defaults, frozenset(free))


def _parameter(part: Identified, name: str, constructor: Constructor) -> Any:
    """Describe the value of a parameter: its attribute, or the argument where the attribute is less
    informative."""
    argument = part._constructor_arguments.get(name, constructor.defaults.get(name, _UNKNOWN))
    attribute = vars(part).get(name, _UNKNOWN)
    if attribute is _UNKNOWN and _is_our_property(type(part), name):
        attribute = getattr(part, name)
    if attribute is _UNKNOWN or (attribute is None and argument is not _UNKNOWN):
        return argument if argument is _UNKNOWN else describe(argument, name)
    described = describe(attribute, name)
    if isinstance(described, dict) and described.keys() == {"class"} and argument is not _UNKNOWN:
        return describe(argument, name) if argument is not None else described
    return described


def _annotations(owner: Callable[..., object]) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(owner)
    except Exception:  # noqa: BLE001  Python 3.14 evaluates annotations here; names may not be imported
        return {}


def is_free(annotation: object) -> bool:
    """Whether an annotation has a ``Free`` mark; text is searched, because its names may not
    resolve."""
    if isinstance(annotation, str):
        return _FREE.search(annotation) is not None
    return any(isinstance(mark, Free) for mark in get_args(annotation))


def _is_our_property(cls: type, name: str) -> bool:
    """Whether ``name`` is a property of a library class: those are cheap, an author's
    may not be."""
    for base in cls.__mro__:
        if name in vars(base):
            return (
                isinstance(vars(base)[name], property)
                and base.__module__.partition(".")[0] in _OUR_PACKAGES
            )
    return False


# --- environments ---------------------------------------------------------------------------------


class RubricParts(Protocol):
    """What the identity of a rubric is made of."""

    def get_reward_func_names(self) -> list[str]: ...

    def get_reward_funcs(self) -> list[Callable[..., Any]]: ...

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


def identity_of(env: EnvironmentParts) -> dict[str, Any]:
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
    further = {
        name: value
        for name, value in described.items()
        if name not in base and name not in excluded
    }
    return base | {"environment": further} | parts


def code_of(env: EnvironmentParts) -> dict[str, str]:
    """Hashes of the source files of an environment: of its class, rubric, parser, functions and
    tools."""
    members = getattr(env, "envs", ())  # of a group of environments
    environments = [env, *(members if isinstance(members, list | tuple) else ())]
    tools = [
        tool for environment in environments for tool in getattr(environment, "tools", ()) or ()
    ]
    rubrics = [environment.rubric for environment in environments]
    functions = [function for rubric in rubrics for function in rubric.get_reward_funcs()]
    parsers = [getattr(environment, "parser", None) for environment in environments]
    return source_hashes([*environments, *parsers, *rubrics, *functions, *tools])


# --- any value as JSON ----------------------------------------------------------------------------


def type_name(cls: object) -> str:
    """``module.qualname``; ``verifiers.Name`` for the library itself, whose modules may move."""
    return _qualified(
        getattr(cls, "__module__", None), getattr(cls, "__qualname__", type(cls).__qualname__)
    )


def _qualified(module: object, name: str) -> str:
    top = str(module or "").partition(".")[0]
    if top in _OUR_PACKAGES:
        return (  # saved runs have the names of before they moved there
            f"{top.removesuffix('_agents')}.{name}"
        )
    return name if module in (None, "builtins") else f"{module}.{name}"


def describe(value: object, name: str = "") -> Any:
    """Convert a value to JSON: equal for equal values in every process, without addresses and secrets. Never raises.

    A component becomes its identity, a function its name and a hash of its bytecode, a class its name, and a value
    without a stable representation the name of its type. What has the ``name`` of a secret becomes a digest.

    >>> describe({"pattern": re.compile("a+"), "api_key": "x", "at": float("inf"), "kind": int, "lock": object()})
    {'pattern': {'pattern': 'a+', 'flags': 32}, 'api_key': '*** bbdf3fb6', 'at': 'inf', 'kind': {'type': 'int'}, \
'lock': {'class': 'object'}}
    """
    if not is_secret_name(name):
        return _describe(value, name)
    return digested({name: value if _is_json(value) else _describe(value, name)})[name]


def _is_json(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(member) for key, member in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return type(value) in _JSON_LEAVES


_JSON_LEAVES = (str, int, float, bool, type(None))


def _describe(value: object, name: str) -> Any:
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is str:
        return _text(value)
    active = _in_progress.get()
    if id(value) in active:  # a component that contains itself
        return {"class": type_name(type(value))}
    token = _in_progress.set((*active, id(value)))
    try:
        return _described(value, name)
    except Exception:  # noqa: BLE001  an author's object may raise anything; describe its type
        return {"class": type_name(type(value))}
    finally:
        _in_progress.reset(token)


def _described(value: object, name: str) -> Any:
    if isinstance(value, enum.Enum):
        return f"{type_name(type(value))}.{value.name}"
    if isinstance(value, str | int | float):  # a subclass
        return describe(
            next(base for base in (str, int, float) if isinstance(value, base))(value), name
        )
    if isinstance(value, bytes | bytearray):
        return {"sha256": hashlib.sha256(value).hexdigest()[:16], "size_bytes": len(value)}
    if isinstance(value, os.PathLike):
        return _text(os.fsdecode(value))
    if isinstance(value, re.Pattern):
        return {"pattern": describe(value.pattern), "flags": value.flags}
    if isinstance(value, type):
        return {"type": type_name(value)}
    if callable(identity_method := getattr(type(value), "identity", None)):
        identity = identity_method(value)
        if isinstance(identity, Mapping):
            is_ours = (
                str(getattr(identity_method, "__module__", "")).partition(".")[0] in _OUR_PACKAGES
            )
            return identity if is_ours else _plain(identity)
    if (function := _function(value)) is not None:
        return function
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if not is_free(field.type)]
        described = {
            field.name: describe(getattr(value, field.name), field.name) for field in fields
        }
        return {"class": type_name(type(value))} | described
    if isinstance(value, Mapping):
        return _bounded(
            {_key(key): describe(member, _key(key)) for key, member in value.items()}, len(value)
        )
    if isinstance(value, list | tuple):
        return _bounded([describe(member) for member in value], len(value))
    if isinstance(value, AbstractSet):
        return _bounded(
            sorted((describe(member) for member in value), key=canonical_json), len(value)
        )
    if isinstance(value, range | complex) or type_name(type(value)) in _NUMBERS_AND_TIMES:
        return str(value)
    model_name = getattr(value, "name_or_path", None)  # a tokenizer or a model in this process
    return {"class": type_name(type(value))} | (
        {"name_or_path": model_name} if isinstance(model_name, str) else {}
    )


_NUMBERS_AND_TIMES = frozenset(
    (
        "decimal.Decimal",
        "fractions.Fraction",
        "datetime.datetime",
        "datetime.date",
        "datetime.timedelta",
        "uuid.UUID",
    )
)


def _text(text: str) -> Any:
    text = digested(text)
    if len(text) <= MAX_STORED_CHARS:
        return text
    return _hashed(text.encode("utf-8", "surrogatepass"), len(text))


def _plain(identity: object) -> Any:
    """Convert the result of an ``identity()`` to JSON; an author's may contain anything."""
    if isinstance(identity, Mapping):
        return {_key(key): _plain(member) for key, member in identity.items()}
    if isinstance(identity, list):
        return [_plain(member) for member in identity]
    return describe(identity)


def _key(key: object) -> str:
    return key if isinstance(key, str) else str(describe(key))


def _bounded(members: object, length: int) -> Any:
    """The members, or their hash if they are long."""
    encoded = canonical_json(members)
    return members if len(encoded) <= MAX_STORED_CHARS else _hashed(encoded, length)


def _hashed(content: bytes, length: int) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest()[:16], "length": length}


# --- functions ------------------------------------------------------------------------------------


def _function(value: object) -> dict[str, Any] | None:
    """A callable's name, code hash and bound values; None if it is not a function."""
    if isinstance(value, functools.partial):
        bound = {"args": describe(value.args), "keywords": describe(value.keywords)}
        return {"function": "functools.partial", "of": describe(value.func)} | {
            k: v for k, v in bound.items() if v
        }
    if isinstance(value, types.MethodType):
        described = _function(value.__func__) or {"function": type_name(value.__func__)}
        return described | {"of": describe(value.__self__)}
    if isinstance(
        value, types.BuiltinFunctionType | types.MethodWrapperType | types.MethodDescriptorType
    ):
        return {"function": type_name(value)}
    wrapped = getattr(value, "__wrapped__", None)
    if not isinstance(value, types.FunctionType):
        return None if wrapped is None else {"function": type_name(value), "of": describe(wrapped)}
    if value.__module__ is None or value.__module__.partition(".")[0] not in _STABLE_MODULES:
        # its code tells it from others; a script is the module __main__ when it is run, and has its
        # name when imported
        described = {
            "function": value.__qualname__,
            "code": f"{_PYTHON}:{_code_hash(value.__code__)}",
        }
    else:
        described = {"function": type_name(value)}
    closure = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    bound_names = {
        "defaults": _defaults(value),
        "closure": {name: _content(cell) for name, cell in closure},
    }
    for name, members in bound_names.items():
        if members:
            described[name] = {key: describe(member, key) for key, member in members.items()}
    return described | ({"of": describe(wrapped)} if wrapped is not None else {})


_STABLE_MODULES = sys.stdlib_module_names | set(_OUR_PACKAGES)
"""Modules without code hashes: a resumed run may use another version of Python or of
this library."""


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    num_parameters = function.__code__.co_argcount
    names = function.__code__.co_varnames[num_parameters - len(values) : num_parameters]
    return dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an unbound name
        return None


@functools.lru_cache(maxsize=1024)
def _code_hash(code: types.CodeType) -> str:
    """16 hex digits of the hash of a function's bytecode, constants and names; independent of its
    file and line."""
    return hashlib.sha256(repr(_code_content(code)).encode("utf-8", "surrogatepass")).hexdigest()[
        :16
    ]


def _code_content(code: types.CodeType) -> tuple[Any, ...]:
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return (
        code.co_code,
        code.co_exceptiontable,
        names,
        counts,
        tuple(_constant(const) for const in code.co_consts),
    )


def _constant(value: object) -> Any:
    if isinstance(value, types.CodeType):
        return _code_content(value)
    if isinstance(value, tuple):
        return tuple(_constant(member) for member in value)
    if isinstance(value, frozenset):  # its order depends on the process
        return sorted(repr(_constant(member)) for member in value)
    return type(value).__name__, value


# --- source files ---------------------------------------------------------------------------------


_NOT_AUTHORS = _STABLE_MODULES | {"__main__", "verifiers_sandboxes"}
"""Modules that are not hashed: a script that is run usually holds more than the environment."""
_LIBRARIES = ("site-packages", "dist-packages")


def source_hashes(objects: Iterable[object]) -> dict[str, str]:
    """File name, relative to its package or folder -> 16 hex digits of the SHA-256 of its content;
    never raises.

    The files are those of the modules that define the objects (functions, classes, or instances,
    which stand for their classes), and what these modules import, also inside functions, from
    beside themselves: from the same package, or for a module without a package from the same
    folder. Installed libraries, modules imported by a computed name and data files are not
    included.
    """
    pending = [
        source for value in objects if (source := _author_file(_module_name(value))) is not None
    ]
    paths: dict[Path, str] = {}
    while pending:
        module, path = pending.pop()
        if path in paths:
            continue
        root, prefix = _root(module, path)
        paths[path] = (prefix / path.relative_to(root)).as_posix() if path != root else path.name
        for name in {*_names_of_values(module), *_imported_names(module, path)}:
            imported = _author_file(name) or _unloaded_file(
                name, root.parent if prefix.parts else root
            )
            if imported is not None and _is_beside(imported[1], root):
                pending.append(imported)
    hashes: dict[str, str] = {}
    for path, label in sorted(paths.items()):
        if (digest := _digest(path)) is not None:
            hashes[label if label not in hashes else f"{path.parent.name}/{label}"] = digest
    return hashes


def _module_name(value: object) -> str | None:
    """The name of the module that defines a function or a class, for an instance that
    of its class."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    owner = value if isinstance(value, type | types.FunctionType) else type(value)
    name = getattr(
        inspect.unwrap(owner) if isinstance(owner, types.FunctionType) else owner,
        "__module__",
        None,
    )
    return name if isinstance(name, str) else None


def _names_of_values(module: str) -> Iterator[str]:
    """The modules that define what a loaded module holds."""
    for value in list(vars(sys.modules[module]).values()) if module in sys.modules else ():
        name = value.__name__ if isinstance(value, types.ModuleType) else _module_name(value)
        if name is not None:
            yield name


def _imported_names(module: str, path: Path) -> Iterator[str]:
    """The modules that the source of a module names in imports, with their packages; further names
    may be none."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    try:
        stat = path.stat()
        statements = _import_statements(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # changed since it was imported
        return
    for node in statements:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            start = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (start, node.module)))
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@functools.lru_cache(maxsize=4096)
def _import_statements(
    path: Path, mtime_ns: int, size_bytes: int
) -> tuple[ast.Import | ast.ImportFrom, ...]:
    tree = parse_python(read_file(path))
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def _author_file(name: str | None) -> tuple[str, Path] | None:
    """The name and the source file of a loaded module that is an author's."""
    if name is None or name.partition(".")[0] in _NOT_AUTHORS:
        return None
    file = getattr(sys.modules.get(name), "__file__", None)
    return (name, Path(file).resolve()) if isinstance(file, str) and file.endswith(".py") else None


def _unloaded_file(name: str, base: Path) -> tuple[str, Path] | None:
    """The name and the source file, below ``base``, of a module that a function will import."""
    if name not in sys.modules:
        path = base.joinpath(*name.split("."))
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return name, file.resolve()
    return None


def _root(module: str, path: Path) -> tuple[Path, Path]:
    """(folder that holds what belongs to the module, prefix of its labels)."""
    top = sys.modules.get(module.partition(".")[0])
    for folder in map(Path, getattr(top, "__path__", ())):
        if path.is_relative_to(folder.resolve()):
            return folder.resolve(), Path(folder.name)
    return (path if any(part in _LIBRARIES for part in path.parts) else path.parent), Path()


def _is_beside(path: Path, root: Path) -> bool:
    return path.is_relative_to(root) and not any(
        part in _LIBRARIES for part in path.relative_to(root).parts
    )


def _digest(path: Path) -> str | None:
    try:
        stat = path.stat()
        return _hash(path, stat.st_mtime_ns, stat.st_size)
    except OSError:  # removed since it was imported
        return None


@functools.lru_cache(maxsize=4096)
def _hash(path: Path, mtime_ns: int, size_bytes: int) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
