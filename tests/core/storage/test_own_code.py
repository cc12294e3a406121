"""Digests of what a user programs: another behaviour is another digest, another place is not."""

import functools
import sys
import types
from dataclasses import dataclass

import pytest

from verifiers.storage.own_code import code_digest, own_code

SCRIPT = """
import math

SIGN = 1.0


def scale(x):
    return SIGN * x


def loss(x, power=2):
    return [scale(y) ** power for y in x]


class Base:
    def hook(self):
        return loss([1.0])


class Sub(Base):
    factor = 3

    @property
    def half(self):
        return 0.5

    @staticmethod
    def square(x):
        return x * x


def made(bound):
    return lambda x: bound * x


bound = made(2)
"""


def module_of(text, name="a_script"):
    module = types.ModuleType(name)
    exec(compile(text, f"/{name}.py", "exec"), vars(module))
    return module


def digests(text):
    module = module_of(text)
    return {name: code_digest(getattr(module, name)) for name in ("loss", "Sub", "bound")}


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("** power", "* power", {"loss", "Sub"}),  # Sub calls it
        ("power=2", "power=3", {"loss", "Sub"}),
        ("SIGN = 1.0", "SIGN = -1.0", {"loss", "Sub"}),
        ("SIGN * x", "SIGN - x", {"loss", "Sub"}),
        ("factor = 3", "factor = 4", {"Sub"}),
        ("return 0.5", "return 0.25", {"Sub"}),
        ("x * x", "x + x", {"Sub"}),
        ("[1.0]", "[2.0]", {"Sub"}),  # of a base class
        ("made(2)", "made(3)", {"bound"}),
        ("import math", "# another line\n\nimport math", set()),
        ("import math", "import math\nUNUSED = 5", set()),
        ("SIGN = 1.0\n", "SIGN = 1.0  # the sign\n", set()),
    ],
)
def test_what_a_function_does_decides_its_digest(before, after, changed):
    assert before in SCRIPT
    first, second = digests(SCRIPT), digests(SCRIPT.replace(before, after))
    assert {name for name in first if first[name] != second[name]} == changed


def test_a_partial_and_a_method_are_their_function():
    module = module_of(SCRIPT)
    assert code_digest(functools.partial(module.loss, power=4)) == code_digest(module.loss)
    assert code_digest(module.Sub().hook) == code_digest(module.Base.hook)


@dataclass
class Clip:
    width: float

    def __call__(self, x):
        return min(x, self.width)


def test_an_instance_is_its_class_and_a_dataclass_its_values_too():
    assert code_digest(Clip(1.0)) == code_digest(Clip(1.0))
    assert code_digest(Clip(1.0)) != code_digest(Clip(2.0))


def test_only_a_users_code_is_hashed():
    module = module_of(SCRIPT)
    hashes = own_code({"loss": [module.loss, len, None], "trainer": [dict, module.Sub]})
    assert set(hashes) == {"loss loss", "trainer Sub"}
    assert all(value.startswith(f"{sys.implementation.name}-") for value in hashes.values())


def test_the_file_of_a_module_is_hashed_with_it():
    function, file = own_code({"loss": [digests]})
    assert function == "loss digests"
    assert file.endswith("storage/test_own_code.py")
