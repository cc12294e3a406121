"""``vf-eval`` told wrong things: one clear paragraph, its exit code, no request,
nothing on disk."""

from __future__ import annotations

import runpy
import socket
import sys
from pathlib import Path

import pytest

from support.eval_command import last_word
from verifiers.cli.common.streams import UNEXPECTED, fail
from verifiers.testing import FakeServer
from verifiers.testing.connection import Behaviour


@pytest.fixture(scope="module")
def server():
    with FakeServer(last_word, models=["m"]) as server:
        yield server


@pytest.fixture
def refused(vf_eval, server, eval_folder):
    """A command that must be refused: its paragraph, after checking code, requests and disk."""

    def run(*words: str, code: int = 2) -> str:
        before = server.count
        ran = vf_eval(*words)
        assert ran.code == code, ran
        assert ran.out == ""
        assert server.count == before
        assert not (eval_folder / "outputs").exists()
        return ran.paragraph

    return run


def test_everything_wrong_on_the_command_line_is_named_at_once(refused):
    paragraph = refused("toy", "--modle", "x", "--num-exampels=5", "-d", "--env.arg.x=1", "-n", "0")
    assert "5 things to correct" in paragraph
    for said in (
        "--modle: no such option, did you mean --model?",
        "--num-exampels: no such option, did you mean --num-examples?",
        "-d is an option of older versions",
        "--env.arg.x: no such setting, did you mean --env.args.x?",
        "--num-examples must be a whole number of at least 1, or -1 for all, not 0",
    ):
        assert said in paragraph


def test_everything_wrong_in_files_and_arguments_is_named_with_its_place(refused, eval_folder):
    (eval_folder / "toy.py").write_text("def load_environment(num_rows=1): ...")
    (eval_folder / "e.toml").write_text(
        'model = "m"\nmax_tokns = 5\n[[eval]]\nenv_id = "toy"\nnum_example = 20\nargs = { num_row ='
        ' 3 }\n[[eval]]\nid = "toy"\ntimeout = "5"\nrollouts_per_example = true\n[[eval]]\nmodel ='
        ' "m"\n'
    )
    paragraph = refused("@", "e.toml", "--temprature", "3")
    for said in (
        "--temprature: no such option, did you mean --temperature?",
        "e.toml:2: unknown key 'max_tokns' in the top level, did you mean \"max_tokens\"?",
        "e.toml:5: unknown key 'num_example' in [[eval]] number 1, did you mean \"num_examples\"?",
        (
            "e.toml:9: timeout in [[eval]] number 2 must be a number of seconds above 0, or none"
            " for no bound, not '5'"
        ),
        (
            "e.toml:10: rollouts_per_example in [[eval]] number 2 must be a whole number of at"
            " least 1, not True"
        ),
        "[[eval]] number 3 has no env_id",
        "environment 'toy' does not know 'num_row' (did you mean 'num_rows'?)",
    ):
        assert said in paragraph


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'model = "m"\nnum_examples = x',
            "e.toml is not valid TOML: Invalid value (at line 2, column 16)",
        ),
        ('[eval]\nenv_id = "toy"', "e.toml:1: write [[eval]], with two brackets"),
        ('model = "m"', "e.toml has neither [[eval]] nor [[ablation]]: add one"),
        (
            '[ablation]\nid = "toy"',
            "e.toml:1: write [[ablation]], with two brackets, once per ablation",
        ),
        ('[[eval]]\nid = "toy"\nenv_ids = ["toy"]', "has id and env_ids; give one of them"),
        ('[[eval]]\nid = "toy"\nargs = 3', "must be a JSON object"),
        ('[[eval]]\nid = "toy"\nargs = {}\nenv_args = {}', "repeats 'env_args'"),
    ],
)
def test_a_file_that_cannot_be_used(refused, eval_folder, text, said):
    (eval_folder / "e.toml").write_text(text)
    assert said in refused("e.toml")


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("", "[[ablation]] number 1 sweeps nothing: add [ablation.sweep] with a list of values to try"),
        ("[ablation.sweep]", "[[ablation]] number 1 sweeps nothing"),
        ("[ablation.sweep.args]", "args in [ablation.sweep] of [[ablation]] number 1 is empty; name what to vary"),
        ("[ablation.sweep]\ntemperature = 0.5", "e.toml:6: temperature in [ablation.sweep] of [[ablation]] number 1 "
         "must be a list of values to try, not 0.5"),
        ("[ablation.sweep]\ntemperature = []", "must be a list of values to try, not an empty list"),
        ("[ablation.sweep.args]\nnum_rows = 3", "args.num_rows in [ablation.sweep] of [[ablation]] number 1 must be "
         "a list of values to try, not 3"),
        ("[ablation.sweep]\ntemprature = [1]", "unknown key 'temprature' in [ablation.sweep] of [[ablation]] number "
         '1, did you mean "temperature"?'),
        ("[ablation.sweep]\ntemperature = [0.5, 'hot']", "must be a number of at least 0, not 'hot'"),
        ("[ablation.sweep]\nmax_tokens = [1, 2]", "gives max_tokens a fixed value and sweeps it"),
        ("[ablation.sweep.sampling_args]\nmax_tokens = [1]", "gives sampling_args.max_tokens a fixed value and sweeps"),
        ("[ablation.sweep.args]\nbroken_rewards = [true]", "gives env_args.broken_rewards a fixed value and sweeps"),
        ("[ablation.sweep]\ntemperature = [0]\nsampling_args = { temperature = [1] }", "sweeps temperature twice"),
        ("[ablation.sweep.args]\nnum_row = [3]", "environment 'toy' does not know 'num_row'"),
    ],
)  # fmt: skip
def test_an_ablation_that_cannot_be_run(refused, eval_folder, sweep, said):
    (eval_folder / "toy.py").write_text(
        "def load_environment(num_rows=1, broken_rewards=False): ..."
    )
    fixed = '[[ablation]]\nid = "toy"\nmax_tokens = 5\nargs = { broken_rewards = true }\n'
    (eval_folder / "e.toml").write_text(fixed + sweep)
    assert said in refused("e.toml", "-m", "m")


