"""``vf-eval`` that goes well: what it prints, where it saves, which setting wins, how it chooses
the model."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.eval_command import TOY, last_word, odd_only
from verifiers.cli.evaluate.options import layered
from verifiers.clients.local import is_installed
from verifiers.results import load_results
from verifiers.testing import FakeServer


@pytest.fixture(scope="module")
def server():
    with FakeServer(odd_only, models=["the-model"]) as server:
        yield server


def test_the_summary_says_what_a_reader_wants_to_know(vf_eval, server):
    ran = vf_eval("toy", "-b", server.url, "-n", "4", "-r", "2")
    assert ran.code == 0
    for expected in (
        "toy · the-model",
        server.url,
        "outputs/evals/toy--the-model/",
        "8 (4 examples × 2)",
        "0.500 ± 0.289 (standard error)",
        "1: 0.500 [0.06, 0.94]  2: 0.500 [0.06, 0.94]",
        "0.500 ± 0.289 (standard error); solved = reward is 1",
        "  exact  ",
        "8 × its only turn",
        "best: example 1, reward 1.000",
        "worst: example 0, reward 0.000",
        "user: say 1\nassistant: 1\nanswer: 1",
        r"assistant: no \x1b[31midea",
    ):
        assert expected in ran.out
    assert "\x1b[31m" not in ran.out
    assert "best: " not in vf_eval("toy", "-b", server.url, "-n", "4", "-A").out


def test_json_is_one_object_with_the_documented_keys_and_nothing_else_is_on_stdout(
    vf_eval, server, eval_folder
):
    (eval_folder / "toy.py").write_text("print('hello from the environment')\n" + TOY)
    ran = vf_eval("toy", "-b", server.url, "-n", "2", "-r", "1", "-T", "0.5", "--json")
    assert ran.code == 0
    assert ran.out.count("\n") == 1
    assert ran.json.keys() == {"schema", "ok", "exit_code", "runs", "error"}
    assert (ran.json["schema"], ran.json["ok"], ran.json["exit_code"], ran.json["error"]) == (
        1,
        True,
        0,
        None,
    )
    (run,) = ran.json["runs"]
    assert sorted(run) == sorted(
        "env_id model base_url path num_examples rollouts_per_example num_rollouts num_errors"
        " num_unscored avg_reward reward_stderr success_metric avg_success success_stderr"
        " avg_metrics metric_counts pass_at_k pass_at_k_interval pass_at_k_examples pass_at_k_unknown"
        " pass_at_k_bounds pass_all_k stop_conditions errors usage cost_usd latency"
        " throughput seconds resumed env_args sampling_args left_to_server stopped spent exported"
        " coverage".split()
    )
    assert (run["num_rollouts"], run["avg_reward"], run["sampling_args"]) == (
        2,
        0.5,
        {"temperature": 0.5},
    )
    assert "hello from the environment" in ran.err


def test_unknown_numbers_are_null_in_json_and_not_one_score_is_exit_3(vf_eval, server):
    ran = vf_eval(
        "toy", "-b", server.url, "-n", "2", "-r", "1", "-a", '{"broken_rewards": true}', "--json"
    )
    assert ran.code == ran.json["exit_code"] == 3
    (run,) = ran.json["runs"]
    assert (run["avg_reward"], run["reward_stderr"], run["num_unscored"]) == (None, None, 2)
    assert "ConnectionError" in ran.json["error"]["message"]
    text = vf_eval(
        "toy", "-b", server.url, "-n", "2", "-r", "1", "-a", '{"broken_rewards": true}'
    ).out
    assert re.search(r"2 × ConnectionError in exact \(toy\.py:\d+\); not in the mean", text), text
    assert re.search(r"reward +unknown\n", text)


def test_progress_json_gives_one_event_per_line(vf_eval, server, eval_folder):
    ran = vf_eval("toy", "-b", server.url, "-n", "2", "-r", "2", "--progress", "json", "-A")
    events = [json.loads(line) for line in ran.err.splitlines()]
    assert [event["event"] for event in events] == ["start", *["rollout"] * 4, "end"]
    assert [event["done"] for event in events[1:5]] == [1, 2, 3, 4]
    assert {event["total"] for event in events} == {4}
    assert all(set(event) >= {"key", "reward", "error"} for event in events[1:5])
    (file,) = eval_folder.glob("outputs/evals/*/*/results.jsonl")
    on_disk = [json.loads(line)["rollout_key"] for line in file.read_text().splitlines()]
    assert sorted(event["key"] for event in events[1:5]) == sorted(on_disk)


def test_several_ids_and_a_file_run_one_after_another(vf_eval, server, eval_folder):
    ran = vf_eval("toy,toy", "-b", server.url, "-n", "1", "-r", "1", "--json")
    assert [run["env_id"] for run in ran.json["runs"]] == ["toy", "toy"]
    assert len({run["path"] for run in ran.json["runs"]}) == 2
    (eval_folder / "two.toml").write_text(
        f'api_base_url = "{server.url}"\nnum_examples = 1\n'
        '[sampling_args]\ntemperature = 0.25\n[[eval]]\nenv_id = "toy"\nrollouts_per_example = 2\n'
        '[[eval]]\nenv_ids = ["toy"]\ntemperature = 0.75\nargs = { num_rows = 3 }\n'
    )
    for words in (["two.toml"], ["@", "two.toml"]):
        first, second = vf_eval(*words, "--json").json["runs"]
        assert (first["rollouts_per_example"], first["sampling_args"]) == (2, {"temperature": 0.25})
        assert (second["env_args"], second["sampling_args"]) == (
            {"num_rows": 3},
            {"temperature": 0.75},
        )


def test_flags_win_over_dotted_keys_over_files_over_the_environments_own_defaults(
    vf_eval, server, eval_folder
):
    (eval_folder / "pyproject.toml").write_text(
        "[tool.verifiers.eval]\nnum_examples = 4\nrollouts_per_example = 1\ntemperature = 0.1\n"
        "env_args = { num_rows = 5 }\n"
    )
    (eval_folder / "top.toml").write_text(
        f'api_base_url = "{server.url}"\nnum_examples = 3\nenv_args = {{ num_rows = 4 }}\n'
    )

    def run(*words: str) -> tuple[int, int, int, float]:
        (run,) = vf_eval("toy", *words, "-A", "--json").json["runs"]
        return (
            run["num_examples"],
            run["rollouts_per_example"],
            run["env_args"]["num_rows"],
            run["sampling_args"]["temperature"],
        )

    assert run("-b", server.url) == (4, 1, 5, 0.1)
    assert run("@", "top.toml") == (3, 1, 4, 0.1)
    assert run("@", "top.toml", "--env.args.num_rows=7", "-r", "2") == (3, 2, 7, 0.1)
    assert run(
        "@", "top.toml", "--env.args.num_rows=7", "-a", '{"num_rows": 2}', "-n", "1", "-T", "1"
    ) == (1, 1, 2, 1)


def test_a_temperature_of_a_higher_layer_beats_the_sampling_args_below_it():
    assert layered({"sampling_args": {"temperature": 1}}, {"temperature": 0})["sampling_args"] == {}
    above = layered({"temperature": 0}, {"sampling_args": {"temperature": 1}})
    # -S wins over -T where both are given
    assert above == {"temperature": 0, "sampling_args": {"temperature": 1}}


def test_arguments_are_json_or_pairs_and_may_be_repeated(vf_eval, server):
    def arguments(*words):
        ran = vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1", "--json", *words)
        return ran.json["runs"][0]["env_args"]

    assert arguments("-a", "num_rows=4,broken_rewards=false") == {
        "num_rows": 4,
        "broken_rewards": False,
    }
    assert arguments("-a", "num_rows=4", "-a", '{"num_rows": 5}') == {"num_rows": 5}


def test_the_dumped_configuration_gives_the_same_configuration_and_no_secret(
    vf_eval, server, eval_folder, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-0123456789")
    words = [
        "toy",
        "-b",
        server.url,
        "-a",
        '{"max_seq_len": null}',
        "--timeout",
        "none",
        "--header",
        "X-Team: a",
    ]
    ran = vf_eval(
        *words, "--header", "Authorization: Bearer canary-1", "--dump-config", "-C", "a,b"
    )
    assert ran.code == 0
    assert "canary" not in ran.out + ran.err
    (entry,) = tomllib.loads(ran.out)["eval"]
    assert (entry["timeout"], entry["header"], entry["state_columns"]) == (
        "none",
        {"X-Team": "a"},
        ["a", "b"],
    )
    (eval_folder / "dumped.toml").write_text(ran.out)
    again = vf_eval("dumped.toml", "--dump-config")
    assert tomllib.loads(again.out) == tomllib.loads(ran.out)


def test_a_dry_run_contacts_nobody_and_writes_nothing(vf_eval, eval_folder):
    ran = vf_eval("toy", "-b", "http://127.0.0.1:9/v1", "-m", "m", "--dry-run", "-n", "2")
    assert ran.code == 0
    assert "6 (2 examples × 3), 32 at a time" in ran.out
    assert "outputs/evals/toy--m/" in ran.out
    assert not (eval_folder / "outputs").exists()


def test_no_save_leaves_nothing_and_output_dir_moves_the_runs(vf_eval, server, eval_folder):
    ran = vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1", "--no-save")
    assert "not saved" in ran.out
    assert not (eval_folder / "outputs").exists()
    vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1", "-o", "elsewhere")
    assert list(eval_folder.glob("elsewhere/evals/toy--the-model/*/results.jsonl"))


def test_a_finished_run_starts_another_and_resume_path_shows_it_without_a_request(
    vf_eval, server, eval_folder
):
    first = vf_eval("toy", "-b", server.url, "-n", "3", "-r", "2", "--json").json["runs"][0]
    before = server.count, len(server.other_hits)
    shown = vf_eval("toy", "--resume", first["path"], "--json").json["runs"][0]
    assert (server.count, len(server.other_hits)) == before
    assert (shown["num_rollouts"], shown["resumed"], shown["avg_reward"]) == (
        6,
        6,
        first["avg_reward"],
    )
    assert (
        vf_eval("toy", "-b", server.url, "-n", "3", "-r", "2", "--json").json["runs"][0]["path"]
        == first["path"] + "-2"
    )


def test_an_environment_is_found_in_the_folder_of_environments(vf_eval, server, eval_folder):
    for folder in ("environments/my_game", "elsewhere/other_game/src"):
        module = folder.split("/")[1]
        (eval_folder / folder).mkdir(parents=True)
        (eval_folder / folder / f"{module}.py").write_text(TOY)
    assert vf_eval("my-game", "-b", server.url, "-n", "1").code == 0
    assert vf_eval("other-game", "-b", server.url, "-n", "1", "-p", "elsewhere").code == 0
    assert list(eval_folder.glob("outputs/evals/my-game--*/*/results.jsonl"))
    assert not (eval_folder / "environments/my_game/outputs").exists()


def test_an_environment_of_one_file_is_found_in_the_folder(vf_eval, server, eval_folder):
    (eval_folder / "environments").mkdir(exist_ok=True)
    (eval_folder / "environments" / "lone_file.py").write_text(TOY)
    assert vf_eval("lone-file", "-b", server.url, "-n", "1").code == 0
    by_path = vf_eval("environments/lone_file.py", "-b", server.url, "-n", "1", "-w", "1", "--json")
    assert by_path.code == 0, by_path.err
    assert "/lone-file--the-model/" in by_path.json["runs"][0]["path"]
    assert vf_eval("lone-files", "-b", server.url, "-n", "1").code == 2


def test_a_mistake_of_a_local_file_is_reported_with_file_and_line(vf_eval, eval_folder):
    (eval_folder / "environments").mkdir(exist_ok=True)
    (eval_folder / "environments" / "lone_file.py").write_text(
        TOY.replace("load_environment", "load_enviroment")
    )
    ran = vf_eval("lone-file", "-m", "local")
    assert ran.code == 2
    assert "environments/lone_file.py:4 defines load_enviroment" in ran.paragraph
    assert "vf-install" not in ran.err


def test_an_ablation_runs_every_combination_of_what_it_sweeps(vf_eval, server, eval_folder):
    (eval_folder / "ablation.toml").write_text(
        f'api_base_url = "{server.url}"\nnum_examples = 2\nrollouts_per_example = 1\ntemperature ='
        ' 0.25\n[[eval]]\nenv_id = "toy"\n[[ablation]]\nid = "toy"\nargs = { broken_rewards ='
        " false }\nmax_tokens = 7\n[ablation.sweep]\ntemperature = [0.0,"
        " 1.0]\n[ablation.sweep.args]\nnum_rows = [3, 5]\n"
    )
    ran = vf_eval("ablation.toml", "--json")
    assert ran.code == 0
    settings = [(run["sampling_args"], run["env_args"]) for run in ran.json["runs"]]
    assert settings == [({"temperature": 0.25}, {})] + [
        (
            {"max_tokens": 7, "temperature": temperature},
            {"broken_rewards": False, "num_rows": num_rows},
        )
        for temperature in (0.0, 1.0)
        for num_rows in (3, 5)
    ]
    assert len({run["path"] for run in ran.json["runs"]}) == 5
    assert (
        "the combination temperature=1.0 env_args.num_rows=3 of the ablation"
        in vf_eval("ablation.toml").out
    )
    dumped = tomllib.loads(vf_eval("ablation.toml", "-m", "m", "--dump-config").out)
    assert [entry["temperature"] for entry in dumped["eval"]] == [0.25, 0.0, 0.0, 1.0, 1.0]
    # a flag wins, and no run is made twice
    plain = vf_eval("ablation.toml", "-m", "m", "-T", "0.5", "--dump-config")
    assert [
        entry.get("env_args", {}).get("num_rows") for entry in tomllib.loads(plain.out)["eval"]
    ] == [None, 3, 5]


def test_whole_tables_can_be_swept_and_several_environments(vf_eval, eval_folder):
    (eval_folder / "a.toml").write_text(
        'model = "m"\n[[ablation]]\nenv_ids = ["toy", "vf-toy"]\n[ablation.sweep]\n'
        "args = [{ num_rows = 1 }, { num_rows = 2, broken_rewards = true }]\n"
    )
    entries = tomllib.loads(vf_eval("a.toml", "-b", "http://127.0.0.1:9/v1", "--dump-config").out)[
        "eval"
    ]
    tables = [{"num_rows": 1}, {"num_rows": 2, "broken_rewards": True}]
    wanted = [(env_id, table) for env_id in ("toy", "vf-toy") for table in tables]
    assert [(entry["env_id"], entry["env_args"]) for entry in entries] == wanted


def test_limits_of_tools_and_headers_from_the_state_reach_the_run(vf_eval, server, eval_folder):
    words = [
        "-n",
        "2",
        "-r",
        "1",
        "--header-from-state",
        "X-Example=example_id",
        "--max-concurrent-tools",
        "2",
    ]
    assert vf_eval("toy", "-b", server.url, *words).code == 0
    assert {hit.headers["x-example"] for hit in server.hits[-2:]} == {"0", "1"}
    (entry,) = tomllib.loads(
        vf_eval("toy", "-b", server.url, "-m", "m", *words, "--dump-config").out
    )["eval"]
    assert (entry["header_from_state"], entry["max_concurrent_tools"]) == (
        {"X-Example": "example_id"},
        2,
    )


def test_headers_from_the_state_reach_every_endpoint_of_an_alias(vf_eval, eval_folder):
    with FakeServer(last_word, models=["m"]) as first, FakeServer(last_word, models=["m"]) as two:
        entries = [
            f'[[endpoint]]\nendpoint_id = "both"\nmodel = "m"\nurl = "{s.url}"\n'
            for s in (first, two)
        ]
        (eval_folder / "e.toml").write_text("".join(entries))
        words = [
            "-e",
            "e.toml",
            "-m",
            "both",
            "-n",
            "4",
            "-r",
            "1",
            "--header-from-state",
            "X-Example=example_id",
        ]
        assert vf_eval("toy", *words).code == 0
    hits = [*first.hits, *two.hits]
    assert sorted(hit.headers["x-example"] for hit in hits) == ["0", "1", "2", "3"]
    assert {len(first.hits), len(two.hits)} == {2}


# --- the model ------------------------------------------------------------------------------------


def test_an_alias_of_the_registry_names_model_and_endpoint_and_flags_win_over_it(
    vf_eval, server, eval_folder
):
    (eval_folder / "configs").mkdir()
    (eval_folder / "configs/endpoints.toml").write_text(
        f'[[endpoint]]\nendpoint_id = "mine"\nmodel = "big"\nurl = "{server.url}"\nheaders = {{'
        ' X-Team = "a" }\n'
    )
    run = vf_eval("toy", "-m", "mine", "-n", "1", "-r", "1", "--json").json["runs"][0]
    assert (run["model"], run["base_url"]) == ("big", server.url)
    assert server.hits[-1].headers["x-team"] == "a"
    with FakeServer(last_word, models=["big"]) as second_server:
        run = vf_eval(
            "toy", "-m", "mine", "-b", second_server.url, "-n", "1", "-r", "1", "--json"
        ).json["runs"][0]
        assert (run["base_url"], second_server.count) == (second_server.url, 1)


def test_without_a_model_the_server_is_asked(vf_eval):
    with FakeServer(last_word, models=["a", "gpt-4.1-mini"]) as server:
        ran = vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1")
        assert "model: gpt-4.1-mini, as" in ran.err
    with FakeServer(last_word, models=["a", "b"]) as server:
        ran = vf_eval("toy", "-b", server.url)
        assert ran.code == 2
        assert "serves 2 models; name one with -m: a, b" in ran.paragraph
        assert server.count == 0


def test_with_a_key_the_default_model_is_taken_and_a_key_problem_never_falls_back(
    vf_eval, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    ran = vf_eval("toy", "--dry-run")
    assert "model: gpt-4.1-mini, because OPENAI_API_KEY is set" in ran.err
    ran = vf_eval("toy", "-k", "NOT_SET_ANYWHERE")
    assert (ran.code, "NOT_SET_ANYWHERE" in ran.paragraph) == (2, True)


def test_without_key_server_or_local_model_three_ways_are_named(vf_eval, monkeypatch):
    monkeypatch.setattr("verifiers.cli.evaluate.models.is_installed", lambda: False)
    paragraph = vf_eval("toy").paragraph
    for way in ("set OPENAI_API_KEY", "point -b at a server", "pip install xllamacpp"):
        assert way in paragraph


@pytest.mark.skipif(not is_installed(), reason="the extra verifiers[local] is not installed")
def test_a_run_of_the_local_model_says_which_model_that_was(vf_eval, server):
    run = vf_eval("toy", "-m", "local", "-n", "1", "-r", "1", "-t", "4", "--json").json["runs"][0]
    stored = json.loads((Path(run["path"]) / "metadata.json").read_text())
    assert (
        run["local_model"]
        == stored["local_model"]
        == load_results(run["path"]).metadata.local_model
    )
    assert run["local_model"].keys() == {"name", "file", "sha256", "quantisation", "sampling"}
    assert len(run["local_model"]["sha256"]) == 64
    served = vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1", "--json").json["runs"][0]
    assert "local_model" not in served


# --- the command itself ---------------------------------------------------------------------------


def test_help_is_quick_and_names_every_flag():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-m", "verifiers.cli.evaluate.command", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time: other processes may hold the machine
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert "--rollouts-per-example" in ran.stdout
    code = (
        "import sys, verifiers.cli.evaluate.command; print({'numpy', 'aiohttp', 'rich', 'datasets'}"
        " & {*sys.modules})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert loaded.strip() == "set()"


def test_the_version_is_that_of_the_library(vf_eval):
    assert vf_eval("--version").out.startswith("vf-eval, verifiers ")


def test_the_flags_are_frozen(vf_eval):
    """A flag is a promise; adding one means adding it here."""
    from verifiers.cli.evaluate.arguments import click_command

    flags = {
        flag for option in click_command().params for flag in (*option.opts, *option.secondary_opts)
    }
    assert {flag for flag in flags if flag.startswith("-") and not flag.startswith("--")} == set(
        "-m -b -k -e -a -x -p -n -r -t -T -S -c -w -i -N -o -s -f -R -C -H -D -A -v -q".split()
    )
    assert {flag for flag in flags if flag.startswith("--")} == set(
        "--accept-changed-code --model --api-base-url --api-key-var --endpoints-path --client"
        " --api-client-type --header --env-args --extra-env-kwargs --env-dir-path --keep-rows"
        " --num-examples --rollouts-per-example --shuffle --no-shuffle --shuffle-seed --seed"
        " --max-tokens --temperature --sampling-args --max-concurrent --max-concurrent-requests"
        " --max-concurrent-generation --max-concurrent-scoring --max-concurrent-tools"
        " --header-from-state --check --independent-scoring --no-independent-scoring"
        " --interleave-scoring --no-interleave-scoring --interleave --num-workers --worker-backend"
        " --export --max-retries --timeout --abort-after --max-error-rate --output-dir"
        " --save-results --save-dataset --no-save --save-every --resume --fresh --no-fresh"
        " --retry-errors --no-retry-errors --state-columns --save-to-hf-hub --no-save-to-hf-hub"
        " --hf-hub-dataset-name --progress --abbreviated-summary --json --dump-config --dry-run"
        " --verbose --quiet --version --detect --until-half-width --until-decided --reward-range"
        " --max-turns --max-seq-len"
        " --max-cost --max-total-tokens --cache --price --new --set --schema --replay".split()
    )


def test_pyproject_of_an_installed_package_gives_its_defaults(vf_eval):
    (entry,) = tomllib.loads(
        vf_eval("reverse-text", "-m", "m", "-b", "http://127.0.0.1:9/v1", "--dump-config").out
    )["eval"]
    project = Path(__file__).parents[2] / "packages/envs/reverse-text/pyproject.toml"
    defaults = tomllib.loads(project.read_text())["tool"]["verifiers"]["eval"]
    assert {name: entry[name] for name in defaults} == defaults


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], "temperature, top_p, top_k, min_p, repetition_penalty"),
        (
            ["-T", "0.5", "-S", '{"top_p": 1, "extra_body": {"top_k": -1}}'],
            "min_p, repetition_penal",
        ),
    ],
)
def test_the_summary_names_what_is_left_to_the_defaults_of_the_server(
    vf_eval, server, eval_folder, flags, names
):
    (eval_folder / "toy.py").write_text(TOY)
    ran = vf_eval("toy", "-b", server.url, "-n", "1", "-r", "1", *flags)
    assert f"left to the server: {names}" in ran.out
