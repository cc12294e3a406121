"""What the library knows of a function is declared in a type or a registry, not in an attribute that
is set on the function."""

import ast

from architecture.test_native_code import product_files
from support.sources import nodes_in, nodes_of


def flags_in(nodes):
    """``(line, text)`` of each attribute, but for Python's own, that is set on a function beside
    its definition."""
    flags = []
    for node in nodes:
        body = getattr(node, "body", None)
        statements = body if isinstance(body, list) else []
        functions = {
            child.name
            for child in statements
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for statement in statements:
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                is_flag = isinstance(target, ast.Attribute) and not target.attr.startswith("__")
                if is_flag and ast.unparse(target.value) in functions:
                    flags.append((target.lineno, ast.unparse(target)))
    return flags


def test_no_attribute_is_set_on_a_function():
    flags = {path.as_posix(): flags_in(nodes_of(path)) for path in product_files()}
    assert len(flags) > 400
    assert {name: lines for name, lines in flags.items() if lines} == {}


def test_such_a_line_would_be_found():
    """Negative control."""
    of_module = nodes_in("def none(rewards): ...\nnone.compares = False\n")
    assert flags_in(of_module) == [(2, "none.compares")]
    of_function = nodes_in("def f():\n    def g(): ...\n    g.x = 1\n    return g\n")
    assert flags_in(of_function) == [(3, "g.x")]
