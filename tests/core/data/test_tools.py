"""Tools: schema from signature and docstring, and the same types as the check of arguments."""

import enum
import functools
import inspect
import json
import keyword
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.tool_schema import (
    ToolFunction,
    parse_arguments,
    shortened,
    tool_from_function,
    tool_name,
)
from verifiers.errors import ConfigError, ToolCallError, ToolParseError


class Unit(enum.Enum):
    metre = "m"
    foot = "ft"


class Point(pydantic.BaseModel):
    x: float
    title: str = "origin"


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = []


def properties(function, **options):
    return ToolFunction.of(function, **options).definition["parameters"]["properties"]


# --- the schema


def test_types_become_json_types_and_defaults_make_optional():
    def tool(
        text: str,
        count: int,
        share: float = 0.5,
        flag: bool = False,
        words: list[str] | None = None,
        table: dict[str, int] | None = None,
    ):
        """Does it."""

    definition = tool_from_function(tool)
    assert definition["name"] == "tool"
    assert definition["description"] == "Does it."
    schema = definition["parameters"]
    assert {
        name: schema_of_field.get("type") for name, schema_of_field in schema["properties"].items()
    } == {
        "text": "string",
        "count": "integer",
        "share": "number",
        "flag": "boolean",
        "words": None,
        "table": None,
    }
    assert schema["properties"]["words"]["anyOf"] == [
        {"type": "array", "items": {"type": "string"}},
        {"type": "null"},
    ]
    assert schema["required"] == ["text", "count"]
    assert schema["properties"]["share"]["default"] == 0.5
    assert schema["additionalProperties"] is False
    assert "strict" not in definition["function"]


def test_choices_stand_in_the_schema_itself():
    def tool(mode: Literal["fast", "slow"], unit: Unit = Unit.metre):
        pass

    fields = properties(tool)
    assert fields["mode"] == {"type": "string", "enum": ["fast", "slow"]}
    assert fields["unit"] == {"type": "string", "enum": ["m", "ft"], "default": "m"}


def test_models_stand_in_place_and_recursive_ones_in_definitions():
    def tool(point: Point, tree: Tree):
        pass

    schema = ToolFunction.of(tool).definition["parameters"]
    assert schema["properties"]["point"]["properties"]["title"] == {
        "type": "string",
        "default": "origin",
    }
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert list(schema["$defs"]) == ["Tree"]


GOOGLE = """Search pages.

    All of them.

    Args:
        query (str): What to look for,
            in words.
        limit: How many.

    Returns:
        The titles.
    """
NUMPY = """Search pages.

    All of them.

    Parameters
    ----------
    query : str
        What to look for,
        in words.
    limit : int, optional
        How many.

    Returns
    -------
    list
        The titles.
    """
REST = """Search pages.

    All of them.

    :param str query: What to look for,
        in words.
    :param limit: How many.
    :returns: The titles.
    """


@pytest.mark.parametrize("docstring", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_parameter_sections_of_three_styles_are_read(docstring):
    def search(query: str, limit: int = 5) -> list[str]: ...

    search.__doc__ = docstring
    definition = tool_from_function(search)
    assert definition["description"] == "Search pages.\n\nAll of them."
    described = definition["parameters"]["properties"]
    assert described["query"]["description"].split() == "What to look for, in words.".split()
    assert described["limit"]["description"] == "How many."


def test_a_docstring_without_sections_describes_the_tool_alone():
    def tool(a, b: Annotated[int, pydantic.Field(ge=1, description="at least one")] = 1):
        """Adds: a and b."""

    assert tool_from_function(tool)["description"] == "Adds: a and b."
    fields = properties(tool)
    assert fields["a"] == {}  # no annotation: anything
    number = {"type": "integer", "minimum": 1, "default": 1}
    assert fields["b"] == number | {"description": "at least one"}
    assert tool_from_function(lambda_named("plain"))["description"] == ""


def lambda_named(name):
    function = lambda: None  # noqa: E731
    function.__name__ = name
    return function


def test_partials_methods_callable_objects_and_wrapped_functions_are_tools():
    class Shop:
        def buy(self, item: str, amount: int = 1):
            """Buy."""

        async def __call__(self, item: "str"):
            pass

    @functools.wraps(Shop.buy)
    def wrapped(*args, **kwargs):
        pass

    assert list(properties(Shop().buy)) == ["item", "amount"]
    assert tool_name(functools.partial(Shop().buy, item="x")) == "buy"
    assert tool_from_function(functools.partial(Shop().buy, amount=3))["description"] == "Buy."
    assert list(properties(wrapped)) == ["self", "item", "amount"]
    shop = Shop()
    shop.__name__ = "shop"
    assert ToolFunction.of(shop).is_async
    assert properties(shop) == {"item": {"type": "string"}}


def test_hidden_parameters_are_in_no_schema_and_their_types_need_not_be_importable():
    def tool(path: str, sandbox: "NotImportedHere", retries: int = 3):  # noqa: F821
        pass

    hidden = ToolFunction.of(tool, args_to_skip=["sandbox", "retries"])
    assert list(hidden.definition["parameters"]["properties"]) == ["path"]
    assert hidden.hidden_required == {"sandbox"}
    with pytest.raises(ToolCallError, match="'sandbox' is not a parameter"):
        hidden.arguments({"path": "x", "sandbox": "mine"})
    # negative control: visible, it must be known
    with pytest.raises(ConfigError, match="NotImportedHere"):
        ToolFunction.of(tool)


def test_a_parameter_may_have_any_name():
    def tool(_private: int, model_config: str, schema: str, title: str, copy: int = 0):
        pass

    described = ToolFunction.of(tool)
    arguments = {"_private": 1, "model_config": "a", "schema": "b", "title": "c"}
    assert described.arguments(arguments) == arguments
    assert list(described.definition["parameters"]["properties"]) == [*arguments, "copy"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda_named("a b"), "cannot be called 'a b'"),
        (lambda_named("../../etc/passwd"), "cannot be called"),
        (lambda_named("x" * 65), "at most 64"),
        (7, "must be a function"),
        (object(), "must be a function"),
        (type("Callable", (), {"__call__": lambda self: 0})(), "needs a __name__"),
    ],
)
def test_what_has_no_usable_name_is_refused(function, said):
    with pytest.raises(ConfigError, match=said):
        ToolFunction.of(function)


