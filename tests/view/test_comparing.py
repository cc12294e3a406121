"""Trainings over each other, settings that differ, and the difference of two texts."""

from __future__ import annotations

import json
import random
import re
from urllib.parse import quote

import pytest

from support import view_runs
from verifiers.storage.directory import RunDirectory
from verifiers.view.curves import Curves

DIFF = """
    const [pairs, done] = arguments;
    import('/static/diff.js').then(({ textDiff }) => done(pairs.map(([a, b]) => textDiff(a, b))),
                                   (error) => done(String(error.stack)));"""


def words(text):
    return re.findall(r"\s+|\w+|[^\w\s]", text)


def common(a, b):
    """Length of the longest common subsequence, by the textbook's table."""
    before = [0] * (len(b) + 1)
    for left in a:
        now = [0]
        for i, right in enumerate(b):
            now.append(before[i] + 1 if left == right else max(before[i + 1], now[i]))
        before = now
    return before[-1]


def test_the_difference_of_two_texts_is_shortest_and_holds_both(page, serve, tmp_path):
    view_runs.training(tmp_path / "one", num_steps=1)
    page.open(serve(tmp_path).url)
    chance = random.Random(0)
    vocabulary = ["a", "b", "c", " ", "\n", ".", "word", "é"]
    pairs = [
        tuple("".join(chance.choices(vocabulary, k=chance.randint(0, 30))) for _ in range(2))
        for _ in range(150)
    ] + [("x " * 9000, "y " * 9000)]
    for (before, after), parts in zip(
        pairs, page.driver.execute_async_script(DIFF, pairs), strict=True
    ):
        assert "".join(text for kind, text in parts if kind != "added") == before
        assert "".join(text for kind, text in parts if kind != "removed") == after
        if len(before) < 1000:
            same = sum(len(words(text)) for kind, text in parts if kind == "same")
            assert same == common(words(before), words(after)), (before, after)


OVER = """
const [lines, done] = arguments;
import('./static/curves_page.js').then((m) => done(m.pointsOver(lines, 'loss', 'seconds')));
"""


def test_the_seconds_of_a_training_have_no_pause_between_its_sessions(page, serve, tmp_path):
    """It was resumed a day later: on the axis of its curves, and in the list of runs."""
    times = [1000.0, 1010.0, 1012.0, 87_400.0]
    lines = [
        {"step": step, "time": at, "loss": 1.0}
        for step, at in zip((1, 2, 2, 3), times, strict=True)
    ]
    for line, seconds in zip(lines, (8.0, 10.0, None, 5.0), strict=True):
        if seconds is not None:  # the third line is an evaluation
            line["time/step"] = seconds
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = Curves(path)
    curves.read()
    assert (curves.seconds, curves.seconds_per_step()) == (23.0, pytest.approx(23 / 3))
    view_runs.training(tmp_path / "one", num_steps=1)
    page.open(serve(tmp_path).url)
    over = page.driver.execute_async_script(OVER, lines)
    assert [point[0] for point in over] == [8.0, 18.0, 18.0, 23.0]
    plain = [{name: line[name] for name in ("step", "time", "loss")} for line in lines]
    over = page.driver.execute_async_script(OVER, plain)  # of another program
    assert [point[0] for point in over] == [at - times[0] for at in times]


@pytest.fixture
def three_trainings(tmp_path):
    for name, steps in (("one", 4), ("two", 6), ("three", 5)):
        view_runs.training(tmp_path / name, num_steps=steps)
        summary = {"environment": "sums", "model": name, "steps": steps}
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
        state = tmp_path / name / "checkpoint-1"
        state.mkdir()
        rate = {"one": 1e-4}.get(name, 3e-4)
        configuration = {"learning_rate": rate, "batch_size": 8, "__proto__": name}
        (state / "rl_state.json").write_text(json.dumps({"configuration": configuration}))
    return tmp_path


