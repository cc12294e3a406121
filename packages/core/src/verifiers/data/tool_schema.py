"""Tools: JSON schemas of typed Python callables, and the check of their arguments.

Promise: the schema shown to the model and the check use the same types. ``ToolFunction`` derives
one JSON schema from the signature and docstring of a callable (Google, NumPy and reST parameter
sections) and checks the arguments of every call, so a tool gets arguments of its declared types or
is not called. Any text of the model yields a dict or a ``ToolError`` with a message of bounded
length for the model.

This module calls no tool (``environments.tool``) and sends nothing.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError, ToolCallError, ToolParseError
from verifiers.runtime.decoding import check_depth, check_values
from verifiers.runtime.suggest import closest
from verifiers.runtime.terminal import escape_control
from verifiers.types import Tool

if TYPE_CHECKING:
    from pydantic import ValidationError

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Function names that every provider accepts."""
TYPED = frozenset("type anyOf oneOf allOf $ref enum const".split())
"""Keys of a JSON schema that say which values are allowed."""
MAX_COMPLAINTS = 5
"""Most wrong arguments named in one error message."""
MAX_ECHO_CHARS = 100
"""Most characters of model text quoted in an error message."""


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A tool: the callable, its definition for the model, and the check of its arguments.

    >>> def area(width: float, height: float = 1.0) -> float:
    ...     '''Area of a rectangle.
    ...
    ...     Args:
    ...         width: In metres.
    ...     '''
    ...     return width * height
    >>> tool = ToolFunction.of(area)
    >>> tool.definition["function"]["description"], tool.definition["parameters"]["required"]
    ('Area of a rectangle.', ['width'])
    >>> tool.arguments({"width": "2"})
    {'width': 2.0}
    """

    function: Callable[..., Any]
    definition: Tool
    is_async: bool
    hidden: frozenset[str]
    """Parameters that the model neither sees nor sets."""
    hidden_required: frozenset[str]
    """Hidden parameters without a default, which ``update_tool_args`` must supply."""
    names: Mapping[str, str]
    """Field of the pydantic model -> parameter."""
    model: Any
    """Pydantic model of the visible arguments; None for no check."""

    @classmethod
    def of(cls, function: Callable[..., Any], args_to_skip: Iterable[str] = ()) -> ToolFunction:
        """Build the tool of a callable; ``args_to_skip`` names parameters to hide from the model.

        *Raises* ConfigError for a name no provider accepts, ``*args`` or positional-only
        parameters, a parameter to skip that does not exist, and an annotation without a JSON
        schema.
        """
        name, hidden = tool_name(function), frozenset(args_to_skip)
        declared = _parameters(function, name, hidden)
        visible = {p.name: p for p in declared if p.name not in hidden}
        description, described = _documentation(function)
        hints = _hints(function, name, visible)
        for parameter, hint in hints.items():  # Annotated[int, "How many."]
            texts = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
            if texts and not described.get(parameter):
                described[parameter] = texts[0]
        parameters = inspect.signature(function).parameters.values()
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        model, schema = _schema(name, visible, hints, described, takes_any)
        return cls(
            function=function,
            definition=Tool(name, description, schema),
            is_async=_is_async(function),
            hidden=hidden,
            hidden_required=frozenset(
                p.name for p in declared if p.name in hidden and p.default is p.empty
            ),
            names={_field(index): parameter for index, parameter in enumerate(visible)},
            model=model,
        )

    @classmethod
    def with_definition(
        cls, function: Callable[..., object], definition: Mapping[str, object]
    ) -> ToolFunction:
        """Build a tool with a schema from another source, for example a tool server; its arguments
        are not checked.

        *Raises* ConfigError for a name no provider accepts.
        """
        tool = Tool.from_wire(definition)
        _check_name(tool["name"])
        return cls(function, tool, _is_async(function), frozenset(), frozenset(), {}, None)

    def unclear(self) -> str:
        """What the model is not told of the tool: ``no docstring, no type of `query```; empty when
        it is told all."""
        if self.model is None:  # a schema from another source
            return ""
        properties = self._properties().items()
        untyped = [f"no type of `{name}`" for name, s in properties if not TYPED & s.keys()]
        undescribed = [] if self.definition.get("description") else ["no docstring"]
        return ", ".join([*undescribed, *untyped])

    def _properties(self) -> Mapping[str, Any]:
        return (self.definition.get("parameters") or {}).get("properties") or {}

    def visible_schema(self, parameter: str) -> Mapping[str, object] | None:
        """The JSON schema of a parameter that the model sees; None if there is none."""
        return self._properties().get(parameter)

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    def arguments(self, values: Mapping[str, Any]) -> dict[str, object]:
        """Convert the visible arguments to their declared types; missing arguments are omitted.

        *Raises* ToolCallError that lists the wrong arguments, for the model.
        """
        import pydantic

        if self.model is None:
            return dict(values)
        try:
            checked = self.model.model_validate(dict(values))
        except pydantic.ValidationError as error:
            raise ToolCallError(f"wrong arguments for {self.name}: {_complaints(error)}") from error
        by_name = {
            name: getattr(checked, field)
            for field, name in self.names.items()
            if field in checked.model_fields_set
        }
        return {**(checked.model_extra or {}), **by_name}


def tool_from_function(function: Callable[..., object], args_to_skip: Iterable[str] = ()) -> Tool:
    """Return the definition of ``function`` for the model; see ``ToolFunction.of``."""
    return ToolFunction.of(function, args_to_skip).definition


def defined_name(tool: Mapping[str, Any]) -> str:
    """The name in a tool definition, with or without the outer ``{"type": "function"}`` object."""
    return str((tool.get("function") or tool).get("name"))


def tool_name(function: Callable[..., object]) -> str:
    """The ``__name__`` of a callable, or of a partial's function. *Raises* ConfigError."""
    if not callable(function):
        raise ConfigError(
            f"a tool must be a function, not {type(function).__name__}: {shortened(function)}"
        )
    name: str | None = getattr(_unwrapped(function), "__name__", None)
    if name is None:
        raise ConfigError(
            f"a tool needs a __name__, which {type(function).__name__} objects lack; write a"
            " function"
        )
    _check_name(name)
    return name


