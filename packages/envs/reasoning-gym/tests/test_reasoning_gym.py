"""reasoning-gym: real generators through the package; skipped where Reasoning Gym is
not installed."""

import pytest

import verifiers as vf
from verifiers.environments.integrations import extras

if not extras.REASONING_GYM.is_installed:
    pytest.skip("reasoning-gym is not installed (the extra 'rg')", allow_module_level=True)

from verifiers.testing import ScriptedClient, run_rollout_sync
from vf_reasoning_gym import DEFAULT_GENERATORS, load_environment


def answering(env):
    """A player that gives each generator's own answer."""
    answers = {
        row["question"]: f"<answer>{row['answer']}</answer>" for row in env.get_eval_dataset()
    }
    return ScriptedClient(lambda request: answers[request.prompt[-1]["content"]])


def test_an_oracle_earns_one_in_every_default_generator():
    env = load_environment(num_train_examples=5, num_eval_examples=40)
    results = env.evaluate(answering(env), "scripted")
    assert list(results["reward"]) == [1.0] * 40
    assert set(results["task"]) == set(DEFAULT_GENERATORS)


def test_a_wrong_answer_or_none_earns_less():
    env = load_environment("chain_sum", num_train_examples=2, num_eval_examples=2)
    row = env.get_eval_dataset()[0]
    assert run_rollout_sync(env, ScriptedClient(["<answer>no idea</answer>"]), row)["reward"] < 0.1
    # without the tags
    assert run_rollout_sync(env, ScriptedClient([row["answer"]]), row)["reward"] < 0.1
    assert (
        run_rollout_sync(env, ScriptedClient([f"<answer>{row['answer']}</answer>"]), row)["reward"]
        == 1.0
    )


def test_the_last_answer_counts_as_in_the_other_environments():
    env = load_environment("chain_sum", num_train_examples=2, num_eval_examples=2)
    row = env.get_eval_dataset()[0]
    for text, is_right in (
        ("<answer>1</answer>, no: <answer>{}</answer>", True),
        ("<answer>{}</answer>, no: <answer>1</answer>", False),
        ("<think><answer>1</answer></think><answer>{}</answer>", True),
    ):
        state = run_rollout_sync(env, ScriptedClient([text.format(row["answer"])]), row)
        assert (state["reward"] == 1.0) is is_right


def test_problems_are_the_seeds_and_held_out_ones_are_not_trained_on():
    def questions(seed):
        env = load_environment(num_train_examples=100, num_eval_examples=20, seed=seed)
        return env.get_dataset()["question"][:], env.get_eval_dataset()["question"][:]

    train, held_out = questions(1)
    assert (train, held_out) == questions(1)
    assert train != questions(2)[0]
    assert not set(train) & set(held_out)


def test_generators_can_be_chosen_weighted_and_configured():
    env = load_environment(
        gym=[
            {"name": "chain_sum", "weight": 9.0, "config": {"max_terms": 2}},
            {"name": "leg_counting", "weight": 1.0},
        ],
        num_train_examples=60,
    )
    tasks = env.get_dataset()["task"][:]
    assert tasks.count("chain_sum") > 2 * tasks.count("leg_counting") > 0
    assert "<answer>" in env.system_prompt
    assert not load_environment("chain_sum", system_prompt="").system_prompt


def test_it_loads_by_its_id_and_is_clean():
    env = vf.load_environment("reasoning-gym", gym="leg_counting", num_train_examples=5)
    assert isinstance(env, vf.ReasoningGymEnv)
    assert env.gym == "leg_counting"
    report = vf.check_environment("reasoning-gym", n=2)
    assert report.ok, report
    assert not report.warnings, report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gym": "chain_sums"}, "chain_sum"),
        ({"gym": []}, "gym"),
        ({"gym": [{"name": "chain_sum", "weight": 0}]}, "weight"),
        ({"num_train_examples": -1}, "number of examples"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(vf.ConfigError, match=message):
        load_environment(**arguments)
