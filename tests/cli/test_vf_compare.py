"""``vf-compare`` over runs that ``vf-eval`` saved."""

import json

import pytest

from support.eval_command import last_word, odd_only, runner_of
from verifiers.cli.compare import COMMAND
from verifiers.testing import FakeServer


@pytest.fixture
def vf_compare(eval_folder, capfd):
    return runner_of(COMMAND, capfd)


@pytest.fixture
def saved(vf_eval):
    """A function that runs the toy environment and gives the folder of the run."""

    def run(model, replies, *more):
        with FakeServer(replies, models=[model]) as server:
            ran = vf_eval(
                "toy", "-b", server.url, "-m", model, "-n", "-1", "-r", "1", "--json", *more
            )
        return ran.json["runs"][0]["path"]

    return run


def test_two_runs_are_compared_in_text_json_and_exit_code(saved, vf_compare):
    rows = ("-a", '{"num_rows": 20}')
    good, bad = saved("good", last_word, *rows), saved("bad", odd_only, *rows)
    ran = vf_compare(good, bad)
    assert ran.code == 0
    assert "B − A  reward: worse (p = 0.002)" in ran.out
    assert "difference   -0.500 ± 0.115 (standard error), 95% from -0.740 to -0.260" in ran.out
    assert "examples     20: B won 0, lost 10, 10 equal" in ran.out
    said = vf_compare(good, bad, "--json").json
    assert said["differences"][0]["verdict"] == "worse"
    assert said["differences"][0]["p"] == pytest.approx(2 / 2**10)
    assert [run["model"] for run in said["runs"]] == ["good", "bad"]
    assert vf_compare(good, bad, "--fail-if-worse").code == 1
    assert vf_compare(bad, good, "--fail-if-worse").code == 0


def test_a_few_examples_name_how_many_would_do(saved, vf_compare):
    ran = vf_compare(saved("good", last_word), saved("bad", odd_only), "--detect", "0.1")
    assert "not distinguishable with 6 examples; 238 would do for a difference of 0.1" in ran.out
    assert "no difference" not in ran.out


def test_a_gate_that_cannot_compare_does_not_pass(saved, vf_compare):
    first, second = saved("m", last_word), saved("m", last_word, "-a", '{"num_rows": 7}')
    ran = vf_compare(first, second, "--fail-if-worse")
    assert (ran.code, ran.out.count("not comparable because env_args differ")) == (2, 1)
    assert vf_compare(first, second, "--anyway").code == 0
    assert vf_compare(first, first).code == 2
    assert vf_compare(first).code == 2
    assert "no run has the metric 'nope'" in vf_compare(first, second, "--metrics", "nope").err


def test_json_of_a_refusal_has_the_reason(saved, vf_compare):
    first, second = saved("m", last_word), saved("m", last_word, "-a", '{"num_rows": 7}')
    said = json.loads(vf_compare(first, second, "--json").out)
    assert said["ok"] is False
    assert "env_args differ" in said["refused"][0]["because"][0]


def test_a_judge_is_compared_with_labels(vf_eval, vf_compare, eval_folder):
    source = (eval_folder / "toy.py").read_text()
    labelled = source.replace(
        '"answer": str(i)}', '"answer": str(i), "info": {"human": i % 3 > 0} if i < 40 else {}}'
    )
    assert labelled != source
    (eval_folder / "toy.py").write_text(labelled)
    with FakeServer(odd_only, models=["m"]) as server:
        words = ("toy", "-b", server.url, "-n", "-1", "-r", "1", "-a", '{"num_rows": 60}', "--json")
        path = vf_eval(*words).json["runs"][0]["path"]
    ran = vf_compare(path, "--labels", "info.human")
    assert "reward against info.human: 40 of 60 rollouts are labelled" in ran.out
    assert "of the yes   0.500 called yes (13 of 26)" in ran.out
    assert (
        "corrected    unknown: the labels are of one kind only, or the judge is no better than"
        " chance" in ran.out
    )
    assert vf_compare(path, "--labels", "info.human", "--json").json["agreement"][0]["true_no"] == 7
    assert vf_compare(path, "--labels", "info.nothing").code == 2
    assert vf_compare(path, path, "--labels", "info.human").code == 2
