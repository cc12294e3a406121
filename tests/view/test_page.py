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
from verifiers.view.listing import MIN_LISTED

CAREFUL = "evals/times-table--careful-7b/3fa9c1d2"
CARELESS = "evals/times-table--careless-1b/3fa9c1d2"
PICTURES = "evals/pictures--sees/00aa11bb"


def at(*parts: object, **query: object) -> str:
    """An address within the page."""
    asked = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
    return (
        "#/"
        + "/".join(quote(str(part), safe="") for part in parts)
        + (f"?{asked}" if asked else "")
    )


def row_with(served, text):
    """The first row of the careful run that holds a text."""
    return served.ask(f"search?run={quote(CAREFUL)}&text={quote(text)}")["rows"][0]


def rows_shown(page):
    return page.texts(".body .row")


# --- the list of runs -----------------------------------------------------------------------------


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


# --- a run ----------------------------------------------------------------------------------------


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


# --- a rollout ------------------------------------------------------------------------------------


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
    assert page.texts("aside thead th") == ["function", "value", "weight", "part"]
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
    page.open(
        serve(runs, tokenizer="bytes").url + at("run", CAREFUL, row_with(served, "repeat it"))
    )
    page.wait_text("log-probabilities of")
    cells = page.count(".message .tokens .token")
    label = page.texts(".message.assistant .tokens")[1]
    assert cells > 50
    assert "The result is" in label
    colours = "[...document.querySelectorAll('.tokens .token')].map((token) => token.className)"
    assert len(set(page.js(f"return {colours}"))) > 1
    assert "tokens · " in page.text(".message.assistant .facts")
    page.picture("probabilities")


