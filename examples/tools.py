"""Give the model tools: Python functions with type hints and a docstring.

What you learn: how a function becomes a tool, what the model sees of it, what happens when a call
is wrong, and how to reward the use of tools. The model here is a script, so that the loop can be
read; pass any client instead. Costs one second.

    python examples/tools.py
"""

import verifiers as vf
from verifiers.testing import ScriptedClient

STOCK = {"apples": 12, "pears": 0}


def in_stock(fruit: str) -> int:
    """How many pieces of a fruit are in stock.

    Args:
        fruit: Name of the fruit, in lower case.
    """
    if fruit not in STOCK:
        # the model reads this, and may try again
        raise ValueError(f"there is no {fruit!r}; known: {', '.join(STOCK)}")
    return STOCK[fruit]


def correct(completion, answer) -> float:
    return float(answer in completion[-1].content)


def main() -> vf.GenerateOutputs:
    env = vf.ToolEnv(
        dataset=[{"question": "How many apples are left?", "answer": "12"}],
        tools=[in_stock],
        rubric=vf.Rubric(funcs=[correct]),
        max_turns=4,
    )
    print("what the model is told:", env.tool_defs[0]["function"], "\n")
    model = ScriptedClient(
        [
            vf.AssistantMessage(
                None, tool_calls=[vf.ToolCall("c1", "in_stock", {"fruit": "Apples"})]
            ),  # a wrong name
            vf.AssistantMessage(
                None, tool_calls=[vf.ToolCall("c2", "in_stock", {"fruit": "apples"})]
            ),
            "There are 12 apples left.",
        ]
    )
    results = env.evaluate(model, "scripted", num_examples=1)
    for message in results.completions[0]:
        calls = [f"{call.name}({call.arguments})" for call in message.tool_calls or ()]
        print(f"{message.role:9} {message.content or ''}{', '.join(calls)}")
    print("\nreward", results.rewards[0], "metrics", dict(results.metadata.avg_metrics))
    return results


if __name__ == "__main__":
    main()
