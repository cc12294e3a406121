"""Results are checked in a fresh sandbox from declared artifacts; a check beside the model's code
can be forged."""

import pytest

import verifiers as vf
from support.isolated import needs_sandbox
from verifiers.testing import ScriptedClient

CHECK = "assert int(open('answer.txt').read()) == 42\nprint('passed')"
FORGERIES = {
    "builtins": "import builtins\nbuiltins.int = lambda text: 42",
    "open": "import builtins, io\nbuiltins.open = lambda path: io.StringIO('42')",
    "equality": (
        "import builtins\nclass Same(int):\n    __eq__ = lambda self, other: True\nbuiltins.int ="
        " lambda text: Same(0)"
    ),
    "traps": (
        "import ast\nast.parse = lambda *a, **k: (_ for _ in ()).throw(SystemExit)\nprint('passed')"
    ),
    "a module beside the check": (
        "open('sitecustomize.py', 'w').write('import builtins; builtins.int = lambda text: 42')"
    ),
}
WRONG = "open('answer.txt', 'w').write('7')"


class Shares(vf.PythonEnv):
    """The check runs in the rollout's own sandbox: the negative control."""

    async def post_rollout(self, state):
        state["checked"] = await self.run_code(state, CHECK)


def passed(state) -> float:
    return float(state["checked"].stdout == "passed\n" and state["checked"].error is None)


def graded(*cells, cls=vf.PythonEnv, sandbox=None):
    sandbox = sandbox or needs_sandbox()
    env = cls(
        "",
        dataset=[{"question": "Write 42."}],
        artifacts=["answer.txt", "absent.txt"],
        sandbox=sandbox,
    )
    env.seen = []

    async def right(state) -> float:
        env.seen.append(state["artifacts"])
        return float((await env.run_check(state, CHECK)).stdout == "passed\n")

    env.rubric = vf.Rubric([passed if cls is Shares else right])
    calls = [vf.ToolCall(f"c{n}", "python", {"code": cell}) for n, cell in enumerate(cells)]
    results = env.evaluate(ScriptedClient([*calls, "done"]), "m")
    assert results["errors"] == [None], results["errors"]
    return results["rewards"][0], env.seen


def test_a_right_result_passes_and_only_declared_files_reach_the_check():
    reward, (artifacts,) = graded(
        "open('answer.txt', 'w').write('42')\nopen('other', 'w').write('x')"
    )
    assert (reward, artifacts) == (1.0, {"answer.txt": b"42"})


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_result_stays_wrong_whatever_the_model_leaves_behind(name):
    assert graded(WRONG, FORGERIES[name])[0] == 0.0


@pytest.mark.parametrize("name", ["builtins", "open", "equality"])
def test_negative_control_a_check_in_the_models_session_is_forged(name):
    assert graded(WRONG, FORGERIES[name], cls=Shares)[0] == 1.0


RACE = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        for target in ("", SECRET, "/proc/1/environ", "../../../.." + SECRET):
            os.symlink(target, "next") if target else open("next", "w").write("7")
            os.rename("next", "answer.txt")
"""


def test_links_that_change_while_artifacts_are_collected_lead_nowhere_outside(tmp_path):
    """The process that changes them is ended first; a link is resolved inside the sandbox."""
    (tmp_path / "secret").write_text("42")
    reward, (artifacts,) = graded(RACE.replace("SECRET", repr(str(tmp_path / "secret"))))
    assert reward == 0.0
    assert b"42" not in artifacts.values()


def test_negative_control_without_a_sandbox_a_link_is_followed(tmp_path):
    (tmp_path / "secret").write_text("42")
    link = f"import os\nos.symlink({str(tmp_path / 'secret')!r}, 'answer.txt')"
    assert graded(link, sandbox="unsafe_subprocess")[1][0].get("answer.txt") == b"42"
    assert graded(link)[1] == [{}]


def test_a_rollout_without_a_sandbox_has_no_artifacts_and_is_checked():
    reward, (artifacts,) = graded()
    assert (reward, artifacts) == (0.0, {})


def test_artifacts_are_a_list_of_paths():
    with pytest.raises(vf.ConfigError, match="pass a list of paths"):
        vf.PythonEnv("", dataset=[{"question": "?"}], artifacts="answer.txt")
