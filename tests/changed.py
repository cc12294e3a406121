"""The test files that a change touches: ``python3 run.py test --changed [COMMIT]``.

A changed Python file touches the tests that import it, inside functions and by ``vf.NAME`` too, and,
where it is no test itself, those of its distribution in the folder that has its folder's name: the
ones with its own name, all if there are none. A ``conftest.py`` touches those beneath it. A test
imports a module too when it has its dotted name, its command (``vf-eval``) or its environment
(``reverse-text``) as a string, since processes are started by these; what tests share is followed on
to the tests. What reaches it through other modules alone is left to CI: followed to the end, nearly
every module is reached by every test.

Any other file of a package or of ``tests`` touches what stands beside it; the changelog touches
nothing; a page touches the tests of the docs, which run the blocks of that page alone; a regular
expression is tried in the file that changed alone; a stub touches the tests of types; data of a whole
distribution, and a folder at the top such as ``benchmarks``, touch what names their folder; settings
of linters touch what reads ``pyproject.toml``; any other file at the top touches everything. The
selection is for the time before a commit: what is imported by a computed name escapes it, and CI runs
everything.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASES = (
    ROOT / "tests",
    *ROOT.glob("packages/*/src"),
    *ROOT.glob("packages/envs/*/src"),
    *ROOT.glob("packages/envs/*"),
)
TESTS, PACKAGES = ROOT / "tests", ROOT / "packages"
BLOCKS, PATTERNS = TESTS / "docs/test_blocks.py", TESTS / "architecture/test_patterns.py"
DISTRIBUTIONS = {"agents", "core", "integrations", "sandboxes", "trainer"}
OF_TOOLS = {"test_benchmarks", "test_changed", "test_forks", "test_mutation"}
"""Tests of what imports or starts the product for a developer; other tests of the architecture read
every source."""
CHANGELOG = {ROOT / "CHANGELOG.md", ROOT / "changes"}
PROJECT = ROOT / "pyproject.toml"
OF_LINTERS = ("importlinter", "mypy", "ruff", "towncrier")
"""Its tables that linters read, and the rules of the architecture, which are tested for every
change."""
WORDS = re.compile(r"[\w.-]+")


def files_by_module() -> dict[str, Path]:
    """All Python files of the packages and their tests, by dotted name."""
    files: dict[str, Path] = {}
    seen: set[Path] = set()
    for base in BASES:
        for path in base.rglob("*.py"):
            if ".venv" not in path.parts and path not in seen:
                seen.add(path)
                files.setdefault(
                    ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(
                        ".__init__"
                    ),
                    path,
                )
    return files


def modules_by_word() -> dict[str, str]:
    """Modules by what starts them: commands and environments."""
    return {
        point.name: point.module
        for group in ("console_scripts", "verifiers.environments")
        for point in entry_points(group=group)
        if group != "console_scripts" or point.name.startswith("vf-")
    }


def exports_of(files: dict[str, Path]) -> dict[str, str]:
    """The modules of the names that packages import, lazily or not:
    ``verifiers.environments.HarborEnv``."""
    import verifiers

    homes = {f"verifiers.{name}": f"{home}.{name}" for name, home in verifiers._HOME.items()}
    homes |= {
        f"verifiers.{point.name}": f"{point.module}.{point.attr}"
        for point in entry_points(group="verifiers.parts")
    }
    for package, path in files.items():
        if path.name == "__init__.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module:
                    homes |= {
                        f"{package}.{alias.name}": f"{node.module}.{alias.name}"
                        for alias in node.names
                    }
                elif isinstance(node, ast.Dict):  # name -> module, of a table of lazy names
                    homes |= {
                        f"{package}.{key.value}": f"{package}.{value.value}.{key.value}"
                        for key, value in zip(node.keys, node.values, strict=True)
                        if isinstance(key, ast.Constant)
                        and isinstance(value, ast.Constant)
                        and f"{package}.{value.value}" in files
                    }
    return homes


def nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of imports for type checkers alone, in no order."""
    pending = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                yield node
                pending.append(node)


def imports(
    module: str, path: Path, files: dict[str, Path], exports: dict[str, str], words: dict[str, str]
) -> set[str]:
    """The modules that a file reaches in one step."""
    is_test, is_package = "tests" in path.parts, path.name == "__init__.py"
    typed = is_package and any(
        name.rpartition(".")[0] == module and home.startswith(f"{module}.")
        for name, home in exports.items()
    )
    names: set[str] = set()
    for node in nodes_that_run(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "vf"
        ):
            names.add(f"verifiers.{node.attr}")
        elif is_test and isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in WORDS.findall(node.value):
                names.add(words.get(word, word if word in files and "." in word else ""))
        elif is_package and isinstance(node, ast.Constant) and not typed:
            # a table of lazy names
            names |= {f"{module}.{word}" for word in WORDS.findall(str(node.value))} & files.keys()
    reached = set()
    for name in names:
        while name in exports and exports[name] != name:
            name = exports[name]
        while name:  # importing a module runs its packages
            if name in files:
                reached.add(name)
            name = name.rpartition(".")[0]
    return reached


