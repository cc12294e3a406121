"""Runs that stop when they are decided: how many rollouts they make, what they store, and what they
refuse."""

import asyncio
import json
import random

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient

SHUFFLED = {"shuffle_seed": 0, "max_concurrent": 4}


def environment(num_rows=400, **more):
    rows = [{"question": f"row {n}", "answer": str(n)} for n in range(num_rows)]

    def right(completion) -> float:
        return float(completion[-1].content)

    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([right]), **more)


def coin(probability, seed):
    """A model that is right with this probability, by row."""
    return lambda request: str(
        float(random.Random(f"{seed}{request.prompt[-1].content}").random() < probability)
    )


def evaluate(env, reply, **options):
    return env.evaluate(ScriptedClient(reply), "m", num_examples=-1, **{**SHUFFLED, **options})


def test_it_stops_at_the_half_width_and_says_so(tmp_path):
    logs = []
    results = evaluate(
        environment(),
        coin(0.5, 1),
        until_half_width=0.2,
        results_path=tmp_path / "run",
        on_log=logs.append,
    )
    stopped = results.metadata.stopped
    assert (stopped["high"] - stopped["low"]) / 2 <= 0.2
    assert stopped["num_examples"] <= len(results) <= stopped["num_examples"] + 4
    assert 30 < len(results) < 150
    assert stopped["low"] < 0.5 < stopped["high"]
    assert results.metadata.num_examples == len(results)
    assert results.metadata.status == "complete"
    assert any(
        line.startswith(f"decided after {stopped['num_examples']} examples: the mean is between")
        for line in logs
    )
    assert vf.load_results(tmp_path / "run").metadata.stopped == stopped


def test_without_the_option_every_row_is_run():
    """Negative control."""
    assert len(evaluate(environment(60), coin(0.5, 1))) == 60


def test_quick_rollouts_do_not_count_before_slow_ones():
    """Right answers come at once and wrong ones late; the examples are read in the order of the
    plan."""

    class Uneven:
        async def complete(self, request):
            text = coin(0.5, 2)(request)
            await asyncio.sleep(0.0 if text == "1.0" else 0.2)
            return vf.Response(vf.AssistantMessage(text))

    env = environment()
    finished = []
    results = env.evaluate(
        Uneven(),
        "m",
        num_examples=-1,
        until_half_width=0.15,
        shuffle_seed=0,
        max_concurrent=32,
        on_progress=lambda outputs, _: finished.extend(output["reward"] for output in outputs),
    )
    stopped = results.metadata.stopped
    order = [example.example_id for example in env.eval_table.take(-1, 0)][
        : stopped["num_examples"]
    ]
    by_id = {output["example_id"]: output["reward"] for output in results.outputs}
    assert stopped["low"] < sum(by_id[n] for n in order) / len(order) < stopped["high"]
    assert len(results) < 400
    # negative control: in the order in which they finished, right ones come first
    assert sum(finished[:30]) / 30 > 0.7


def test_a_run_is_stopped_once_its_difference_to_a_saved_one_is_decided(tmp_path):
    env = environment()
    evaluate(env, coin(0.3, 1), results_path=tmp_path / "base")
    better = evaluate(env, coin(0.8, 3), until_decided=tmp_path / "base")
    assert better.metadata.stopped["low"] > 0
    assert better.metadata.stopped["against"] == str(tmp_path / "base")
    assert len(better) < 200
    logs = []
    same = evaluate(env, coin(0.3, 1), until_decided=tmp_path / "base", on_log=logs.append)
    assert (same.metadata.stopped, len(same)) == (None, 400)
    assert logs[-1].startswith("not decided with all 400 examples: the difference to")


def test_only_the_rows_of_the_saved_run_are_run(tmp_path):
    evaluate(environment(10), coin(0.5, 1), results_path=tmp_path / "base")
    results = evaluate(
        environment(50), coin(0.5, 2), until_decided=tmp_path / "base", rollouts_per_example=2
    )
    assert (len(results), results.metadata.num_examples) == (20, 10)
    assert max(results["example_ids"]) < 10


def test_a_stopped_run_resumes_to_the_same_decision(tmp_path):
    uninterrupted = evaluate(environment(), coin(0.5, 4), until_half_width=0.2)
    interrupted = tmp_path / "run"
    # the first twenty rows exist already
    evaluate(environment(20), coin(0.5, 4), results_path=interrupted)
    results = evaluate(environment(), coin(0.5, 4), until_half_width=0.2, results_path=interrupted)
    assert results.metadata.stopped == uninterrupted.metadata.stopped


def test_siblings_are_one_example(tmp_path):
    results = evaluate(environment(), coin(0.5, 1), until_half_width=0.2, rollouts_per_example=4)
    assert len(results) % 4 == 0
    assert results.metadata.stopped["num_examples"] * 4 <= len(results)


def test_a_reward_outside_the_range_ends_the_run_with_the_fix(tmp_path):
    with pytest.raises(
        vf.RunError,
        match=r"the value 5 is outside 0 to 1: give the range .*--reward-range LOW,HIGH",
    ):
        evaluate(environment(), "5", until_half_width=0.1, results_path=tmp_path / "run")
    results = evaluate(environment(), "5", until_half_width=0.5, reward_range=(0, 10))
    assert results.metadata.stopped is not None


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"until_half_width": 0}, "above 0"),
        ({"until_half_width": "0.1"}, "above 0"),
        ({"until_half_width": 0.1, "until_decided": "x"}, "both stop the run"),
        ({"until_half_width": 0.1, "interleave_scoring": False}, "scores at the end"),
        ({"until_half_width": 0.1, "score_rollouts": False}, "leaves every reward unknown"),
        ({"until_half_width": 0.1, "reward_range": (1, 0)}, "the lowest and the highest"),
        ({"until_decided": "nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_decided_is_refused_before_anything_is_written(options, because, tmp_path):
    with pytest.raises(vf.ConfigError, match=because):
        evaluate(environment(), "1", results_path=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_environment_is_no_baseline(tmp_path):
    evaluate(environment(10), "1", results_path=tmp_path / "base")
    config = json.loads((tmp_path / "base/config.json").read_text())
    assert config["config"]["env_args"] == {}
    another = vf.SingleTurnEnv(
        eval_dataset=[{"question": "x"}], rubric=vf.Rubric([lambda completion: 1.0])
    )
    with pytest.raises(
        vf.ConfigError, match="cannot be compared with this one: they have no example in common"
    ):
        evaluate(another, "1", until_decided=tmp_path / "base")