def test_images_out_of_messages_are_shown_and_no_address_is_loaded(page, served):
    page.open(served.url + at("run", PICTURES, 0))
    page.wait_text("What is on the picture?")
    page.wait(lambda: page.js("return document.querySelector('.message img').naturalWidth") == 48)
    assert page.count("img") == 1
    assert "image not loaded: http://127.0.0.1:9/secret.png" in page.text()
    asked = page.js("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert all(name.startswith((served.url, "data:")) for name in asked)
    page.picture("pictures")


# --- what a model may not do ----------------------------------------------------------------------


def attacked_row(served):
    return row_with(served, "window.owned")


def test_markup_in_a_completion_is_text(page, served):
    page.open(served.url + at("run", CAREFUL, attacked_row(served)))
    page.wait_text(view_runs.ATTACK.strip())
    page.picture("attack")
    time.sleep(0.3)
    assert page.js("return window.owned") is None
    assert page.count("main script, main img, main [onload], main a[href^=javascript]") == 0
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
    raw = json.dumps(
        served.ask(f"rollout?run={quote(CAREFUL)}&row={row}")["messages"], ensure_ascii=False
    )
    assert "\\u001b]8;;" in raw  # negative control: they are in what the page is given
    page.open(served.url + at("run", CAREFUL, row))
    page.wait_text("and nothing else")
    shown = page.text(".message.assistant .text")
    assert r"\x1b[2J\x1b[31mred\x1b[0m \x1b]8;;https://evil.example\x07link" in shown
    assert r"\u202eevil\u202c \u{e0041} \x00" in shown
    everything = page.js("return document.documentElement.textContent")
    assert not set(everything) & {chr(code) for code in (0, 7, 0x1B, 0x202E, 0xE0041)}
    page.picture("escapes")


# --- comparing ------------------------------------------------------------------------------------


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
        {
            n: sum(r for e, r in zip(c["example"], c["reward"], strict=True) if e == n) / 3
            for n in range(12)
        }
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


# --- trainings ------------------------------------------------------------------------------------


def test_a_training_shows_curves_and_the_rollouts_of_each_step(page, served):
    page.open(served.url + at("training", "learner"))
    page.wait_text("Rollouts of step 30")
    page.wait_text("Reverse word30")
    page.picture("training")
    titles = page.texts(".curve figcaption span")
    assert titles[0] == "reward/mean"
    assert "learner" in page.text(".title")
    assert "tokens per rollout\n6.5" in page.text(
        ".cards"
    )  # all of the batch, not 13 of the trained
    assert "known from the first checkpoint on" in page.js(
        "return document.querySelector('details.settings').textContent"
    )
    assert {"entropy", "loss", "grad_norm"} <= set(titles)
    assert page.count(".curve.wide .mark") == 3
    points = page.js(
        "return document.querySelector('.curve.wide .line').getAttribute('points').split('"
        " ').length"
    )
    assert points == 30
    page.press("[")
    page.wait_text("Rollouts of step 29")
    page.wait_text("Reverse word29")
    page.press("j", "ENTER")
    page.wait_text("step 29", "#bar")
    page.wait_text("advantage")
    page.press("/")
    page.press("u")
    page.wait_text("Rollouts of step 29")


def hacked_training(folder):
    """Four steps; from the third on copies are paid, one of them in a rollout that is kept."""
    view_runs.training(folder, num_steps=4)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] > 2:
            line |= {"hacking/copied": 0.5, "alarm/hacking_copied": 1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = folder / "completions" / "step-3.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["metrics"]["hacking/copied"] = 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_warning_of_a_hacked_reward_leads_to_the_rollouts_that_show_it(page, serve, tmp_path):
    hacked_training(tmp_path / "learner")
    view_runs.training(tmp_path / "sound", num_steps=4)
    server = serve(tmp_path)
    page.open(server.url + at("training", "learner"))
    page.wait_text("paid without solving the task: copied, step 3")
    assert page.count(".curve.wide .event") == 1
    assert page.count(".curve .event") == 1
    page.picture("hacked")
    page.find("p[role=alert] a").click()
    page.wait_text("Rollouts of step 3")
    page.wait(lambda: len(rows_shown(page)) == 1)
    page.open(server.url + at("training", "sound"))  # negative control
    page.wait_text("Rollouts of step 4")
    assert page.count("p[role=alert], .event") == 0


# --- while a run goes on --------------------------------------------------------------------------


def test_a_training_shows_its_proof_version_by_version(page, serve, tmp_path):
    folder = view_runs.training(tmp_path / "learner", num_steps=3)
    server = serve(tmp_path)
    page.open(server.url + at("training", "learner"))
    page.wait_text("Proof: the policy that sampled is the policy that was trained")
    page.find(".proof summary").click()
    rows = page.texts(".proof tbody tr")
    assert len(rows) == 4
    assert "0.25 × 0.04" in rows[0]
    assert "abcdef" in rows[0]
    assert "15 at lag 0" in rows[2]
    page.wait_text("18 not trained: no_signal")
    page.picture("proof")
    (folder / "proof.json").write_text(
        json.dumps({"steps": 4, "verdict": "ended", "reason": "<b>disagree</b> by 0.5 nats"})
    )
    view_runs.training(folder, num_steps=1, first=4)
    page.wait_text("Proof: a disagreement ended the run")
    page.wait_text("<b>disagree</b> by 0.5 nats")


def test_a_run_and_a_training_go_on_before_the_readers_eyes(page, serve, tmp_path):
    path, chance = tmp_path / "evals" / "tower--small" / "abc", random.Random(0)
    view_runs.training(tmp_path / "learner", num_steps=3)
    server = serve(tmp_path)
    names = {"env_id": "tower", "model": "small"}
    facts = names | {"rollouts_per_example": 1}
    with RunDirectory.create_or_resume(path, names) as run:
        run.write_metadata(facts | {"status": "running", "num_examples": 9})
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
        run.write_metadata(facts | {"status": "complete", "num_examples": 5})
        page.wait_text("finished")
    page.open(server.url + at("training", "learner"))
    page.wait_text("Rollouts of step 3")
    view_runs.training(tmp_path / "learner", num_steps=2, first=4)
    page.wait_text("Rollouts of step 5")
    line = "return document.querySelector('.curve.wide .line').getAttribute('points')"
    page.wait(lambda: len(page.js(line).split(" ")) == 5)


# --- size -----------------------------------------------------------------------------------------


HOSTILE_NAMES = "__proto__ constructor toString hasOwnProperty length <b>bold</b> √é".split()
HOSTILE_NAMES += ["", "a b"]


@pytest.fixture(scope="module")
def oddly_named(tmp_path_factory):
    """An evaluation and a training whose metrics have names that mean something to a script."""
    folder = tmp_path_factory.mktemp("names")
    values = {name: float(number) for number, name in enumerate(HOSTILE_NAMES)}
    same = {"completion": "yes", "info": {"__proto__": {"polluted": 1}}}
    rows = [
        same
        | {"example_id": n, "prompt": f"Question {n}", "reward": n % 2}
        | {"metrics": values if n else {}, "rollout_key": str(n), "example_hash": str(n)}
        for n in range(4)
    ]
    for model in ("a", "b"):
        with RunDirectory.create_or_resume(
            folder / f"evals/odd--{model}/1", {"env_id": "odd", "model": model}
        ) as run:
            with run.open_journal() as journal:
                journal.append_sync(rows)
            run.write_metadata({"status": "complete", "avg_metrics": values})
    (folder / "training").mkdir()
    lines = [{"step": step, "reward/mean": 0.5 * step, **values} for step in (1, 2, 3)]
    (folder / "training" / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


PAGES = {
    "list": (at(), "odd"),
    "run": (at("run", "evals/odd--a/1"), "Question 1"),
    "sorted": (at("run", "evals/odd--a/1", sort="-metric:__proto__"), "Question 1"),
    "rollout": (at("run", "evals/odd--a/1", 1), "Question 1"),
    "comparison": (at("compare", "evals/odd--a/1", "evals/odd--b/1"), "Comparison"),
    "ordered": (at("compare", "evals/odd--a/1", "evals/odd--b/1", order="__proto__"), "Question 1"),
    "ordered by change": (
        at("compare", "evals/odd--a/1", "evals/odd--b/1", order="change"),
        "Question 1",
    ),
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
        assert [
            text for text in page.texts("th[scope=row]") if text in HOSTILE_NAMES
        ] == HOSTILE_NAMES


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
    print(
        f"first rows after {first_rows_s:.2f} s, all indexed after"
        f" {time.perf_counter() - started:.2f} s"
    )
    page.picture("fifty-thousand")
    assert first_rows_s < 20  # alone on two cores: under two
    sent = page.js(
        "return performance.getEntriesByType('resource').reduce((n, e) => n + e.encodedBodySize, 0)"
    )
    size = (large / "evals/tower--big/50000000/results.jsonl").stat().st_size
    assert sent < size / 4
    for share in (0.3, 0.9, 0.5):
        page.js("scrollTo(0, document.body.scrollHeight * arguments[0])", share)
        page.wait(
            lambda share=share: (
                abs(int(page.texts(".body .id")[10].split(".")[0]) / 50_000 - share) < 0.01
            )
        )
        assert page.count(".body .row") < 60
    page.wait_text(f"Question {page.texts('.body .id')[10].split('.')[0]}:")
    page.press("END")
    page.wait_text("Question 49999:")
    longest = page.js(
        "const start = performance.now(); let most = 0, before = start;for (let y = 0; y < 200;"
        " y++) { scrollTo(0, 5000 * y); document.body.offsetHeight;const now = performance.now();"
        " most = Math.max(most, now - before); before = now; } return most;"
    )
    assert longest < 1000
    page.choose("Errors", "any")
    page.wait_text("199 rollouts")
    page.press("/", *"tower of 777?")
    page.find("input[type=search]")
    page.choose("Errors", "")
    page.wait_text("50 rollouts")


# --- comparisons ----------------------------------------------------------------------------------


@pytest.fixture
def three_evaluations(tmp_path):
    """Runs a, b, c of one environment over 20 rows: b is right where a is and on half of the
    others, c is as a."""
    folder = tmp_path / "outputs"
    for model, right in (
        ("a", lambda n: n % 4 == 0),
        ("b", lambda n: n % 2 == 0 or n < 12),
        ("c", lambda n: n % 4 == 0),
    ):
        config = {"env_id": "sums", "model": model}
        rows = [
            {"example_id": n, "prompt": f"Question {n}", "reward": float(right(n)), "metrics": {}}
            | {"rollout_key": str(n), "example_hash": f"{n:016x}" + "0" * 48}
            for n in range(20)
        ]
        with RunDirectory.create_or_resume(folder / f"evals/sums--{model}/1", config) as run:
            with run.open_journal() as journal:
                journal.append_sync(rows)
            run.write_metadata({"status": "complete", "env_id": "sums", "model": model})
    return folder


RUNS = [f"evals/sums--{model}/1" for model in "abc"]


@pytest.mark.parametrize("is_copy", [False, True], ids=["server", "copy"])
def test_two_runs_are_compared_by_the_statistics_of_the_command(
    page, serve, three_evaluations, is_copy, tmp_path
):
    if is_copy:
        url = export(Library(Catalog([three_evaluations])), tmp_path / "site").as_uri()
    else:
        url = serve(three_evaluations).url
    page.open(url + at("compare", RUNS[0], RUNS[1]))
    page.wait_text("better (p = 0.00098)")
    assert "± one standard error; 95% from" in page.text()
    page.open(url + at("compare", RUNS[0], RUNS[2]))
    page.wait_text("not distinguishable with 20 examples, of which none differs")
    assert "no difference" not in page.text()


def test_any_number_of_runs_is_compared_with_the_first(page, serve, three_evaluations):
    server = serve(three_evaluations)
    page.open(server.url + at("compared", *RUNS))
    page.wait_text("Comparison of 3 runs")
    assert len(page.texts("table.compared tbody tr")) == 2
    # not adjusted: the other comparison, in which nothing differs, can give no p so small
    assert "better (p = 0.00098)" in page.text()
    answer = server.ask("compare?runs=" + "%0A".join(run.replace("/", "%2F") for run in RUNS))
    assert [difference["won"] for difference in answer["differences"]] == [11, 0]
    assert answer["differences"][0]["p_adjusted"] == pytest.approx(2 / 2**11)
    assert server.get("/api/compare?runs=x")[0] in (400, 404)


# --- filters, columns and examples ----------------------------------------------------------------

FILTERS = [
    "exact < 1 and turns > 1",
    "exact == 1 or reward < 0.1",
    "not exact == 1 and sibling != 0",
    "(turns - 1) * 2 >= 2 and 0 <= sibling < 2",
    "-reward > -0.5",
    "stop_condition == 'no_tools_called' and brief / 2 < 0.3",
]


def filtered(page, where, call="test"):
    """How many rows pass a filter of the page, or the sentence that it says."""
    return page.driver.execute_async_script(
        "const [where, names, rows, done] = arguments;import('/static/expression.js').then(({"
        " compile }) => {try { const { test } = compile(where, names); done(rows.map((row) =>"
        " test((name) => row[name]))); }catch (error) { done(error.message); } });",
        where,
        *call,
    )


def test_a_filter_selects_the_rows_that_python_selects(page, served):
    page.open(served.url)
    answer = served.ask(f"columns?run={quote(CAREFUL)}")
    columns = {
        name: values for name, values in answer["columns"].items() if isinstance(values, list)
    }
    columns |= answer["metrics"] | {"stop_condition": ["no_tools_called"] * answer["total"]}
    rows = [{name: values[n] for name, values in columns.items()} for n in range(answer["total"])]
    for where in FILTERS:
        expected = [bool(eval(where, {}, row)) for row in rows]
        assert 0 < sum(expected) < len(rows)
        assert filtered(page, where, (list(columns), rows)) == expected, where
    assert filtered(page, "reward = unknown", (["reward"], [{"reward": None}, {"reward": 0}])) == [
        True,
        False,
    ]
    assert filtered(page, "reward < 1", (["reward"], [{"reward": None}, {"reward": 0}])) == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("exct < 1", "There is no column “exct”; did you mean exact?"),
        ("exact <", "The filter ends after “exact <”; a number, a text or a column is missing."),
        ("(exact < 1", "The filter lacks a closing parenthesis after “( exact < 1”."),
        ("exact < 1 && exact > 0", "The filter cannot be read at “&& exact > 0”: write and."),
        ("exact 1", "The filter has “1” after “exact”; join two conditions with and, or."),
    ],
)
def test_a_wrong_filter_is_explained(page, served, where, sentence):
    page.open(served.url + at("run", CAREFUL, where=where))
    page.wait_text(sentence)
    assert "36 rollouts" in page.text()  # nothing is filtered


def test_a_filter_a_bar_and_the_next_failure_lead_to_rollouts(page, served):
    answer = served.ask(f"columns?run={quote(CAREFUL)}")
    exact, turns = answer["metrics"]["exact"], answer["columns"]["turns"]
    wrong = sum(e < 1 and t > 1 for e, t in zip(exact, turns, strict=True))
    page.open(served.url + at("run", CAREFUL))
    page.wait_text("36 rollouts")
    box = page.find("input[aria-label='Filter by an expression']")
    box.send_keys("exact < 1 and turns > 1")
    page.press("ENTER")
    page.wait_text(f"{wrong} rollouts")
    page.find("main .controls button").click()  # Clear
    page.wait_text("36 rollouts")
    page.js(
        "document.querySelectorAll('.plot')[1].querySelector('.pick').dispatchEvent(new"
        " Event('click'))"
    )
    address = "return decodeURIComponent(location.hash.replace(/\\+/g, ' '))"
    page.wait(lambda: "output_tokens >=" in page.js(address))
    page.open(served.url + at("run", CAREFUL))
    page.wait_text("36 rollouts")
    page.press("f", "ENTER")
    page.wait_text("rollout begins")
    row = int(page.js("return location.hash.split('?')[0].split('/').pop()"))
    assert answer["columns"]["reward"][row] < 1


def test_a_row_per_example_has_a_cell_per_sibling(page, served):
    answer = served.ask(f"columns?run={quote(CAREFUL)}")
    page.open(served.url + at("run", CAREFUL, by="example", sort="mean"))
    page.wait_text("36 rollouts")
    page.wait(lambda: len(rows_shown(page)) == 12)
    page.picture("examples")
    assert page.count(".heat .cell") == 36
    rewards = answer["columns"]["reward"]
    means = [
        sum(r for r, e in zip(rewards, answer["columns"]["example"], strict=True) if e == n) / 3
        for n in range(12)
    ]
    first = rows_shown(page)[0].split()
    assert float(first[1]) == pytest.approx(min(means), abs=1e-3)
    page.find(".heat .cell").click()
    page.wait_text("rollout begins")


def test_the_list_shows_the_settings_that_vary_and_on_a_phone_the_reward(page, serve, tmp_path):
    for unit, cost in (("word", 0.5), ("letter", None)):
        config = {"env_id": "sums", "model": "a", "env_args": {"unit": unit, "same": 1}}
        with RunDirectory.create_or_resume(tmp_path / f"evals/sums--a/{unit}", config) as run:
            with run.open_journal() as journal:
                journal.append_sync(
                    [{"example_id": 0, "reward": 0.25, "metrics": {}, "rollout_key": "0"}]
                )
            usage = {"input_tokens": 1000.0, "output_tokens": 234.0}
            counts = {"num_rollouts": 2, "num_unscored": 1, "usage": usage, "cost_usd": cost}
            means = {"avg_reward": 0.25, "avg_success": 0.5}
            run.write_metadata({"status": "complete", **config, **counts, **means})
    server = serve(tmp_path)
    page.open(server.url)
    page.wait(lambda: len(rows_shown(page)) == 2)
    heads = page.texts(".head [role=columnheader]")
    assert "env_args.unit" in heads
    assert "env_args.same" not in heads
    assert {"Success", "Cost", "Not scored", "Tokens", "Time"} <= set(heads)
    word = next(text for text in rows_shown(page) if "letter" not in text)
    assert "2,468" in word
    assert "$0.500" in word
    page.find(".chooser summary").click()
    page.js("[...document.querySelectorAll('.chooser input')].pop().click()")
    page.wait(lambda: "Size" in page.texts(".head [role=columnheader]"))
    size = page.driver.get_window_size()
    is_wide = "return document.querySelector('.table').classList.contains('wide')"
    fits = (
        "return document.querySelector('.head').scrollWidth <="
        " document.querySelector('.table').clientWidth"
    )
    try:
        page.driver.set_window_size(2200, 800)
        page.wait(lambda: not page.js(is_wide) and page.js(fits))
        # the last columns are reached by scrolling within the table
        page.driver.set_window_size(1000, 800)
        page.wait(lambda: page.js(is_wide))
        page.js("document.querySelector('.table').scrollLeft = 10000")
        last = (
            "return [...document.querySelectorAll('.head >"
            " div')].pop().getBoundingClientRect().right"
        )
        page.wait(lambda: page.js(last) <= page.js("return innerWidth"))
        page.driver.set_window_size(500, 800)
        page.wait(lambda: page.texts(".head [role=columnheader]") == ["Run", "Reward"])
        edge = page.js(
            "return [...document.querySelectorAll('.body .row >"
            " div')][1].getBoundingClientRect().right"
        )
        assert edge <= page.js("return innerWidth")
        page.picture("phone")
    finally:
        page.driver.set_window_size(size["width"], size["height"])


def test_the_list_has_status_and_date_and_the_settings_that_differ_most_usefully(
    page, serve, tmp_path
):
    for number in (1, 2):
        config = {
            "env_id": "sums",
            "model": "a",
            "env_args": {"unit": str(number)},
            "sampling_args": {"temperature": number},
            "max_turns": number,
        }
        with RunDirectory.create_or_resume(tmp_path / f"evals/sums--a/{number}", config) as run:
            with run.open_journal() as journal:
                journal.append_sync([{"example_id": 0, "reward": 0.25, "rollout_key": "0"}])
            counts = {"num_examples": number, "rollouts_per_example": number}
            run.write_metadata({"status": "complete", **config, **counts, "avg_reward": 0.25})
    page.driver.set_window_size(1280, 800)
    try:
        page.open(serve(tmp_path).url)
        page.wait(lambda: len(rows_shown(page)) == 2)
        heads = page.texts(".head [role=columnheader]")
        assert heads[3:6] == ["sampling.temperature", "env_args.unit", "max_turns"]
        edges = page.js(
            "return Object.fromEntries([...document.querySelectorAll('.head > div')]"
            ".map((head) => [head.innerText.replace('↓', ''), head.getBoundingClientRect().right]))"
        )
        right = page.js("return document.querySelector('.table').getBoundingClientRect().right")
        assert edges["Status"] < edges["Date"] <= right
        assert edges["Time"] > edges["Date"]
    finally:
        page.driver.set_window_size(1400, 900)
    page.open(page.driver.current_url.split("#")[0] + at("run", "evals/sums--a/1"))
    page.find("details.settings summary").click()
    names = page.texts("details.settings th[scope=row]")
    assert names[:4] == ["model", "sampling_args.temperature", "env_args.unit", "env_id"]


def test_a_long_list_of_runs_that_comes_in_parts_is_shown_whole(page, serve, tmp_path, monkeypatch):
    monkeypatch.setattr("verifiers.view.app.LIST_S", 0.0)
    for number in range(MIN_LISTED + 5):
        view_runs.training(tmp_path / f"run-{number:03}", num_steps=1)
    server = serve(tmp_path)
    assert server.ask("runs?first=0")["next"] == MIN_LISTED
    page.open(server.url)
    page.find("input[type=search]").send_keys(f"run-{MIN_LISTED + 4:03}")
    page.wait_text(f"training · run-{MIN_LISTED + 4:03}")
    assert "run-000" not in page.text()
