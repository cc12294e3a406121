"""The soak notices what it looks for: its invariants hold for real runs, and break when one of them
is spoiled."""

import copy
import json
import multiprocessing
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import soak
import verifiers as vf
from support.training import run, small_trainer
from verifiers.storage.journal import read_journal
from verifiers.testing import ScriptedClient

SOAK = Path(soak.__file__)


def right(completion, answer):
    return float(completion[-1]["content"].endswith(f": {answer}"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of a real run under the soak's questions and answers."""
    folder = tmp_path_factory.mktemp("evaluation")
    questions = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(soak.NUM_ROWS)]
    env = vf.SingleTurnEnv(eval_dataset=questions, rubric=vf.Rubric(funcs=[right]))
    env.evaluate(
        ScriptedClient(soak.solve), "m", rollouts_per_example=soak.SIBLINGS, results_path=folder
    )
    return list(read_journal(folder / "results.jsonl"))


def spoiled(rows, what):
    rows = copy.deepcopy(rows)
    if what == "an acknowledged row deleted":
        return rows[1:]
    if what == "a row twice":
        return [*rows, rows[0]]
    if what == "a row of another run":
        rows[0]["completion"][-1]["content"] = "another: 1"
    elif what == "a failed rollout with a reward":
        rows[0] |= {"error": {"error": "ModelUnavailable"}, "reward": 0.0}
    elif what == "a failure of ours":
        rows[0] |= {"error": {"error": "KeyError"}, "reward": None}
    return rows


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", None),
        ("an acknowledged row deleted", "1 acknowledged rows are lost"),
        ("a row twice", "1 rows are there twice"),
        ("a row of another run", "a row of another run or question: 'another: 1', not 'm: "),
        ("a failed rollout with a reward", "a failed rollout has the reward 0.0, which is unknown"),
        ("a failure of ours", "a row failed for no fault of the server"),
    ],
)
def test_rows_lost_doubled_mixed_or_invented_are_reported(rows, what, said):
    acknowledged = {row["rollout_key"] for row in rows}
    if said is None:
        soak.check_rows(rows, acknowledged, "m", is_done=True)
        return
    with pytest.raises(soak.Violation, match=said):
        soak.check_rows(spoiled(rows, what), acknowledged, "m", is_done=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a real training of as many steps as the soak's."""
    folder = tmp_path_factory.mktemp("training")
    settings = {"deterministic": True, "max_off_policy_steps": 0, "log_completions": True}
    run(
        small_trainer(
            folder, max_steps=soak.STEPS, save_strategy="steps", save_steps=soak.STEPS, **settings
        )
    )
    return folder


def change(file, key, value):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    last = [row for row in rows if row.get("trained", True)][-1]
    last[key] = value(last[key])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("file", "key", "value", "said"),
    [
        ("", "", None, None),
        ("metrics.jsonl", "loss", lambda loss: loss + 1e-9, "the losses of the resumed run differ"),
        ("metrics.jsonl", "sampler/log_ratio_abs", lambda _: 0.1, r"mean \|log ratio\| 0.1"),
        (
            f"completions/step-{soak.STEPS}.jsonl",
            "completion_tokens",
            lambda count: count + 1,
            "tokens of",
        ),
        (
            f"completions/step-{soak.STEPS}.jsonl",
            "policy_version",
            lambda version: version - 1,
            "rollouts of policy 4",
        ),
    ],
    ids=["nothing", "loss", "ratio", "tokens", "version"],
)
def test_a_training_that_is_not_the_undisturbed_one_is_reported(
    trained, tmp_path, file, key, value, said
):
    losses, saved = soak.losses_in(trained), soak.saved_in(trained)
    folder = shutil.copytree(trained, tmp_path / "run")
    if said is None:
        assert soak.check_training(folder, losses, saved, max_lag=0) > 0
        return
    change(folder / file, key, value)
    with pytest.raises(soak.Violation, match=said):
        soak.check_training(folder, losses, saved, max_lag=0)


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["row", "process", "file"])
def test_the_soak_itself_ends_with_what_repeats_its_violation(tmp_path, sabotage):
    words = [
        "--seed",
        "3",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path / "soak"),
        "--sabotage",
        sabotage,
    ]
    ended = subprocess.run(
        [sys.executable, str(SOAK), *words], capture_output=True, text=True, timeout=900
    )
    report = json.loads(ended.stdout[ended.stdout.index("{\n") :])
    assert (ended.returncode, report["rounds"]) == (1, 0), ended.stderr
    sentences = {
        "row": "acknowledged rows are lost",
        "process": "processes are left",
        "file": "temporary files are left",
    }
    assert sentences[sabotage] in report["violation"]
    assert "python3 run.py soak --seed 3 --first-round 1 --rounds 1" in ended.stderr


def test_a_command_that_hangs_is_a_violation_though_waiting_for_a_processor_is_not_counted(
    tmp_path, monkeypatch
):
    def started():
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        process.start()
        return soak.Command(process, tmp_path / "log")

    with pytest.raises(soak.Violation, match="did not end within 1 s"):
        started().wait(timeout_s=1.0)
    command = started()
    monkeypatch.setattr(command, "_starved_s", lambda: 100.0)
    monkeypatch.setattr(soak, "LONGEST_S", 3.0)
    with pytest.raises(soak.Violation, match=r"0 s of its own, 3 s in all"):
        command.wait(timeout_s=1.0)


def test_a_secret_in_a_file_of_a_round_is_reported(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/metadata.json").write_text('{"header": "***"}')
    soak.require_no_secret(tmp_path)
    for secret in (soak.KEY, soak.GATE):
        (tmp_path / "runs/eval.log").write_text(f"refused {secret}")
        with pytest.raises(soak.Violation, match=r"a secret is in runs/eval\.log"):
            soak.require_no_secret(tmp_path)
