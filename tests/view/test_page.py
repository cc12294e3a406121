"""The page in a real browser: what a reader sees, clicks and presses."""

from __future__ import annotations

import json
import random
import time
from urllib.parse import quote

import pytest

from support import view_runs
from verifiers.storage.directory import RunDirectory
from verifiers.view.catalog import Catalog
from verifiers.view.export import export
from verifiers.view.library import Library

CAREFUL, CARELESS = "evals/times-table--careful-7b/3fa9c1d2", "evals/times-table--careless-1b/3fa9c1d2"
PICTURES = "evals/pictures--sees/00aa11bb"


def at(*parts: object, **query: object) -> str:
    """An address within the page."""
    asked = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
    return "#/" + "/".join(quote(str(part), safe="") for part in parts) + (f"?{asked}" if asked else "")


def row_with(served, text):
    """The first row of the careful run that holds a text."""
    return served.ask(f"search?run={quote(CAREFUL)}&text={quote(text)}")["rows"][0]


def rows_shown(page):
    return page.texts(".body .row")


# --- the list of runs -------------------------------------------------------------------------------------------


def test_the_list_shows_every_run_with_its_reward(page, served):
    page.open(served.url)
    page.wait(lambda: len(rows_shown(page)) == 4)
    page.picture("runs")
    careful = next(text for text in rows_shown(page) if "careful-7b" in text)
    expected = next(run for run in served.ask("runs")["runs"] if run["id"] == CAREFUL)
    assert "times-table" in careful
    assert "finished" in careful
    assert f"{expected['reward']:.3f} ± {expected['stderr']:.3f}" in careful
    assert any("training" in text and "step 30" in text for text in rows_shown(page))


def test_the_list_is_filtered_and_sorted(page, served):
    page.open(served.url)
    page.press("/", *"careless")
    page.wait(lambda: len(rows_shown(page)) == 1)
    page.press(*["BACKSPACE"] * len("careless"))
    page.choose("Kind", "evaluation")
    page.wait(lambda: len(rows_shown(page)) == 3)
    page.find("button[title='sort by Reward']").click()
    rewards = [run["reward"] for run in served.ask("runs")["runs"] if run["kind"] == "evaluation"]
    page.wait(lambda: f"{min(rewards):.3f}" in rows_shown(page)[0])


# --- a run ------------------------------------------------------------------------------------------------------


def test_a_run_is_filtered_by_reward_stop_and_text(page, served):
    page.open(served.url + at("run", CAREFUL))
    page.wait_text("36 rollouts")
    page.wait_text("What is 3 times 1?")
    page.picture("run")
    columns = served.ask(f"columns?run={quote(CAREFUL)}")["columns"]
    low = sum(reward < 0.5 for reward in columns["reward"])
    box = page.find("input[aria-label='most reward']")
    box.send_keys("0.5")
    page.press("TAB")
    page.wait_text(f"{low} rollouts")
    assert all(float(text.split()[1]) < 0.5 for text in rows_shown(page))
    page.find("main .controls button").click()  # Clear
    page.wait_text("36 rollouts")
    page.press("/", *"about a hundred")
    hundreds = len(served.ask(f"search?run={quote(CAREFUL)}&text=About%20A%20hundred")["rows"])
    assert 0 < hundreds < 36
    page.wait_text(f"{hundreds} rollouts")
    page.wait(lambda: page.texts(".body mark")[:1] == ["about a hundred"])


def test_rows_sort_by_any_column(page, served):
    page.open(served.url + at("run", CAREFUL, sort="-reward"))
    page.wait_text("36 rollouts")
    page.wait(lambda: rows_shown(page))
    columns = served.ask(f"columns?run={quote(CAREFUL)}")
    assert f"{max(columns['columns']['reward']):.3f}" in rows_shown(page)[0]
    page.find("button[title='sort by Tokens']").click()
    page.wait(lambda: str(max(columns["columns"]["output_tokens"])) in rows_shown(page)[0])


# --- a rollout --------------------------------------------------------------------------------------------------


