"""``GymEnv`` over real environments of Gymnasium, and over the older form of ``step`` and
``reset``."""

import math

import pytest

from verifiers.environments.integrations import extras

if not extras.GYM.is_installed:
    pytest.skip("gymnasium is not installed (the extra 'gym')", allow_module_level=True)

import gymnasium

from verifiers.environments.group import EnvGroup
from verifiers.environments.integrations.gym import EpisodicSumRubric, GymEnv
from verifiers.errors import ConfigError
from verifiers.parsers import XMLParser
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient

RIGHT, DOWN = "2", "1"
TO_THE_GOAL = [DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT]
made = []


class Counter:
    """An environment of the older form: four values of ``step``, an observation of ``reset``,
    ``seed()``."""

    def __init__(self, goal=3):
        self.goal, self.closed = goal, False
        made.append(self)

    def seed(self, seed):
        self.start = seed

    def reset(self):
        self.at = self.start
        return f"at {self.at}"

    def step(self, action):
        if action == "crash":
            raise RuntimeError("the counter is stuck")
        self.at += int(action)
        return f"at {self.at}", 0.5, self.at >= self.goal, {"at": self.at}

    def close(self):
        self.closed = True


def frozen_lake(**parameters):
    parameters.setdefault("env_kwargs", {"is_slippery": False})
    return GymEnv("FrozenLake-v1", num_train_episodes=2, num_eval_episodes=2, **parameters)


def counter(**parameters):
    parameters = {
        "num_train_episodes": 1,
        "num_eval_episodes": 1,
        "action_parser": str,
    } | parameters
    return GymEnv(Counter, **parameters)


def run(env, *replies, **options):
    return env.evaluate(ScriptedClient(list(replies)), "m", num_examples=1, **options)


def texts(results):
    return [message["content"] for message in results["completions"][0]]


# --- real environments


def test_the_model_walks_over_the_frozen_lake_to_the_goal():
    env = frozen_lake(
        system_prompt="Answer with 0 to 3.",
        obs_to_text=lambda observation: f"You are on {observation}.",
    )
    results = run(env, *TO_THE_GOAL)
    assert results["prompts"][0] == [
        {"role": "system", "content": "Answer with 0 to 3."},
        {"role": "user", "content": "You are on 0."},
    ]
    assert texts(results)[1::2] == [f"You are on {field}." for field in (4, 8, 9, 10, 14, 15)]
    assert results["stop_conditions"] == ["has_final_env_response"]
    assert results["rewards"] == [1.0]
    steps = results["states"][0]["trajectory"]
    assert [step["reward"] for step in steps] == [0, 0, 0, 0, 0, 1]
    info = results["states"][0]["gym_info"]
    assert steps[-1]["extras"] == {"terminated": True, "truncated": False, "gym_info": info}
    assert (list(info), results["states"][0]["gym_done"]) == (["prob"], True)


def test_the_row_decides_the_episode_and_training_and_evaluation_rows_differ():
    env = GymEnv("CartPole-v1", num_train_episodes=3, num_eval_episodes=2, seed=40)
    train, evaluation = env.get_dataset(), env.get_eval_dataset()
    assert [row["info"]["seed"] for row in train] == [40, 41, 42]
    assert [row["info"]["seed"] for row in evaluation] == [43, 44]
    # "left" ends the episode at once
    results = env.evaluate(ScriptedClient(["left"]), "m", rollouts_per_example=2)
    first, sibling, second, _ = [prompt[0]["content"] for prompt in results["prompts"]]
    assert first == sibling != second
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=43)
    assert first == str(expected)


async def test_a_row_without_a_seed_of_its_own_is_dealt_seed_plus_example_id():
    env = GymEnv("CartPole-v1", seed=40)
    row = {"prompt": "Balance the pole.", "example_id": 2}
    state = await env.a_rollout(row, ScriptedClient(["none"]), "m")
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=42)
    assert state["prompt"] == [{"role": "user", "content": f"Balance the pole.\n\n{expected}"}]


def test_every_action_counts_up_to_the_bound_of_steps():
    env = GymEnv("CartPole-v1", num_train_episodes=0, num_eval_episodes=1, max_episode_steps=3)
    results = run(env, "0", "1")
    assert results["rewards"] == [3.0]
    assert results["states"][0]["trajectory"][-1]["extras"] == {
        "terminated": False,
        "truncated": True,
        "gym_info": {},
    }
    limited = GymEnv("CartPole-v1", num_train_episodes=0, num_eval_episodes=1, max_turns=3)
    assert run(limited, "0", "1")["rewards"] == [3.0]  # the last turn's action is taken, too


def test_rollouts_play_apart_from_each_other():
    env = frozen_lake()
    client = ScriptedClient(
        lambda request: TO_THE_GOAL[sum(m["role"] == "assistant" for m in request.prompt)]
    )
    results = env.evaluate(client, "m", rollouts_per_example=3)
    assert results["rewards"] == [1.0] * 6
    assert len({id(state["gym_env"]) for state in results["states"]}) == 6