def star(*values: int): ...
def positional(a, /): ...
def opaque(handle: inspect.Signature): ...
def options(query: str, **extra: Any): ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (star, r"'\*values: int'"),
        (positional, "passes arguments by name"),
        (opaque, "no JSON schema .*'opaque'"),
    ],
)
def test_signatures_a_model_cannot_use_are_refused(function, said):
    with pytest.raises(ConfigError, match=said):
        ToolFunction.of(function)


def test_a_parameter_to_skip_must_exist_unless_the_tool_takes_all():
    with pytest.raises(ConfigError, match="no parameter 'quer' to skip, did you mean \"query\""):
        ToolFunction.of(search_of("query"), args_to_skip=["quer"])
    assert list(properties(options, args_to_skip=["state"])) == ["query"]


def search_of(parameter):
    def search(**_): ...

    search.__signature__ = inspect.Signature(
        [inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY)]
    )
    return search


def test_a_default_that_json_cannot_hold_is_not_shown():
    def tool(a: Any = object(), b: float = 1.5):  # noqa: B008
        pass

    assert properties(tool) == {"a": {}, "b": {"type": "number", "default": 1.5}}
    assert ToolFunction.of(tool).arguments({}) == {}


def test_a_definition_from_elsewhere_leaves_arguments_unchecked():
    foreign = ToolFunction.with_definition(
        options, {"name": "remote", "description": "d", "parameters": {"x": 1}}
    )
    assert foreign.definition["function"]["parameters"] == {"x": 1}
    assert foreign.arguments({"anything": [1]}) == {"anything": [1]}
    with pytest.raises(ConfigError, match="cannot be called"):
        ToolFunction.with_definition(options, {"name": "a/b"})


# --- arguments


def test_arguments_arrive_in_the_declared_types():
    def tool(n: int, unit: Unit, point: Point, note: str = None, when: Optional[str] = "now"):  # noqa: RUF013, UP045
        pass

    arguments = ToolFunction.of(tool).arguments(
        {"n": "3", "unit": "ft", "point": {"x": 1}, "note": None}
    )
    assert arguments == {"n": 3, "unit": Unit.foot, "point": Point(x=1.0), "note": None}


def test_what_is_wrong_with_arguments_is_said_shortly():
    def tool(n: int, mode: Literal["a", "b"] = "a"):
        pass

    described = ToolFunction.of(tool)
    for passed, said in [
        ({}, "'n' is missing"),
        ({"n": "many"}, "'n': Input should be a valid integer"),
        ({"n": 1, "mode": "c"}, "'mode': Input should be 'a' or 'b'"),
        ({"n": 1, "argument_1": "a"}, "'argument_1' is not a parameter"),
        ({"n": 1, "x" * 5_000_000: 0}, "is not a parameter"),
        ({"n": "9" * 5_000_000}, "'n'"),
        ({f"k{i}": 0 for i in range(1000)}, "and 996 more"),
    ]:
        with pytest.raises(ToolCallError) as raised:
            described.arguments(passed)
        assert said in str(raised.value)
        assert len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": ', "line 1 column 7"),
        ("[1]", "not a list"),
        ('"{}"', "not a text"),
        ("null", "not a null"),
        ('{"a": NaN}', "NaN is no JSON value"),
        ('{"a": -Infinity}', "no JSON value"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a": ' + "9" * 10_000 + "}", "not valid JSON"),
    ],
)
def test_arguments_that_are_no_json_object_are_refused_with_the_place(text, said):
    with pytest.raises(ToolParseError, match=said) as raised:
        parse_arguments(text)
    assert len(str(raised.value)) < 300