def parse_arguments(text: str) -> dict[str, object]:
    """Parse the JSON arguments of a call; an empty text means no arguments.

    *Raises* ToolParseError when it is not a JSON object.
    """
    try:
        check_values(text)
        arguments = _DECODER.decode(text) if text.strip() else {}
        check_depth(arguments)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno} column {error.colno}"
        raise ToolParseError(f"{_NOT_JSON}: {where}; write one JSON object") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else shortened(str(error))
        raise ToolParseError(f"{_NOT_JSON}: {reason}; write one JSON object") from error
    if not isinstance(arguments, dict):
        kind = _JSON_KINDS[type(arguments)]
        raise ToolParseError(f"the arguments must be one JSON object, not a {kind}")
    return arguments


def shortened(value: object, limit: int = MAX_ECHO_CHARS) -> str:
    """At most ``limit`` characters of a text, control characters escaped, for error messages."""
    text = value if isinstance(value, str) else repr(value)
    return escape_control(text if len(text) <= limit else text[: limit - 1] + "…")


_NOT_JSON = "the arguments are not valid JSON"
_JSON_KINDS = {
    list: "list",
    str: "text",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"a tool cannot be called {name!r}; use letters, digits, _ and -, at most 64"
        )


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


# ``json.loads`` would make a decoder for each call
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


# --- the signature --------------------------------------------------------------------------------


def _parameters(
    function: Callable[..., object], name: str, hidden: frozenset[str]
) -> list[inspect.Parameter]:
    """Return the parameters that can be passed by name, without ``**kwargs``."""
    try:
        declared = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the tool {name!r} has no readable signature; wrap it in a function"
        ) from error
    for parameter in declared:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"the tool {name!r} declares {str(parameter)!r}, but a model passes arguments by"
                " name; give every parameter a name"
            )
    by_name = [p for p in declared if p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in by_name]
    if len(names) == len(declared) and (unknown := sorted(hidden - set(names))):
        raise ConfigError(
            f"the tool {name!r} has no parameter {unknown[0]!r} to skip"
            + closest(unknown[0], names)
        )
    return by_name


def _hints(
    function: Callable[..., object], name: str, visible: Mapping[str, inspect.Parameter]
) -> dict[str, object]:
    """Resolve the types of visible parameters only: those of hidden ones may not be importable."""
    written = {p.name: p.annotation for p in visible.values() if p.annotation is not p.empty}
    source: Any = inspect.unwrap(_unwrapped(function))
    if not hasattr(source, "__globals__"):
        source = getattr(source, "__call__", source)  # noqa: B004  the method of an object has the globals of its module
    try:
        hints = typing.get_type_hints(
            SimpleNamespace(__annotations__=written),
            getattr(source, "__globals__", {}),
            include_extras=True,
        )
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise ConfigError(
            f"an annotation of the tool {name!r} cannot be resolved: {error}; define or import the"
            " type in the module of the tool, or hide the parameter (StatefulToolEnv.add_tool(…,"
            " args_to_skip=[…]))"
        ) from error
    return {p.name: hints.get(p.name, Any) for p in visible.values()}


