"""The source files of an environment belong to its runs: a changed file is refused, or accepted and
recorded."""

import hashlib
import importlib.util
import json
import sys

import pytest

import verifiers as vf
from support.warm_commands import run_vf_eval
from verifiers.storage.source_code import source_hashes
from verifiers.testing import FakeServer, ScriptedClient

SUMS = """
import json
import verifiers as vf
from helper import near

def right(completion, answer):
    return near(completion[-1].content, answer)

def load_environment():
    rows = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(4)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]))
"""
HELPER = "def near(text, answer):\n    return float(text == answer)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "sums.py").write_text(SUMS)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "unrelated.py").write_text("")
    yield tmp_path
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("sums", "helper", "package", "constants")
    ]:
        del sys.modules[name]


def loaded(folder, name="sums"):
    sys.modules.pop("helper", None)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def run(folder, num_examples=4, replies="1", **options):
    """One evaluation in this process, in the run directory ``folder/run``."""
    env = loaded(folder).load_environment()
    options = {"results_path": folder / "run", **options}
    return env.evaluate(ScriptedClient(replies), "m", num_examples=num_examples, **options)


def test_the_files_are_the_module_and_what_it_imports_beside_itself(folder):
    module = loaded(folder)
    expected = {"helper.py": sha(folder / "helper.py"), "sums.py": sha(folder / "sums.py")}
    assert source_hashes([module.right]) == expected
    assert source_hashes([json.dumps, vf.Rubric(), 3, None]) == {}


def test_of_a_package_the_modules_that_are_used_count(folder):
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from package.part import score\n")
    (package / "part.py").write_text("def score(completion):\n    return 1.0\n")
    (package / "other.py").write_text("")
    from package import score

    assert set(source_hashes([score])) == {"package/part.py"}
    assert set(source_hashes([sys.modules["package"].score, vf])) == {"package/part.py"}


def test_modules_that_are_imported_for_a_constant_or_inside_a_function_count(folder):
    """Nothing in the importing module's namespace leads to them."""
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text(
        "from .values import BONUS\nfrom . import words\ndef score(completion):\n    from"
        " package.later.late import extra\n    return BONUS + extra\n"
    )
    for name, text in {
        "values": "BONUS = 1.0",
        "words": "LIST = []",
        "other": "",
        "extra": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    (package / "later").mkdir()
    (package / "later/__init__.py").write_text("")
    (package / "later/late.py").write_text("extra = 1.0")
    from package.part import score

    used = {
        f"package/{name}.py"
        for name in ("__init__", "part", "values", "words", "later/__init__", "later/late")
    }
    assert set(source_hashes([score])) == used
    (folder / "constants.py").write_text("NEAR = 0.5\nimport json\nimport unrelated_and_absent\n")
    (folder / "sums.py").write_text(
        SUMS.replace("import json", "def later():\n    from constants import NEAR")
    )
    assert set(source_hashes([loaded(folder).right])) == {"constants.py", "helper.py", "sums.py"}
    (folder / "constants.py").write_text("a file that cannot be parsed")
    assert set(source_hashes([loaded(folder).right])) == {"constants.py", "helper.py", "sums.py"}


@pytest.mark.parametrize("name", ["sums.py", "helper.py"])
def test_a_changed_file_is_refused_by_name_unless_it_is_accepted(folder, name):
    run(folder, num_examples=2)
    file = folder / name
    file.write_text(file.read_text() + "\nMORE = 1\n")
    with pytest.raises(vf.RunMismatch, match=rf"other code: {name} changed since") as raised:
        run(folder)
    assert f"code.{name}" in raised.value.differences
    results = run(folder, accept_changed_code=True)
    assert len(results) == 4
    assert json.loads((folder / "run/metadata.json").read_text())["changed_code"] == [name]


def test_without_the_hashes_both_versions_would_be_one_mean(folder, monkeypatch):
    """Negative control: the helper's function is no part of any constructor."""
    monkeypatch.setattr("verifiers.runs.description.code_of", lambda env: {})
    run(folder, num_examples=2)
    (folder / "helper.py").write_text(HELPER.replace("return ", "return 5 * "))
    assert sorted(run(folder)["reward"]) == [0.0, 0.0, 0.0, 1.0]


def test_a_file_that_the_environment_does_not_import_may_change(folder):
    run(folder, num_examples=2)
    (folder / "unrelated.py").write_text("x = 1")
    assert run(folder).metadata.resumed == 2


def test_another_model_is_no_change_of_code(folder):
    run(folder, num_examples=2)
    (folder / "helper.py").write_text(HELPER + "\n")
    env = loaded(folder).load_environment()
    with pytest.raises(vf.RunMismatch, match="model was 'm', now 'other'"):
        env.evaluate(
            ScriptedClient("1"), "other", results_path=folder / "run", accept_changed_code=True
        )


def test_a_command_refuses_the_unfinished_run_of_other_code_and_continues_or_leaves_it(folder):
    def evaluated(*words):
        with FakeServer("1") as server:
            return run_vf_eval(
                folder, "sums", "-b", server.url, "-m", "m", "-n", "4", "-r", "1", *words
            )

    first = evaluated()
    assert first.code == 0, first.err
    (unfinished,) = (folder / "outputs/evals").glob("*/*")
    metadata = json.loads((unfinished / "metadata.json").read_text())
    (unfinished / "metadata.json").write_text(json.dumps(metadata | {"status": "interrupted"}))
    (folder / "helper.py").write_text(HELPER + "\n")
    refused = evaluated()
    assert refused.code != 0
    assert "an unfinished run of other code: helper.py changed since" in " ".join(
        refused.err.split()
    )
    accepted = evaluated("--accept-changed-code")
    assert accepted.code == 0, accepted.err
    assert "helper.py changed between two sessions of this run" in accepted.out + accepted.err
    assert len(list((folder / "outputs/evals").glob("*/*"))) == 1
    fresh = evaluated("--fresh")
    assert fresh.code == 0, fresh.err
    assert len(list((folder / "outputs/evals").glob("*/*"))) == 2
