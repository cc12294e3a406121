"""``vf-audit``: the page, the JSON object, exit codes, certificates, and the rows that are useful
to a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import verifiers as vf
from support.fresh_python import Ran
from verifiers.checks.audit.profile import write_useful
from verifiers.checks.audit.report import RowProfile
from verifiers.cli.audit import COMMAND
from verifiers.cli.evaluate.command import run_command as vf_eval
from verifiers.cli.install.command import COMMAND as INSTALL
from verifiers.testing import FakeServer

HONEST = """
import verifiers as vf

def load_environment(lenient: bool = False):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20, 44)]

    def exact(completion, answer):
        text = completion[-1].content
        return float(answer in text if lenient else text == answer)

    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([exact]))
"""


@pytest.fixture
def vf_audit(tmp_path, monkeypatch, capfd):
    """The command, run in this process inside a folder with the package ``environments/honest``."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "environments" / "honest"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(HONEST)

    def run(*words: str, command=COMMAND) -> Ran:
        capfd.readouterr()
        code = command(list(words)) if command is vf_eval else command.run(words)
        streams = capfd.readouterr()
        return Ran(code, streams.out, streams.err)

    return run


def test_the_page_says_what_was_paid_for_what(vf_audit):
    ran = vf_audit("honest")
    assert ran.code == 0
    assert "honest: no way to be paid without solving it was found" in ran.out
    assert "success metric   reward" in ran.out
    assert "a right answer" in ran.out
    assert "non-solutions earned nothing" in ran.out


def test_a_way_to_be_paid_is_exit_1_with_its_place_and_fix(vf_audit):
    ran = vf_audit("honest", "-a", '{"lenient": true}')
    assert ran.code == 1
    assert "error non-solution-is-paid: " in ran.out
    assert "at:  environments/honest/__init__.py:" in ran.out
    assert "vf-audit: honest: non-solution-is-paid" in ran.err


def test_json_is_one_object_with_every_non_solution(vf_audit):
    ran = vf_audit("honest", "-a", '{"lenient": true}', "--json", "--search", "0")
    content = json.loads(ran.out)
    assert (content["ok"], content["exit_code"]) == (False, 1)
    assert content["errors"][0]["code"] == "non-solution-is-paid"
    assert content["oracle"]["reward"] == 1.0
    assert content["best_non_solution"]["reward"] == 1.0
    assert len(content["non_solutions"]) > 80
    by_test = content["rfc_008"]["results"]
    assert by_test["statistical.adversarial_floor"]["status"] == "fail"
    assert by_test["semantic.oracle_max"]["status"] == "pass"
    assert "vf-eval" in content["rfc_008"]["not_run"]["runtime.seed_control"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give one environment"),
        (("honest", "-a", "[1]"), "must be a JSON object"),
        (("honest", "-a", "{"), "is not JSON"),
        (("honest", "--keep", "x.jsonl"), "name it with -m"),
        (("honest", "-a", '{"lenient": true}', "--certify"), "leave -a out"),
        (("nothing-of-this-name",), "nothing-of-this-name"),
    ],
)
def test_what_cannot_be_meant_is_refused(vf_audit, words, said):
    ran = vf_audit(*words)
    assert ran.code == 2
    assert said in ran.err


# --- certificates ---------------------------------------------------------------------------------


def test_a_certificate_is_fresh_until_the_package_changes(vf_audit):
    from verifiers.checks.audit.certificate import read_certificate

    assert read_certificate("honest") is None
    ran = vf_audit("honest", "--certify")
    assert ran.code == 0
    assert "certificate in " in ran.err
    stored = read_certificate("honest")
    assert (stored.ok, stored.is_fresh, stored.non_solution_reward) == (True, True, 0.0)
    assert str(stored).startswith("audit passed 20")
    source = Path("environments/honest/__init__.py")
    source.write_text(source.read_text() + "\n# another line\n")
    assert not read_certificate("honest").is_fresh
    assert "stale" in str(read_certificate("honest"))


def test_a_failed_audit_is_stored_as_failed(vf_audit):
    from verifiers.checks.audit.certificate import read_certificate

    source = Path("environments/honest/__init__.py")
    source.write_text(HONEST.replace("lenient: bool = False", "lenient: bool = True"))
    assert vf_audit("honest", "--certify").code == 1
    assert str(read_certificate("honest")).startswith("audit FAILED: non-solution-is-paid")


def test_a_single_file_has_no_certificate(vf_audit):
    shutil.move("environments/honest/__init__.py", "environments/single.py")
    ran = vf_audit("single", "--certify")
    assert ran.code == 2
    assert "single is a single file; a certificate is stored in the folder of a package" in ran.err


def test_the_line_of_a_run_comes_from_a_fresh_certificate_of_the_default_arguments(vf_audit):
    from verifiers.checks.audit.certificate import non_solution_reward

    assert non_solution_reward(vf.load_environment("honest")) is None
    vf_audit("honest", "--certify")
    assert non_solution_reward(vf.load_environment("honest")) == 0.0
    assert non_solution_reward(vf.load_environment("honest", lenient=True)) is None
    env = vf.load_environment("honest", lenient=True)
    env.non_solution_reward = 0.4
    assert non_solution_reward(env) == 0.4


def test_vf_install_lists_the_audits(vf_audit):
    lines = vf_audit("--list", command=INSTALL).out.splitlines()
    (line,) = [line for line in lines if line.startswith("reverse-text ")]
    assert "audit passed " in line
    environments = json.loads(vf_audit("--list", "--json", command=INSTALL).out)["environments"]
    assert all("audit" in environment for environment in environments)


# --- rows that are useful to a model --------------------------------------------------------------