def test_everything_wrong_with_ablations_is_named_at_once(refused, eval_folder):
    (eval_folder / "e.toml").write_text(
        'modle = "m"\n[[ablation]]\nmax_tokens = 0\n[ablation.sweep]\ntemperature = 1\nnum_example'
        " = [1]\n"
    )
    paragraph = refused("e.toml", "--temprature", "3")
    assert "6 things to correct" in paragraph
    for said in (
        "--temprature",
        "'modle'",
        "has no env_id",
        "max_tokens",
        "must be a list",
        "'num_example'",
    ):
        assert said in paragraph


def test_a_file_that_is_not_there_and_an_id_beside_a_file(refused, eval_folder):
    assert "nope.toml cannot be read: No such file or directory" in refused("nope.toml")
    (eval_folder / "e.toml").write_text('[[eval]]\nid = "toy"')
    assert "both name evaluations" in refused("toy", "@", "e.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-T", "-1"], "--temperature must be a number of at least 0, not -1"),
        (["-T", "warm"], "--temperature must be a number of at least 0, not 'warm'"),
        (["-c", "1.5"], "--max-concurrent must be a whole number of at least 1"),
        (["--max-error-rate", "2"], "--max-error-rate must be a number from 0 to 1, not 2"),
        (["--timeout", "0"], "--timeout must be a number of seconds above 0, or none"),
        (["-S", '{"a":'], "--sampling-args is not JSON"),
        (["-a", "[1]"], "--env-args must be a JSON object"),
        (["--header", "nocolon"], '--header must be "Name: value"'),
        (["--header", "A: b\nC: d"], "with characters that cannot be sent"),
        (["--header-from-state", "X-A"], "--header-from-state must be NAME=key, not 'X-A'"),
        (["--header-from-state", "X-A="], "names no key of the state for X-A; write X-A=key"),
        (
            ["--header-from-state", "X A=task"],
            "--header-from-state has a header name that cannot be sent: 'X A'",
        ),
        (
            ["--max-concurrent-tools", "0"],
            "--max-concurrent-tools must be a whole number of at least 1, not 0",
        ),
        (
            ["--progress", "loud"],
            "--progress must be one of auto, bar, plain, json, none, not 'loud'",
        ),
        (["--api-client-type", "soap"], "--client must be chat, completions, responses, messages"),
        (["--fresh", "-R"], "--fresh starts a new run and --resume continues an old one"),
        (["-H"], "--save-to-hf-hub needs a name"),
        (["-m"], "Option '-m' requires an argument"),
        (["other"], "'other': one more argument than expected"),
        (
            ["-x", '{"message_typ": "chat"}'],
            "--extra-env-kwargs: SingleTurnEnv has no parameter 'message_typ'",
        ),
    ],
)
def test_values_out_of_range_and_contradictions(refused, server, words, said):
    assert said in refused("toy", "-b", server.url, *words)


@pytest.mark.parametrize(
    "line", ["X-Key=sk-canary-1234567890", "Authorization Bearer sk-canary-1234567890: x"]
)
def test_a_header_that_cannot_be_read_is_not_repeated(refused, line):
    paragraph = refused("toy", "--header", line)
    assert "--header " in paragraph
    assert "…" in paragraph
    assert "canary" not in paragraph


