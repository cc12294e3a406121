"""An environment in the working folder needs no installation, and its mistakes are reported with
file and line."""

import importlib
import sys
from pathlib import Path

import pytest

from support.eval_command import install_toy
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError, EnvironmentLoadError, UnknownEnvironment

LOADER = """import verifiers as vf

def load_environment(word: str = "local"):
    return vf.SingleTurnEnv(dataset=[{"question": word, "answer": word}])
"""
ENTRY = (
    '[project]\nname = "acme-words"\nversion ='
    ' "0.7"\n[project.entry-points."verifiers.environments"]\n'
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder; modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "toy", raising=False)  # that of another file's tests
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


def write(path, text=LOADER):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    importlib.invalidate_caches()


def word_of(env):
    return env.train_table[0].row["answer"]


@pytest.mark.parametrize(
    "env_id",
    ["local-sums", "vf-local-sums", "local_sums", "environments/local_sums.py", "./environments/local_sums.py",
     "environments/local_sums"],
)  # fmt: skip
def test_a_file_is_loaded_by_its_id_and_by_its_path(folder, env_id):
    write("environments/local_sums.py")
    env = load_environment(env_id, word="mine")
    assert word_of(env) == "mine"
    assert env.env_id == (env_id if "/" not in env_id else "local-sums")
    assert Path(env.loaded_from.env_id).is_absolute()  # a worker process loads the same file
    assert word_of(load_environment(env.loaded_from.env_id, word="again")) == "again"


def test_an_absolute_path_is_loaded_from_anywhere(folder, monkeypatch, tmp_path_factory):
    write("games/word_list.py")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert load_environment(str(folder / "games/word_list.py")).env_id == "word-list"


@pytest.mark.parametrize(
    ("file", "env_id"),
    [
        ("environments/den/den.py", "den"),
        ("environments/den/__init__.py", "den"),
        ("environments/den/src/vf_den/__init__.py", "den"),
        ("environments/vf-den/vf_den.py", "den"),
        ("environments/den/den/__init__.py", "environments/den"),
        ("den.py", "den"),
    ],
)
def test_every_layout_of_a_local_environment(folder, file, env_id):
    write(file)
    assert word_of(load_environment(env_id)) == "local"


def test_the_entry_point_of_a_local_project_names_the_module(folder):
    write(
        "environments/words/src/acme_words/__init__.py", LOADER.replace("load_environment", "build")
    )
    write("environments/words/pyproject.toml", f'{ENTRY}words = "acme_words:build"\n')
    for env_id in ("words", "environments/words", "words@0.7"):
        env = load_environment(env_id)
        assert (word_of(env), env.env_version) == ("local", "0.7")


def test_a_local_environment_imports_the_files_beside_it(folder):
    write("environments/helped/helped_rows.py", "WORD = 'beside'\n")
    write(
        "environments/helped/helped.py",
        "import helped_rows\n" + LOADER.replace('"local"', "helped_rows.WORD"),
    )
    assert word_of(load_environment("helped")) == "beside"


def test_a_local_environment_may_be_named_like_an_imported_module(folder):
    write("environments/json.py")
    assert word_of(load_environment("environments/json.py")) == "local"
    # negative control: the standard library is not replaced
    assert importlib.import_module("json").loads("1") == 1


@pytest.mark.parametrize("path", ["environments/toy.py", "toy.py"])
def test_a_local_file_is_used_before_an_installed_environment(folder, path, caplog):
    site = folder / "site"
    site.mkdir()
    install_toy(site)
    sys.path.insert(0, str(site))
    # negative control: the installed one, without a local file
    assert load_environment("toy").env_version == "1.0"
    write(path)
    env = load_environment("toy")
    assert (word_of(env), env.env_version) == ("local", "")
    assert path in caplog.text
    assert "vf-toy 1.0" in caplog.text


def test_the_source_of_an_installed_environment_is_that_environment(folder):
    install_toy(folder)
    sys.path.insert(0, str(folder))
    assert load_environment("toy").env_version == "1.0"


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "env_id"),
    [
        ("environments/bent.py", "bent"),
        ("environments/bent.py", "environments/bent.py"),
        ("environments/bent/src/vf_bent/__init__.py", "bent"),
        ("bent.py", "bent"),
        ("on_the_path/bent.py", "bent"),
    ],
)
def test_a_syntax_error_is_reported_with_file_and_line(folder, file, env_id):
    sys.path.append(str(folder / "on_the_path"))
    write(file, "import verifiers as vf\n\ndef load_environment(:\n    pass\n")
    with pytest.raises(EnvironmentLoadError, match=rf"{file}:3: SyntaxError") as caught:
        load_environment(env_id)
    assert "install" not in str(caught.value)
    assert caught.value.line == 3


@pytest.mark.parametrize("misspelt", ["load_enviroment", "load_env", "Load_Environment"])
@pytest.mark.parametrize(
    "file", ["environments/bent.py", "environments/bent/bent/__init__.py", "bent.py"]
)
def test_a_misspelt_loader_is_reported_with_file_and_line(folder, file, misspelt):
    write(file, LOADER.replace("load_environment", misspelt))
    with pytest.raises(
        UnknownEnvironment, match=rf"{file}:3 defines {misspelt}.*load_environment"
    ) as caught:
        load_environment("bent")
    assert "install" not in str(caught.value)


def test_a_file_without_a_loader_is_named(folder):
    write("environments/bent.py", "x = 1\n")
    with pytest.raises(
        UnknownEnvironment, match=r"environments/bent\.py does not define load_environment"
    ) as caught:
        load_environment("bent")
    assert "install" not in str(caught.value)


def test_an_exception_of_the_import_is_reported_with_file_and_line(folder):
    write("environments/bent.py", "import verifiers as vf\n\nROWS = {}['rows']\n\n" + LOADER)
    with pytest.raises(EnvironmentLoadError, match=r"environments/bent\.py:3"):
        load_environment("bent")


def test_a_script_of_the_working_folder_does_not_hide_an_installed_environment(folder):
    site = folder / "site"
    site.mkdir()
    install_toy(site)
    sys.path.insert(0, str(site))
    write("toy.py", "print('a script')\n")
    assert load_environment("toy").env_version == "1.0"


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        (
            "environments/sumz.py",
            r"no file or folder .*environments/sumz\.py.*did you mean 'environments/sums\.py'",
        ),
        ("./nowhere", "no file or folder"),
        ("./empty", "holds no environment"),
        ("sumz", "did you mean 'sums'"),
    ],
)
def test_a_wrong_path_is_named_with_the_nearest(folder, env_id, said):
    write("environments/sums.py")
    (folder / "empty").mkdir()
    with pytest.raises(UnknownEnvironment, match=said):
        load_environment(env_id)


@pytest.mark.parametrize("env_id", ["numpy", "os"])
def test_an_installed_module_that_is_no_environment_is_not_offered_from_the_index(folder, env_id):
    with pytest.raises(UnknownEnvironment, match=f"{env_id}") as caught:
        load_environment(env_id)
    assert "vf-install" not in str(caught.value)


def test_a_folder_of_results_is_no_environment(folder):
    (folder / "environments/plain_words/outputs").mkdir(parents=True)
    with pytest.raises(UnknownEnvironment, match="vf-install plain-words"):
        load_environment("plain-words")


def test_a_version_that_a_local_file_does_not_have_is_refused(folder):
    write("environments/bent.py")
    with pytest.raises((ConfigError, UnknownEnvironment), match=r"has no version") as caught:
        load_environment("bent@9.9")
    assert "vf-install" not in str(caught.value)