def importers_of(files: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that reach each module in one step."""
    exports, words = exports_of(files), modules_by_word()
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in files.items():
        for reached in imports(module, path, files, exports, words):
            importers[reached].add(module)
    return importers


def dependents(
    changed: Iterable[str], importers: dict[str, set[str]], files: dict[str, Path]
) -> set[str]:
    """The modules that import or name one of ``changed``, and these; what the tests share is
    followed on to the tests."""
    seen, queue = set(changed), list(changed)
    while queue:
        new = importers.get(queue.pop(), set()) - seen
        seen |= new
        queue += [module for module in new if "tests" in files[module].parts]
    return seen


def tests_of(
    changed: Iterable[Path], files: dict[str, Path], importers: dict[str, set[str]]
) -> set[Path]:
    """The test files of changed files, all given by absolute path."""
    modules = {path: module for module, path in files.items()}
    every = {path for path in files.values() if path.name.startswith("test_")}
    python = [path for path in changed if path.suffix == ".py" and path in modules]
    chosen = {
        files[module] for module in dependents([modules[path] for path in python], importers, files)
    } & every
    for path in python:
        if path.name == "conftest.py":
            chosen |= {test for test in every if path.parent in test.parents}
        elif path not in every and not (TESTS in path.parents and importers.get(modules[path])):
            chosen |= mirrors(path, every)
    for path in set(changed) - set(python):
        if path in CHANGELOG or CHANGELOG & set(path.parents):
            continue  # no test reads it
        if path.suffix == ".pyi":
            read_stubs = {test for test in every if test.stem == "test_reference_pages"}
            chosen |= {test for test in every if test.parent == TESTS / "typing"} | read_stubs
            continue
        if is_readme(path):
            chosen |= {test for test in every if test.parent == TESTS / "docs"}
            chosen |= {test for test in every if "readme" in test.stem}
            continue
        folder = next(
            (base for base in path.parents if base in BASES or base == ROOT / "docs"), None
        )
        if folder is None and path.parent != ROOT:
            naming = modules_naming(path.relative_to(ROOT).parts[0], files)
            reached = {files[module] for module in dependents(naming, importers, files)} & every
            if reached:
                chosen |= reached
                continue
        if path.parent == ROOT or folder is None:
            return every
        beside = {ROOT / "docs": ROOT / "tests/docs", ROOT / "tests": path.parent}.get(
            folder, folder
        )
        beneath = (
            (up, [name for source, name in modules.items() if source.parent == up])
            for up in path.parents
        )
        up, package = next(filter(lambda pair: pair[1], beneath), (folder, []))
        if up.parent in BASES and path.parent != up:  # the whole distribution is beside it
            package = modules_naming(path.relative_to(up).parts[0], files) or package
        chosen |= {test for test in every if beside in test.parents}
        chosen |= {files[module] for module in dependents(package, importers, files)} & every
    rules = {test for test in every if test.parent.name == "architecture"}
    rules -= {test for test in rules if test.stem in OF_TOOLS}
    if not any(path.suffix == ".py" and has_pattern(path) for path in changed):
        rules.discard(PATTERNS)
    return chosen | rules


def mirrors(source: Path, every: set[Path]) -> set[Path]:
    """The tests that mirror a source: of the nearest folder that has its folder's name, those with
    the name of the module, or of a package between; all of the folder if there are none."""
    names = [source.stem]
    for up in source.parents:
        folder = {test for test in every if test.parent.name == up.name and may_test(test, source)}
        # a folder for all distributions may have this name too
        of_distribution = {
            test for test in folder if first_below(TESTS, test) == first_below(PACKAGES, source)
        }
        if folder := of_distribution or folder:
            named = re.compile(rf"test_({'|'.join(map(re.escape, names))})(_|$)")
            return {test for test in folder if named.match(test.stem)} or folder
        names.append(up.name)
    return set()


def may_test(test: Path, source: Path) -> bool:
    """Not a test of another distribution, whose folders may have the same names."""
    folder, distribution = first_below(TESTS, test), first_below(PACKAGES, source)
    return not distribution or folder not in DISTRIBUTIONS or folder == distribution


@functools.cache
def first_below(folder: Path, path: Path) -> str:
    """The first part of a path below a folder; empty if it is elsewhere."""
    return path.relative_to(folder).parts[0] if folder in path.parents else ""


def has_pattern(path: Path) -> bool:
    """Whether a source uses regular expressions, each of which is tried for its worst texts."""
    if not path.exists():
        return False
    return re.search(r"\bre\.\w+\(", path.read_text(encoding="utf-8")) is not None


def wholly(changed: set[Path], files: dict[str, Path], importers: dict[str, set[str]]) -> set[Path]:
    """Of the test files whose cases are files, those that something else than these files wants."""
    pages = {
        path
        for path in changed
        if is_readme(path) or (path.suffix == ".md" and ROOT / "docs" in path.parents)
    }
    blocks = tests_of(changed - pages, files, importers) & {BLOCKS}
    return blocks | ({PATTERNS} & changed)


def is_readme(path: Path) -> bool:
    """A page at the top of the repository or of a package."""
    return path.suffix == ".md" and (path.parent == ROOT or path.parent.parent == PACKAGES)


def modules_naming(folder: str, files: dict[str, Path]) -> list[str]:
    """The modules that have a folder's name as a string, or within a path."""
    name = re.compile(rf"""["'/]{re.escape(folder)}["'/]""")
    return [
        module for module, path in files.items() if name.search(path.read_text(encoding="utf-8"))
    ]


def words_of(chosen: set[Path], whole: set[Path], changed: Iterable[Path]) -> list[str]:
    """What pytest is given: of the pages of the docs, if nothing else wants all of them (``whole``),
    those that changed, and of the sources with regular expressions likewise."""
    changed = [path for path in changed if path.exists()]
    pages = [path for path in changed if ROOT / "docs" in path.parents and path.suffix == ".md"]
    sources = [path for path in changed if path.suffix == ".py" and "src" in path.parts]
    of_file = {
        BLOCKS: [
            *(
                f"test_page_does_what_it_says[{page.relative_to(ROOT / 'docs').as_posix()}]"
                for page in pages
            ),
            "test_every_link_leads_somewhere",
            "test_every_page_is_reached_from_the_index",
        ],
        PATTERNS: [
            "test_every_pattern_takes_time_in_proportion_to_its_text"
            f"[{source.relative_to(ROOT).as_posix()}]"
            for source in filter(has_pattern, sources)
        ],
    }
    parts = {file: names for file, names in of_file.items() if file in chosen - whole}
    return [
        *sorted(str(path.relative_to(ROOT)) for path in chosen - parts.keys()),
        *(f"{file.relative_to(ROOT)}::{name}" for file, names in parts.items() for name in names),
    ]


def changed_files(commit: str) -> set[Path]:
    """The files that differ from ``commit``, those not yet added included."""
    names = git(commit, "diff", "--name-only", commit, "--")
    names += git(commit, "ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names.splitlines()}


def git(commit: str, *words: str) -> str:
    """What git prints. *Raises* SystemExit if it does not know the commit."""
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"--changed: git knows no commit {commit!r} here: {ran.stderr.strip()}")
    return ran.stdout


def differs_for_linters_alone(commit: str) -> bool:
    """Whether ``pyproject.toml`` has only settings of linters that it had not in ``commit``."""
    before = git(commit, "show", f"{commit}:{PROJECT.name}")
    return settings_of_tests(before) == settings_of_tests(PROJECT.read_text(encoding="utf-8"))


def readers_of_project(files: dict[str, Path]) -> set[Path]:
    """The tests that read the ``pyproject.toml`` of the repository, such as those that run a linter
    with its settings."""
    read = re.compile(r'(REPOSITORY|ROOT) / "pyproject\.toml"')
    tests = {path for path in files.values() if path.name.startswith("test_")}
    return {test for test in tests if read.search(test.read_text(encoding="utf-8"))}


def settings_of_tests(text: str) -> dict[str, Any]:
    """A ``pyproject.toml`` without the tables that linters alone read."""
    settings = tomllib.loads(text)
    tools = settings.get("tool", {})
    settings["tool"] = {name: table for name, table in tools.items() if name not in OF_LINTERS}
    return settings


def main() -> int:
    """Run pytest on the tests of what differs from the commit that is named first, by default the
    last one."""
    words = sys.argv[1:]
    commit = words.pop(0) if words and not words[0].startswith("-") else "HEAD"
    changed = changed_files(commit)
    if not changed:
        print(f"nothing differs from {commit}")
        return 0
    number = len(changed)
    files = files_by_module()
    importers = importers_of(files)
    chosen: set[Path] = set()
    if PROJECT in changed and differs_for_linters_alone(commit):
        changed.remove(PROJECT)
        chosen = readers_of_project(files)
    chosen |= tests_of(changed, files, importers)
    tests = words_of(chosen, wholly(changed, files, importers), changed)
    print(f"{number} changed files touch {len(chosen)} test files")
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "-m", "not slow and not gpu"]
    return subprocess.call([*pytest, *words, *tests], cwd=ROOT)


if __name__ == "__main__":
    raise SystemExit(main())