def test_a_key_given_instead_of_its_variable_is_refused_and_not_repeated(refused):
    paragraph = refused("toy", "-k", "sk-canary-1234567890")
    assert "must be the NAME of an environment variable" in paragraph
    assert "canary" not in paragraph


@pytest.mark.parametrize("env_id", ["os", "../../x", "a;b", "tоy", "x" * 300, "toyy"])
def test_a_wrong_id_imports_nothing(refused, server, env_id):
    before = set(sys.modules)
    paragraph = refused(env_id, "-b", server.url)
    assert {
        name
        for name in set(sys.modules) - before
        if not name.startswith(("verifiers", "importlib"))
    } <= {"rich"}
    if env_id == "toyy":
        assert "did you mean 'toy'?" in paragraph


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import not_there_at_all\ndef load_environment(): ...",
            "No module named 'not_there_at_all'",
        ),
        ("def load_environment(): raise ValueError('no data today')", "ValueError: no data today"),
        ("def load_environment(): return 3", "returned int, not a verifiers.Environment"),
        ("raise SystemExit('gone')\ndef load_environment(): ...", "gone"),
    ],
)
def test_a_broken_environment_shows_its_own_error(refused, eval_folder, server, source, said):
    (eval_folder / "toy.py").write_text(source)
    assert said in refused("toy", "-b", server.url)


def test_nothing_to_evaluate_lists_what_is_installed(refused):
    assert "name an environment: vf-eval ENV_ID; installed: " in refused()
    assert "toy" in refused()


# --- the endpoint ---------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("model", [["-m", "m"], []])
def test_nothing_listens(refused, model):
    url = f"http://127.0.0.1:{closed_port()}/v1"
    assert (
        f"no answer from {url} (connection refused): start the server or correct the base URL"
        in refused("toy", "-b", url, *model)
    )


def test_a_wrong_url_a_web_page_and_a_missing_key(refused, monkeypatch):
    assert "is no http(s) URL" in refused("toy", "-b", "not-a-url", "-m", "m")
    with FakeServer(models=Behaviour(200, body="<html>hi</html>")) as page:
        assert "answered with a web page" in refused("toy", "-b", page.url, "-m", "m")
    assert "set the environment variable OPENAI_API_KEY" in refused("toy", "-m", "gpt-4.1-mini")


def test_a_refused_key_names_its_variable_and_never_its_value(refused, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-canary-1234567890")
    with FakeServer(
        models=Behaviour(401, body='{"error": "bad key sk-canary-1234567890"}')
    ) as locked:
        paragraph = refused("toy", "-b", locked.url, "-m", "m", "-k", "MY_KEY")
        assert "refused the key in the variable MY_KEY" in paragraph
        assert "canary" not in paragraph
        assert locked.count == 0


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "needs a key, and none was sent, because the variable MY_KEY is not set (HTTP 401)"),
        (403, "(HTTP 403; no key was sent, because the variable MY_KEY is not set)"),
    ],
)
def test_a_key_that_was_not_sent_was_not_refused(refused, monkeypatch, status, said):
    monkeypatch.delenv("MY_KEY", raising=False)
    with FakeServer(models=Behaviour(status, body='{"error": "who are you"}')) as locked:
        paragraph = refused("toy", "-b", locked.url, "-m", "m", "-k", "MY_KEY")
        assert said in paragraph
        assert "refused the key" not in paragraph
        monkeypatch.setenv("MY_KEY", "sk-wrong")  # negative control
        paragraph = refused("toy", "-b", locked.url, "-m", "m", "-k", "MY_KEY")
        assert "not set" not in paragraph


def test_an_unknown_model_stops_the_run_after_the_first_answer(vf_eval):
    body = '{"error": {"message": "The model `nope` does not exist", "code": "model_not_found"}}'
    with FakeServer(script=lambda hit: Behaviour(404, body=body), models=["a", "b"]) as picky:
        ran = vf_eval("toy", "-b", picky.url, "-m", "nope", "-n", "-1", "-c", "2")
        assert ran.code == 2
        assert "lists a, b, not 'nope'" in ran.err
        assert f"{picky.url} does not serve the model 'nope'" in ran.paragraph
        assert picky.count <= 2


def test_failure_after_failure_stops_the_run_with_3_and_says_how_to_go_on(vf_eval):
    with FakeServer(
        script=lambda hit: Behaviour(400, body='{"error": "no"}'), models=["m"]
    ) as broken:
        ran = vf_eval(
            "toy",
            "-b",
            broken.url,
            "-n",
            "-1",
            "-r",
            "10",
            "-c",
            "1",
            "--abort-after",
            "4",
            "--json",
        )
        assert (ran.code, broken.count) == (3, 4)
        assert ran.json["error"]["type"] == "TooManyFaults"
        assert "4 rollouts in a row failed with ModelRefused" in ran.json["error"]["message"]
        assert "to resume: vf-eval toy" in ran.err


