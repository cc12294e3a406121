"""An environment as packages of 0.1.10 to 0.1.14 are written: message objects, flat tool calls,
marked methods."""

import verifiers as vf
from verifiers.types import AssistantMessage, Messages, RolloutInput, State, UserMessage
from verifiers.utils.message_utils import concat_messages

CLOSED: list[str] = []


def add(amount: int, account: dict) -> str:
    """Book an amount.

    Args:
        amount: What to add.
        account: The rollout's own.
    """
    account["balance"] += amount
    return str(account["balance"])


class LedgerEnv(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[], max_turns=6, **kwargs)
        self.add_tool(add, args_to_skip=["account"])

    @vf.setup(priority=5)
    async def open_account(self, state: State):
        state["account"] = {"balance": 0}

    def update_tool_args(
        self, tool_name: str, tool_args: dict, messages: Messages, state: State, **kwargs
    ) -> dict:
        return {**tool_args, "account": state["account"]}

    async def env_response(self, messages: Messages, state: State, **kwargs) -> Messages:
        said = messages[-1]
        assert isinstance(said, AssistantMessage) or said.role == "assistant"
        assert all(
            call.name == "add" and isinstance(call.arguments, str) for call in said.tool_calls or []
        )
        answers = await super().env_response(messages, state, **kwargs)
        if state["account"]["balance"] == int(state["answer"]):
            state["final_env_response"] = concat_messages([answers, [UserMessage(content="Done.")]])
            return state["final_env_response"]
        return concat_messages([answers, [UserMessage(content="Go on.")]])

    @vf.stop(priority=10)
    async def overdrawn(self, state: State) -> bool:
        return state["account"]["balance"] > int(state["answer"])

    @vf.cleanup
    async def note_balance(self, state: State):
        state["final_balance"] = state["account"]["balance"]

    @vf.teardown
    async def close_books(self):
        CLOSED.append("books")


class LedgerRubric(vf.Rubric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_reward_func(self.reached, weight=1.0)
        self.add_metric(self.num_bookings)

    async def reached(self, state: State, answer: str, difficulty: str) -> float:
        assert difficulty in ("easy", "hard")
        return float(state["final_balance"] == int(answer))

    async def num_bookings(self, completion: Messages) -> int:
        return sum(
            len(message.tool_calls or []) for message in completion if message.role == "assistant"
        )


def rows(count: int) -> list[RolloutInput]:
    prompts = [[UserMessage(content=f"Reach {n + 2}.")] for n in range(count)]
    return [
        {
            "prompt": prompt,
            "answer": str(n + 2),
            "info": {"goal": n + 2},
            "difficulty": "easy",
            "example_id": n,
        }
        for n, prompt in enumerate(prompts)
    ]


def load_environment(num_examples: int = 2) -> vf.Environment:
    return LedgerEnv(
        dataset=lambda: rows(num_examples), rubric=LedgerRubric(), env_id="ledger-game"
    )
