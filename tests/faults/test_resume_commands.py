"""Promise: the printed command finishes the run; what was done to its files by hand is told and
never mixed in."""

from __future__ import annotations

import itertools
import json
import shlex
import zlib

import pytest

import verifiers as vf
from support.eval_command import last_word
from support.small_envs import add_one, single_turn
from verifiers.results import loading
from verifiers.testing import FakeServer

NUM_ROWS, FAILS_AT = 6, 3


def deletes_journal_at(number, folder):
    """A script: another program deletes the journal during this completion, which stops the run;
    the rows that were saved are written again."""

    def script(hit):
        if hit.index == number:
            max(folder.rglob("results.jsonl"), key=lambda path: path.stat().st_mtime_ns).unlink()

    return script


FLAGS = {
    "fresh": [[], ["--fresh"]],
    "folder": [[], ["--output-dir=here"]],
    "before": [[], ["an unfinished run"], ["a finished run"]],
    "file": [[], ["fresh = true"], ['output_dir = "there"']],
}


@pytest.mark.parametrize("words", list(itertools.product(*FLAGS.values())), ids=str)
def test_the_printed_command_finishes_the_run_that_it_is_printed_for(words, vf_eval, eval_folder):
    fresh, folder, (before, *_), (setting, *_) = (part or [""] for part in words)
    flags = [word for word in (*fresh, *folder) if word]
    if setting:
        (eval_folder / "more.toml").write_text(setting + "\n[[eval]]\nenv_id = 'toy'\n")
    target = ["more.toml"] if setting else ["toy"]
    common = ["-m", "m", "-n", str(NUM_ROWS), "-r", "1", "-c", "1", "-A", *flags]
    if before:
        with FakeServer(
            last_word,
            deletes_journal_at(2, eval_folder) if "unfinished" in before else None,
            models=["m"],
        ) as server:
            vf_eval(*target, "-b", server.url, *common)
    with FakeServer(last_word, deletes_journal_at(FAILS_AT, eval_folder), models=["m"]) as server:
        url = server.url
        ran = vf_eval(*target, "-b", url, *common)
        asked = server.count
    if ran.code == 0:  # the finished run of before
        assert before == "a finished run"
        return
    assert ran.code == 3, ran.err
    (line,) = [line for line in ran.err.splitlines() if line.startswith("to resume: ")]
    path = next(part for part in ran.err.split("finished rollouts are in ")[1].splitlines())
    done = (eval_folder / path / "results.jsonl").read_bytes().count(b"\n")
    assert done >= FAILS_AT or before == "an unfinished run"
    port = int(url.split(":")[2].split("/")[0])
    with FakeServer(last_word, models=["m"], port=port) as server:
        again = vf_eval(*shlex.split(line.removeprefix("to resume: "))[1:])
        assert server.count == NUM_ROWS - done
    assert again.code == 0, again.err
    assert asked
    results = vf.load_results(eval_folder / path)
    assert results.metadata.status == "complete"
    assert sorted(results["example_id"]) == list(range(NUM_ROWS))


def test_a_folder_that_does_not_hold_the_named_run_is_refused(vf_eval, eval_folder):
    with FakeServer(last_word, models=["m"]) as server:
        vf_eval("toy", "-b", server.url, "-m", "m", "-o", "here")
        (run,) = eval_folder.glob("here/evals/*/*")
        ran = vf_eval("toy", "-b", server.url, "-m", "m", "-o", "elsewhere", "--resume", str(run))
    assert ran.code == 2
    assert "which is not in elsewhere; leave out --output-dir" in ran.paragraph


# --- files changed by hand ------------------------------------------------------------------------


def play(path, num_rows=NUM_ROWS, **more):
    with FakeServer(add_one) as server:
        client = vf.OpenAIChatCompletionsClient(base_url=server.url)
        results = single_turn(num_rows).evaluate(client, "scripted", results_path=path, **more)
        return results, server.count


@pytest.mark.parametrize("num_rows", [None, 0, 2], ids=["deleted", "emptied", "cut"])
def test_a_finished_run_that_has_lost_rows_says_so_before_it_generates_them_again(
    num_rows, tmp_path, caplog
):
    play(tmp_path / "run")
    rows = tmp_path / "run" / "results.jsonl"
    if num_rows is None:
        rows.unlink()
    else:
        rows.write_bytes(b"".join(rows.read_bytes().splitlines(keepends=True)[:num_rows]))
    told = []
    results, asked = play(tmp_path / "run", on_log=told.append)
    said = (
        f"has lost rows: metadata.json counted {NUM_ROWS} rollouts, the file has {num_rows or 0}; the"
        " missing ones are"
    )
    assert said in caplog.text
    assert said in told[0]
    assert asked == NUM_ROWS - (num_rows or 0)
    assert len(results) == NUM_ROWS
    caplog.clear()
    assert play(tmp_path / "run")[1] == 0  # negative control: whole again
    assert "lost rows" not in caplog.text


@pytest.mark.parametrize("key", ["model", "seed", "max_turns"])
def test_a_configuration_changed_by_hand_is_refused_and_nothing_is_written(key, tmp_path):
    play(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    stored = json.loads(file.read_text())
    stored["config"][key] = 7
    file.write_text(json.dumps(stored))
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    with pytest.raises(vf.RunMismatch, match=r"config\.json was changed since the run began"):
        play(tmp_path / "run", num_rows=NUM_ROWS + 2)
    assert (tmp_path / "run" / "results.jsonl").read_bytes() == before


FOREIGN = {
    "no key": {"reward": 1.0},
    "a key that is no text": {"rollout_key": [1], "reward": 1.0},
    "metrics are text": {"metrics": {"a": {}}, "error": 5, "timing": "late"},
    "an error that is a number": {"error": 5, "timing": [1]},
    "messages are numbers": {"prompt": [1, 2], "completion": [None]},
    "nothing of a rollout, no key": {"hello": "world", "trajectory": None},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_row_of_another_shape_with_a_right_checksum_is_named_by_file_and_line(
    kind, tmp_path, monkeypatch
):
    play(tmp_path / "run")
    file = tmp_path / "run" / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    row = json.loads(lines[2])
    row.pop("crc32")
    row = FOREIGN[kind] if "key" in kind else row | FOREIGN[kind]
    body = json.dumps(row, separators=(",", ":")).encode()[:-1]
    lines[2] = b'%b,"crc32":%d}\n' % (body, zlib.crc32(body))
    file.write_bytes(b"".join(lines))
    before = file.read_bytes()
    with pytest.raises(
        vf.JournalError, match=r"results\.jsonl:3: this line is not a saved rollout"
    ):
        play(tmp_path / "run", num_rows=NUM_ROWS + 1)
    assert file.read_bytes() == before
    if "key" not in kind or kind.startswith("nothing"):
        for large in (loading.LARGE_BYTES, 1):
            monkeypatch.setattr(loading, "LARGE_BYTES", large)
            with pytest.raises(
                vf.JournalError, match=r"results\.jsonl:3: this line is not a saved rollout"
            ):
                vf.load_results(tmp_path / "run")
