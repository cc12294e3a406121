"""An environment as packages of 0.1.5 to 0.1.9 are written: dicts, tuples, states handed back,
objects for rewards."""

import json

from datasets import Dataset

import verifiers as vf
from verifiers.types import ChatMessage, Messages, State
from verifiers.utils.tool_utils import convert_func_to_oai_tool

CAPITALS = {"France": "Paris", "Peru": "Lima", "Japan": "Tokyo"}


def first_letter(country: str) -> str:
    """The first letter of a capital.

    Args:
        country: The country.
    """
    return CAPITALS[country][0]


class CapitalEnv(vf.MultiTurnEnv):
    def __init__(self, max_guesses: int = 3, **kwargs):
        super().__init__(oai_tools=[convert_func_to_oai_tool(first_letter)], **kwargs)
        self.max_guesses = max_guesses

    async def setup_state(self, state: State, **kwargs) -> State:
        state["guesses"] = []
        state["country"] = state["info"]["country"]
        return state

    def is_completed(self, messages: Messages, state: State, **kwargs) -> bool:
        return (
            state["turn"] >= self.max_guesses
            or self.parser.parse_answer(messages) == state["answer"]
        )

    def env_response(
        self, messages: Messages, state: State, **kwargs
    ) -> tuple[list[ChatMessage], State]:
        said = messages[-1]
        assert said["role"] == "assistant"
        if said.get("tool_calls"):
            call = said["tool_calls"][0]
            letter = first_letter(**json.loads(call["function"]["arguments"]))
            return [{"role": "tool", "content": letter, "tool_call_id": call["id"]}], state
        guess = self.parser.parse_answer([said])
        state["guesses"] = [*state["guesses"], guess]
        return [{"role": "user", "content": f"{guess} is wrong. Try again."}], state


def correct(completion, answer, parser, **kwargs) -> float:
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


def patience(state: State, limit: int, task: str) -> float:
    assert task == "capitals"
    return 1.0 - len(state["responses"]) / limit


def load_environment(num_train_examples: int = 3, **kwargs) -> vf.Environment:
    rows = [
        {
            "question": f"Capital of {c}?",
            "answer": a,
            "task": "capitals",
            "info": json.dumps({"country": c}),
        }
        for c, a in list(CAPITALS.items())[:num_train_examples]
    ]
    parser = vf.XMLParser(fields=["think", "answer"], answer_field="answer")
    rubric = vf.Rubric(
        funcs=[correct, patience, parser.get_format_reward_func()],
        weights=[1.0, 0.0, 0.2],
        parser=parser,
    )
    rubric.class_objects["limit"] = 10
    return CapitalEnv(
        dataset=Dataset.from_list(rows),
        system_prompt="Answer in tags.",
        parser=parser,
        rubric=rubric,
        **kwargs,
    )
