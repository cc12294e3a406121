"""Tools as packages of 0.1.8 to 0.1.10 are written: plain and async functions, a tool rubric, a
rubric group."""

import verifiers as vf
from verifiers.rubrics.rubric_group import RubricGroup
from verifiers.rubrics.tool_rubric import ToolRubric

PRICES = {"apple": 3, "bread": 5, "cheese": 11}


def price_of(item: str) -> int:
    """Look up a price.

    Args:
        item: Name of the item.

    Returns:
        Its price.
    """
    return PRICES[item]


async def multiply(a: int, b: int = 2) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def right_total(completion, answer, **kwargs) -> float:
    return float(completion[-1]["content"].strip().endswith(f"TOTAL {answer}"))


def asked_for_the_price(completion, **kwargs) -> float:
    answers = [m for m in completion if m["role"] == "tool"]
    return float(any(m["content"] in ("3", "5", "11") for m in answers))


def load_environment(**kwargs):
    tools = [price_of, multiply]
    dataset = [
        {"question": "What do 4 apples cost?", "answer": "12"},
        {"question": "What do 2 cheeses cost?", "answer": "22"},
        {"question": "What do 3 pears cost?", "answer": "unknown"},
    ]
    rubric = RubricGroup(
        rubrics=[
            vf.Rubric(funcs=[right_total, asked_for_the_price], weights=[1.0, 0.25]),
            ToolRubric(tools=tools),
        ]
    )
    return vf.ToolEnv(
        dataset=dataset,
        system_prompt="Use the tools. End with TOTAL and the number.",
        tools=tools,
        rubric=rubric,
        max_turns=5,
        **kwargs,
    )
