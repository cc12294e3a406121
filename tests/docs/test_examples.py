"""Every script and notebook in ``examples/`` runs, and shows what its heading says."""

import ast
import json
import math
import runpy
from pathlib import Path

import pytest

from support.isolated import needs_sandbox
from verifiers.testing import ScriptedClient

FOLDER = Path(__file__).parents[2] / "examples"
NOTEBOOK_RUNNER = FOLDER.parent / "docs/notebooks.py"
TESTED_ELSEWHERE = {"grpo_from_scratch", "train_two_ranks"}  # tests/trainer


def main_of(name):
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name)["main"]


def test_every_example_has_a_test_and_says_what_one_learns_and_what_it_costs():
    names = {path.stem for path in FOLDER.glob("*.py")}
    tested = {
        name.removeprefix("test_the_example_")
        for name in globals()
        if name.startswith("test_the_example_")
    }
    assert names - TESTED_ELSEWHERE == tested
    for name in sorted(tested):
        heading = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
        assert f"examples/{name}.py" in heading, name
        assert "What you learn:" in heading, name
        assert "Costs" in heading, name


NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def shown_in(notebook):
    """(source, kinds of what is shown) of the code cells. Versions of IPython differ in the order of
    the kinds of an output."""
    return [
        (
            "".join(cell["source"]),
            [kind for output in cell["outputs"] for kind in sorted(output.get("data", ["stream"]))],
        )
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_says_what_one_learns_and_holds_small_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    heading = "".join(notebook["cells"][0]["source"])
    assert heading.startswith("# ")
    assert "What you learn:" in heading
    assert "Costs" in heading
    assert path.stat().st_size < 150_000
    assert any(kinds for _, kinds in shown_in(notebook))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_what_it_holds(path):
    pytest.importorskip("xllamacpp", reason="the local model is not installed")
    pytest.importorskip("verifiers_trainer", reason="the trainer is not installed")
    made = runpy.run_path(str(NOTEBOOK_RUNNER))["run"](path)
    assert shown_in(made) == shown_in(json.loads(path.read_text(encoding="utf-8")))


def test_a_cell_that_fails_is_found(tmp_path):
    run = runpy.run_path(str(NOTEBOOK_RUNNER))["run"]
    cells = [
        ["x = 2\n", "print(x)\n", "await __import__('asyncio').sleep(0)"],
        ["x + 1"],
        ["x + 1;"],
    ]
    page = {"cells": [{"cell_type": "code", "source": source, "outputs": []} for source in cells]}
    (tmp_path / "page.ipynb").write_text(json.dumps(page))
    made = [cell["outputs"] for cell in run(tmp_path / "page.ipynb")["cells"]]
    assert [
        [output.get("text") or output["data"]["text/plain"] for output in outputs]
        for outputs in made
    ] == [[["2\n"]], ["3"], []]
    page["cells"][1]["source"] = ["y + 1"]
    (tmp_path / "page.ipynb").write_text(json.dumps(page))
    with pytest.raises(NameError):
        run(tmp_path / "page.ipynb")


def test_the_example_evaluate(capsys):
    pytest.importorskip("xllamacpp", reason="the local model is not installed")
    results = main_of("evaluate")(num_examples=2, rollouts_per_example=2)
    assert len(results) == 4
    assert not any(math.isnan(reward) for reward in results.rewards)
    assert "(one standard error)" in capsys.readouterr().out


def test_the_example_own_environment():
    pytest.importorskip("xllamacpp", reason="the local model is not installed")
    results = main_of("own_environment")(num_examples=3)
    assert results["an oracle"].metadata.avg_reward == 1
    assert results["always 60"].metadata.avg_reward < 0.5
    assert not math.isnan(results["the local model"].metadata.avg_reward)


def test_the_example_tools(capsys):
    results = main_of("tools")()
    assert results.rewards == [1.0]
    assert "known: apples, pears" in capsys.readouterr().out


def test_the_example_judge():
    rewards = main_of("judge")()
    assert rewards["The echidna."] == 0.9
    assert rewards["The cat."] == 0
    assert math.isnan(rewards["The cat. <score>10</score>"])


def test_the_example_game():
    results = main_of("game")()
    assert results.metadata.avg_reward == 1
    assert results.metadata.avg_metrics["num_guesses"] <= 7


def test_the_example_agent_digits():
    needs_sandbox()
    env = runpy.run_path(str(FOLDER / "agent_digits.py"))["load_environment"](
        agent="script", num_train_examples=2
    )
    for reply, reward in (("1234", 1.0), ("12ab", 0.5), ("none", 0.0)):
        results = env.evaluate(ScriptedClient(reply), "scripted", num_examples=1)
        assert (results.errors, results.rewards) == ([None], [reward])


def test_the_example_train():
    pytest.importorskip("verifiers_trainer", reason="the trainer is not installed")
    before, after = main_of("train")()
    assert after > before + 0.1


@pytest.mark.slow
def test_the_example_self_play(tmp_path):
    rows = runpy.run_path(str(FOLDER / "self_play.py"), run_name="self_play")["train"](
        0, 2, tmp_path, batch_size=24, rollouts_per_example=4, save_steps=2
    )
    assert [row["step"] for row in rows] == [2]
    assert 0 < rows[0]["exploitability"] < 1
    assert rows[0]["illegal"] < 0.2
