"""Ids lead to environments; a wrong id imports nothing; every failure says whose it is."""

import importlib
import re
import subprocess
import sys
import textwrap

import importlib_metadata
import pytest

import verifiers as vf
from verifiers.environments.registry import (
    EnvironmentInfo,
    list_environments,
    load_environment,
    parse_env_id,
)
from verifiers.errors import (
    ConfigError,
    DatasetError,
    EnvironmentLoadError,
    MissingKeyError,
    UnknownEnvironment,
)

LOADER = """
    import verifiers as vf

    def load_environment(num_train_examples: int = 2, seed: int = 0):
        rows = [{"question": f"{i} + {seed}?", "answer": str(i)} for i in range(num_train_examples)]
        return vf.SingleTurnEnv(dataset=rows)
"""


class Site:
    """A folder on the path where a test puts packages, as an installer would."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = []

    def module(self, name, source=LOADER):
        (self.folder / f"{name}.py").write_text(textwrap.dedent(source))
        self.modules.append(name)
        importlib.invalidate_caches()

    def distribution(self, name, entry_points, version="1.2", summary="A test environment."):
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
        )
        lines = "\n".join(f"{key} = {value}" for key, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[verifiers.environments]\n{lines}\n")
        (info / "top_level.txt").write_text(
            "\n".join(value.split(":")[0] for value in entry_points.values()) + "\n"
        )

    def environment(self, env_id="word-game", source=LOADER, **facts):
        module = "vf_" + env_id.replace("-", "_")
        self.module(module, source)
        self.distribution(f"vf-{env_id}", {env_id: f"{module}:load_environment"}, **facts)
        return module


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    made = Site(tmp_path)
    yield made
    for name in made.modules:
        sys.modules.pop(name, None)


def test_an_environment_is_found_by_its_entry_point(site):
    site.environment()
    env = load_environment("word-game", num_train_examples=3)
    assert len(env.train_table) == 3
    assert (env.env_id, env.env_args, env.env_version) == (
        "word-game",
        {"num_train_examples": 3},
        "1.2",
    )
    assert env.train_table[0].row["task"] == "word-game"


@pytest.mark.parametrize(
    "env_id",
    [
        "vf-word-game",
        "word_game",
        "Word.Game",
        "acme/word-game",
        "word-game@1.2",
        "word-game@latest",
        "acme/vf_word-game@1.2",
    ],
)
def test_other_spellings_of_an_id_lead_to_the_same_environment(site, env_id):
    site.environment()
    assert load_environment(env_id).env_version == "1.2"


def test_the_id_of_the_environment_has_no_version(site):
    site.environment()
    assert load_environment("acme/word-game@1.2").env_id == "acme/word-game"


def test_an_entry_point_named_with_the_prefix_is_found_without_it(site):
    site.module("vf_other")
    site.distribution("vf-other", {"vf-other": "vf_other:load_environment"})
    assert load_environment("other").env_version == "1.2"


def test_what_the_loader_set_itself_stays(site):
    source = """
        import verifiers as vf

        def load_environment(**kwargs):
            return vf.SingleTurnEnv(dataset=[{"question": "q"}], env_id="own", env_args={"a": 1})
    """
    site.environment(source=source)
    env = load_environment("word-game", anything=True)
    assert (env.env_id, env.env_args) == ("own", {"a": 1})


@pytest.mark.parametrize(
    "env_id",
    [
        "",
        "a b",
        "a/b/c",
        "../x",
        "-a",
        "a@",
        "a@1@2",
        "é",
        "x" * 101,
        "o" * 40 + "/a",
        "a\n",
        None,
        "http://a",
    ],
)
def test_ids_outside_the_grammar_are_refused(env_id, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")  # beside which there is no folder x
    with pytest.raises(UnknownEnvironment, match="no environment id"):
        load_environment(env_id)


def test_the_parts_of_an_id():
    parsed = parse_env_id("acme/word-game@1.2.post1+cpu")
    assert (parsed.owner, parsed.name, parsed.version) == ("acme", "word-game", "1.2.post1+cpu")


def test_an_unknown_id_names_the_nearest_and_the_command(site):
    site.environment()
    with pytest.raises(UnknownEnvironment) as caught:
        load_environment("wrd-game")
    assert "did you mean 'word-game'" in str(caught.value)
    assert "vf-install wrd-game" in str(caught.value)
    assert caught.value.suggestions == ["word-game"]
    assert isinstance(caught.value, LookupError)


def test_another_version_is_refused_and_both_are_named(site):
    site.environment()
    with pytest.raises(UnknownEnvironment, match=r"version 9\.9 .* 1\.2 is installed"):
        load_environment("word-game@9.9")


def test_two_distributions_with_one_id_are_named(site):
    site.environment()
    site.module("other_words")
    site.distribution("acme-words", {"word_game": "other_words:load_environment"})
    with pytest.raises(EnvironmentLoadError, match=r"acme-words.*vf-word-game"):
        load_environment("word-game")


def test_a_distribution_and_a_module_of_another_with_one_id_are_named(site):
    """A package of the historical layout beside a registered one of the same id, as
    ``reverse-text`` of 0.1 is."""
    site.environment()
    site.module("word_game")
    site.distribution("word-game", {}, version="0.1.4")
    (site.folder / "word_game-0.1.4.dist-info" / "top_level.txt").write_text("word_game\n")
    with pytest.raises(
        ConfigError,
        match=r"vf-word-game 1\.2 .*word-game 0\.1\.4.*word-game@1\.2 or word-game@0\.1\.4",
    ):
        load_environment("word-game")
    assert load_environment("word-game@0.1.4").env_version == "0.1.4"
    assert load_environment("word-game@1.2").env_version == "1.2"


def test_one_distribution_twice_on_the_path_is_one(site, tmp_path, monkeypatch):
    site.environment()
    again = tmp_path / "again"
    again.mkdir()
    Site(again).distribution("vf-word-game", {"word-game": "vf_word_game:load_environment"})
    monkeypatch.syspath_prepend(again)
    assert load_environment("word-game").env_version == "1.2"


# --- the historical layout ------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["bare_words", "vf_bare_words"])
@pytest.mark.parametrize("env_id", ["bare-words", "vf-bare-words"])
def test_a_module_that_binds_the_loader_is_an_environment(site, module, env_id):
    site.module(module)
    env = load_environment(env_id)
    assert (env.env_id, env.env_version) == (env_id, "")


@pytest.mark.parametrize(
    "source",
    [
        "from vf_helper_words import load_environment",
        "from vf_helper_words import build as load_environment",
        "try:\n    from vf_helper_words import load_environment\nexcept ImportError:\n    raise",
        "import vf_helper_words\nload_environment = vf_helper_words.load_environment",
    ],
)
def test_every_way_to_bind_the_loader_counts(site, source):
    site.module("vf_helper_words", textwrap.dedent(LOADER) + "build = load_environment\n")
    (site.folder / "bound_words.py").write_text(source)
    site.modules.append("bound_words")
    assert load_environment("bound-words").env_id == "bound-words"


def test_the_version_of_a_bare_module_comes_from_its_distribution(site):
    site.module("listed_words")
    site.distribution("listed-words", {}, version="3.0")
    (site.folder / "listed_words-3.0.dist-info" / "top_level.txt").write_text("listed_words\n")
    assert load_environment("listed-words@3.0").env_version == "3.0"
    site.module("bare_words")
    with pytest.raises(UnknownEnvironment, match="unknown"):
        load_environment("bare-words@3.0")


def test_a_wrong_id_imports_nothing(site):  # fault 23: load_environment("os") imported os
    site.module("innocent", "import sys\nsys.imported_innocent = True\ndef load_env(): pass\n")
    site.module("half_written", "def load_environment(:\n")
    for env_id in ("innocent", "half-written", "os", "antigravity", "numpy", "verifiers"):
        with pytest.raises(
            EnvironmentLoadError if env_id == "half-written" else UnknownEnvironment
        ):
            load_environment(env_id)
    assert not hasattr(sys, "imported_innocent")
    script = (
        "import sys, verifiers.environments.registry as r\n"
        "try: r.load_environment('sqlite3')\n"
        "except r.UnknownEnvironment: print('sqlite3' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
        == "False\n"
    )


# --- arguments and failures -----------------------------------------------------------------------


def test_an_argument_the_loader_does_not_take_is_refused_before_it_runs(site):  # fault 12
    site.environment()
    with pytest.raises(ConfigError, match="did you mean 'num_train_examples'"):
        load_environment("word-game", num_train_example=3)


def test_a_required_argument_is_named(site):
    site.environment(
        source=LOADER.replace(
            "num_train_examples: int = 2, seed: int = 0", "seed, num_train_examples=2"
        )
    )
    with pytest.raises(ConfigError, match="needs seed"):
        load_environment("word-game")


# fault 24: it was reported as "not installed"
def test_a_missing_dependency_inside_an_environment_is_shown(site):
    site.environment(source="import a_package_that_is_not_there\n")
    with pytest.raises(EnvironmentLoadError, match="a_package_that_is_not_there") as caught:
        load_environment("word-game")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "is installed" not in str(caught.value)


@pytest.mark.parametrize("error", ["ValueError('bad data')", "SystemExit(3)", "KeyError()"])
def test_the_loaders_own_failure_is_chained(site, error):
    site.environment(source=f"def load_environment():\n    raise {error}\n")
    with pytest.raises(EnvironmentLoadError, match="word-game") as caught:
        load_environment("word-game")
    assert type(caught.value.__cause__).__name__ in error


@pytest.mark.parametrize("kind", [ConfigError, DatasetError, MissingKeyError])
def test_usage_errors_of_the_loader_pass_as_they_are(site, kind):
    site.environment(
        source=(
            "import verifiers as vf\ndef load_environment():\n    raise"
            f" vf.{kind.__name__}('mine')\n"
        )
    )
    with pytest.raises(kind, match=r"^mine$"):
        load_environment("word-game")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def load_environment():\n    return 3\n", "returned int"),
        ("async def load_environment():\n    return 3\n", "returned coroutine"),
        ("load_environment = 3\n", "not a function"),
        ("x = 1\n", "load_environment"),
    ],
)
def test_what_is_no_environment_is_refused(site, source, message):
    site.environment(source=source)
    with pytest.raises(EnvironmentLoadError, match=message):
        load_environment("word-game")


def test_listing_imports_no_environment(site):
    site.environment(
        "word-game", source="import sys\nsys.imported_word_game = True\n", summary="Guess the word."
    )
    site.environment("a-game", source="raise SystemExit\n", summary="Another.")
    listed = [
        info for info in list_environments() if info.distribution in ("vf-word-game", "vf-a-game")
    ]
    assert listed == [
        EnvironmentInfo("a-game", "vf-a-game", "1.2", "Another."),
        EnvironmentInfo("word-game", "vf-word-game", "1.2", "Guess the word."),
    ]
    assert not hasattr(sys, "imported_word_game")


# --- damaged metadata of other packages -----------------------------------------------------------

DAMAGED = {
    "no METADATA": (
        {"entry_points.txt": "[verifiers.environments]\nhurt = hurt:load\n"},
        "METADATA",
        "hurt",
    ),
    "empty METADATA": (
        {"METADATA": "", "entry_points.txt": "[verifiers.environments]\nhurt = hurt:load\n"},
        "METADATA",
        "hurt",
    ),
    "three words": (
        {
            "METADATA": "Metadata-Version: 2.1\nName: hurt\nVersion: 1\n",
            "entry_points.txt": "[verifiers.environments]\nhurt = a b c\n",
        },
        "'a b c' is not module:function",
        "hurt",
    ),
    "a path": (
        {
            "METADATA": "Metadata-Version: 2.1\nName: hurt\nVersion: 1\n",
            "entry_points.txt": "[verifiers.environments]\nhurt = ../../etc:load\n",
        },
        "is not module:function",
        "hurt",
    ),
    "no list": (
        {
            "METADATA": "Metadata-Version: 2.1\nName: hurt\nVersion: 1\n",
            "entry_points.txt": "[verifiers.environments]\nhurt\n[x\n= = =\n",
        },
        "",
        "",
    ),
    "bytes": (
        {
            "METADATA": b"\xff\xfe\x00",
            "entry_points.txt": b"[verifiers.environments]\nhurt = \xff\n",
        },
        "",
        "",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_metadata_of_one_package_costs_its_own_environments_only(
    kind, tmp_path, monkeypatch, capfd
):
    from verifiers.cli.install.command import COMMAND

    files, reason, name = DAMAGED[kind]
    before = [info.id for info in vf.list_environments()]
    about = tmp_path / "hurt-1.dist-info"
    about.mkdir()
    for file, content in files.items():
        (about / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert [info.id for info in vf.list_environments()] == before != []
    assert vf.load_environment("reverse-text", num_train_examples=1) is not None
    assert COMMAND.run(["--list"]) == 0
    out, err = capfd.readouterr()
    assert before[0] in out
    if reason:
        assert f"broken: {name} of {about}: " in err
        assert reason in err
        with pytest.raises(
            vf.EnvironmentLoadError, match=f"'hurt' is declared by {re.escape(str(about))}, but its"
        ):
            vf.load_environment("hurt")
    else:
        with pytest.raises((vf.EnvironmentLoadError, vf.UnknownEnvironment)):
            vf.load_environment("hurt")


def test_damaged_metadata_is_not_read_by_the_plain_functions(tmp_path, monkeypatch):
    """Negative control."""
    about = tmp_path / "hurt-1.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_text("[verifiers.environments]\nhurt = a b c\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    (entry,) = importlib_metadata.entry_points(group="verifiers.environments", name="hurt")
    with pytest.raises(
        (
            ValueError,
            AttributeError,
            LookupError,
            importlib_metadata.PackageNotFoundError,
            TypeError,
        )
    ):
        _ = entry.module, entry.dist.version, entry.dist.metadata["Name"].lower()
