"""Every script in ``examples/`` runs, and shows what its heading says."""

import ast
import math
import runpy
import shutil
from pathlib import Path

import pytest

from verifiers.testing import ScriptedClient

FOLDER = Path(__file__).parents[2] / "examples"
TESTED_ELSEWHERE = {"grpo_from_scratch", "train_two_ranks"}  # tests/trainer


def main_of(name):
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name)["main"]


def test_every_example_has_a_test_and_says_what_one_learns_and_what_it_costs():
    names = {path.stem for path in FOLDER.glob("*.py")}
    tested = {name.removeprefix("test_the_example_") for name in globals() if name.startswith("test_the_example_")}
    assert names - TESTED_ELSEWHERE == tested
    for name in sorted(tested):
        heading = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
        assert f"examples/{name}.py" in heading, name
        assert "What you learn:" in heading, name
        assert "Costs" in heading, name


def test_the_example_evaluate(capsys):
    pytest.importorskip("xllamacpp", reason="the local model is not installed")
    results = main_of("evaluate")(num_examples=2, rollouts_per_example=2)
    assert len(results) == 4
    assert not any(math.isnan(reward) for reward in results.rewards)
    assert "(one standard error)" in capsys.readouterr().out


def test_the_example_own_environment():
    pytest.importorskip("xllamacpp", reason="the local model is not installed")
    found = main_of("own_environment")(num_examples=3)
    assert found["an oracle"].metadata.avg_reward == 1
    assert found["always 60"].metadata.avg_reward < 0.5
    assert not math.isnan(found["the local model"].metadata.avg_reward)


def test_the_example_tools(capsys):
    results = main_of("tools")()
    assert results.rewards == [1.0]
    assert "known: apples, pears" in capsys.readouterr().out


def test_the_example_judge():
    found = main_of("judge")()
    assert found["The echidna."] == 0.9
    assert found["The cat."] == 0
    assert math.isnan(found["The cat. <score>10</score>"])


def test_the_example_game():
    results = main_of("game")()
    assert results.metadata.avg_reward == 1
    assert results.metadata.avg_metrics["num_guesses"] <= 7


def test_the_example_agent_digits():
    if not shutil.which("bwrap"):
        pytest.skip("an agent runs in bubblewrap, which is not installed")
    env = runpy.run_path(str(FOLDER / "agent_digits.py"))["load_environment"](agent="script", num_train_examples=2)
    for reply, reward in (("1234", 1.0), ("12ab", 0.5), ("none", 0.0)):
        results = env.evaluate(ScriptedClient(reply), "scripted", num_examples=1)
        assert (results.errors, results.rewards) == ([None], [reward])


def test_the_example_train():
    pytest.importorskip("verifiers_trainer", reason="the trainer is not installed")
    before, after = main_of("train")()
    assert after > before + 0.1
