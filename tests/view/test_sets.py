"""The pages of sets of runs: a table of models and environments, and the change since the last
set."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.browser import too_wide
from support.eval_command import TOY, eval_folder, last_word, odd_only, vf_eval  # noqa: F401
from verifiers.testing import FakeServer
from verifiers.view.catalog import Catalog
from verifiers.view.export import export
from verifiers.view.library import Library

NIGHT = """
rollouts_per_example = 2
num_examples = 20
[[ablation]]
env_ids = ["toy", "more"]
[ablation.sweep]
model = ["steady", "fading"]
[ablation.sweep.args]
num_rows = [20]
"""


@pytest.fixture
def nights(vf_eval, eval_folder) -> Path:  # noqa: F811
    """Two nights of two models in two environments: one of the models forgets half; and a single
    run."""
    (eval_folder / "more.py").write_text(TOY)
    (eval_folder / "nightly.toml").write_text(NIGHT)

    def faded(request):
        return odd_only(request) if request.model == "fading" else last_word(request)

    for night, replies in (("2026-11-27", last_word), ("2026-11-28", faded)):
        with FakeServer(replies, models=["steady", "fading"]) as server:
            ran = vf_eval("nightly.toml", "-b", server.url, "-A", "--set", night)
            assert ran.code == 0, ran.err
    with FakeServer(last_word, models=["m"]) as server:
        assert vf_eval("toy", "-b", server.url, "-m", "m", "-n", "1", "-A").code == 0
    return eval_folder / "outputs"


def test_a_set_is_a_table_with_its_change_since_the_last_complete_set(nights):
    library = Library(Catalog([nights]))
    newest, first = library.sets()["sets"]
    assert (newest["set"], newest["states"], newest["complete"]) == (
        "2026-11-28",
        {"complete": 4},
        True,
    )
    table = library.set(newest["id"])
    assert table["before"] == first["id"]
    cells = {(cell["row"], cell["column"]): cell for cell in table["cells"]}
    assert set(cells) == {(m, e) for m in ("steady", "fading") for e in ("toy", "more")}
    faded, steady = cells["fading", "toy"], cells["steady", "toy"]
    assert (faded["reward"], faded["change"]["difference"]) == (0.5, -0.5)
    assert faded["change"]["verdict"] == "worse"
    assert steady["change"]["difference"] == 0
    assert library.run(faded["run"])["env"] == "toy"
    assert library.set(first["id"])["before"] is None


def test_a_set_that_is_not_complete_says_which_runs_are_pending(nights):
    (folder,) = nights.glob("sets/nightly/2026-11-28/evals/more--fading/*")
    for file in folder.iterdir():
        file.unlink()
    library = Library(Catalog([nights]))
    table = library.set(library.sets()["sets"][0]["id"])
    (pending,) = [cell for cell in table["cells"] if cell["state"] == "pending"]
    assert (pending["row"], pending["column"], pending["run"]) == ("fading", "more", None)
    assert (table["complete"], pending["change"]) == (False, None)


def test_damaged_sets_and_folders_of_one_set_do_not_break_the_list(nights):
    alone = Library(Catalog([nights / "sets/nightly/2026-11-28"]))
    (only,) = alone.sets()["sets"]
    assert only["id"] == "nightly/2026-11-28"
    (nights / "sets/nightly/2026-11-27/set.json").write_text("{")
    library = Library(Catalog([nights]))
    assert [one["set"] for one in library.sets()["sets"]] == ["2026-11-28"]
    with pytest.raises(LookupError, match="there is no set of runs"):
        library.set("elsewhere")


def check_pages(page) -> None:
    """What the pages of the sets show, in a server's page and in a copy."""
    page.find("a[href='#/sets']:not([hidden])").click()
    page.wait_text("2 sets of runs")
    page.find("table a").click()
    for words in (
        "nightly / 2026-11-28",
        "complete",
        "2 worse",
        "steady",
        "fading",
        "-0.500 worse",
    ):
        page.wait_text(words)
    assert too_wide(page) == []
    page.picture("set")
    page.find("table.set td a.bad").click()
    page.wait_text("Comparison")


def test_the_pages_lead_from_the_runs_to_a_set_its_change_and_a_run(page, serve, nights):
    page.open(serve(nights).url)
    check_pages(page)


def test_a_copy_has_the_same_pages(page, nights, tmp_path):
    written = export(Library(Catalog([nights])), tmp_path / "copy")
    page.open(written.as_uri())
    check_pages(page)
    content = "".join(file.read_text() for file in (tmp_path / "copy/data").glob("set*.js"))
    assert str(nights) not in content
