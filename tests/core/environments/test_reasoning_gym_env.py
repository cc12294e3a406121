"""``ReasoningGymEnv`` over real generators: their questions, their scores, and answers that are
programs."""

import contextlib
import math
import os

import pytest

from verifiers.environments.integrations import extras

if not extras.REASONING_GYM.is_installed:
    pytest.skip("reasoning_gym is not installed (the extra 'rg')", allow_module_level=True)

import reasoning_gym

from verifiers.environments.integrations import reasoning_gym_scoring as scoring
from verifiers.environments.integrations.reasoning_gym import ReasoningGymEnv
from verifiers.errors import ConfigError, ScoringError
from verifiers.runtime.processes import ProcessPool
from verifiers.testing import ScriptedClient

in_one_loop = pytest.mark.asyncio(loop_scope="module")  # its worker processes take seconds to start


def rg_env(gym="chain_sum", **parameters):
    return ReasoningGymEnv(gym, **({"num_train_examples": 4, "num_eval_examples": 3} | parameters))


async def run(env, client, **options):
    return await env.a_evaluate(client, "m", max_concurrent=1, **options)


def answering(env, change=str):
    """A client that knows the answer of every question of the evaluation set."""
    answers = {row["question"]: row["answer"] for row in env.get_eval_dataset()}
    return ScriptedClient(
        lambda request: f"<answer>{change(answers[request.prompt[-1]['content']])}</answer>"
    )


# --- rows


def test_the_rows_are_the_generators_own():
    env = rg_env(seed=3)
    theirs = reasoning_gym.create_dataset("chain_sum", seed=3, size=7)
    rows = [*env.get_dataset(), *env.get_eval_dataset()]
    assert [row["question"] for row in rows] == [theirs[i]["question"] for i in range(7)]
    assert [row["answer"] for row in rows] == [theirs[i]["answer"] for i in range(7)]
    assert rows[0]["prompt"][0]["content"].endswith("<answer>\n...\n</answer>")
    assert {row["task"] for row in rows} == {"chain_sum"}


def test_one_seed_gives_one_set_of_rows_and_another_another():
    assert list(rg_env(seed=1).get_dataset()) == list(rg_env(seed=1).get_dataset())
    assert rg_env(seed=1).get_dataset()["question"] != rg_env(seed=9).get_dataset()["question"]


def test_a_mixture_draws_by_weight_and_passes_configurations_on():
    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    env = rg_env(
        [{"name": "chain_sum", "weight": 9, "config": terms}, {"name": "leg_counting"}],
        num_train_examples=60,
    )
    tasks = env.get_dataset()["task"]
    assert 40 < tasks.count("chain_sum") < 60
    assert {"chain_sum", "leg_counting"} == set(tasks)
    sums = [row["question"] for row in env.get_dataset() if row["task"] == "chain_sum"]
    assert all(question.count("+") + question.count("- ") == 1 for question in sums)
    assert set(
        rg_env(["chain_sum", "leg_counting"], num_train_examples=20).get_dataset()["task"]
    ) == set(tasks)


# --- scores


@in_one_loop
@pytest.mark.parametrize("gym", ["chain_sum", "spell_backward", ["chain_sum", "leg_counting"]])
async def test_the_score_is_the_generators_own(gym):
    env = rg_env(gym)
    assert (await run(env, answering(env)))["rewards"] == [1.0] * 3
    wrong = await run(env, answering(env, change=lambda answer: "nonsense"))
    assert all(reward < 1 for reward in wrong["rewards"])
    assert wrong["errors"] == [None] * 3


@in_one_loop
async def test_partial_credit_and_answers_without_a_tag_are_judged_by_the_generator_too():
    env = rg_env("spell_backward")
    row = env.get_eval_dataset()[0]
    generator = reasoning_gym.create_dataset("spell_backward", seed=0, size=7)
    entry = generator[row["info"]["index"]]
    nearly = row["answer"][:-1] + "x"
    expected = generator.score_answer(nearly, entry)
    results = await run(env, ScriptedClient([f"<answer>{nearly}</answer>"]), num_examples=1)
    assert results["rewards"] == [expected]
    assert (await run(env, ScriptedClient(["no tag"]), num_examples=1))["rewards"] == [0.0]


