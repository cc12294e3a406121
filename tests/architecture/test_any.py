"""How many parameters are annotated with nothing but ``Any``: the share of each package may only
fall."""

import ast
from itertools import chain

import pytest

from support.import_graph import AGENTS, CORE, INTEGRATIONS, TRAINER, modules

LIMITS = {(CORE, AGENTS): 0.025, (TRAINER, INTEGRATIONS): 0.029}
"""Share of all annotated parameters, of packages that were one. Lower it when it has fallen."""


def bare_any(*packages):
    """(parameters annotated ``Any`` as ``module:line name``, all annotated parameters); ``self``
    and the like and parameters that take whatever a caller passes on (``*_: Any``)
    are not counted."""
    bare, total = [], 0
    for name, path in chain.from_iterable(modules(package).items() for package in packages):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = node.args
            annotated = [
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                arguments.vararg,
                arguments.kwarg,
            ]
            for argument in annotated:
                if argument is None or argument.annotation is None or argument.arg == "_":
                    continue
                total += 1
                if ast.unparse(argument.annotation) == "Any":
                    bare.append(f"{name}:{argument.lineno} {argument.arg}")
    return bare, total


@pytest.mark.parametrize("packages", LIMITS, ids=lambda paths: paths[0].name)
def test_the_share_of_bare_any_parameters_only_falls(packages):
    bare, total = bare_any(*packages)
    share = len(bare) / total
    assert share <= LIMITS[packages], f"{len(bare)} of {total} parameters are Any: {bare}"
    assert share > LIMITS[packages] - 0.01, (
        f"it has fallen to {share:.4f}: lower the limit to {share + 0.001:.3f}"
    )
