"""A game of several turns, played by a model with a memory of what it was told.

What you learn: ``setup_state``, ``env_response``, how the environment ends a rollout, rewards that
read the state, and how a rollout looks turn by turn. The player is a script that searches by
halves; pass any client instead. Costs one second.

    python examples/game.py
"""

import random

import verifiers as vf
from verifiers.testing import ScriptedClient


class GuessTheNumber(vf.MultiTurnEnv):
    """The model guesses; the environment says higher or lower."""

    async def setup_state(self, state):
        state["guesses"] = []

    async def env_response(self, messages, state):
        digits = "".join(c for c in messages[-1].content if c.isdigit())
        guess = int(digits or 0)
        state["guesses"].append(guess)
        if str(guess) == state["answer"]:
            state["final_env_response"] = "right"  # ends the rollout
            return None
        return "higher" if guess < int(state["answer"]) else "lower"


def won(state) -> float:
    return float(str((state["guesses"] or [None])[-1]) == state["answer"])


def num_guesses(state) -> float:
    return float(len(state["guesses"]))


def search_by_halves(request: vf.ModelRequest) -> str:
    """The middle of what is still possible after the answers so far."""
    low, high = 1, 100
    turns = request.prompt[1:]
    for guess, told in zip(turns[::2], turns[1::2], strict=True):
        number = int(guess.content)
        low, high = (number + 1, high) if told.content == "higher" else (low, number - 1)
    return str((low + high) // 2)


def main(num_examples: int = 20) -> vf.GenerateOutputs:
    rng = random.Random(0)
    rows = [
        {"question": "Guess my number, 1 to 100.", "answer": str(rng.randint(1, 100))}
        for _ in range(num_examples)
    ]
    rubric = vf.Rubric(funcs=[won, num_guesses], weights=[1.0, 0.0])
    env = GuessTheNumber(dataset=rows, rubric=rubric, max_turns=8)
    results = env.evaluate(ScriptedClient(search_by_halves), "scripted", num_examples=num_examples)
    for message in results.completions[0]:
        print(f"{message.role:9} {message.content}")
    print(f"\nwon {results.metadata.avg_reward:.2f} of {num_examples} games, ", end="")
    print(f"{results.metadata.avg_metrics['num_guesses']:.1f} guesses on average")
    return results


if __name__ == "__main__":
    main()
