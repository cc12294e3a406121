"""What the library knows of a function is declared in a type or a registry, not in an attribute that
is set on the function."""

import ast

from architecture.test_native_code import product_files


def flags_in(source):
    """``(line, text)`` of each attribute that is set on a function of the same module."""
    tree = ast.parse(source)
    functions = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    targets = (
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
    )
    return [
        (target.lineno, ast.unparse(target))
        for target in targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in functions
    ]


def test_no_attribute_is_set_on_a_function():
    flags = {name: flags_in(source) for name, source in product_files()}
    assert len(flags) > 400
    assert {name: lines for name, lines in flags.items() if lines} == {}


def test_such_a_line_would_be_found():
    """Negative control."""
    assert flags_in("def none(rewards): ...\nnone.compares = False\n") == [(2, "none.compares")]
