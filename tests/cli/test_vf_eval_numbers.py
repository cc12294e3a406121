"""``vf-eval``: what a run cost and how fast it was, the formats it is exported to, and what
``--dry-run`` shows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path

import pytest

import verifiers as vf
from support.eval_command import last_word, odd_only
from verifiers.cli.evaluate.arguments import parse
from verifiers.cli.evaluate.exporting import FORMATS
from verifiers.clients import load_endpoints
from verifiers.clients.protocol import prices_of
from verifiers.results import load_results
from verifiers.testing import FakeServer

PRICES = "usd_per_million_input_tokens = 2.0\nusd_per_million_output_tokens = 8\n"


def counted(request):
    """A right answer that cost 1,000 tokens in and 500 out."""
    return vf.Response(vf.AssistantMessage(last_word(request)), usage=vf.Usage(1000, 500))


def registry(folder: Path, *urls: str, prices: str = PRICES) -> None:
    entries = [
        f'[[endpoint]]\nendpoint_id = "mine"\nmodel = "m"\nurl = "{url}"\n{prices}' for url in urls
    ]
    (folder / "e.toml").write_text("".join(entries))


# --- cost -----------------------------------------------------------------------------------------


def test_the_cost_is_in_the_summary_the_json_and_the_metadata(vf_eval, eval_folder):
    words = ["toy", "-e", "e.toml", "-m", "mine", "-n", "4", "-r", "2"]
    with FakeServer(counted, models=["m"]) as server:
        registry(eval_folder, server.url)
        run = vf_eval(*words, "--json").json["runs"][0]
        text = vf_eval(*words, "-A").out
    assert (run["usage"]["input_tokens"], run["usage"]["output_tokens"]) == (8000, 4000)
    assert run["cost_usd"] == pytest.approx(8 * (1000 * 2 + 500 * 8) / 1e6)
    assert re.search(r"cost +\$0\.048 \(\$0\.006 per rollout\)\n", text)
    assert re.search(r"time .* rollouts/s, [\d,]+ tokens/s\)\n", text)
    stored = json.loads((Path(run["path"]) / "metadata.json").read_text())
    assert stored["cost_usd"] == run["cost_usd"]
    assert stored["prices"] == {
        "usd_per_million_input_tokens": 2.0,
        "usd_per_million_output_tokens": 8.0,
    }
    assert load_results(run["path"]).metadata["cost_usd"] == run["cost_usd"]


@pytest.mark.parametrize("num_servers", [1, 2])
def test_the_rates_of_an_entry_pace_its_requests(vf_eval, eval_folder, num_servers):
    words = ["toy", "-e", "e.toml", "-m", "mine", "-n", "4", "-r", "2", "-A"]
    with FakeServer(counted, models=["m"]) as first, FakeServer(counted, models=["m"]) as second:
        urls = [first.url, second.url][:num_servers]
        registry(eval_folder, *urls, prices="requests_per_minute = 600\n")
        vf_eval(*words)
        assert first.count == 8 // num_servers
        assert first.times_s[-1] - first.times_s[0] >= 0.095 * (first.count - 1)
        assert second.count == 8 - first.count


def test_the_summary_is_computed_once(vf_eval, eval_folder, monkeypatch):
    computed, summary = [], vf.GenerateOutputs.summary
    monkeypatch.setattr(
        vf.GenerateOutputs, "summary", lambda results: computed.append(1) or summary(results)
    )
    with FakeServer(counted, models=["m"]) as server:
        registry(eval_folder, server.url)
        assert "rollouts" in vf_eval("toy", "-e", "e.toml", "-m", "mine", "-n", "2").out
    assert len(computed) == 1


def test_without_prices_or_without_counts_the_cost_is_unknown_and_not_zero(vf_eval, eval_folder):
    words = ["toy", "-e", "e.toml", "-m", "mine", "-n", "1", "-r", "1", "--json"]
    with FakeServer(counted, models=["m"]) as server, FakeServer(last_word, models=["m"]) as silent:
        registry(eval_folder, server.url, prices="")
        assert vf_eval(*words).json["runs"][0]["cost_usd"] is None
        registry(eval_folder, silent.url)
        assert vf_eval(*words).json["runs"][0]["cost_usd"] is None
        registry(eval_folder, silent.url)  # another server than the one the prices are of
        assert vf_eval(*words, "-b", server.url).json["runs"][0]["cost_usd"] is None


def test_variants_of_one_price_have_a_cost_and_of_several_have_none(eval_folder):
    def entry(price):
        return (
            '[[endpoint]]\nendpoint_id = "a"\nmodel = "m"\nusd_per_million_input_tokens ='
            f" {price}\n" + "usd_per_million_output_tokens = 1\n"
        )

    for prices, has_price in (((1, 1), True), ((1, 2), False)):
        (eval_folder / "e.toml").write_text("".join(map(entry, prices)))
        client = vf.as_client(load_endpoints(eval_folder / "e.toml")["a"])
        assert (prices_of(client) is not None) == has_price


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        (
            "usd_per_million_input_tokens = -1\n",
            "must be a number of US dollars, 0 or more, not -1",
        ),
        (
            'usd_per_million_input_tokens = "1"\n',
            "must be a number of US dollars, 0 or more, not '1'",
        ),
        ("usd_per_million_input_tokens = true\n", "must be a number of US dollars"),
        (
            "usd_per_million_input_tokens = 1\n",
            "'usd_per_million_input_tokens' alone; a cost needs both prices",
        ),
        ("usd_per_million_imput_tokens = 1\n", 'did you mean "usd_per_million_input_tokens"?'),
    ],
)
def test_a_wrong_price_is_refused_before_any_request(vf_eval, eval_folder, prices, said):
    with FakeServer("x", models=["m"]) as server:
        registry(eval_folder, server.url, prices=prices)
        ran = vf_eval("toy", "-e", "e.toml", "-m", "mine")
        assert (ran.code, server.count) == (2, 0)
        assert said in ran.paragraph


# --- speed ----------------------------------------------------------------------------------------


def test_throughput_counts_what_this_call_played(vf_eval, eval_folder):
    words = ["toy", "-n", "4", "-r", "1", "--json"]
    with FakeServer(counted, models=["m"], delay_s=0.05) as server:
        run = vf_eval(*words, "-b", server.url).json["runs"][0]
        again = vf_eval("toy", "--resume", run["path"], "--json").json["runs"][0]
    rates = run["throughput"]
    assert rates["rollouts_per_s"] == pytest.approx(4 / run["seconds"])
    assert rates["output_tokens_per_s"] == pytest.approx(2000 / run["seconds"])
    assert run["latency"].keys() == {"median_ms", "p95_ms", "p99_ms", "max_ms"}
    assert run["latency"]["median_ms"] >= 50
    assert again["throughput"] == {"rollouts_per_s": None, "output_tokens_per_s": None}


# --- export ---------------------------------------------------------------------------------------


def test_a_run_is_exported_beside_its_journal(vf_eval, eval_folder):
    with FakeServer(odd_only, models=["m"]) as server:
        ran = vf_eval(
            "toy", "-b", server.url, "-n", "4", "-r", "2", "--export", "parquet,hf", "--json"
        )
        text = vf_eval("toy", "-b", server.url, "-n", "4", "-r", "2", "--export", "parquet", "-A")
    assert (ran.code, ran.err) == (0, f"model: m, as {server.url} lists it\n")
    run = ran.json["runs"][0]
    assert {name: Path(path).name for name, path in run["exported"].items()} == {
        "parquet": "results.parquet",
        "hf": "dataset",
    }
    import datasets

    rewards = load_results(run["path"])["rewards"]
    assert sum(rewards) == 4
    assert datasets.load_from_disk(run["exported"]["hf"])["reward"][:] == rewards
    (table,) = (
        datasets.Dataset.from_parquet(run["exported"]["parquet"]).to_pandas().groupby(lambda _: 0)
    )
    assert table[1]["reward"].tolist() == rewards
    assert "results.parquet (parquet)" in text.out


def test_an_inspect_log_is_written_or_its_absence_said_before_any_request(vf_eval):
    with FakeServer(last_word, models=["m"]) as server:
        ran = vf_eval(
            "toy", "-b", server.url, "-n", "2", "-r", "1", "--export", "inspect", "--json"
        )
        if importlib.util.find_spec("inspect_ai") is None:
            assert (ran.code, server.count) == (2, 0)
            assert (
                "needs inspect_ai, which is not installed: pip install inspect-ai"
                in ran.json["error"]["message"]
            )
        else:
            assert Path(ran.json["runs"][0]["exported"]["inspect"]).suffix == ".eval"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--export", "parqet"], "--export must be of parquet, hf, atif, inspect, not 'parqet'"),
        (["--export", "parquet", "--no-save"], "--export writes beside the saved run"),
    ],
)
def test_a_format_that_cannot_be_written_is_refused_before_any_request(vf_eval, words, said):
    with FakeServer("x", models=["m"]) as server:
        ran = vf_eval("toy", "-b", server.url, *words)
        assert (ran.code, server.count) == (2, 0)
        assert said in ran.paragraph


def test_an_export_that_fails_is_exit_3_and_the_run_is_kept(vf_eval, eval_folder):
    with FakeServer(last_word, models=["m"]) as server:
        words = ["toy", "-b", server.url, "-n", "1", "-r", "1", "--export", "parquet", "--json"]
        path = Path(vf_eval(*words[:-3]).out.split("saved in")[1].split()[0])
        path.with_name(path.name + "-2").mkdir()
        blocked = path.with_name(path.name + "-2") / "results.parquet"
        blocked.mkdir()
        ran = vf_eval(*words)
    assert ran.code == 3
    assert "--export failed" in ran.json["error"]["message"]
    assert (ran.json["runs"][0]["num_rollouts"], ran.json["runs"][0]["exported"]) == (1, None)


def test_the_formats_of_the_option_are_those_that_can_be_written():
    for name in FORMATS:
        line = parse(["toy", "--export", name])
        assert (line.problems, line.flags) == ([], {"export": (name,)})
    assert "must be of" in parse(["toy", "--export", "csv"]).problems[0]


# --- dry run --------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_first_prompt_its_answer_and_the_scoring(vf_eval):
    ran = vf_eval(
        "toy",
        "-b",
        "http://127.0.0.1:9/v1",
        "-m",
        "m",
        "--dry-run",
        "-n",
        "2",
        "--export",
        "parquet",
    )
    assert ran.code == 0
    for line in ("scored by   exact × 1", "exported as parquet", "user: say 0", "answer: 0"):
        assert line in ran.out
    words = [
        "toy",
        "-b",
        "http://127.0.0.1:9/v1",
        "-m",
        "m",
        "--dry-run",
        "--shuffle",
        "--shuffle-seed",
    ]
    firsts = set()
    for seed in range(4):
        shown = vf_eval(*words, str(seed)).out
        firsts.add(first := int(shown.split("the first prompt: example ")[1].split()[0]))
        assert f"user: say {first}" in shown
    assert len(firsts) > 1


def test_the_seed_of_the_shuffle_asks_for_it_and_is_part_of_the_run(vf_eval, eval_folder):
    def first_row(*words):
        planned = vf_eval("toy", "-b", "http://127.0.0.1:9/v1", "-m", "m", "--dry-run", *words)
        path = planned.out.split("saved in")[1].split()[0]
        return planned.out.split("the first prompt: example ")[1].split()[0], path

    for seed in ("0", "1", "2", "3"):
        alone = first_row("--shuffle-seed", seed)
        assert alone == first_row("--shuffle", "--shuffle-seed", seed)
    seeds = [first_row("--shuffle-seed", seed) for seed in ("0", "1", "2", "3")]
    assert len({row for row, _ in seeds}) > 1
    paths = {path for _, path in (*seeds, first_row())}
    assert len(paths) == 5
    assert first_row("--no-shuffle", "--shuffle-seed", "1") == first_row()
    assert first_row("--shuffle") == first_row("--shuffle-seed", "0")
    (eval_folder / "shuffled.toml").write_text("shuffle_seed = 1\n")
    assert first_row("@", "shuffled.toml") == seeds[1]


def test_a_dry_run_names_the_tools_and_a_metric_as_one(vf_eval):
    ran = vf_eval("tool-test", "-b", "http://127.0.0.1:9/v1", "-m", "m", "--dry-run")
    assert "tools: add, to_fahrenheit" in ran.out
    assert "all_right (metric)" in ran.out


def test_plan_and_configuration_are_in_the_one_json_object(vf_eval):
    words = ["toy", "-b", "http://127.0.0.1:9/v1", "-m", "m", "--json"]
    plan, config = vf_eval(*words, "--dry-run").json, vf_eval(*words, "--dump-config").json
    assert "scored by   exact × 1" in plan["plan"]
    assert tomllib.loads(config["config"])["eval"][0]["env_id"] == "toy"
    assert (plan["runs"], config["runs"], plan["ok"], config["ok"]) == ([], [], True, True)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["-r", "0"], "--rollouts-per-example"),
        (["-S", '{"n": 2}'], "'n'"),
        (["--max-cost", "1", "-t", "9"], "a limit on the cost needs the prices"),
        (["--max-total-tokens", "9"], "set max_tokens (-t)"),
        (["--until-decided", "nowhere"], "nowhere"),
        (["--resume", "run", "-T", "0.3"], "holds a run of another configuration"),
        (["--resume", "elsewhere"], "is not a run directory"),
        (["--output-dir", "toy.py"], "is a file"),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(vf_eval, eval_folder, flags, sentence):
    with FakeServer(odd_only, models=["m"]) as server:
        words = ["toy", "-b", server.url, "-m", "m", "-n", "2"]
        done = vf_eval(*words, "--json").json["runs"][0]["path"]
        os.replace(eval_folder / done, eval_folder / "run")
        dry, ran = (vf_eval(*words, *flags, *further) for further in (["--dry-run"], []))
    assert (dry.code, sentence in dry.err) == (ran.code, True) == (2, sentence in ran.err)
    assert dry.err == ran.err


# --- workers and scoring --------------------------------------------------------------------------


def test_the_flags_of_workers_and_of_scoring_after_playing_reach_the_run(vf_eval, eval_folder):
    words = ["toy", "-b", "http://127.0.0.1:9/v1", "-m", "m", "--dump-config"]
    for flags, expected in (
        ([], (0, "process", True)),
        (["-w", "auto", "-N"], (0, "process", False)),
        (["--num-workers", "3", "--no-interleave-scoring"], (3, "process", False)),
        (["-w", "2", "--worker-backend", "ray", "--interleave-scoring"], (2, "ray", True)),
    ):
        (entry,) = tomllib.loads(vf_eval(*words, *flags).out)["eval"]
        assert (
            entry["num_workers"],
            entry["worker_backend"],
            entry["interleave_scoring"],
        ) == expected
    for wrong in ("-1", "two", "1.5"):
        assert "a number of processes, 0 for this one" in vf_eval(*words, "-w", wrong).paragraph
    assert "must be one of process, ray" in vf_eval(*words, "--worker-backend", "slurm").paragraph


def test_with_scoring_after_playing_the_rewards_are_the_same(vf_eval):
    with FakeServer(odd_only, models=["m"]) as server:
        runs = [
            vf_eval("toy", "-b", server.url, "-n", "4", "-r", "2", *more, "--json").json["runs"][0]
            for more in ([], ["-N"])
        ]
    assert [run["avg_reward"] for run in runs] == [0.5, 0.5]
    assert runs[0]["num_rollouts"] == runs[1]["num_rollouts"] == 8


@pytest.mark.slow
def test_worker_processes_play_the_same_run(vf_eval, eval_folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(eval_folder))
    with FakeServer(odd_only, models=["m"]) as server:
        ran = vf_eval("toy", "-b", server.url, "-n", "4", "-r", "2", "-w", "2", "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["runs"][0]["num_rollouts"], ran.json["runs"][0]["avg_reward"]) == (8, 0.5)
