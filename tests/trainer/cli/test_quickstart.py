"""``vf-train quickstart``: every preset fits its environment, and a short run writes and says all
that it promises."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

import verifiers as vf
from verifiers.results.retokenise import text_turns
from verifiers.testing import ScriptedClient
from verifiers_trainer.cli import quickstart
from verifiers_trainer.cli.quickstart import PRESETS
from verifiers_trainer.cli.train import quickstart_command
from verifiers_trainer.pipeline.warmup import tagged_answers
from verifiers_trainer.policy.loading import get_model_and_tokenizer
from verifiers_trainer.run.metrics_files import read_metrics

FEW = {"num_train_examples": 24, "num_eval_examples": 4}


def environment_of(name, **args):
    return vf.load_environment(name, seed=0, **(PRESETS[name].env_args | args))


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_answers_of_the_warm_up_are_right(name):
    env = environment_of(name, **FEW)
    answer = tagged_answers(env)
    right = {row["prompt"][-1]["content"]: answer(row) for row in (e.row for e in env.eval_table)}
    results = env.evaluate(
        ScriptedClient(lambda request: right[request.prompt[-1]["content"]]), "scripted"
    )
    summary = quickstart.statistics_of(results, PRESETS[name].exact)
    assert (summary["mean_reward"], summary["exact"], summary["examples"]) == (1.0, 1.0, 4)
    wrong = quickstart.statistics_of(
        env.evaluate(ScriptedClient(lambda _: "?"), "scripted"), PRESETS[name].exact
    )
    assert (wrong["mean_reward"], wrong["exact"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_prompt_and_right_answer_fit(name):
    env, training = environment_of(name), PRESETS[name].training
    answer, (_, tokenizer) = tagged_answers(env), get_model_and_tokenizer("builtin:tiny")
    for row in (e.row for table in (env.train_table, env.eval_table) for e in list(table)[:300]):
        (turn,) = text_turns(row["prompt"], answer(row), None, tokenizer)
        prompt_ids, answer_ids = turn.prompt_ids, turn.completion_ids
        # the template's newline after the end token is none
        assert len(answer_ids) - 1 <= training["max_tokens"]
        assert len(prompt_ids) + training["max_tokens"] <= training["max_seq_len"]
        assert tokenizer.unk_token_id not in (*prompt_ids, *answer_ids)


def test_held_out_rows_that_are_trained_on_as_well_are_left_out():
    env = environment_of("reasoning-gym")
    trained_on = {example.row["prompt"][-1]["content"] for example in env.train_table}
    held_out = [row["prompt"][-1]["content"] for row in quickstart._held_out(env)]
    assert len(held_out) >= 190
    assert not trained_on.intersection(held_out)
    assert trained_on.intersection(e.row["prompt"][-1]["content"] for e in env.eval_table), (
        "the generator repeats"
    )


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "reasoning-gym" else name
        for name in PRESETS
    ],
)
def test_a_short_run_measures_trains_and_reports(name, tmp_path, monkeypatch):
    preset = PRESETS[name]
    short = dataclasses.replace(  # four rows are learnt by heart in seconds
        preset,
        env_args=preset.env_args | {"num_train_examples": 4, "num_eval_examples": 4},
        target=0.2,
        warm_up={"max_steps": 120, "probe_every": 4, "rows_per_step": 4, "learning_rate": 3e-3},
        training=preset.training | {"batch_size": 16, "embedded_threads": 1},
    )
    monkeypatch.setitem(PRESETS, name, short)
    words = [
        "--env",
        name,
        "--seed",
        "1",
        "--steps",
        "2",
        "--output-dir",
        str(tmp_path / "run"),
        "--json",
    ]
    result = CliRunner().invoke(quickstart_command, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output

    summary = json.loads((tmp_path / "run/summary.json").read_text())
    printed = json.loads(result.stdout)
    per_batch = 8 if preset.recipe == "best_of_group" else 1
    assert (printed["step"], printed["metrics"]) == (2 * per_batch, summary["after"])
    assert (summary["environment"], summary["seed"], summary["batches"]) == (name, 1, 2)
    assert (summary["recipe"], summary["steps"]) == (preset.recipe, 2 * per_batch)
    assert 4 <= summary["warm_up_steps"] < 120  # it reached its target
    for when in ("before", "after"):
        assert (summary[when]["examples"], summary[when]["rollouts"]) == (4, 16)
        low, high = summary[when]["mean_reward_interval"]
        assert high - low == pytest.approx(2 * 1.96 * summary[when]["mean_reward_stderr"])
        assert (tmp_path / "run/eval" / when / "results.jsonl").is_file()
    assert (tmp_path / "run/learning_curve.png").stat().st_size > 10_000
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "reward/mean" in row]
    assert len(rows) == 2 * per_batch
    assert all(f"reward/{preset.exact}" in row for row in rows)
    for expected in (
        f"2/4 before: 16 rollouts on 4 held-out {preset.noun}",
        f"Held-out {preset.noun}",
        "±",
        "prompt: ",
    ):
        assert expected in result.stderr


def test_an_unknown_environment_is_one_sentence_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(quickstart_command, ["--env", "gsm8k"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    for expected in (*PRESETS, "'gsm8k'", "vf-train @ file.toml"):
        assert expected in result.stderr
    assert not list(tmp_path.iterdir())


def test_help_names_every_preset():
    said = CliRunner().invoke(quickstart_command, ["--help"], terminal_width=120).stdout
    assert all(name in said for name in PRESETS)
    assert "[default: reverse-text]" in " ".join(said.split())
