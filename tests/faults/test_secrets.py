"""Promise: a key that a run was given is in no file and on no stream of it, and resuming still
compares it.

What counts as a secret is in ``core/runtime/test_redaction.py``.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import verifiers as vf
from support.eval_command import end, last_word, rows_on_disk, start
from support.warm_commands import run_vf_eval
from verifiers.runtime import redaction
from verifiers.testing import FakeServer

CANARIES = {
    "argument": "canary-argument-0123456789",
    "nested": "canary-nested-0123456789",
    "sampling": "canary-sampling-0123456789",
    "header": "canary-header-0123456789",
    "custom": "canary-custom-0123456789",
    "variable": "canary-variable-0123456789",
    "key": "canary-key",
    "code": "canary-code",
    "sig": "canary-sig",
    "opaque": "canary-opaque-0123456789",
    "body": "canary-body-0123456789",
}
ENVIRONMENT = '''
import verifiers as vf

def load_environment(judge_api_key: str, judge: dict, wrong: bool = False, num_rows: int = 8):
    """Holds its keys as its author might: in the rubric, the parser, closures, error messages and the state."""
    if wrong:
        raise ValueError(f"the judge refused {judge_api_key}")

    class Keyed(vf.Rubric):
        def __init__(self, judge_api_key, judge, **more):
            super().__init__(**more)
            self.judge_api_key, self.judge = judge_api_key, judge

    class Env(vf.SingleTurnEnv):
        @vf.setup
        async def keep(self, state):
            state["connection"] = {"headers": {"Authorization": judge["headers"]["X-Judge"]}, "api_key": judge_api_key}
            print("connecting")

    def exact(completion, answer):
        if answer == "3":
            raise ConnectionError(f"the judge refused {judge_api_key} and {judge['headers']['X-Judge']}")
        return float(completion[-1]["content"][-1:] == answer)

    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(num_rows)]
    return Env(dataset=rows, eval_dataset=rows, rubric=Keyed(judge_api_key, judge, funcs=[exact]))
'''
ARGUMENTS = json.dumps(
    {
        "judge_api_key": CANARIES["argument"],
        "judge": {"headers": {"X-Judge": CANARIES["nested"]}, "model": "j"},
    }
)


def found(folder: Path, *texts: str) -> list[str]:
    """Where a canary is: names of files below the folder, and numbers of texts."""
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files |= {f"text {number}": text.encode() for number, text in enumerate(texts)}
    pairs = [(name, kind, value) for name in files for kind, value in CANARIES.items()]
    return sorted(f"{name}: {kind}" for name, kind, value in pairs if value.encode() in files[name])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "keyed.py").write_text(ENVIRONMENT)
    return tmp_path


def address(server: FakeServer) -> str:
    query = "&".join(f"{name}={CANARIES[name]}" for name in ("key", "code", "sig", "opaque"))
    return f"{server.url}?{query}&api-version=2024-10-01-preview"


def evaluate(
    folder: Path,
    server: FakeServer,
    *words: str,
    arguments: str = ARGUMENTS,
    run: Callable[..., Any] = run_vf_eval,
) -> Any:
    return run(
        folder,
        *(
            "keyed",
            "-b",
            address(server),
            "-m",
            "m",
            "-n",
            "8",
            "-r",
            "1",
            "-c",
            "1",
            "-a",
            arguments,
            "-k",
            "JUDGE_KEY",
        ),
        *(
            "-S",
            json.dumps(
                {
                    "extra_headers": {"X-Api-Key": CANARIES["sampling"]},
                    "extra_body": {"api_key": CANARIES["body"]},
                }
            ),
            "-C",
            "connection",
        ),
        *(
            "--header",
            f"X-Api-Key: {CANARIES['header']}",
            "--header",
            f"X-Gate: {CANARIES['custom']}",
        ),
        *words,
        JUDGE_KEY=CANARIES["variable"],
    )


@pytest.mark.parametrize(
    "words",
    [
        ("-v",),
        ("--json", "--progress", "json"),
        ("--dry-run",),
        ("--dump-config",),
        ("--check",),
        ("--env-args.wrong", "true", "-v"),
        ("--env-args.misspelt_api_key", CANARIES["argument"]),
        ("--export", "parquet"),
        ("--cache", "outputs/cache"),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_an_evaluation_that_holds_keys_writes_and_prints_none(folder, words):
    with FakeServer(last_word, models=["m"]) as server:
        ran = evaluate(folder, server, *words)
        sent = json.dumps([dict(hit.headers) for hit in server.hits])
    # X-Gate may be no secret
    out = ran.out.replace(CANARIES["custom"], "") if "--dump-config" in words else ran.out
    assert found(folder / "outputs", out, ran.err) == []
    if "--dry-run" in words or "--dump-config" in words:
        assert ran.code == 0, ran.err
    if words[0] == "--cache":
        assert list(folder.glob("outputs/cache/*/*.json"))
    if words[0] in ("-v", "--json", "--export", "--cache"):
        assert (
            CANARIES["header"] in sent,
            CANARIES["custom"] in sent,
            CANARIES["variable"] in sent,
        ) == (True,) * 3
        assert len(rows_on_disk(folder)) == 8, ran.err
        (config,) = folder.glob("outputs/evals/*/*/config.json")
        assert json.loads(config.read_text())["config"]["env_args"]["judge_api_key"].startswith(
            "*** "
        )


def test_the_printed_command_of_an_interrupted_evaluation_holds_no_key_and_names_the_gaps(folder):
    with FakeServer(last_word, models=["m"], delay_s=0.3) as server:
        child = evaluate(folder, server, run=start)
        deadline = time.monotonic() + 30
        while server.count < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        ran = end(child)
    assert ran.code == 130, ran.err
    assert found(folder / "outputs", ran.out, ran.err) == []
    assert "--header 'X-Api-Key: ***' --header 'X-Gate: ***'" in ran.err
    assert "write the secrets again where *** stands" in ran.err


def test_resuming_with_another_key_is_refused_without_naming_either(folder):
    with FakeServer(last_word, models=["m"], delay_s=0.3) as server:
        child = evaluate(folder, server, "-o", "here", run=start)
        deadline = time.monotonic() + 30
        while server.count < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        end(child)
        (run,) = folder.glob("here/evals/*/*")
        arguments = ARGUMENTS.replace(CANARIES["argument"], "another-key-987654321")
        refused = evaluate(folder, server, "--resume", str(run), arguments=arguments)
        assert refused.code == 2, refused.err
        assert "env_args.judge_api_key was '*** " in refused.err
        assert "another-key-987654321" not in refused.err
        same = evaluate(folder, server, "--resume", str(run))
    assert same.code == 0, same.err
    assert found(folder / "here", refused.out, refused.err, same.out, same.err) == []


def test_without_redaction_the_keys_are_in_the_files(folder, monkeypatch, tmp_path):
    """Negative control: the same environment and client, with names and values of
    secrets unknown."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(redaction, "_walk", lambda value, *_: value)
    monkeypatch.setattr(redaction, "_remembered", set())
    with FakeServer(last_word, models=["m"]) as server:
        env = vf.load_environment("keyed", **json.loads(ARGUMENTS))
        client = vf.OpenAIChatCompletionsClient(
            base_url=server.url, headers={"X-Gate": CANARIES["custom"]}
        )
        env.evaluate(client, "m", results_path=tmp_path / "run", state_columns=["connection"])
    hits = found(tmp_path / "run")
    assert {hit.rpartition(": ")[2] for hit in hits} == {"argument", "nested", "custom"}
    assert {Path(hit.rpartition(": ")[0]).name for hit in hits} == {
        "config.json",
        "metadata.json",
        "results.jsonl",
    }
    sys.modules.pop("keyed", None)


