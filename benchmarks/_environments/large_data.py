"""Single-turn questions, each different, with an answer: as many as are asked for."""

import verifiers as vf

QUESTION = "What is {} times seven? " + "Think about it, then answer in one sentence. " * 8


def load_environment(num_examples: int = 100) -> vf.Environment:
    """``num_examples`` questions. The reward is the share of the answer's digits in
    the completion."""
    rows = [
        {"question": QUESTION.format(number), "answer": str(7 * number)}
        for number in range(num_examples)
    ]
    rubric = vf.Rubric([share_of_digits])
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt="Answer in one sentence.")


def share_of_digits(completion: list, answer: str) -> float:
    """The share of the answer's digits that occur in the last message."""
    return sum(digit in completion[-1].content for digit in answer) / len(answer)
