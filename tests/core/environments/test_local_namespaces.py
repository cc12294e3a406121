"""Each local environment imports from its own folder, runs the code that its run records, and is run
again when a file of it has changed: in this process and in workers."""

from __future__ import annotations

import sys

import pytest

import verifiers as vf
from verifiers.storage.directory import read_config
from verifiers.testing import FakeServer, ScriptedClient

HELPED = """
import verifiers as vf
{how}
def load_environment():
    def reward(completion):
        {late}
        return weight()
    rows = [{{"question": text(), "answer": ""}}]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[reward]))
"""
HELPER = "def text(): return {name!r}\ndef weight(): return {weight}\n"
AT_ONCE = HELPED.format(how="from utils import text, weight", late="")
LATE = HELPED.format(how="import utils\ntext = utils.text", late="from utils import weight")
EDITED = """
import verifiers as vf
def reward(completion): return {}
def load_environment():
    rows = [{{"question": "q", "answer": "a"}}]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[reward]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name.partition(".")[0] in ("aa", "bb", "utils", "edited", "words", "parts"):
            del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def two(folder, source):
    for name, weight in (("aa", 0.25), ("bb", 0.75)):
        write(folder / f"environments/{name}/{name}.py", source)
        write(folder / f"environments/{name}/utils.py", HELPER.format(name=name, weight=weight))


def rewards(env, **options):
    return env.evaluate(ScriptedClient("x"), "m", num_examples=1, **options)["reward"]


@pytest.mark.parametrize("source", [AT_ONCE, LATE])
def test_helpers_of_one_name_are_each_environments_own(folder, source):
    two(folder, source)
    envs = {name: vf.load_environment(name) for name in ("aa", "bb", "aa")}
    assert {name: env.get_dataset()["question"][0] for name, env in envs.items()} == {
        "aa": "aa",
        "bb": "bb",
    }
    for name, weight in (("bb", 0.75), ("aa", 0.25), ("bb", 0.75)):
        assert rewards(envs[name]) == [weight]


def test_packages_of_one_name_are_each_environments_own(folder):
    two(folder, AT_ONCE.replace("from utils", "from parts.inner"))
    for name in ("aa", "bb"):
        root = folder / f"environments/{name}"
        write(root / "parts/__init__.py", "from .words import text\n")
        write(root / "parts/words.py", f"def text(): return {name!r}\n")
        write(root / "parts/inner.py", "from . import text\ndef weight(): return 1.0\n")
    for name in ("aa", "bb", "aa"):
        assert vf.load_environment(name).get_dataset()["question"][0] == name


def test_folders_without_an_init_file_are_each_environments_own(folder):
    two(folder, AT_ONCE.replace("from utils", "from parts.deep.inner"))
    for name in ("aa", "bb"):
        inner = folder / f"environments/{name}/parts/deep/inner.py"
        write(inner.with_name("name.txt"), name)
        write(
            inner,
            "from importlib.resources import files\n"
            "def text(): return files('parts.deep').joinpath('name.txt').read_text()\n"
            "def weight(): return 1.0\n",
        )
    for name in ("aa", "bb", "aa"):
        assert vf.load_environment(name).get_dataset()["question"][0] == name
        assert len(sys.modules["parts"].__path__) == 1


def test_each_run_records_the_helper_that_it_used(folder):
    two(folder, AT_ONCE)
    codes = {}
    for name in ("aa", "bb", "aa"):
        env = vf.load_environment(name)
        rewards(env, results_path=f"run-{name}", save_results=True, resume=True)
        codes[name] = read_config(folder / f"run-{name}")["config"]["code"]
    assert codes["aa"].keys() == {"aa.py", "utils.py"}
    assert codes["aa"]["utils.py"] != codes["bb"]["utils.py"]


def test_what_is_edited_runs_when_it_is_loaded_again_and_is_recorded_as_it_ran(folder):
    file = folder / "environments/edited.py"

    def run(env, path):
        return rewards(env, results_path=path, save_results=True), read_config(folder / path)[
            "config"
        ]["code"]

    write(file, EDITED.format("0.25"))
    old = vf.load_environment("edited")
    write(file, EDITED.format("0.75"))  # equally long, within the same second
    new = vf.load_environment("edited")
    (first, code), (second, new_code) = run(old, "one"), run(new, "two")
    assert (first, second) == ([0.25], [0.75])
    assert code != new_code
    write(file, EDITED.format("0.50"))  # negative control: an object is what it was loaded as
    assert run(new, "three") == ([0.75], new_code)


def test_a_helper_that_is_edited_is_loaded_again_with_its_environment(folder):
    two(folder, AT_ONCE)
    assert rewards(vf.load_environment("aa")) == [0.25]
    write(folder / "environments/aa/utils.py", HELPER.format(name="aa", weight=0.5))
    assert rewards(vf.load_environment("aa")) == [0.5]
    same = vf.load_environment("aa")
    assert type(vf.load_environment("aa").rubric) is type(same.rubric)


def test_a_project_keeps_its_version_when_it_is_loaded_again_and_by_its_path(folder):
    root = folder / "environments/words"
    write(root / "words.py", EDITED.format("1.0"))
    write(root / "pyproject.toml", '[project]\nname = "words"\nversion = "0.1.0"\n')
    for env_id in ("words", "words@0.1.0", "words", str(root / "words.py"), "words@latest"):
        assert vf.load_environment(env_id).env_version == "0.1.0"
    with pytest.raises(vf.UnknownEnvironment, match=r"has version 0\.1\.0"):
        vf.load_environment("words@9.9")


def test_workers_load_the_same_code(folder):
    two(folder, LATE)
    vf.load_environment("aa")
    with FakeServer("x") as server:
        env = vf.load_environment("bb")
        results = env.evaluate(
            vf.ClientConfig(api_base_url=server.url), "m", num_examples=1, num_workers=1
        )
    assert results["reward"] == [0.75]


def test_a_file_that_fails_leaves_nothing_and_runs_once_it_is_mended(folder):
    two(folder, AT_ONCE)
    write(folder / "environments/aa/utils.py", "raise RuntimeError('not yet')\n")
    with pytest.raises(vf.EnvironmentLoadError, match="not yet"):
        vf.load_environment("aa")
    write(folder / "environments/aa/utils.py", HELPER.format(name="aa", weight=1.0))
    assert rewards(vf.load_environment("aa")) == [1.0]