def test_trainings_are_drawn_over_each_other(page, serve, three_trainings):
    server = serve(three_trainings)
    page.open(server.url)
    for name in ("one", "two", "three"):
        page.find(f"input[aria-label='compare {name}']").click()
    page.find("a.primary:not([hidden])").click()
    page.wait_text("Learning curves of 3 trainings")
    page.find(".over polyline")  # drawn after the title
    lines = page.js(
        "return [...document.querySelectorAll('.over polyline')].map((l) =>"
        " l.getAttribute('points'))"
    )
    assert [len(line.split()) for line in lines] == [4, 6, 5]
    steps = page.js(
        "return [...document.querySelectorAll('.over text[text-anchor=middle]')].map((t) =>"
        " t.textContent)"
    )
    assert len(set(steps)) == len(steps) > 2
    assert page.texts(".settings th[scope=row]") == ["model", "__proto__", "learning_rate"]
    page.choose("Horizontal axis", "tokens")
    page.choose("Smoothing", "0")
    page.wait(
        lambda: (
            "sampled tokens" in page.js("return document.querySelector('.over svg').textContent")
        )
    )
    page.choose("Metric", "entropy")
    last = [
        json.loads(line)
        for line in (three_trainings / "two/metrics.jsonl").read_text().splitlines()
    ][-1]
    page.wait(lambda: f"{last['entropy']:.3f}" in page.text("table.compared"))
    lines = page.js(
        "return [...document.querySelectorAll('.over polyline')].map((l) =>"
        " l.getAttribute('points'))"
    )
    ends = [float(line.split()[-1].split(",")[0]) for line in lines]
    starts = [float(line.split()[0].split(",")[0]) for line in lines]
    shares = [(end - starts[0]) / (max(ends) - starts[0]) for end in ends]
    assert shares == pytest.approx([3 / 5, 1, 4 / 5], abs=2e-3)  # 26 tokens in each step
    page.picture("curves")


def test_seeds_are_a_mean_with_a_band_and_other_curves_stand_below(page, serve, tmp_path):
    for name, seed, rate in (("one", 1, 1e-4), ("two", 2, 1e-4), ("three", 1, 3e-4)):
        view_runs.training(tmp_path / name, num_steps=4, first=1)
        state = tmp_path / name / "checkpoint-1"
        state.mkdir()
        settings = {"learning_rate": rate, "seed": seed, "run_name": name}
        (state / "rl_state.json").write_text(json.dumps({"configuration": settings}))
    file = tmp_path / "two/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["reward/mean"] += 0.5
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.open(serve(tmp_path).url + "#/curves/one/two/three")
    page.wait_text("Learning curves of 3 trainings")
    count = "return document.querySelectorAll(arguments[0]).length"
    assert page.js(count, ".over polyline") == 2
    assert page.js(count, ".over polygon") == 1
    high = lines[-1]["reward/mean"]
    raw = f"{high - 0.25:.3f}, mean of 2 ({high - 0.5:.3f} to {high:.3f})"
    assert raw in page.text("table.compared")
    page.choose("Seeds", "each")
    page.wait(lambda: page.js(count, ".over polyline") == 3)
    assert page.js(count, ".over polygon") == 0
    assert "entropy" in page.texts(".curve:not(.over) figcaption")
    page.js(
        "[...document.querySelectorAll('figcaption button')]"
        ".find((b) => b.innerText === 'entropy').click()"
    )
    page.wait(lambda: page.text(".over figcaption") == "entropy")


def test_the_texts_of_a_pair_are_compared(page, served):
    page.open(served.url)
    for model in ("careful-7b", "careless-1b"):
        page.find(f"input[aria-label*='{model}']").click()
    page.find("a.primary:not([hidden])").click()
    page.wait_text("12 examples")
    assert page.texts(".settings th[scope=row]")[-1] == "model"
    page.wait(lambda: page.texts(".body .row"))
    page.press("j", "ENTER")
    page.wait(lambda: len(page.texts(".pane .transcript")) == 2)
    gaps = page.js(
        "return [...document.querySelectorAll('.pane aside h3')].filter((h) =>"
        " h.nextElementSibling).map((h) => h.nextElementSibling.getBoundingClientRect().top -"
        " h.getBoundingClientRect().bottom)"
    )
    assert len(gaps) > 4
    assert max(gaps) < 20  # no hole below a heading beside a taller section
    page.press("d")
    page.wait(lambda: page.texts(".difference ins"))
    assert "about a hundred" in " ".join(
        page.texts(".difference ins, .difference del")
    ) + page.text(".difference")
    page.picture("difference")


