"""``vf-compare`` over runs that ``vf-eval`` saved."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from support.eval_command import last_word, odd_only, runner_of
from support.small_envs import add_one, single_turn
from verifiers.cli.compare import COMMAND
from verifiers.testing import FakeServer, ScriptedClient


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


@pytest.fixture
def save_night(tmp_path):
    """A function that evaluates two models in two environments of 60 rows, a tenth of them wrong.
    ``failing``: further wrong rows of one of the four runs. Gives the folder."""

    def save(name, failing=0, env_ids=("sums", "words"), models=("m", "n")):
        for env_id, model in itertools.product(env_ids, models):
            wrong = set(random.Random(f"{env_id} {model}").sample(range(60), 6))
            if (env_id, model) == ("words", "n"):
                wrong |= set(sorted(set(range(60)) - wrong)[:failing])

            def reply(request, wrong=wrong):
                number = int(request.prompt[-1]["content"].split()[0])
                return "?" if number in wrong else add_one(request)

            folder = tmp_path / name / env_id / model
            env = single_turn(60, env_id=env_id)
            env.evaluate(ScriptedClient(reply), model, num_examples=-1, results_path=folder)
        return str(tmp_path / name)

    return save


def test_two_folders_of_runs_are_compared_run_by_run(save_night, vf_compare):
    first, copy, worse = save_night("a"), save_night("b"), save_night("c", failing=8)
    ran = vf_compare(first, copy, "--fail-if-worse")
    assert (ran.code, ran.out.count("of which none differs")) == (0, 4)
    ran = vf_compare(first, worse, "--fail-if-worse", "--json")
    assert ran.code == 1
    verdicts = {d["run"]: d["verdict"] for d in ran.json["differences"]}
    assert verdicts.pop(f"{worse}/words/n") == "worse"
    assert list(verdicts.values()) == ["not distinguishable"] * 3
    text = vf_compare(first, worse).out
    assert text.startswith("4 pairs of runs; p is adjusted for all of them\n\nwords · n")
    assert "reward: worse (p = 0.0078)\n  from 0.900 to 0.767: -0.133" in text
    assert vf_compare(worse, first, "--fail-if-worse").code == 0


def test_runs_of_a_folder_without_a_partner_are_named(save_night, vf_compare):
    first, second = save_night("a", models=("m", "old")), save_night("b", models=("m", "new"))
    ran = vf_compare(first, second, "--fail-if-worse")
    assert ran.code == 0
    assert f"without a partner in the second set:\n  sums · old · {first}/sums/old" in ran.out
    assert f"without a partner in the first set:\n  sums · new · {second}/sums/new" in ran.out
    assert vf_compare(first, second, "--json").json["without_partner"] == [
        [f"{first}/sums/old", f"{first}/words/old"],
        [f"{second}/sums/new", f"{second}/words/new"],
    ]
    third = save_night("c", models=("x",))
    ran = vf_compare(first, third, "--fail-if-worse")
    assert (ran.code, "no run has a partner in the other set" in ran.err) == (2, True)
    assert "two of those are compared" in vf_compare(first, second, third).err


def test_a_run_is_a_set_beside_a_folder_of_runs(save_night, vf_compare):
    first, second = save_night("a"), save_night("b")
    ran = vf_compare(f"{first}/words/m", second)
    assert (ran.code, ran.out.startswith("1 pair of runs")) == (0, True)


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


# --- a set and the one before it ------------------------------------------------------------------


@pytest.fixture
def night(vf_eval):
    """A function that runs a set of two runs under an id."""

    def run(set_id, replies, *more):
        with FakeServer(replies, models=["m", "k"]) as server:
            words = ("toy,toy", "-b", server.url, "-m", "m", "-n", "6", "-r", "1", "--json")
            return vf_eval(*words, "--set", set_id, *more).json["set"]["path"]

    return run


def test_a_set_is_compared_with_the_newest_complete_one_before_it(night, vf_compare, eval_folder):
    first = vf_compare(night("c", last_word), "--last", "--fail-if-worse", "--json")
    assert (first.code, first.json["sets"][0]) == (0, None)
    assert "no complete set precedes toy+toy/c" in first.err
    unfinished = night("b", odd_only)
    next((eval_folder / unfinished).glob("evals/*/*/metadata.json")).unlink()
    newest = night("a", last_word)
    ran = vf_compare("outputs/sets/toy+toy", "--last", "--json")
    assert ran.code == 0
    assert ran.json["sets"] == ["outputs/sets/toy+toy/c", newest]
    assert len(ran.json["differences"]) == 2
    assert vf_compare(unfinished, "--last", "--json").json["sets"][1] == unfinished
    assert "is not complete: 1 of 2 runs are" in vf_compare(unfinished, "--last").err
    worse = night("d", lambda request: "no")
    failed = vf_compare(worse, "--last", "--fail-if-worse")
    assert failed.code == 1
    assert "toy+toy/a and toy+toy/d" in failed.out


def test_the_last_set_needs_one_folder_of_sets(saved, vf_compare, night):
    run = saved("m", last_word)
    assert "has no set of runs (set.json)" in vf_compare(run, "--last").err
    assert "one set of runs with --last" in vf_compare(run, run, "--last").err
    night("a", last_word)
    assert vf_compare("outputs", "--last").code == 0


def test_rollouts_of_a_folder_say_their_set(night, saved, eval_folder):
    import verifiers as vf

    night("2026-11-27", last_word)
    night("2026-11-28", odd_only)
    saved("m", last_word)
    results = vf.load_results(eval_folder / "outputs")
    assert sorted(
        {(str(each), n) for each, n in zip(results["set"], results["model"], strict=True)}
    ) == [
        ("None", "m"),
        ("toy+toy/2026-11-27", "m"),
        ("toy+toy/2026-11-28", "m"),
    ]
    means = results.to_pandas().groupby("set")["reward"].mean().to_dict()
    assert means == {"toy+toy/2026-11-27": 1.0, "toy+toy/2026-11-28": 0.5}
    inside = vf.load_results(eval_folder / "outputs/sets/toy+toy/2026-11-28/evals")
    assert set(inside["set"]) == {"toy+toy/2026-11-28"}


def trained(folder, name, reward, steps=4, **settings):
    path = folder / name
    path.mkdir(parents=True)
    stored = {"model": "m", "max_steps": 4, "configuration": {"beta": 0.0, **settings}}
    (path / "settings.json").write_text(json.dumps(stored))
    lines = [{"step": step, "reward/mean": reward} for step in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_trainings_are_compared_by_their_seeds(eval_folder, vf_compare):
    for seed, (low, high) in enumerate([(0.2, 0.6), (0.22, 0.64), (0.21, 0.61)]):
        trained(eval_folder / "low", f"seed={seed}", low, seed=seed)
        trained(eval_folder / "high", f"seed={seed}", high, seed=seed, beta=0.1)
    ran = vf_compare("low", "high")
    assert ran.code == 0
    assert "beta=0.0  0.210 ± 0.010 (0.200 0.220 0.210)" in ran.out
    assert re.search(r"beta=0\.1  \+0\.407, 95% from .* p = .*: better", ran.out)
    assert vf_compare("low", "high", "--fail-if-worse").code == 0
    assert vf_compare("high", "low", "--fail-if-worse").code == 1
    assert vf_compare("high", "low", "--json").json["differences"][0]["verdict"] == "worse"
    same = vf_compare("low")
    assert same.code == 2
    assert "the same settings but for their seeds" in same.err
    trained(eval_folder / "high", "seed=3", 0.1, steps=2, seed=3, beta=0.1)
    ran = vf_compare("low", "high")
    assert ran.code == 2
    assert "2 of 4 steps" in ran.err
    assert vf_compare("low", "high", "--anyway").code == 0


def test_evaluations_beside_trainings_are_named(eval_folder, saved, vf_compare):
    for seed, (low, high) in enumerate([(0.2, 0.6), (0.22, 0.64)]):
        trained(eval_folder / "outputs/low", f"seed={seed}", low, seed=seed)
        trained(eval_folder / "outputs/high", f"seed={seed}", high, seed=seed, beta=0.1)
    assert vf_compare("outputs").err == ""  # negative control
    evaluation = saved("m", last_word)
    ran = vf_compare("outputs")
    assert ran.code == 0
    assert "the trainings alone were compared, not the evaluations beside them" in ran.err
    assert Path(evaluation).name in ran.err
    mixed = vf_compare("outputs/low", evaluation)
    assert mixed.code == 2
    assert f"outputs/low holds trainings and {evaluation} holds none" in mixed.err