@in_one_loop
async def test_an_answer_that_a_scorer_stumbles_over_is_worth_nothing():
    config = {"seed": 0, "size": 4}
    generator = reasoning_gym.create_dataset("prime_factorization", **config)
    with pytest.raises(ValueError, match="invalid literal"):
        generator.score_answer("seven", generator[0])
    assert scoring.plain_score("prime_factorization", config, generator[0], "seven") == 0.0
    results = await run(rg_env("prime_factorization"), ScriptedClient(["<answer>seven</answer>"]))
    assert results["rewards"] == [0.0] * 3
    # there the scorer is at fault, whatever the answer
    with pytest.raises(ValueError, match="invalid literal"):
        scoring.plain_score(
            "prime_factorization", config, generator[0] | {"answer": "odd"}, "seven"
        )


@in_one_loop
async def test_a_question_that_the_generator_does_not_ask_again_makes_the_reward_unknown():
    env = rg_env()
    row = env.get_eval_dataset()[0] | {"question": "Another?"}
    results = await env.a_generate([row], ScriptedClient(["<answer>1</answer>"]), "m")
    assert math.isnan(results["rewards"][0])
    assert "PYTHONHASHSEED" in results["errors"][0]["message"]


# --- answers that are programs

ATTACKS = ("spiral_matrix", "countdown")  # one evaluates the answer itself, one has sympy do it


def attack(name, target):
    config = {"seed": 0, "size": 4}
    entry = reasoning_gym.create_dataset(name, **config)[0]
    answer = f"__import__('os').system('touch {target}')"
    return {"name": name, "config": config, "entry": entry, "answer": answer}


def test_answers_that_are_programs_are_not_run(tmp_path):
    with contextlib.closing(ProcessPool(1)) as unguarded:  # negative control
        for name in ATTACKS:
            unguarded.call(
                scoring.plain_score, attack(name, tmp_path / f"{name}-without"), 60.0, "attack"
            )
    with contextlib.closing(ProcessPool(1, scoring.guard)) as guarded:
        for name in ATTACKS:
            score = guarded.call(
                scoring.plain_score, attack(name, tmp_path / f"{name}-with"), 60.0, "attack"
            )
            assert score < 0.1
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}-without" for name in ATTACKS}


def test_the_guard_lets_readers_read_and_refuses_the_rest(tmp_path):
    scoring._refuse("open", (__file__, "r", os.O_RDONLY))
    scoring._refuse("import", ("math", None, None, None, None))
    for event, arguments in {
        "open": (str(tmp_path / "x"), "w", 0),
        "os.system": (b"true",),
        "subprocess.Popen": ("true", ["true"], None, None),
        "socket.connect": (None, ("127.0.0.1", 80)),
        "os.remove": ("x", -1),
    }.items():
        with pytest.raises(PermissionError):
            scoring._refuse(event, arguments)


@in_one_loop
async def test_an_answer_that_never_ends_is_worth_nothing_and_its_process_is_killed(monkeypatch):
    monkeypatch.setattr(scoring, "LIMIT_S", 2.0)
    config = {"seed": 0, "size": 4}
    entry = reasoning_gym.create_dataset("countdown", **config)[0]
    assert await scoring.score("countdown", config, entry, "9**9**9**9") < 0.1


@in_one_loop
async def test_a_scorer_that_fails_on_its_own_answer_makes_the_reward_unknown():
    config = {"seed": 0, "size": 4}
    entry = reasoning_gym.create_dataset("prime_factorization", **config)[0] | {"answer": "odd"}
    with pytest.raises(ScoringError, match="prime_factorization"):
        await scoring.score("prime_factorization", config, entry, "seven")


# --- settings


@pytest.mark.parametrize(
    ("gym", "said"),
    [
        ("chain_sums", 'did you mean "chain_sum"'),
        ([], "give a generator's name"),
        ([3], "gym lists 3"),
        ([{"weight": 1}], "has no name"),
        ([{"name": "chain_sum", "wait": 1}], "did you mean 'weight'"),
        ([{"name": "chain_sum", "weight": 0}], "must be above 0"),
        (["chain_sum", "chain_sum"], "twice"),
        ([{"name": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}}], "refuses its config"),
        ([{"name": "chain_sum", "config": {"colour": 2}}], "refuses its config.*colour"),
    ],
)
def test_a_mixture_that_cannot_work_is_refused_at_construction(gym, said):
    with pytest.raises(ConfigError, match=said):
        rg_env(gym)


def test_numbers_of_examples_are_checked():
    with pytest.raises(ConfigError, match="-1; it must be 0 or more"):
        rg_env(num_train_examples=-1)
    with pytest.raises(ConfigError, match="at least one"):
        rg_env(num_train_examples=0, num_eval_examples=0)