TRAINING = """
model = "builtin:tiny"

[env]
id = "keyed"

[env.args]
judge_api_key = "ARGUMENT"
judge = { model = "j", headers = { X-Judge = "NESTED" } }

[trainer.args]
run_name = "test"
hub_token = "SAMPLING"
rollouts_per_example = 4
batch_size = 16
micro_batch_size = 4
max_steps = 2
max_tokens = 6
max_seq_len = 64
use_lora = false
embedded_threads = 1
eval_steps = 2
eval_strategy = "steps"
report_to = "tensorboard"
deterministic = true
"""


def test_a_training_that_holds_keys_writes_and_prints_none_checkpoints_included(
    folder, monkeypatch
):
    from verifiers_trainer.cli.train import train_command

    text = TRAINING
    for kind in ("argument", "nested", "sampling"):
        text = text.replace(kind.upper(), CANARIES[kind])
    (folder / "train.toml").write_text(text)
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("JUDGE_KEY", CANARIES["variable"])
    outputs = []
    for words in (["-v"], ["--dump-config"], ["-v", "--trainer.args.max_steps", "3"]):
        ran = CliRunner().invoke(train_command, ["@", "../train.toml", *words])
        outputs += [ran.stdout, ran.stderr]
        assert ran.exit_code == 0, ran.output
    sys.modules.pop("keyed", None)
    assert found(folder / "work", *outputs) == []
    (checkpoint,) = folder.glob("work/outputs/*/checkpoint-3")
    saved = json.loads((checkpoint / "rl_state.json").read_text())
    assert saved["configuration"]["env_args"]["judge_api_key"].startswith("*** ")
    assert "*** " in saved["configuration"]["env_args"]["judge"]
    assert "the judge refused ***" in (checkpoint / "pending.jsonl").read_text()
