"""What the docstrings show is what happens, and every public class and function shows something.

Examples are run with ``vf`` imported, as a reader has it.
"""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import verifiers as vf

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NEED_AN_EXTRA = {"verifiers.cli.plot", "verifiers.cli.tui"}
"""Modules that import a library of an extra at their top."""
WITHOUT_EXAMPLE: set[str] = {"SandboxEnv"}
"""Public names whose docstring shows nothing yet. It only becomes shorter."""


def modules():
    packages_found = pkgutil.walk_packages(vf.__path__, "verifiers.")
    return sorted(
        m.name for m in packages_found if "__main__" not in m.name and ".inside" not in m.name
    )


def with_examples():
    """Modules whose source has an example, found without importing them."""
    for name in modules():
        source = importlib.util.find_spec(name).loader.get_source(name) or ""
        if ">>> " in source and name not in NEED_AN_EXTRA:
            yield name


@pytest.mark.parametrize("name", list(with_examples()))
def test_examples_of_a_module_run(name):
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, extraglobs={"vf": vf}, optionflags=FLAGS)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_a_wrong_example_is_found(capsys):
    def wrong():
        """
        >>> vf.Usage(1, 2).total_tokens
        4
        """

    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS)
    (example,) = finder.find(wrong, "wrong", globs={"vf": vf})
    assert runner.run(example).failed == 1
    assert "Expected:\n    4\nGot:\n    3\n" in capsys.readouterr().out


def public():
    """The classes and functions that ``verifiers`` promises; errors say what they are by their name
    and sentence."""
    for name in vf.__all__:
        value = getattr(vf, name)
        if inspect.isfunction(value) or (
            inspect.isclass(value) and not issubclass(value, BaseException)
        ):
            yield name, value


@pytest.mark.parametrize("name", vf.__all__)
def test_every_public_class_and_function_is_described(name):
    value = getattr(vf, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert (
            len((vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or "")
            > 10
        )


def test_every_public_class_and_function_has_an_example():
    shows = {
        name: ">>> " in value.__doc__ or "::\n\n    " in inspect.getdoc(value)
        for name, value in public()
    }
    assert len(shows) > 60
    assert {name for name, has_one in shows.items() if not has_one} == WITHOUT_EXAMPLE