def test_no_arguments_at_all_are_an_empty_object():
    assert parse_arguments("") == parse_arguments(" \n") == parse_arguments("{}") == {}


def test_text_in_errors_is_short_and_cannot_steer_a_terminal():
    assert shortened("\x1b[2J" + "a" * 500).startswith("\\x1b[2Ja")
    assert len(shortened("a" * 500)) == 100


# --- properties

KINDS = {
    "int": (int, st.integers(-(2**40), 2**40)),
    "float": (float, st.floats(allow_nan=False, allow_infinity=False)),
    "str": (str, st.text()),
    "bool": (bool, st.booleans()),
    "list": (list[int], st.lists(st.integers(-5, 5))),
    "dict": (dict[str, bool], st.dictionaries(st.text(), st.booleans())),
    "choice": (Literal["a", "b"], st.sampled_from(["a", "b"])),
    "optional": (int | None, st.none() | st.integers(-5, 5)),
    "any": (Any, st.recursive(st.none() | st.text(), st.lists)),
}
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name)
)


@st.composite
def tools_with_arguments(draw):
    """(a function of random parameters, arguments for it, names of those without a default)."""
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    parameters, arguments, required = [], {}, []
    for name in names:
        hint, values = KINDS[draw(st.sampled_from(sorted(KINDS)))]
        default = draw(values) if draw(st.booleans()) else inspect.Parameter.empty
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
            )
        )
        if default is inspect.Parameter.empty:
            required.append(name)
        if default is inspect.Parameter.empty or draw(st.booleans()):
            arguments[name] = draw(values)

    def tool(**keywords):
        return keywords

    tool.__signature__ = inspect.Signature(parameters)
    return tool, arguments, required


@settings(max_examples=40, deadline=None)
@given(tools_with_arguments())
def test_the_schema_names_every_parameter_and_valid_arguments_come_through_unchanged(case):
    tool, arguments, required = case
    described = ToolFunction.of(tool)
    schema = described.definition["parameters"]
    assert list(schema["properties"]) == list(inspect.signature(tool).parameters)
    assert schema.get("required", []) == required
    assert json.loads(json.dumps(described.definition)) == described.definition
    assert described.arguments(parse_arguments(json.dumps(arguments))) == arguments
    for name in required:
        with pytest.raises(ToolCallError, match="is missing"):
            described.arguments({key: value for key, value in arguments.items() if key != name})
    with pytest.raises(ToolCallError, match="is not a parameter"):
        described.arguments(arguments | {"not a parameter": 1})


def said_or(kind, function, *args):
    """(value, None), or (None, the text of the error)."""
    try:
        return function(*args), None
    except kind as error:
        return None, str(error)


@settings(max_examples=100, deadline=None)
@given(
    st.text()
    | st.recursive(st.none() | st.booleans() | st.text(), lambda s: st.lists(s)).map(json.dumps)
)
def test_whatever_a_model_writes_is_a_dict_or_a_short_parse_error(text):
    arguments, said = said_or(ToolParseError, parse_arguments, text)
    assert isinstance(arguments, dict) or len(said) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def typed(n: int, unit: Unit, point: Point, tree: Tree | None = None, words: list[str] = []):  # noqa: B006
    pass


TYPED = ToolFunction.of(typed)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["n", "unit", "point", "tree", "words", "x"]), JSON))
def test_arguments_of_any_shape_are_accepted_or_refused_with_a_bounded_text(arguments):
    accepted, said = said_or(ToolCallError, TYPED.arguments, arguments)
    assert isinstance(accepted["n"], int) if said is None else len(said) < 1500


def test_a_description_in_the_annotation_is_shown_unless_the_docstring_has_one():
    def take(count: Annotated[int, "How many."], size: Annotated[int, "Unused."] = 1) -> int:
        """Take.

        Args:
            size: How large.
        """
        return count

    properties = ToolFunction.of(take).definition["function"]["parameters"]["properties"]
    assert [properties[name]["description"] for name in ("count", "size")] == [
        "How many.",
        "How large.",
    ]