@pytest.fixture
def levels(tmp_path):
    """Sixteen rollouts of two tasks and three levels; every rollout of level 2 has
    the same reward."""
    rows = [
        {
            "example_id": n,
            "prompt": f"Question {n}",
            "reward": 0.5 if n % 3 == 2 else float(n % 2),
            "metrics": {},
        }
        | {
            "rollout_key": str(n),
            "example_hash": f"{n:016x}",
            "task": 'a "first"' if n < 10 else "second",
        }
        | {"info": {"level": n % 3, "__proto__": "x"}}
        for n in range(16)
    ]
    config = {"env_id": "levels", "model": "m"}
    with RunDirectory.create_or_resume(tmp_path / "evals/levels--m/1", config) as run:
        with run.open_journal() as journal:
            journal.append_sync(rows)
        run.write_metadata({"status": "complete", **config})
    return tmp_path


def test_rollouts_are_grouped_by_task_or_by_a_column_of_info(page, serve, levels):
    page.open(serve(levels).url + "#/run/evals%2Flevels--m%2F1")
    page.wait_text("16 rollouts")
    page.choose("Rows of the table", "info.level")
    page.wait(lambda: [text.split()[0] for text in page.texts(".body .row")] == ["0", "1", "2"])
    # no standard error of zero
    assert page.texts(".body .row")[2].split() == ["2", "0.500", "0", "/", "5", "5", "0"]
    assert "±" in page.texts(".body .row")[0]
    page.picture("groups")
    page.choose("Rows of the table", "info.__proto__")
    page.wait(lambda: len(page.texts(".body .row")) == 1)
    page.choose("Rows of the table", "task")
    page.wait(lambda: len(page.texts(".body .row")) == 2)
    page.js("document.querySelector('.body .row a').click()")
    page.wait_text("10 rollouts")
    assert page.js("return document.querySelector('input.wide').value") == "task = 'a \"first\"'"


def test_the_runs_of_two_nights_are_compared_with_their_partners(page, serve, tmp_path):
    """Two models on one environment, twice: each with itself, and what has no partner is named."""
    for night, model in [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (2, "c")]:
        config = {"env_id": "sums", "model": model, "sampling_args": {"temperature": 0.5}}
        with RunDirectory.create_or_resume(tmp_path / f"night-{night}/{model}", config) as run:
            rows = [
                view_runs.plain_row(number, random.Random(number))
                | {"reward": float(number % 2), "error": None}
                for number in range(12)
            ]
            with run.open_journal() as journal:
                journal.append_sync(rows)
            run.write_metadata({"status": "complete", **config})
    server = serve(tmp_path)
    names = [run["id"] for run in server.ask("runs")["runs"]]
    answer = server.ask(
        "compare?runs=" + "%0A".join(quote(name, safe="") for name in sorted(names))
    )
    pairs = [(found["baseline"][-1], found["run"][-1]) for found in answer["differences"]]
    assert pairs == [("a", "a"), ("b", "b")]
    assert [name[-1] for name in answer["without_partner"]] == ["c"]
    page.open(server.url + "#/compared/" + "/".join(quote(name, safe="") for name in sorted(names)))
    page.wait_text("Without a partner")
    assert len(page.texts("table.compared tbody tr")) == 2
    first = sorted(names)[:2]  # negative control: of different settings, with the first
    answer = server.ask("compare?runs=" + "%0A".join(quote(name, safe="") for name in first))
    assert len(answer["differences"]) == 1
