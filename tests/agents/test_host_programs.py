"""Agent scripts run with an environment of the user's own: its interpreter, its packages and its
console scripts are there, read-only, and nothing else of the host is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from support.agents import CLIENT
from support.isolated import needs_sandbox
from verifiers.testing import ScriptedClient
from verifiers_agents.host_programs import host_program

AGENT = CLIENT + "import mine\nprint(chat([user(mine.WORD)])['content'])\n"
PYPROJECT = (
    '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = []\n'
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with ``agent.py`` and a virtual environment in which ``mine`` is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UV_OFFLINE", "1")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], check=True)
    (packages,) = Path(".venv/lib").glob("python3*/site-packages")
    (packages / "mine.py").write_text("WORD = 'of my environment'\n")
    script = Path(".venv/bin/my-agent")
    script.write_text(f"#!{tmp_path}/.venv/bin/python\n{AGENT}")
    script.chmod(0o755)
    Path("agent.py").write_text(AGENT)
    Path("pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def run(command, sandbox="bubblewrap", **parameters):
    if sandbox == "bubblewrap":
        needs_sandbox()
    env = vf.AgentEnv(
        command=command, sandbox=sandbox, dataset=[{"question": "Q", "answer": ""}], **parameters
    )
    (output,) = env.evaluate(ScriptedClient("done"), "m", state_columns=["trajectory"]).outputs
    return output


def assert_ran(output, said="of my environment"):
    assert output.error is None, output.error
    assert output["agent"]["log"] == "done\n"
    assert output["trajectory"][0]["prompt"][0]["content"] == said


BESIDE_PYTHON = Path(sys.executable).with_name("uv")
UV = str(BESIDE_PYTHON) if BESIDE_PYTHON.is_file() else shutil.which("uv") or ""
COMMANDS = {
    "its path": ["{project}/.venv/bin/python", "agent.py"],
    "a relative path": [".venv/bin/python", "-u", "agent.py"],
    "a console script": [".venv/bin/my-agent"],
    "uv run": [UV, "run", "--no-sync", "agent.py"],
    "uv run python": [UV, "run", "--no-sync", "python", "agent.py"],
    "uv run console script": [UV, "run", "--no-sync", "--", "my-agent"],
    "uv run with a chosen python": [
        *(UV, "run", "--no-project", "--python", "{project}/.venv/bin/python", "agent.py")
    ],
    "uv run with a python by name": [
        *(UV, "run", "--no-sync", "-p", f"python3.{sys.version_info.minor}", "agent.py")
    ],
}


@pytest.mark.parametrize("sandbox", ["bubblewrap", "unsafe_subprocess"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_environment_of_the_command_is_there(project, command, sandbox):
    if command[0] == UV and not UV:
        pytest.skip("uv is not installed")
    assert_ran(run([word.format(project=project) for word in command], sandbox))


def test_negative_control_the_interpreter_of_the_sandbox_has_no_such_package(project):
    assert "No module named 'mine'" in run(["python3", "agent.py"]).error.message


def test_this_interpreter_brings_its_packages_and_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(
        "import os, openai, verifiers\n"  # the one installed, the other a source folder
        "client = openai.OpenAI()\n"
        "client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}])\n"
        "print('done')"
    )
    assert_ran(run([sys.executable, "agent.py"]), "x")


def test_a_script_with_requirements_of_its_own_runs_in_their_environment(project):
    if not UV:
        pytest.skip("uv is not installed")
    head = "# /// script\n# requires-python = '>=3.11'\n# dependencies = []\n# ///\n"
    Path("alone.py").write_text(head + CLIENT + "print(chat([user('x')])['content'])\n")
    assert_ran(run([UV, "run", "alone.py"]), "x")


@pytest.mark.parametrize("sandbox", ["bubblewrap", "unsafe_subprocess"])
def test_a_script_outside_the_working_folder_is_copied(project, tmp_path, monkeypatch, sandbox):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for script in (f"{project}/agent.py", "../agent.py"):
        output = run([f"{project}/.venv/bin/python", script], sandbox)
        assert_ran(output)
        assert output["agent"]["command"][1] == "agent.py"


def test_what_is_mounted_cannot_be_changed_and_what_is_beside_it_is_not_there(project):
    Path("secret.txt").write_text("s")
    for file in project.glob(".venv/lib/python3*/site-packages/mine.py"):
        file.chmod(0o666)
    Path("agent.py").write_text(
        CLIENT
        + f"""
import mine
try:
    open(mine.__file__, "a")
except OSError as error:
    print(error.strerror)
print([os.path.exists(path) for path in ({str(project / "secret.txt")!r}, {os.path.expanduser("~/.bashrc")!r})])
chat([user("x")])
"""
    )
    output = run([".venv/bin/python", "agent.py"])
    assert output["agent"]["log"].splitlines() == ["Read-only file system", "[False, False]"]


def test_another_program_of_the_host_is_there_itself(project):
    Path("say").write_text("#!/bin/sh\nexec python3 agent.py\n")
    Path("say").chmod(0o755)
    Path("agent.py").write_text(CLIENT + "print(chat([user('x')])['content'])\n")
    assert_ran(run(["./say"], files={"agent.py": Path("agent.py")}), "x")


def test_an_environment_whose_interpreter_does_not_run_is_named(project):
    Path(".venv/bin/python").unlink()
    Path(".venv/bin/python").write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    Path(".venv/bin/python").chmod(0o755)
    with pytest.raises(vf.ConfigError, match=r"\.venv/bin/python does not run.*broken"):
        host_program((".venv/bin/python", "agent.py"), os.getcwd())


def test_what_uv_says_is_quoted(project):
    if not UV:
        pytest.skip("uv is not installed")
    command = (UV, "run", "--with", "no-such-package-anywhere", "agent.py")
    with pytest.raises(vf.ConfigError, match=r"uv run .* failed.*no-such-package-anywhere"):
        host_program(command, os.getcwd())
