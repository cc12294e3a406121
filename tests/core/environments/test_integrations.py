"""A library that an environment stands on: absent, it is named with its extra; broken, it speaks
for itself."""

import functools
import subprocess
import sys
import textwrap

import pytest

from verifiers.runtime.install_lines import install_line

CASES = {
    "TextArenaEnv": ("textarena", "TextArena", "ta", "TextArenaEnv('GuessTheNumber-v0')"),
    "ReasoningGymEnv": ("reasoning_gym", "Reasoning Gym", "rg", "ReasoningGymEnv('chain_sum')"),
    "GymEnv": ("gym", "Gymnasium", "gym", "GymEnv('CartPole-v1')"),
    "MCPEnv": ("mcp", "the MCP client", "mcp", "MCPEnv(mcp_servers=[], dataset=[])"),
}
PACKAGES = {"GymEnv": "gymnasium"}


@pytest.fixture
def use(warm):
    """What a process of its own says to ``hasattr``, to the name and to the constructor, after a
    preparation."""
    return functools.partial(used, warm)


def used(warm, name, prepare):
    module, _, _, construct = CASES[name]
    program = f"""
        import sys
        {prepare}
        import verifiers.environments.integrations as found
        from verifiers.environments.integrations.{module} import {name}
        print(hasattr(found, "{name}"))
        for use in (lambda: found.{name}, lambda: {construct}):
            try:
                use()
            except Exception as error:
                print(type(error).__name__, error)
    """
    ended = warm.run(textwrap.dedent(program))
    assert ended.returncode == 0, ended.stderr
    return ended.lines


@pytest.mark.parametrize("name", CASES)
def test_without_the_library_the_extra_and_the_command_are_named(use, name):
    _, title, extra, _ = CASES[name]
    package = PACKAGES.get(name, CASES[name][0])
    sentence = f"needs {title}, which is not installed: {install_line('verifiers', extra)}"
    assert use(name, f"sys.modules[{package!r}] = None") == [
        "False",
        f"AttributeError vf.{name} {sentence}",
        f"ConfigError {name} {sentence}",
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_broken_library_shows_its_own_error(use, name, tmp_path):
    package = tmp_path / PACKAGES.get(name, CASES[name][0])
    package.mkdir()
    assert (
        "not installed"
        in use(
            name, f"sys.path.insert(0, {str(tmp_path)!r}); sys.modules[{package.name!r}] = None"
        )[1]
    )
    (package / "__init__.py").write_text("import a_dependency_that_is_gone")
    assert use(name, f"sys.path.insert(0, {str(tmp_path)!r})") == [
        "True",
        "ModuleNotFoundError No module named 'a_dependency_that_is_gone'",
    ]


def test_a_bare_folder_of_the_name_is_no_package(use, tmp_path):
    (tmp_path / "textarena").mkdir()
    # with what it stands on, before its folder is hidden too
    hide = "import verifiers.environments.base, verifiers.environments.integrations; "
    hide += (
        "sys.path[:] = [p for p in sys.path if not __import__('os').path.isdir(p + '/textarena')]; "
    )
    said = use("TextArenaEnv", hide + f"sys.path.insert(0, {str(tmp_path)!r})")
    assert said[0] == "False"


def test_finding_the_classes_imports_none_of_the_libraries():
    code = """
        import sys
        import verifiers.environments.integrations as found
        for name in ("GymEnv", "MCPEnv", "ReasoningGymEnv", "TextArenaEnv"):
            getattr(found, name, None)
        print({"gymnasium", "mcp", "reasoning_gym", "textarena"} & set(sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "set()", done.stderr
