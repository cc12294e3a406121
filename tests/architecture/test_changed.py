"""``run.py test --changed`` chooses the tests that a change touches."""

from pathlib import Path

import pytest

import changed

AGENTS = Path("packages/agents/src/verifiers_agents")
CORE, TRAINER = Path("packages/core/src/verifiers"), Path("packages/trainer/src/verifiers_trainer")


@pytest.fixture(scope="module")
def graph():
    files = changed.files_by_module()
    return files, changed.importers_of(files)


@pytest.fixture
def chosen(graph):
    def tests(name):
        return {
            str(path.relative_to(changed.ROOT))
            for path in changed.tests_of([changed.ROOT / name], *graph)
        }

    return tests


@pytest.mark.parametrize(
    ("changed_file", "test", "untouched"),
    [
        # imported in the test; by the lazy name vf.HarborEnv; the server behind a table of lazy
        # names
        (
            CORE / "results/sequential.py",
            "tests/core/results/test_sequential.py",
            "tests/core/parsers/test_parsers.py",
        ),
        (AGENTS / "harbor/env.py", "tests/agents/test_harbor_env.py", "tests/view/test_tui.py"),
        (
            CORE / "testing/server.py",
            "tests/faults/test_retry_faults.py",
            "tests/core/results/test_sequential.py",
        ),
        # by the folder of the same name, not through other modules; by a command that a test starts
        (
            TRAINER / "algorithm/losses.py",
            "tests/trainer/algorithm/test_credit.py",
            "tests/trainer/run/test_trainer.py",
        ),
        (
            CORE / "cli/compare.py",
            "tests/cli/test_vf_compare.py",
            "tests/core/results/test_sequential.py",
        ),
        (
            CORE / "sandbox/guest/zygote.py",
            "tests/core/sandbox/test_sandbox.py",
            "tests/view/test_tui.py",
        ),
        # no module of Python
        (
            CORE / "view/static/expression.js",
            "tests/view/test_opening.py",
            "tests/core/results/test_sequential.py",
        ),
        (
            Path("docs/train/objective.md"),
            "tests/docs/test_blocks.py",
            "tests/core/results/test_sequential.py",
        ),
        (Path("tests/view/test_tui.py"), "tests/view/test_tui.py", "tests/cli/test_vf_eval.py"),
        (
            Path("tests/support/zoo.py"),
            "tests/core/checks/test_audit_zoo.py",
            "tests/cli/test_vf_eval.py",
        ),
    ],
)
def test_a_change_touches_its_tests_and_not_all(chosen, changed_file, test, untouched):
    assert (changed.ROOT / changed_file).exists()
    assert (changed.ROOT / untouched).exists()
    tests = chosen(changed_file)
    assert test in tests
    assert untouched not in tests
    assert "tests/architecture/test_layers.py" in tests


def test_a_file_at_the_top_touches_everything(chosen):
    assert len(chosen("pyproject.toml")) > 200


@pytest.mark.parametrize("name", ["CHANGELOG.md", "changes/a-new-flag.added.md"])
def test_the_changelog_touches_nothing_but_the_architecture(chosen, name):
    assert {Path(test).parent.name for test in chosen(name)} == {"architecture"}


def test_every_module_has_tests(graph):
    """Also those that are started by a computed name: by the folder of the same name."""
    files, importers = graph
    sources = [
        path
        for module, path in files.items()
        if module.startswith("verifiers") and "src" in path.parts
    ]
    assert len(sources) > 300
    for path in sources:
        tests = changed.tests_of([path], files, importers)
        assert {test for test in tests if test.parent.name != "architecture"}, path


def test_an_unknown_commit_is_one_sentence():
    with pytest.raises(SystemExit, match="git knows no commit 'no-such'"):
        list(changed.changed_files("no-such"))
