"""A recipe replaces defaults, loses to what is given, and is what the page says."""

from pathlib import Path

import pytest

import verifiers as vf
from support.training import small_trainer, toy_env
from verifiers.errors import ConfigError
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.recipes import NAMES, RECIPES

PAGE = Path(__file__).parents[3] / "docs" / "train" / "recipes.md"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_values_and_its_config_is_valid(name):
    config = RLConfig(recipe=name)
    assigned = RLConfig()
    assigned.recipe = name
    for config_made in (config, assigned, config.private_copy()):
        config_made.resolve()
        assert {
            setting: getattr(config_made, setting) for setting in RECIPES[name].settings
        } == RECIPES[name].settings
        assert config_made.max_steps % config_made.steps_per_batch == 0


def test_what_is_given_wins_and_without_a_recipe_the_defaults_return():
    config = RLConfig(recipe="best_of_group", updates_per_batch=2, advantage="mean")
    config.num_iterations = 3
    config.resolve()
    assert (config.loss, config.advantage) == ("reinforce", "mean")
    assert (config.updates_per_batch, config.num_iterations, config.max_steps) == (2, 3, 504)
    config.recipe = None
    config.resolve()
    assert (config.loss, config.updates_per_batch, config.num_iterations) == ("cispo", 2, 3)

    config = RLConfig(recipe="best_of_group")
    config.recipe = None
    config.resolve()
    default = RLConfig()
    default.resolve()
    assert {name: getattr(config, name) for name in NAMES} == {
        name: getattr(default, name) for name in NAMES
    }
    assert config.max_steps == default.max_steps == 500


def test_the_loss_of_a_recipe_brings_what_its_name_means():
    config = RLConfig(recipe="clipped_updates", loss="dr_grpo")
    config.resolve()
    assert (config.loss, config.aggregation, config.advantage) == (
        "dr_grpo",
        "constant_length",
        "mean_std",
    )


def test_the_page_has_the_table():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    expected = [
        f"| `{name}` | "
        + ", ".join(
            f'`{key}` "{v}"' if isinstance(v, str) else f"`{key}` {v}"
            for key, v in recipe.settings.items()
        )
        + f" | {recipe.source} |"
        for name, recipe in RECIPES.items()
    ]
    assert rows[1 : 1 + len(expected)] == expected


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ConfigError, match='did you mean "best_of_group"'):
        RLConfig(recipe="best_of_grop").resolve()


def test_an_environments_own_advantages_do_not_replace_those_of_a_recipe(tmp_path):
    class OwnRubric(vf.Rubric):
        @vf.advantage
        def all_of_them(self, states):
            return [float(n) for n, _ in enumerate(states)]

    env = toy_env()
    env.rubric = OwnRubric(funcs=env.rubric.funcs)
    settings = {"updates_per_batch": 1, "num_iterations": 1}
    assert small_trainer(tmp_path, env, recipe="best_of_group", **settings).args.advantage == "best"
    assert small_trainer(tmp_path, env).args.advantage == "environment"  # negative control
