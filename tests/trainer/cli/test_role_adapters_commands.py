"""An adapter for each role by commands alone: trained by a file, evaluated from the folder, served
by the names of the roles."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from verifiers.cli.evaluate.command import run_command
from verifiers_trainer.cli.capacity import capacity_plan
from verifiers_trainer.cli.train import train_command
from verifiers_trainer.run.metrics_files import read_metrics

FILE = """
model = "builtin:tiny"

[env]
id = "kuhn-poker"
args = { style = "letters" }

[trainer.args]
run_name = "kuhn"
lora_per_role = true
rollouts_per_example = 4
batch_size = 16
micro_batch_size = 4
max_steps = 2
save_steps = 2
max_tokens = 2
max_seq_len = 64
zero_variance = "keep"
embedded_threads = 1
"""
PER_ROLE = ("--trainer.args.lora_per_role", "true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the file and the outputs of its training."""
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("run.toml").write_text(FILE)
        result = CliRunner().invoke(train_command, ["run.toml"])
    assert result.exit_code == 0, result.output
    assert "an adapter for each of first, second" in result.output
    return folder


def test_a_file_trains_an_adapter_for_each_role(folder):
    rows = [row for row in read_metrics(folder / "outputs/kuhn/metrics.jsonl") if "loss" in row]
    assert len(rows) == 2
    assert {"loss/first", "grad_norm/second", "sampler/disagreement/first"} <= rows[0].keys()
    saved = folder / "outputs/kuhn/checkpoint-2"
    assert sorted(path.name for path in saved.glob("role-*")) == ["role-first", "role-second"]


def test_the_folder_is_evaluated_with_the_adapter_of_each_role(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    words = ["kuhn-poker", "-a", '{"style": "letters"}', "-n", "6", "-r", "2", "-t", "2", "--json"]
    assert run_command([*words, "-m", "outputs/kuhn"]) == 0
    run = json.loads(capfd.readouterr().out)["runs"][0]
    assert (run["num_rollouts"], run["num_errors"]) == (12, 0)
    # of one role's adapter alone, an ordinary model
    one = "outputs/kuhn/checkpoint-2/role-first"
    assert run_command([*words, "-m", one]) == 0
    # an environment of no role is told what to name
    assert run_command(["gsm8k", "-n", "1", "-m", "outputs/kuhn", "--json"]) != 0
    assert "has an adapter for each of the roles first, second" in capfd.readouterr().err


def test_it_is_served_as_a_model_for_each_role(folder):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "verifiers_trainer.cli.serve"),
            *(str(folder / "outputs/kuhn"), "--json", "--port", "0"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def ask(url, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            return json.load(error)

    try:
        facts = json.loads(process.stdout.readline())
        assert facts["model"] == "first, second"
        url = facts["url"]
        assert [model["id"] for model in ask(url, "models")["data"]] == ["first", "second"]
        body = {"messages": [{"role": "user", "content": "K"}], "max_tokens": 2, "seed": 1}
        answers = [
            ask(url, "chat/completions", {**body, "model": role})
            for role in facts["model"].split(", ")
        ]
        assert [answer["model"] for answer in answers] == ["first", "second"]
        refused = ask(url, "chat/completions", {**body, "model": "third"})
        assert "serves 'first', 'second', an adapter for each role" in refused["error"]["message"]
        process.send_signal(signal.SIGTERM)
        _, notes = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, notes
    assert "a model for each role, such as -m first" in notes


def test_a_plan_counts_the_adapters():
    words = ["--env.id", "kuhn-poker", "--model", "builtin:tiny"]

    def optimizer(*more, **options):
        plan = capacity_plan([*words, *more], **options)
        return plan.memory["trainer"]["optimizer"]

    one = optimizer()
    assert optimizer(*PER_ROLE) == 2 * one
    assert optimizer(*PER_ROLE, overrides=["roles=3"]) == 3 * one
    # the control: without the setting there is one
    assert optimizer(overrides=["roles=3"]) == one
