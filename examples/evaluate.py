"""Evaluate a model on an environment and look at the results.

What you learn: load an environment by its id, run a real model (135M parameters, in this process),
read rewards, metrics and rollouts. Costs about 15 seconds on two cores; no key, no GPU, no network.

    python examples/evaluate.py
"""

import verifiers as vf


def main(num_examples: int = 6, rollouts_per_example: int = 3) -> vf.GenerateOutputs:
    env = vf.load_environment("small-tasks")
    results = env.evaluate(
        "local",
        num_examples=num_examples,
        rollouts_per_example=rollouts_per_example,
        max_tokens=32,
        seed=0,
    )

    metadata = results.metadata
    print(
        f"mean reward {metadata.avg_reward:.3f} ± {metadata.reward_stderr:.3f} (one standard error)"
    )
    for example_id in dict.fromkeys(results.example_ids):
        siblings = results.filter(lambda rollout, wanted=example_id: rollout.example_id == wanted)
        first = siblings.rollout(example_id)
        print(f"\n{first.prompt[-1].content}    rewards {siblings.rewards}, for example:")
        print(f"  {first.completion[-1].content!r}")
    return results


if __name__ == "__main__":
    main()