def _unwrapped(function: object) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: Callable[..., object]) -> bool:
    plain = _unwrapped(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(
        getattr(plain, "__call__", None)  # noqa: B004  an object whose __call__ is a coroutine function
    )


def _documentation(function: Callable[..., object]) -> tuple[str, dict[str, str]]:
    """(description, parameter -> description) of the docstring, without returns and examples."""
    import docstring_parser

    text = inspect.getdoc(_unwrapped(function)) or ""
    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return text, {}
    described: dict[str, str] = {}
    for parameter in parsed.params:
        for name in parameter.arg_name.split(","):  # NumPy sections describe several at once
            described[name.strip().lstrip("*")] = (parameter.description or "").strip()
    return (parsed.description or "").strip(), described


# --- the schema -----------------------------------------------------------------------------------


def _field(index: int) -> str:
    return f"argument_{index}"


def _schema(
    name: str,
    visible: Mapping[str, inspect.Parameter],
    hints: Mapping[str, Any],
    described: Mapping[str, str],
    takes_any: bool,
) -> tuple[object, dict[str, object]]:
    """Build (pydantic model, JSON schema); ``takes_any`` allows further names.

    Model fields are numbered, so that a parameter may have any name.
    """
    import pydantic
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    fields: dict[str, Any] = {}
    for index, parameter in enumerate(visible.values()):
        hint = hints[parameter.name]
        options: dict[str, Any] = {"alias": parameter.name}
        if description := described.get(parameter.name):
            options["description"] = description
        if parameter.default is not parameter.empty:
            options |= _default(parameter.default)
            hint = hint | None if parameter.default is None and hint is not Any else hint
        fields[_field(index)] = (hint, pydantic.Field(**options))
    config = pydantic.ConfigDict(extra="allow" if takes_any else "forbid")
    try:
        model = pydantic.create_model(name, __config__=config, **fields)
        schema = model.model_json_schema()
    except (PydanticUserError, PydanticUndefinedAnnotation, TypeError) as error:
        raise ConfigError(
            f"no JSON schema can be derived for the tool {name!r}: {str(error).splitlines()[0]};"
            " annotate with JSON types, or hide the parameter (StatefulToolEnv.add_tool(…,"
            " args_to_skip=[…]))"
        ) from error
    definitions = schema.pop("$defs", {})
    flat = {key: entry for key, entry in definitions.items() if not _refers(entry)}
    leaves = {f"#/$defs/{key}": _plain(entry, {}) for key, entry in flat.items()}
    schema.pop("description", None)
    plain = {"type": "object", "properties": {}} | _plain(schema, leaves)
    unlinked = {k: _plain(entry, leaves) for k, entry in definitions.items() if k not in flat}
    return model, plain | {"$defs": unlinked} if unlinked else plain


def _default(value: object) -> dict[str, object]:
    """Return the field options of a default, which the schema omits when JSON cannot store it."""
    import pydantic_core

    try:
        pydantic_core.to_json(value)
    except (pydantic_core.PydanticSerializationError, ValueError, RecursionError):
        return {"default_factory": lambda: value}
    return {"default": value}


def _refers(schema: object) -> bool:
    if isinstance(schema, dict):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _plain(schema: object, leaves: Mapping[str, Any]) -> Any:
    """A schema without generated titles, references to ``leaves`` (enums, flat models) inlined."""
    if isinstance(schema, list):
        return [_plain(member, leaves) for member in schema]
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, object] = {}
    for key, value in schema.items():
        if key == "$ref" and value in leaves:
            plain = leaves[value] | plain
        elif key in ("default", "const", "enum", "examples"):  # data, not schemas
            plain[key] = value
        elif key == "properties":
            plain[key] = {name: _plain(member, leaves) for name, member in value.items()}
        elif key != "title":
            plain[key] = _plain(value, leaves)
    return plain


_WRONG = {"missing": " is missing", "extra_forbidden": " is not a parameter"}


def _complaints(error: ValidationError) -> str:
    """Validation errors for the model, ``'n': input should be a valid integer``, not too long."""
    complaints = []
    entries = error.errors(include_url=False, include_context=False, include_input=False)
    for entry in entries[:MAX_COMPLAINTS]:
        path = shortened(".".join(str(part)[: MAX_ECHO_CHARS + 1] for part in entry["loc"]))
        wrong = _WRONG.get(entry["type"])
        wrong = wrong or f": {shortened(entry['msg'], 2 * MAX_ECHO_CHARS)}"
        complaints.append(f"'{path}'{wrong}")
    more = error.error_count() - len(complaints)
    return "; ".join(complaints) + (f"; and {more} more" if more > 0 else "")


__all__ = ["ToolFunction", "parse_arguments", "shortened", "tool_from_function", "tool_name"]
