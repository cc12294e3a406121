"""``vf-rescore`` over a run that ``vf-eval`` saved."""

import json
from pathlib import Path

import pytest

from support.eval_command import odd_only, runner_of
from verifiers.cli.rescore import COMMAND
from verifiers.testing import FakeServer


@pytest.fixture
def vf_rescore(eval_folder, capfd):
    return runner_of(COMMAND, capfd)


@pytest.fixture
def saved(vf_eval):
    with FakeServer(odd_only, models=["m"]) as server:
        return vf_eval("toy", "-b", server.url, "-n", "-1", "-r", "2", "--json").json["runs"][0][
            "path"
        ]


def test_a_changed_environment_scores_the_saved_rollouts(saved, vf_rescore, eval_folder):
    source = (eval_folder / "toy.py").read_text()
    assert "== answer" in source
    (eval_folder / "lax.py").write_text(source.replace("== answer", "!= 'nothing'"))
    about = eval_folder / "vf_lax-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vf-lax\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[verifiers.environments]\nlax = lax:load_environment\n"
    )
    ran = vf_rescore(saved, "--env", "lax")
    assert ran.code == 0
    assert "reward       1.000 ± 0.000 (standard error)" in ran.out
    assert f"note         scored again from {saved}, whose reward was 0.500" in ran.out
    said = vf_rescore(saved, "--env", "lax", "--to", "new", "--json").json
    assert (said["run"]["avg_reward"], said["origin"]["avg_reward"]) == (1.0, 0.5)
    assert json.loads(Path("new/metadata.json").read_text())["origin"]["path"] == saved


def test_without_arguments_it_takes_those_of_the_run(saved, vf_rescore):
    ran = vf_rescore(saved, "--json")
    assert (ran.code, ran.json["run"]["avg_reward"], ran.json["run"]["num_rollouts"]) == (
        0,
        0.5,
        12,
    )


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([], "give one run"),
        (["{saved}", "--env", "nope"], "nope"),
        (["{saved}", "-a", "{"], "--env-args is not JSON"),
        (["{saved}", "-a", "[1]"], "must be a JSON object"),
    ],
)
def test_what_cannot_be_scored_is_refused(saved, vf_rescore, words, because):
    ran = vf_rescore(
        *(word.replace("{saved}", saved) if word == "{saved}" else word for word in words)
    )
    assert ran.code == 2
    assert because in ran.err
