"""``PythonEnv``: an interpreter per rollout that keeps its state; results, tracebacks and limits as
text."""

import shutil

import pytest

import verifiers as vf
from verifiers.environments.python import distributions
from verifiers.testing import ScriptedClient

ROW = {"question": "Do it.", "answer": ""}
BACKENDS = [
    "unsafe_subprocess",
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(
            shutil.which("bwrap") is None, reason="bubblewrap is not installed"
        ),
    ),
]


def python(code):
    return vf.ToolCall("c1", "python", {"code": code})


def play(*replies, **parameters):
    parameters = {"sandbox": "unsafe_subprocess", "pip_install_packages": ""} | parameters
    return vf.PythonEnv(dataset=[ROW], **parameters).evaluate(
        ScriptedClient([*replies, "done"]), "m"
    )


def told(results):
    return [m["content"] for m in results["completions"][0] if m["role"] == "tool"]


def test_the_model_sees_the_tool_python_with_code_and_no_bash():
    env = vf.PythonEnv(dataset=[ROW])
    (tool,) = env.tool_defs
    assert tool["function"]["name"] == "python"
    assert list(tool["parameters"]["properties"]) == ["code"]
    assert env.sandbox_spec.packages == ("numpy", "sympy", "scipy")
    assert env.max_startup_wait_seconds == 30
    assert isinstance(env, vf.SandboxEnv | vf.StatefulToolEnv)


@pytest.mark.parametrize("sandbox", BACKENDS)
def test_state_stays_between_calls_and_a_last_expression_is_shown(sandbox):
    results = play(
        python("x = 6 * 7"),
        python("print('x is', x)\nx + 1"),
        python("def f(n):\n    return n * x\n\nf(2)"),
        python("y"),
        python("None"),
        sandbox=sandbox,
    )
    nothing, shown, function, wrong, none = told(results)
    assert nothing == "(no output)"
    assert shown == "x is 42\nOut[2]: 43"
    assert function == "Out[3]: 84"
    assert wrong.startswith("Traceback (most recent call last):\n")
    assert wrong.endswith("NameError: name 'y' is not defined")
    assert none == "(no output)"
    assert results["metrics"]["tool_errors"] == [1.0]
    assert results["metrics"]["python_calls"] == [5.0]


@pytest.mark.parametrize("sandbox", BACKENDS)
def test_a_call_that_takes_too_long_costs_the_variables_and_says_so(sandbox):
    # warm first: what is measured is the endless call, not the start
    results = play(
        python("x = 1"),
        python("import time; time.sleep(3600)"),  # one that computes: test_code_blocks
        python("x"),
        python("2 + 2"),
        sandbox=sandbox,
        timeout_per_command_seconds=3,
    )
    _, stopped, gone, works = told(results)
    assert stopped == "(stopped after 3 s, the time limit of one call; all variables are gone)"
    assert "NameError: name 'x'" in gone
    assert works == "Out[2]: 4"
    assert results["states"][0]["error"] is None
    assert results["metrics"]["tool_errors"] == [2.0]


def test_errors_of_syntax_and_system_exit_are_texts():
    syntax, leave, after = told(play(python("1 +"), python("raise SystemExit(3)"), python("5")))
    assert "SyntaxError" in syntax
    assert "SystemExit" in leave
    assert after == "Out[3]: 5"


def test_a_long_result_is_cut_and_marked():
    (text,) = told(play(python("'ab' * 100_000"), max_tool_result_chars=500))
    assert len(text) < 600
    assert "characters left out" in text
    (uncut,) = told(play(python("'ab' * 100"), max_tool_result_chars=500))
    assert uncut == f"Out[1]: {'ab' * 100!r}"


def test_the_wait_for_the_interpreter_is_measured():
    metrics = play(python("1"))["metrics"]
    assert metrics["python_ready_wait_time"] == metrics["sandbox_ready_wait_time"]
    assert metrics["python_ready_wait_time"][0] > 0
    assert metrics["sandbox_command_execution_time"][0] > 0


def test_rollouts_share_no_variable():
    env = vf.PythonEnv(dataset=[ROW] * 3, sandbox="unsafe_subprocess", pip_install_packages="")
    client = ScriptedClient(
        lambda request: [python("n = globals().get('n', 0) + 1\nn"), "done"][
            len(request.prompt) > 2
        ]
    )
    results = env.evaluate(client, "m", rollouts_per_example=2)
    texts = [
        m["content"]
        for completion in results["completions"]
        for m in completion
        if m["role"] == "tool"
    ]
    assert texts == ["Out[1]: 1"] * 6


# --- packages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sandbox", BACKENDS)
def test_the_packages_asked_for_can_be_imported(sandbox):
    (text,) = told(
        play(
            python("import sympy, numpy; int(numpy.array([1, 2]).sum() + sympy.Integer(4))"),
            pip_install_packages="numpy sympy",
            sandbox=sandbox,
        )
    )
    assert text == "Out[1]: 7"


def test_a_package_that_is_not_installed_ends_the_run_with_the_command():
    client = ScriptedClient(["done"])
    env = vf.PythonEnv(
        dataset=[ROW], sandbox="unsafe_subprocess", pip_install_packages="numpy no-such-thing"
    )
    with pytest.raises(vf.ConfigError, match="pip install no-such-thing"):
        env.evaluate(client, "m")
    assert client.requests == []


def test_names_of_packages():
    assert distributions("numpy  sympy>=1.12 scipy[x]==1.*") == ("numpy", "sympy", "scipy")
    assert distributions(["numpy", "numpy"]) == ("numpy",)
    assert distributions("") == ()
    with pytest.raises(vf.ConfigError, match="'-U'"):
        distributions("-U numpy")


def test_the_older_module_leads_here():
    from verifiers.envs.python_env import PythonEnv

    assert PythonEnv is vf.PythonEnv


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_auto_runs_in_a_real_sandbox():
    code = "import os\nsorted(os.environ), os.getpid() < 1000, os.path.exists('/root')"
    (plain,) = told(play(python(code)))
    (inside,) = told(play(python(code), sandbox="auto"))
    assert "PATH" in plain
    assert inside.endswith("True, False)")
