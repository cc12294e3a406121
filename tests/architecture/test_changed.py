"""``run.py test --changed`` chooses the tests that a change touches."""

from pathlib import Path

import pytest

import changed

AGENTS = Path("packages/agents/src/verifiers_agents")
INTEGRATIONS = Path("packages/integrations/src/verifiers_integrations")
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
            TRAINER / "algorithm/group.py",
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
        # by its own name in that folder, or by that of its package; without either by the folder
        (
            TRAINER / "policy/teacher.py",
            "tests/trainer/policy/test_teacher.py",
            "tests/trainer/policy/test_zoo.py",
        ),
        (
            INTEGRATIONS / "tinker/client.py",
            "tests/integrations/test_tinker.py",
            "tests/integrations/test_verl.py",
        ),
        (
            TRAINER / "run/reward_monitor.py",
            "tests/trainer/run/test_reward_watch.py",
            "tests/trainer/policy/test_zoo.py",
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


@pytest.mark.parametrize(
    ("changed_file", "untouched"),
    [
        # another test of its folder; the trainer's folder of the same name, and core's;
        # environments, which are tested in folders called "tests"
        ("tests/trainer/run/test_own_loop.py", "tests/trainer/run/test_signals.py"),
        (f"{CORE}/cli/scaffold.py", "tests/trainer/cli/test_cli_train.py"),
        (f"{TRAINER}/cli/capacity.py", "tests/cli/test_vf_eval.py"),
        ("tests/support/zoo.py", "packages/envs/wordle/tests/test_wordle.py"),
        ("packages/trainer/README.md", "tests/trainer/run/test_signals.py"),
        # rules of the architecture that it cannot break
        ("tests/view/test_tui.py", "tests/architecture/test_forks.py"),
        ("changes/README.md", "tests/architecture/test_patterns.py"),
    ],
)
def test_what_a_change_cannot_break_is_left_to_ci(chosen, changed_file, untouched):
    assert (changed.ROOT / changed_file).exists()
    assert (changed.ROOT / untouched).exists()
    assert untouched not in chosen(changed_file)


def test_tests_of_tools_run_with_their_tools(chosen):
    assert "tests/architecture/test_forks.py" in chosen("tests/support/forks.py")
    assert "tests/architecture/test_changed.py" in chosen("tests/changed.py")
    assert "tests/architecture/test_patterns.py" in chosen(f"{CORE}/clients/failures.py")
    assert "tests/trainer/test_trainer_readme.py" in chosen("packages/trainer/README.md")


def test_a_conftest_touches_all_beneath_it(chosen):
    assert len(chosen("tests/conftest.py")) > 300


def test_of_the_pages_and_the_patterns_those_that_changed_are_run(graph):
    page = changed.ROOT / "docs/concepts.md"
    source = changed.ROOT / CORE / "clients/failures.py"
    every = changed.tests_of([page, source], *graph)
    blocks, patterns = "tests/docs/test_blocks.py", "tests/architecture/test_patterns.py"
    words = changed.words_of(every, changed.wholly({page}, *graph), [page, source])
    assert f"{blocks}::test_page_does_what_it_says[concepts.md]" in words
    assert f"{blocks}::test_every_link_leads_somewhere" in words
    assert (
        f"{patterns}::test_every_pattern_takes_time_in_proportion_to_its_text"
        f"[{CORE}/clients/failures.py]" in words
    )
    assert not {blocks, patterns} & set(words)
    # if something else wants all of them
    assert {blocks, patterns} <= set(changed.words_of(every, every, [page, source]))
    whole = changed.wholly({changed.BLOCKS, changed.PATTERNS}, *graph)
    assert whole == {changed.BLOCKS, changed.PATTERNS}


@pytest.mark.parametrize(
    ("changed_file", "test", "most"),
    [
        (f"{CORE}/__init__.pyi", "tests/typing/test_type_checkers.py", 40),
        ("benchmarks/results.json", "tests/architecture/test_benchmarks.py", 40),
        (f"{CORE}/templates/environment/table/README.md.tmpl", "tests/cli/test_vf_init.py", 60),
        ("CONTRIBUTING.md", "tests/docs/test_blocks.py", 40),
    ],
)
def test_a_file_that_no_module_stands_beside_touches_what_names_it(
    chosen, changed_file, test, most
):
    assert (changed.ROOT / changed_file).exists()
    tests = chosen(changed_file)
    assert test in tests
    assert len(tests) < most


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
        changed.changed_files("no-such")


def test_settings_of_linters_touch_what_reads_their_file(graph):
    readers = changed.readers_of_project(graph[0])
    assert changed.TESTS / "cli/test_vf_init.py" in readers  # runs ruff with them
    assert len(readers) < 10


def test_settings_of_linters_are_told_from_those_of_tests():
    project = (changed.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    of_tests = changed.settings_of_tests(project)
    stricter = project.replace("check_untyped_defs = true", "check_untyped_defs = false")
    longer = project.replace("max-line-length = 120", "max-line-length = 121")
    assert project not in (stricter, longer)
    for other in (stricter, longer, project + "# a comment\n"):
        assert changed.settings_of_tests(other) == of_tests
    # negative control: what is installed, and how pytest runs
    for line, instead in (('"ruff>=0.14"', '"ruff>=0.15"'), ('asyncio_mode = "auto"', "")):
        other = project.replace(line, instead)
        assert other != project
        assert changed.settings_of_tests(other) != of_tests