def test_a_rollout_is_opened_read_and_left_by_keys(page, served):
    page.open(served.url + at("run", CAREFUL))
    page.wait_text("What is 3 times 1?")
    page.press("j", "j", "j", "ENTER")
    page.wait_text("rollout begins")
    page.wait_text("3 of 36")
    page.picture("rollout")
    text = page.text()
    assert "multiply()" in text
    assert "a: 3\nb: 1" in text
    assert "I need 3 x 1; the tool does it." in text
    assert "× 0.2" in text
    assert page.texts(".message .role")[:3] == ["user", "assistant", "tool"]
    assert "turn 2 · " in text
    assert "mean log-prob -" in text
    page.press("j")
    page.wait_text("4 of 36")
    page.press("k")
    page.wait_text("3 of 36")
    page.press("]")  # the last sibling has no next one
    page.press("[")
    page.wait_text("2 of 36")
    page.press("u")
    page.wait_text("36 rollouts")


def test_next_follows_the_filtered_list(page, served):
    columns = served.ask(f"columns?run={quote(CAREFUL)}")["columns"]
    good = sum(reward > 1 for reward in columns["reward"])
    page.open(served.url + at("run", CAREFUL, low=1, sort="-output_tokens"))
    page.wait_text(f"{good} rollouts")
    page.press("j", "ENTER")
    page.wait_text(f"1 of {good}")
    for number in range(2, good + 1):
        page.press("j")
        page.wait_text(f"{number} of {good}")
    page.press("j")  # the last has no next one
    page.wait_text(f"{good} of {good}")


def test_every_turn_has_its_tokens_time_and_coloured_probabilities(page, serve, served, runs):
    page.open(serve(runs, tokenizer="bytes").url + at("run", CAREFUL, row_with(served, "repeat it")))
    page.wait_text("log-probabilities of")
    cells = page.js("return document.querySelectorAll('.message .tokens .token').length")
    named = page.texts(".message.assistant .tokens")[1]
    assert cells > 50
    assert "The result is" in named
    assert page.js("return new Set([...document.querySelectorAll('.tokens .token')].map((t) => t.className)).size") > 1
    assert "tokens · " in page.text(".message.assistant .facts")
    page.picture("probabilities")