# --- the older form


def test_four_values_of_step_and_a_bare_observation_of_reset_are_understood():
    made.clear()
    results = run(counter(seed=0, num_train_episodes=0), "1", "1", "1")
    assert results["prompts"][0][-1]["content"] == "at 0"
    assert texts(results)[1::2] == ["at 1", "at 2", "at 3"]
    assert results["rewards"] == [1.5]
    assert results["states"][0]["gym_info"] == {"at": 3}
    assert [env.closed for env in made] == [True]


def test_another_number_of_values_is_the_environments_fault():
    class Odd(Counter):
        def step(self, action):
            return "at", 0.0, True

    results = run(GymEnv(Odd, num_train_episodes=1, num_eval_episodes=0, action_parser=str), "1")
    assert "step() returned 3 values" in results["errors"][0]["message"]
    assert math.isnan(results["rewards"][0])


def test_in_a_group_a_row_keeps_its_seed():
    group = EnvGroup([counter(seed=9, num_train_episodes=0), counter(seed=1, num_train_episodes=0)])
    results = group.evaluate(ScriptedClient(["9"]), "m")
    assert [prompt[0]["content"] for prompt in results["prompts"]] == ["at 9", "at 1"]
    assert results["rewards"] == [0.5, 0.5]


# --- what cannot be done


def test_an_action_that_cannot_be_read_ends_the_episode_and_is_scored():
    results = run(frozen_lake(), DOWN, "somewhere warm")
    assert results["errors"] == [None]
    assert results["rewards"] == [0.0]
    assert results["stop_conditions"] == ["has_final_env_response"]
    assert "could not be read" in texts(results)[-1]
    last = results["states"][0]["trajectory"][-1]
    assert last["reward"] == 0.0
    assert "ValueError" in last["extras"]["action_error"]


def test_what_was_earned_before_an_unreadable_action_counts():
    def parse(text):
        return {"go": "1"}[text]

    assert run(counter(action_parser=parse), "go", "stay")["rewards"] == [0.5]


def test_an_action_outside_the_action_space_is_the_models_doing():
    results = run(frozen_lake(), "7")
    assert results["errors"] == [None]
    assert "7 is not in Discrete(4)" in texts(results)[-1]


def test_what_the_environment_raises_is_its_fault_and_not_scored():
    made.clear()
    results = run(counter(), "crash")
    (error,) = results["errors"]
    assert error["error"] == "EnvironmentFault"
    assert (
        "the step of the gym environment raised RuntimeError: the counter is stuck"
        in error["message"]
    )
    assert math.isnan(results["rewards"][0])
    assert made[-1].closed


# --- the author's callables


def test_parsers_of_text_and_observations_may_be_async_and_the_rubric_the_authors_own():
    async def parse(text):
        return XMLParser(["move"]).parse(text).move

    async def show(observation):
        return [{"type": "text", "text": observation}]

    def long_enough(state) -> float:
        return float(len(state["trajectory"]) > 2)

    env = counter(
        action_parser=parse, obs_to_text=show, rubric=Rubric([long_enough]), num_train_episodes=0
    )
    results = run(env, "<move>1</move>")
    assert results["prompts"][0][-1]["content"] == [{"type": "text", "text": "at 0"}]
    assert results["rewards"] == [1.0]


def test_the_default_action_is_what_the_parser_finds():
    env = frozen_lake(parser=XMLParser(["action"], answer_field="action"))
    assert run(env, "right? no: <action>1</action>")["completions"][0][1]["content"] == "4"


def test_completion_mode_plays_in_one_text():
    results = run(counter(message_type="completion", num_train_episodes=0), "1")
    assert results["prompts"] == ["at 0"]
    assert results["completions"] == ["1at 11at 21at 3"]


def test_the_sum_of_step_rewards_stands_beside_functions_of_ones_own():
    def brave(state) -> float:
        return 1.0

    assert EpisodicSumRubric(funcs=[brave]).get_reward_func_names() == ["brave", "sum_step_rewards"]


# --- settings


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"env_cls": "CartPoole-v1"}, "no environment 'CartPoole-v1'.*CartPole"),
        ({"env_cls": 3}, "env_cls is 3"),
        ({"env_cls": Counter, "max_episode_steps": 0}, "max_episode_steps is 0"),
        ({"env_cls": Counter, "num_train_episodes": -1}, "-1; it must be 0 or more"),
        ({"env_cls": Counter, "num_train_episodes": 0, "num_eval_episodes": 0}, "at least one"),
        ({"env_cls": Counter, "max_episode_step": 3}, "did you mean 'max_episode_steps'"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_construction(parameters, said):
    with pytest.raises(ConfigError, match=said):
        GymEnv(**parameters)
