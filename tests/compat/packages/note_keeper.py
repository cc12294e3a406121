"""A tool environment with state as packages of 0.1.8 are written: hidden arguments, ``setup_state``
hands it back."""

import verifiers as vf
from verifiers.envs.stateful_tool_env import StatefulToolEnv
from verifiers.types import Messages, State


class NoteKeeperEnv(StatefulToolEnv):
    def __init__(self, max_notes: int = 3, **kwargs):
        super().__init__(tools=[self.count_notes], **kwargs)
        self.max_notes = max_notes
        self.add_tool(self.write_note, args_to_skip=["notes"])

    async def setup_state(self, state: State, **kwargs) -> State:
        state = await super().setup_state(state, **kwargs)
        state["notes"] = list(state["info"].get("given", []))
        return state

    def update_tool_args(
        self, tool_name: str, tool_args: dict, messages: Messages, state: State, **kwargs
    ) -> dict:
        if tool_name == "write_note":
            tool_args["notes"] = state["notes"]
        else:
            tool_args["total"] = len(state["notes"])
        return tool_args

    async def write_note(self, text: str, notes: list[str]) -> str:
        """Keep a note.

        Args:
            text: The note.
            notes: Where it is kept.
        """
        if len(notes) >= self.max_notes:
            raise ValueError("the notebook is full")
        notes.append(text)
        return f"noted ({len(notes)})"

    def count_notes(self, total: int = 0) -> int:
        """How many notes there are."""
        return total


def all_noted(state: State, info: dict, **kwargs) -> float:
    return float(state["notes"] == info["wanted"])


def load_environment(max_turns: int = 4):
    rows = [
        {"question": "Note: milk", "info": {"wanted": ["milk"]}},
        {"question": "Note: eggs", "info": {"wanted": ["bread", "eggs"], "given": ["bread"]}},
        {
            "question": "Note: salt",
            "info": {"wanted": ["a", "b", "c", "salt"], "given": ["a", "b", "c"]},
        },
    ]
    return NoteKeeperEnv(dataset=rows, rubric=vf.Rubric(funcs=[all_noted]), max_turns=max_turns)