def test_images_out_of_messages_are_shown_and_no_address_is_loaded(page, served):
    page.open(served.url + at("run", PICTURES, 0))
    page.wait_text("What is on the picture?")
    page.wait(lambda: page.js("return document.querySelector('.message img').naturalWidth") == 48)
    assert page.js("return document.querySelectorAll('img').length") == 1
    assert "image not loaded: http://127.0.0.1:9/secret.png" in page.text()
    asked = page.js("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert all(name.startswith((served.url, "data:")) for name in asked)
    page.picture("pictures")


# --- what a model may not do ------------------------------------------------------------------------------------


def attacked_row(served):
    return row_with(served, "window.owned")


def test_markup_in_a_completion_is_text(page, served):
    page.open(served.url + at("run", CAREFUL, attacked_row(served)))
    page.wait_text(view_runs.ATTACK.strip())
    page.picture("attack")
    time.sleep(0.3)
    assert page.js("return window.owned") is None
    assert (
        page.js(
            "return document.querySelectorAll('main script, main img, main [onload], main a[href^=javascript]').length"
        )
        == 0
    )
    page.open(served.url + at("run", CAREFUL))
    page.wait_text("<script>window.owned")
    assert page.js("return window.owned") is None


def test_the_same_markup_takes_over_a_page_that_parses_it(browser_window):
    """Negative control."""
    page = browser_window
    page.driver.get("data:text/html,<title>none</title>")
    page.js("document.body.innerHTML = arguments[0]", view_runs.ATTACK)
    page.wait(lambda: page.js("return window.owned") == 2)
    page.complaints()


def test_the_policy_stops_what_a_fault_of_the_page_would_let_through(browser_window, served):
    page = browser_window
    page.open(served.url + at("run", CAREFUL, attacked_row(served)))
    page.js("document.body.insertAdjacentHTML('beforeend', arguments[0])", view_runs.ATTACK)
    time.sleep(0.5)
    assert page.js("return window.owned") is None
    assert any("Content Security Policy" in complaint for complaint in page.complaints())


def test_terminal_escapes_are_spelled_out(page, served):
    row = row_with(served, "nothing else")
    raw = json.dumps(served.ask(f"rollout?run={quote(CAREFUL)}&row={row}")["messages"], ensure_ascii=False)
    assert "\\u001b]8;;" in raw  # negative control: they are in what the page is given
    page.open(served.url + at("run", CAREFUL, row))
    page.wait_text("and nothing else")
    shown = page.text(".message.assistant .text")
    assert r"\x1b[2J\x1b[31mred\x1b[0m \x1b]8;;https://evil.example\x07link" in shown
    assert r"\u202eevil\u202c \u{e0041} \x00" in shown
    everything = page.js("return document.documentElement.textContent")
    assert not set(everything) & {chr(code) for code in (0, 7, 0x1B, 0x202E, 0xE0041)}
    page.picture("escapes")


# --- comparing --------------------------------------------------------------------------------------------------


def test_two_runs_stand_side_by_side_differences_first(page, served):
    page.open(served.url)
    for model in ("careful-7b", "careless-1b"):
        page.find(f"input[aria-label*='{model}']").click()
    page.find("a.primary:not([hidden])").click()
    page.wait_text("12 examples")
    page.wait_text("What is")
    page.picture("comparison")
    sides = [served.ask(f"columns?run={quote(run)}")["columns"] for run in (CAREFUL, CARELESS)]
    means = [
        {n: sum(r for e, r in zip(c["example"], c["reward"], strict=True) if e == n) / 3 for n in range(12)}
        for c in sides
    ]
    changes = {n: means[1][n] - means[0][n] for n in range(12)}
    first = rows_shown(page)[0].split()
    assert abs(changes[int(first[0])]) == max(map(abs, changes.values()))
    worse = sum(change < -1e-9 for change in changes.values())
    assert f"worse\n{worse}" in page.text(".cards")
    page.press("j", "ENTER")
    page.wait(lambda: len(page.texts(".pane .transcript")) == 2)
    page.picture("pair")
    left, right = page.texts(".pane .message.user")
    assert left == right
    page.press("j")
    page.wait_text("2 of 12")


# --- trainings --------------------------------------------------------------------------------------------------


def test_a_training_shows_curves_and_the_rollouts_of_each_step(page, served):
    page.open(served.url + at("training", "learner"))
    page.wait_text("Rollouts of step 30")
    page.wait_text("Reverse word30")
    page.picture("training")
    titles = page.texts(".curve figcaption span")
    assert titles[0] == "reward/mean"
    assert {"entropy", "loss", "grad_norm"} <= set(titles)
    assert page.js("return document.querySelectorAll('.curve.wide .mark').length") == 3
    points = page.js("return document.querySelector('.curve.wide .line').getAttribute('points').split(' ').length")
    assert points == 30
    page.press("[")
    page.wait_text("Rollouts of step 29")
    page.wait_text("Reverse word29")
    page.press("j", "ENTER")
    page.wait_text("advantage")
    assert "step 29" in page.text("#bar")
    page.press("/")
    page.press("u")
    page.wait_text("Rollouts of step 29")


# --- while a run goes on ----------------------------------------------------------------------------------------


def test_a_run_and_a_training_go_on_before_the_readers_eyes(page, serve, tmp_path):
    path, chance = tmp_path / "evals" / "tower--small" / "abc", random.Random(0)
    view_runs.training(tmp_path / "learner", num_steps=3)
    server = serve(tmp_path)
    with RunDirectory.create_or_resume(path, {"env_id": "tower", "model": "small"}) as run:
        run.write_metadata(
            {"env_id": "tower", "model": "small", "status": "running", "num_examples": 9, "rollouts_per_example": 1}
        )
        with run.open_journal() as journal:
            journal.append_sync([view_runs.plain_row(n, chance) for n in range(4)])
            page.open(server.url)
            page.wait_text("running")
            page.open(server.url + at("run", "evals/tower--small/abc"))
            page.wait_text("4 rollouts")
            page.js("window.untouched = true")
            journal.append_sync(view_runs.plain_row(4, chance))
            page.wait_text("5 rollouts")
            page.wait_text("5 of 9 rollouts")
            assert page.js("return window.untouched")  # the page was not loaded again
        run.write_metadata(
            {"env_id": "tower", "model": "small", "status": "complete", "num_examples": 5, "rollouts_per_example": 1}
        )
        page.wait_text("finished")
    page.open(server.url + at("training", "learner"))
    page.wait_text("Rollouts of step 3")
    view_runs.training(tmp_path / "learner", num_steps=2, first=4)
    page.wait_text("Rollouts of step 5")
    page.wait(
        lambda: (
            page.js("return document.querySelector('.curve.wide .line').getAttribute('points').split(' ').length") == 5
        )
    )


# --- size -------------------------------------------------------------------------------------------------------


HOSTILE_NAMES = ["__proto__", "constructor", "toString", "hasOwnProperty", "length", "<b>bold</b>", "", "a b", "√é"]


@pytest.fixture(scope="module")
def oddly_named(tmp_path_factory):
    """An evaluation and a training whose metrics have names that mean something to a script."""
    folder = tmp_path_factory.mktemp("names")
    values = {name: float(number) for number, name in enumerate(HOSTILE_NAMES)}
    same = {"completion": "yes", "info": {"__proto__": {"polluted": 1}}}
    rows = [
        same
        | {"example_id": n, "prompt": f"Question {n}", "reward": n % 2, "metrics": values if n else {}}
        | {"rollout_key": str(n), "example_hash": str(n)}
        for n in range(4)
    ]
    for model in ("a", "b"):
        with RunDirectory.create_or_resume(folder / f"evals/odd--{model}/1", {"env_id": "odd", "model": model}) as run:
            with run.open_journal() as journal:
                journal.append_sync(rows)
            run.write_metadata({"status": "complete", "avg_metrics": values})
    (folder / "training").mkdir()
    lines = [{"step": step, "reward/mean": 0.5 * step, **values} for step in (1, 2, 3)]
    (folder / "training" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


PAGES = {
    "list": (at(), "odd"),
    "run": (at("run", "evals/odd--a/1"), "Question 1"),
    "sorted": (at("run", "evals/odd--a/1", sort="-metric:__proto__"), "Question 1"),
    "rollout": (at("run", "evals/odd--a/1", 1), "Question 1"),
    "comparison": (at("compare", "evals/odd--a/1", "evals/odd--b/1"), "Comparison"),
    "ordered": (at("compare", "evals/odd--a/1", "evals/odd--b/1", order="__proto__"), "Question 1"),
    "ordered by change": (at("compare", "evals/odd--a/1", "evals/odd--b/1", order="change"), "Question 1"),
    "training": (at("training", "training"), "reward/mean"),
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("is_copy", [False, True], ids=["server", "copy"])
def test_names_of_metrics_that_mean_something_to_a_script_break_no_page(
    page, serve, oddly_named, name, is_copy, tmp_path
):
    address, shown = PAGES[name]
    if is_copy:
        url = export(Library(Catalog([oddly_named])), tmp_path / "site").as_uri()
    else:
        url = serve(oddly_named).url
    page.open(url + address)
    page.wait_text(shown)
    assert "went wrong" not in page.text()
    assert "problem" not in page.js("return document.title")
    assert page.js("return ({}).polluted") is None
    if name == "rollout":
        assert [text for text in page.texts("th[scope=row]") if text in HOSTILE_NAMES] == HOSTILE_NAMES


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    view_runs.large_run(folder, 50_000)
    return folder


def test_fifty_thousand_rollouts_open_at_once_and_scroll(page, serve, large):
    server = serve(large)
    started = time.perf_counter()
    page.open(server.url + at("run", "evals/tower--big/50000000"))
    page.wait_text("Question 0:")
    first_rows_s = time.perf_counter() - started
    page.wait_text("50.0k rollouts")
    print(f"first rows after {first_rows_s:.2f} s, all indexed after {time.perf_counter() - started:.2f} s")
    page.picture("fifty-thousand")
    assert first_rows_s < 20  # alone on two cores: under two
    sent = page.js("return performance.getEntriesByType('resource').reduce((n, e) => n + e.encodedBodySize, 0)")
    size = (large / "evals/tower--big/50000000/results.jsonl").stat().st_size
    assert sent < size / 4
    for share in (0.3, 0.9, 0.5):
        page.js("scrollTo(0, document.body.scrollHeight * arguments[0])", share)
        page.wait(lambda share=share: abs(int(page.texts(".body .id")[10].split(".")[0]) / 50_000 - share) < 0.01)
        assert page.js("return document.querySelectorAll('.body .row').length") < 60
    page.wait_text(f"Question {page.texts('.body .id')[10].split('.')[0]}:")
    page.press("END")
    page.wait_text("Question 49999:")
    longest = page.js(
        "const start = performance.now(); let most = 0, before = start;"
        "for (let y = 0; y < 200; y++) { scrollTo(0, 5000 * y); document.body.offsetHeight;"
        "const now = performance.now(); most = Math.max(most, now - before); before = now; } return most;"
    )
    assert longest < 1000
    page.choose("Errors", "any")
    page.wait_text("199 rollouts")
    page.press("/", *"tower of 777?")
    page.find("input[type=search]")
    page.choose("Errors", "")
    page.wait_text("50 rollouts")
