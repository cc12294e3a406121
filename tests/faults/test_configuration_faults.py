"""Promise: a misspelt setting stops the run before the first request and names the right one.

Every wrong word of a command line at once: ``cli/test_errors_vf_eval.py``. Ids and packages:
``core/environments/test_registry.py``.
"""

import importlib
import sys

import pytest

import verifiers as vf
from support.small_envs import single_turn
from verifiers.testing import FakeServer, ScriptedClient


def test_misspelt_keywords_in_python_are_named_all_at_once_before_any_request():
    client = ScriptedClient("x")
    with pytest.raises(vf.ConfigError) as caught:
        single_turn(3).evaluate(
            client, "m", max_concurent=4, temprature=1, rolouts_per_example=2, num_exampels=5
        )
    for wrong, right in (
        ("max_concurent", "max_concurrent"),
        ("temprature", "temperature"),
        ("rolouts_per_example", "rollouts_per_example"),
        ("num_exampels", "num_examples"),
    ):
        assert f"{wrong!r} (did you mean {right!r}?)" in str(caught.value)
    assert client.requests == []


def test_taken_as_they_come_misspelt_keywords_change_nothing_and_say_nothing():
    """Negative control: what ``**options`` does by itself."""

    def evaluate(max_concurrent=1024, **options):
        return max_concurrent

    assert evaluate(max_concurent=4) == 1024


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"max_concurrent": "4"},
            "max_concurrent must be a whole number of at least 1, or -1 for as many as possible, not '4'",
        ),
        (
            {"max_concurrent": 0},
            "max_concurrent must be a whole number of at least 1, or -1 for as many as possible, not 0",
        ),
        (
            {"rollout_timeout_s": "5m"},
            "rollout_timeout_s must be a number of seconds above 0, or none for no bound, not '5m'",
        ),
        (
            {"rollouts_per_example": True},
            "rollouts_per_example must be a whole number of at least 1, not True",
        ),
        ({"push_to_hub": True}, "push_to_hub needs hub_name"),
        ({"sampling_args": {"n": 4}}, "must be 1: ask for siblings with rollouts_per_example"),
        ({"rollouts_per_example": 2, "num_generations": 4}, "rollouts_per_example"),
    ],
)
def test_a_wrong_type_range_unit_or_contradiction_is_refused_with_value_and_range(options, said):
    client = ScriptedClient("x")
    with pytest.raises(vf.ConfigError) as caught:
        single_turn(3).evaluate(client, "m", **options)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert client.requests == []


def test_unreadable_toml_wrong_types_and_contradictions_of_a_file_are_exit_2_by_line(
    vf_eval, eval_folder
):
    with FakeServer("x", models=["m"]) as server:
        for text, said in (
            (
                'model = "m"\nnum_examples = x',
                "e.toml is not valid TOML: Invalid value (at line 2, column 16)",
            ),
            ('[[eval]]\nid = "toy"\ntimeout = "5"', "e.toml:3: timeout in [[eval]]"),
            ('[[eval]]\nid = "toy"\nenv_ids = ["toy"]', "has id and env_ids; give one of them"),
        ):
            (eval_folder / "e.toml").write_text(text)
            ran = vf_eval("e.toml", "-b", server.url)
            assert ran.code == 2
            assert said in ran.paragraph
        assert server.count == 0


def test_read_without_a_schema_the_same_files_are_fine():
    """Negative control."""
    import tomllib

    assert (
        tomllib.loads('[[eval]]\nid = "toy"\ntimeout = "5"\nnum_example = 3')["eval"][0][
            "num_example"
        ]
        == 3
    )


# the fourth has a Cyrillic letter
HOSTILE_IDS = ["os", "../../x", "a;b", "tоy", "x" * 300, "toy\n", "toyy"]


@pytest.mark.parametrize("env_id", HOSTILE_IDS, ids=lambda env_id: repr(env_id)[:12])
def test_a_hostile_or_misspelt_id_is_refused_and_nothing_is_imported(eval_folder, env_id):
    before = set(sys.modules)
    with pytest.raises(vf.UnknownEnvironment) as caught:
        vf.load_environment(env_id)
    assert {
        name
        for name in set(sys.modules) - before
        if not name.startswith(("verifiers", "importlib"))
    } == set()
    assert "toy" not in sys.modules
    if env_id == "toyy":
        assert "did you mean 'toy'" in str(caught.value)


def test_imported_by_name_any_module_is_run():
    """Negative control: an id that is handed to the import system."""
    sys.modules.pop("this", None)
    assert importlib.import_module("this").__name__ == "this"
    assert "this" in sys.modules


BROKEN = {
    "missing dependency": (
        "import not_there_at_all\n",
        "No module named 'not_there_at_all'",
        ModuleNotFoundError,
    ),
    "raises": (
        "def load_environment(): raise ValueError('no data today')\n",
        "no data today",
        ValueError,
    ),
    "returns a number": ("def load_environment(): return 3\n", "returned int", type(None)),
}


def second_distribution(folder):
    about = folder / "acme_toys-2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-toys\nVersion: 2.0\n")
    (about / "entry_points.txt").write_text(
        "[verifiers.environments]\ntoy = acme_toys:load_environment\n"
    )
    importlib.invalidate_caches()


@pytest.mark.parametrize(("source", "said", "cause"), BROKEN.values(), ids=BROKEN)
def test_a_broken_environment_shows_the_real_error_and_two_of_one_id_are_both_named(
    eval_folder, source, said, cause
):
    (eval_folder / "toy.py").write_text(source)
    with pytest.raises(vf.EnvironmentLoadError) as caught:
        vf.load_environment("toy")
    assert said in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)
    second_distribution(eval_folder)
    with pytest.raises(vf.EnvironmentLoadError, match=r"acme-toys.*vf-toy"):
        vf.load_environment("toy")


def test_asked_in_the_naive_way_a_broken_environment_is_not_installed_and_one_of_two_wins(
    eval_folder,
):
    """Negative control: what an import in a ``try`` and the first entry point say."""
    from importlib.metadata import entry_points

    (eval_folder / "toy.py").write_text(BROKEN["missing dependency"][0])
    try:
        importlib.import_module("toy")
    except ImportError:
        is_refused = False
    assert not is_refused
    second_distribution(eval_folder)
    claims = entry_points(group="verifiers.environments", name="toy")
    assert len({claim.value for claim in claims}) == 2
    assert next(iter(claims)).name == "toy"