def test_the_useful_rows_are_those_that_the_model_solves_sometimes(vf_audit):
    seen: dict[str, int] = {}

    # rows below 24 never, from 28 on always, the others every second time
    def half(request) -> str:
        number = int(request.prompt[-1]["content"].split()[2])
        seen[str(number)] = seen.get(str(number), 0) + 1
        is_right = number >= 28 or (number >= 24 and seen[str(number)] % 2)
        return str(number + 1 if is_right else 0)

    with FakeServer(half, models=["m"]) as server:
        words = (
            "honest",
            "-m",
            "m",
            "-b",
            server.url,
            "--rows",
            "12",
            "-r",
            "4",
            "--keep",
            "useful.jsonl",
        )
        ran = vf_audit(*words, "--search", "0", "--json")
    content = json.loads(ran.out)
    assert [row["kind"] for row in content["profile"]] == ["dead"] * 4 + ["useful"] * 4 + [
        "solved"
    ] * 4
    assert content["kept"] == {"path": "useful.jsonl", "rows": 4}
    env = vf.load_environment("honest")
    assert len(env.train_table) == 24
    env.set_kwargs(keep_rows="useful.jsonl")
    assert [example.row["answer"] for example in env.train_table] == ["25", "26", "27", "28"]
    assert {
        json.loads(line)["pass_rate"] for line in Path("useful.jsonl").read_text().splitlines()
    } == {0.5}


@pytest.fixture
def kept(vf_audit):
    """The file of two useful rows of ``honest``, questions 20 and 21 of the default arguments."""
    examples = list(vf.load_environment("honest").train_table)[:2]
    profiles = [RowProfile(example.example_id, example.hash, 1, 2) for example in examples]
    write_useful(Path("useful.jsonl"), examples, profiles, vf.load_environment("honest"), "m")
    return "useful.jsonl"


def test_an_evaluation_runs_the_kept_rows_and_its_identity_says_which(vf_audit, kept):
    with FakeServer("21", models=["m"]) as server:
        words = (
            "honest",
            "-m",
            "m",
            "-b",
            server.url,
            "-n",
            "-1",
            "-r",
            "1",
            "--json",
            "--progress",
            "none",
        )
        some = json.loads(vf_audit(*words, "--keep-rows", kept, command=vf_eval).out)["runs"][0]
        shutil.move(kept, "moved.jsonl")
        again = json.loads(vf_audit(*words, "--keep-rows", "moved.jsonl", command=vf_eval).out)[
            "runs"
        ][0]
        all_rows = json.loads(vf_audit(*words, command=vf_eval).out)["runs"][0]
    assert (some["num_rollouts"], some["avg_reward"]) == (2, 0.5)
    # what is kept is in the identity, not the name of the file
    assert again["path"] == f"{some['path']}-2"
    assert all_rows["num_rollouts"] == 24
    assert not all_rows["path"].startswith(some["path"])


@pytest.mark.parametrize(
    ("env_id", "arguments", "sentence"),
    [
        ("other", "{}", "lists rows of honest, not of other; profile it with vf-audit other"),
        (
            "honest",
            '{"lenient": true}',
            'for honest with the arguments {}, and these are {"lenient": true}',
        ),
    ],
)
def test_the_profile_of_another_environment_or_other_arguments_is_refused(
    vf_audit, kept, env_id, arguments, sentence
):
    shutil.copytree("environments/honest", "environments/other")
    ran = vf_audit(
        env_id,
        "-m",
        "m",
        "-b",
        "http://127.0.0.1:9",
        "-a",
        arguments,
        "--keep-rows",
        kept,
        command=vf_eval,
    )
    assert ran.code == 2
    assert sentence in ran.err


def test_rows_that_the_data_no_longer_have_are_refused(vf_audit, kept):
    vf.load_environment("honest").set_kwargs(keep_rows=kept)  # negative control
    changed = vf.load_environment("honest").train_table
    env = vf.SingleTurnEnv(dataset=[example.row for example in changed][1:], env_id="honest")
    with pytest.raises(
        vf.ConfigError,
        match="1 of its 2 rows are no training rows of honest, whose data have changed",
    ):
        env.set_kwargs(keep_rows=kept)


def test_the_held_out_rows_stay_where_training_rows_are_kept(tmp_path):
    rows = [{"question": str(n), "answer": "x"} for n in range(4)]
    env = vf.SingleTurnEnv(dataset=rows[:3], eval_dataset=rows[3:])
    first = list(env.train_table)[:1]
    file = tmp_path / "useful.jsonl"
    write_useful(file, first, [RowProfile(first[0].example_id, first[0].hash, 1, 2)], env, "m")
    env.set_kwargs(keep_rows=file)
    assert [
        len(env.train_table),
        [example.row["prompt"][0]["content"] for example in env.eval_table],
    ] == [1, ["3"]]
    before = env.identity()
    env.set_kwargs(keep_eval_rows=file)
    assert [example.row["prompt"][0]["content"] for example in env.eval_table] == ["0"]
    assert env.identity() != before


def test_rows_of_another_environment_and_a_file_of_another_kind_are_refused(vf_audit, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"example_hash": "0"}\n')
    (tmp_path / "wrong.jsonl").write_text('{"question": "?"}\n')
    env = vf.load_environment("honest")
    with pytest.raises(vf.ConfigError, match="lists no training row of honest"):
        env.set_kwargs(keep_rows="other.jsonl")
    for name in ("wrong.jsonl", "absent.jsonl"):
        with pytest.raises(vf.ConfigError, match="cannot be read"):
            env.set_kwargs(keep_rows=name)
    assert len(env.train_table) == 24
