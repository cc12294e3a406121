"""Write an environment: rows, a parser and a reward, in twenty lines.

What you learn: what an environment is made of, how a reward function gets its arguments, and why a
reward should be read against answers that do not do the task. Costs about 10 seconds on two cores.

    python examples/own_environment.py
"""

import random

import verifiers as vf
from verifiers.testing import ScriptedClient


def load_environment(num_rows: int = 200, seed: int = 0) -> vf.Environment:
    """Sums of two numbers; the model is shown to write the sum again before its result."""
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 49), rng.randint(10, 49)) for _ in range(num_rows)]
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
    shots = ["What is 12 + 23?", "12 + 23 = 35", "What is 48 + 14?", "48 + 14 = 62"]
    few_shot = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(shots)
    ]

    def correct(completion, answer) -> float:
        """1 when the text after the last equals sign is the answer."""
        return float(completion[-1].content.rpartition("=")[2].strip() == answer)

    def wrote_the_sum_again(prompt, completion) -> float:
        """A metric: weight 0 does not change the reward."""
        terms = prompt[-1].content.removeprefix("What is ").removesuffix("?")
        return float(completion[-1].content.startswith(terms))

    rubric = vf.Rubric(funcs=[correct, wrote_the_sum_again], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=rows, few_shot=few_shot, rubric=rubric, env_id="own-sums")


def main(num_examples: int = 8) -> dict[str, vf.GenerateOutputs]:
    env = load_environment()

    def solve(request: vf.ModelRequest) -> str:
        terms = request.prompt[-1].content.removeprefix("What is ").removesuffix("?")
        return f"{terms} = {sum(map(int, terms.split(' + ')))}"

    players = {
        "an oracle": (ScriptedClient(solve), "scripted"),
        "always 60": (ScriptedClient("30 + 30 = 60"), "scripted"),
        "the local model": ("local", None),
    }
    results = {}
    for name, (client, model) in players.items():
        results[name] = env.evaluate(
            client, model, num_examples=num_examples, max_tokens=16, seed=0
        )
        metadata = results[name].metadata
        print(f"{name:16} reward {metadata.avg_reward:.2f}  metrics {dict(metadata.avg_metrics)}")
    return results


if __name__ == "__main__":
    main()
