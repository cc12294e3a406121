"""The snippets of the first guides, in their own words: evaluation, data, rewards (trainers:
``tests/trainer``)."""

import math
import time

import numpy as np
import openai
import pytest

import verifiers as vf
from support.small_envs import sums
from verifiers.envs import SingleTurnEnv
from verifiers.parsers import XMLParser
from verifiers.rubrics import JudgeRubric, Rubric, RubricGroup
from verifiers.testing import ByteTokenizer, FakeServer

PACKAGE = """
import verifiers as vf

def load_environment(dataset_name="math", num_train_examples=-1):
    rows = [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(min(num_train_examples, 5))]
    def correct_answer(completion, answer):
        return float(completion[-1]["content"] == answer)
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[correct_answer]))
"""


def solve(request):
    return str(int(request.prompt[-1]["content"].split()[0]) + 1)


@pytest.fixture
def server(monkeypatch):
    """What ``OPENAI_BASE_URL`` names; it solves the sums."""
    with FakeServer(solve, models=("gpt-4.1-mini", "gpt-3.5-turbo")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "dummy")
        yield server


@pytest.fixture
def vf_env(tmp_path, monkeypatch):
    (tmp_path / "guide_math.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    return vf.load_environment("guide-math", dataset_name="math", num_train_examples=1000)


def correct_answer(completion, answer):
    return float(completion[-1]["content"] == answer)


@pytest.fixture
def env():
    rows = [{**row, "difficulty": "hard" if n else "easy"} for n, row in enumerate(sums(3))]
    return SingleTurnEnv(
        dataset=rows,
        parser=XMLParser(["reasoning", "answer"]),
        rubric=Rubric(funcs=[correct_answer]),
    )


# --- evaluation and training guide


def test_evaluate_and_generate(server, vf_env, capsys):
    client = openai.OpenAI()
    results = vf_env.evaluate(
        client=client, model="gpt-4.1-mini", num_examples=100, rollouts_per_example=3
    )
    print(f"Average reward: {sum(results['rewards']) / len(results['rewards'])}")
    print(f"Correct answers: {sum(1 for r in results['rewards'] if r > 0.8)}")
    assert capsys.readouterr().out == "Average reward: 1.0\nCorrect answers: 15\n"
    results = vf_env.generate(client=client, model="gpt-4.1-mini", n_samples=12)
    assert len(vf_env.make_dataset(results)) == 12
    with pytest.raises(vf.ConfigError, match="hub_name"):
        vf_env.make_dataset(results, push_to_hub=True)


def test_environments_as_reward_functions(server, vf_env):
    tokenizer = ByteTokenizer()
    results = vf_env.generate(client=openai.OpenAI(), model="gpt-4.1-mini", n_samples=4)
    processed = vf_env.process_env_results(
        prompts=results["prompts"],
        completions=results["completions"],
        states=results["states"],
        rewards=results["rewards"],
        processing_class=tokenizer,
    )
    batches = list(processed)
    assert len(batches) == 4
    assert all(batch["rewards"] == 1.0 and batch["completion_ids"] for batch in batches)


def test_any_compatible_client(server, vf_env):
    client = openai.OpenAI(base_url=server.url, api_key="your-key")
    results = vf_env.evaluate(client=client, model="gpt-4.1-mini", num_examples=2)
    assert results["rewards"] == [1.0, 1.0]


# --- training guide


def test_online_generation(server, env):
    completions, rewards = [], []
    for prompt in env.sample_prompts(4):
        completion, _ = env.rollout(
            client=openai.OpenAI(),
            model="gpt-3.5-turbo",
            prompt=prompt["prompt"],
            answer=prompt["answer"],
            temperature=0.7,
        )
        score = env.rubric.score_rollout_sync(
            prompt=prompt["prompt"], completion=completion, answer=prompt["answer"], state={}
        )
        completions.append(completion)
        rewards.append(score["reward"])
    assert rewards == [1.0] * 4
    assert server.hits[0].json()["temperature"] == 0.7


def test_offline_generation(server, env):
    prompts, completions, rewards = env.generate(
        model="gpt-3.5-turbo", n_samples=10, temperature=0.8, batch_size=100, max_concurrent=10
    )
    assert len(prompts) == len(completions) == len(rewards) == 10


def test_curriculum_filters_the_dataset(env):
    assert len([d for d in env.dataset if d.get("difficulty", "easy") == "easy"]) == 1
    assert len([d for d in env.dataset if d.get("difficulty", "easy") == "hard"]) == 2
    without = SingleTurnEnv(dataset=sums(3))
    assert len([d for d in without.dataset if d.get("difficulty", "easy") == "easy"]) == 3


def test_weights_of_several_rubrics_change_and_return(server):
    def length_penalty(completion):
        return -float(len(completion[-1]["content"]))

    def clarity_reward(completion):
        return 0.5

    def formality_reward(completion):
        return 0.5

    combined = RubricGroup(
        [
            Rubric(funcs=[correct_answer], weights=[1.0]),
            Rubric(funcs=[length_penalty], weights=[0.5]),
            Rubric(funcs=[clarity_reward, formality_reward], weights=[0.7, 0.3]),
        ]
    )
    env = SingleTurnEnv(dataset=sums(2), rubric=combined)
    original = env.rubric.get_group_weights()
    env.rubric.set_group_weights([1.0, 0.0, 0.0])
    weighted = env.evaluate(model="gpt-4.1-mini")["rewards"]
    env.rubric.set_group_weights(original)
    assert weighted == [1.0, 1.0]
    assert env.evaluate(model="gpt-4.1-mini")["rewards"] == [1.0, 1.0]
    assert original == [1.0, 1.0, 1.0]


def test_rewards_from_several_judges(server):
    template = (
        "Evaluate this response for helpfulness and accuracy.\n\nQuestion: {prompt}\nResponse:"
        " {completion}\n\nScore from 0-10 and explain your reasoning.\n\n<reasoning>\n[Your"
        " evaluation here]\n</reasoning>\n<score>\n[0-10]\n</score>"
    )
    with FakeServer(
        lambda request: f"<score>\n{4 if request.model == 'gpt-4' else 8}\n</score>"
    ) as judges:
        openai_client = openai.OpenAI(base_url=judges.url, api_key="k")
        rubric = JudgeRubric(
            judge_models=["gpt-4", "claude-2"],
            aggregation="mean",
            client=openai_client,
            template=template,
        )
        results = SingleTurnEnv(dataset=sums(1), rubric=rubric).evaluate(model="gpt-4.1-mini")
    assert results["rewards"] == pytest.approx([0.6])


def test_evaluation_during_training(env):
    prompts = [row["prompt"] for row in env.dataset]
    answers = [row["answer"] for row in env.dataset]
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    rewards = env.rubric.score_rollouts(
        prompts=prompts, completions=completions, answers=answers, states=[{} for _ in prompts]
    )
    assert sum(rewards["reward"]) / len(prompts) == 1.0


def test_tracking_several_metrics(server, env):
    metrics = {
        "reward": [],
        "format_compliance": [],
        "answer_accuracy": [],
        "response_length": [],
        "inference_time": [],
    }
    for sample in env.dataset:
        start_time = time.time()
        completion, _ = env.rollout(
            model="gpt-4.1-mini", prompt=sample["prompt"], answer=sample["answer"]
        )
        scores = env.rubric.score_rollout_sync(
            prompt=sample["prompt"], completion=completion, answer=sample["answer"], state={}
        )
        metrics["reward"].append(scores["reward"])
        metrics["format_compliance"].append(scores.get("format", 0))
        metrics["answer_accuracy"].append(scores.get("correct_answer", 0))
        metrics["response_length"].append(len(completion))
        metrics["inference_time"].append(time.time() - start_time)
    means = {metric: np.mean(values) for metric, values in metrics.items()}
    assert (means["reward"], means["answer_accuracy"], means["format_compliance"]) == (
        1.0,
        1.0,
        0.0,
    )
    assert math.isfinite(means["inference_time"])
