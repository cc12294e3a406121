"""The generated pages of the reference are what the code says, and a page that says something else
is found."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers_trainer") is None, reason="the trainer is on the pages too"
)


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("reference_pages", DOCS / "reference_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PACKAGE = "../../packages/core/src/verifiers"
NAMES = (
    *("commands.md", "settings.md", "python.md", "modules.md", "record.md"),
    f"{PACKAGE}/runtime/distributions.json",
    f"{PACKAGE}/rollouts/typed_fields.py",
    f"{PACKAGE}/runs/keywords.py",
    f"{PACKAGE}/environments/keywords.py",
)


def test_all_that_is_written_is_compared(pages):
    assert sorted(pages.PAGES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.removeprefix(PACKAGE))
def test_page_is_up_to_date(pages, name):
    kept = (DOCS / "reference" / name).read_text(encoding="utf-8").splitlines()
    made = pages.PAGES[name]().splitlines()
    differing = [line for line in made if line not in kept] + [
        line for line in kept if line not in made
    ]
    assert kept == made, "run python docs/reference_pages.py\n" + "\n".join(differing[:10])


def test_a_stale_page_is_found_and_made_anew(pages, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    monkeypatch.setattr(pages, "PAGES", {"settings.md": pages.settings})
    assert pages.main(["--check"]) == 1
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0
    page = tmp_path / "settings.md"
    page.write_text(page.read_text().replace("`max_seq_len`", "`max_length`"))
    assert pages.main(["--check"]) == 1
    assert "not what the code says" in capsys.readouterr().out


def test_every_setting_has_a_meaning(pages):
    from verifiers.runs import options
    from verifiers_trainer.settings import fields

    for module, name in ((fields, "Settings"), (options, "RunOptions")):
        assert [
            setting for setting, meaning in pages._documented(module, name) if not meaning
        ] == []


def test_every_parameter_of_what_users_call_has_a_meaning(pages):
    import verifiers as vf

    names = [
        name
        for topic in pages.TOPICS.values()
        for name in topic.split()
        if name not in pages.SETTINGS
    ]
    rows = [(name, *row) for name in names for row in pages.parameters(getattr(vf, name))]
    assert len(rows) > 200
    assert [f"{name}({parameter})" for name, parameter, *_, meaning in rows if not meaning] == []
    documented = {
        (name, parameter)
        for name in names
        for parameter in pages._args(getattr(vf, name).__doc__ or "")
    }
    assert documented <= {(name, parameter) for name, parameter, *_ in rows}, (
        "a meaning of a parameter that is not"
    )


def test_a_parameter_without_a_meaning_is_found(pages):
    def scored(reward: float, weight: float = 1.0) -> None:
        """Score.

        Args:
            reward: What was earned,
                in points.
        """

    assert list(pages.parameters(scored)) == [
        ("reward", "<class 'float'>", "", "What was earned, in points."),
        ("weight", "<class 'float'>", "`1.0`", ""),
    ]


def test_every_setting_and_command_is_shown(pages):
    from verifiers_trainer.settings.fields import Settings

    shown = pages.settings()
    assert not [name for name in Settings.__annotations__ if f"| `{name}` |" not in shown]
    assert {"vf-eval", "vf-init", "vf-install", "vf-train", "vf-view"} <= {
        line.removeprefix("## ") for line in pages.commands().splitlines() if line.startswith("## ")
    }