def test_errors_above_the_allowed_share_are_exit_3_and_below_it_0(vf_eval):
    for allowed, code in (("0.2", 3), ("0.3", 0)):
        with FakeServer("x", script=[400, None, None, None], models=["m"]) as server:
            ran = vf_eval(
                "toy",
                "-b",
                server.url,
                "-n",
                "4",
                "-r",
                "1",
                "-c",
                "1",
                "--max-error-rate",
                allowed,
            )
            assert ran.code == code
            assert "1 × ModelRefused" in ran.out


@pytest.mark.parametrize("model", ["local", "builtin:tiny", "./model"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--header-from-state", "X-Task=task"),
        ("--header", "X-Task: a"),
        ("-k", "MY_KEY"),
        ("--client", "messages"),
    ],
)
def test_what_an_endpoint_is_told_needs_an_endpoint(refused, eval_folder, model, flag, value):
    (eval_folder / "model").mkdir()
    message = f"-m {model} runs in this process; leave out {flag}, or name a server with -b"
    assert message in refused("toy", "-m", model, flag, value)


# --- the disk -------------------------------------------------------------------------------------


def test_an_output_folder_that_cannot_be_written(refused, server, eval_folder):
    (eval_folder / "taken").write_text("")
    assert "taken is a file. Choose another folder with --output-dir" in refused(
        "toy", "-b", server.url, "-o", "taken", "-m", "m"
    )


def test_a_run_of_another_configuration_is_not_touched(vf_eval, server):
    path = vf_eval("toy", "-b", server.url, "-n", "1", "--json").json["runs"][0]["path"]
    before = {file.name: file.read_bytes() for file in Path(path).iterdir()}
    ran = vf_eval(
        "toy", "-b", server.url, "-n", "1", "--resume", path, "-T", "0.5", "-a", '{"num_rows": 2}'
    )
    assert ran.code == 2
    assert "env_args.num_rows was '<not set>', now 2" in ran.paragraph
    assert "sampling_args.temperature was '<not set>', now 0.5" in ran.paragraph
    assert {file.name: file.read_bytes() for file in Path(path).iterdir()} == before


def test_resuming_what_is_not_there(refused, server):
    assert "this folder is not a run directory" in refused(
        "toy", "-b", server.url, "-m", "m", "--resume", "nowhere"
    )
    assert "there is no unfinished run of this configuration" in refused(
        "toy", "-b", server.url, "-m", "m", "-R"
    )


# --- how errors are said --------------------------------------------------------------------------


def test_json_says_the_error_on_stdout_too(vf_eval):
    ran = vf_eval("toyy", "--json")
    assert (ran.json["ok"], ran.json["exit_code"], ran.json["runs"]) == (False, 2, [])
    assert ran.json["error"]["type"] == "UnknownEnvironment"
    assert ran.json["error"]["hint"] == "toy"
    assert vf_eval("toy", "--json", "-m").json["exit_code"] == 2


def test_a_traceback_is_shown_only_on_request(vf_eval, eval_folder):
    (eval_folder / "toy.py").write_text("def load_environment(): raise ValueError('no data today')")
    assert "Traceback" not in vf_eval("toy", "-m", "m").err
    assert "Traceback" in vf_eval("toy", "-m", "m", "-v").err


def test_an_unreadable_log_level(vf_eval, monkeypatch):
    monkeypatch.setenv("VF_LOG_LEVEL", "loud")
    ran = vf_eval("toy", "-m", "m", "-b", "http://127.0.0.1:9/v1")
    assert (ran.code, "VF_LOG_LEVEL is 'LOUD'; it must be one of DEBUG" in ran.paragraph) == (
        2,
        True,
    )


def test_an_unexpected_error_names_the_line_of_the_authors_code(tmp_path, capsys):
    (tmp_path / "mymod.py").write_text("def loss(row):\n    return row.logprobs\n")
    with pytest.raises(AttributeError) as caught:
        runpy.run_path(str(tmp_path / "mymod.py"))["loss"](object())
    code, facts = fail(caught.value, command="vf-train", verbose=False)
    assert (code, facts["type"]) == (UNEXPECTED, "AttributeError")
    assert (
        "has no attribute 'logprobs' at mymod.py:2 (-v shows the traceback)"
        in capsys.readouterr().err
    )
    # negative control: it has no line
    fail(AttributeError("never raised"), command="vf-train", verbose=False)
    assert " at " not in capsys.readouterr().err
