"""Backends of other distributions are found by entry point; one that is not installed says what to
install."""

import importlib
from importlib.metadata import entry_points

import pytest

import verifiers as vf
from support.partial_install import without
from verifiers.legacy.moved import MOVED
from verifiers.runtime.distributions import SANDBOXES, provided
from verifiers.runtime.install_lines import install_line
from verifiers.sandbox import choice, register
from verifiers.sandbox.backends.unsafe_subprocess import UnsafeSubprocess

ELSEWHERE = {old: new for old, new in MOVED.items() if new.startswith("verifiers_sandboxes.")}
EXTRAS = {name: name for name in ("nsjail", "e2b", "modal", "daytona", "prime")} | {
    "prime-sandboxes": "prime"
}
ASK = """
import asyncio, sys
from verifiers.sandbox import backend_for
try:
    asyncio.run(backend_for(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""
IMPORT = """
import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except ModuleNotFoundError as error:
    print(error.name, error)
"""
THIRD_PARTY = """
from verifiers.sandbox.backends.unsafe_subprocess import UnsafeSubprocess
class Firecracker(UnsafeSubprocess):
    name = "firecracker"
"""


@pytest.fixture
def core_only(tmp_path):
    """Run Python code where everything is installed but verifiers-sandboxes."""
    return without(tmp_path, "verifiers_sandboxes")


def test_every_backend_of_the_distribution_is_found_by_its_name():
    points = entry_points(group=SANDBOXES)
    assert {point.name for point in points} >= {*provided(SANDBOXES)}
    for name in provided(SANDBOXES):
        backend = choice._create(name)
        assert backend.name == ("prime-sandboxes" if name == "prime" else name)


@pytest.mark.parametrize("name", provided(SANDBOXES))
def test_without_the_distribution_it_says_what_to_install(name, core_only):
    install = install_line("verifiers-sandboxes", EXTRAS.get(name, ""))
    assert (
        core_only(ASK, name)
        == f"SandboxUnavailable The sandbox {name!r} is in verifiers-sandboxes, which is not"
        f" installed: {install}"
    )


def test_without_the_distribution_an_unknown_name_still_lists_all_backends(core_only):
    answer = core_only(ASK, "dokcer")
    assert answer.startswith(
        "ConfigError Unknown sandbox backend 'dokcer'; available: auto, bubblewrap, daytona"
    )
    assert 'did you mean "docker"' in answer


def test_a_third_party_backend_is_found_by_its_entry_point_and_two_of_one_name_are_refused(
    core_only, tmp_path
):
    for folder in ("one", "two"):
        info = tmp_path / folder / f"{folder}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {folder}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[verifiers.sandboxes]\nfirecracker = module_{folder}:Firecracker\n"
        )
        (info.parent / f"module_{folder}.py").write_text(THIRD_PARTY)
    ask = ASK.replace(
        "asyncio.run(backend_for(sys.argv[1]))", "print(asyncio.run(backend_for(sys.argv[1])).name)"
    )
    assert core_only(ask, "firecracker", folder=tmp_path / "one") == "firecracker"
    assert (
        core_only(ask, "firecracker", folder=f"{tmp_path}/one:{tmp_path}/two")
        == "ConfigError Two packages have a sandbox backend 'firecracker': "
        "module_one:Firecracker and module_two:Firecracker; uninstall one"
    )


@pytest.mark.parametrize("name", ["docker", "prime", "bubblewrap", "auto"])
def test_a_name_that_is_taken_cannot_be_registered(name):
    with pytest.raises(vf.ConfigError, match="already"):
        register(name, UnsafeSubprocess)


@pytest.mark.parametrize("old", ELSEWHERE)
def test_an_old_module_path_is_the_module_of_the_distribution(old):
    module = importlib.import_module(f"verifiers.{old}")
    assert module is importlib.import_module(ELSEWHERE[old])
    assert module.__spec__.name == ELSEWHERE[old]


def test_without_the_distribution_an_old_module_path_says_what_to_install(core_only):
    assert (
        core_only(IMPORT, "verifiers.sandbox.engines")
        == "verifiers.sandbox.engines verifiers.sandbox.engines is now"
        " verifiers_sandboxes.engines, in a package that is not installed; install with:"
        f" {install_line('verifiers-sandboxes')}"
    )
