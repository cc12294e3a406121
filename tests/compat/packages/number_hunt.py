"""A game as packages of 0.1.8 are written: states handed back, ``await super().is_completed``,
messages returned."""

from datasets import Dataset

import verifiers as vf
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.types import Messages, State

PROMPT = "I think of a number from 1 to 100. Guess it in <guess>...</guess>."


class NumberHuntEnv(MultiTurnEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)

    async def setup_state(self, state: State, **kwargs) -> State:
        state["low"], state["high"] = 1, 100
        state["solved"] = False
        return state

    async def is_completed(self, messages: Messages, state: State, **kwargs) -> bool:
        if await super().is_completed(messages, state, **kwargs):
            return True
        if state["turn"] > 0:
            guess = self.parser.parse_answer(messages)
            state["solved"] = guess == state["answer"]
        return state["solved"]

    async def env_response(self, messages: Messages, state: State, **kwargs) -> Messages:
        guess = self.parser.parse_answer(messages)
        if guess is None or not guess.isdecimal():
            return [{"role": "user", "content": "That is no guess."}]
        if int(guess) < int(state["answer"]):
            state["low"] = max(state["low"], int(guess) + 1)
            return [{"role": "user", "content": f"Higher than {guess}."}]
        state["high"] = min(state["high"], int(guess) - 1)
        return [{"role": "user", "content": f"Lower than {guess}."}]


def solved(parser, completion, answer, state, info, **kwargs) -> float:
    assert info["level"] == "easy"
    return 1.0 if state["solved"] else 0.0


def few_turns(state, max_turns=10, **kwargs) -> float:
    return 1.0 - state["turn"] / max_turns


def load_environment(max_turns: int = 10, **kwargs):
    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": PROMPT}]] * 3,
            "answer": ["50", "25", "99"],
            "info": [{"level": "easy"}] * 3,
            "task": ["hunt"] * 3,
        }
    )
    parser = vf.XMLParser(fields=["guess"], answer_field="guess")
    rubric = vf.Rubric(parser=parser)
    rubric.add_reward_func(solved)
    rubric.add_reward_func(few_turns, weight=0.5)
    rubric.add_reward_func(parser.get_format_reward_func(), weight=0.1)
    return NumberHuntEnv(
        dataset=dataset, parser=parser, rubric=rubric, max_turns=max_turns, **kwargs
    )
