"""Completion mode as packages of 0.1.10 are written: text prompts, text completions, several turns
of text."""

import verifiers as vf
from verifiers.types import Messages, State


class CountingEnv(vf.MultiTurnEnv):
    def env_response(self, messages: Messages, state: State, **kwargs) -> Messages:
        assert isinstance(messages, str)
        return ", "

    @vf.stop
    async def reached(self, state: State) -> bool:
        return (
            bool(state["trajectory"]) and state["trajectory"][-1]["completion"] == state["answer"]
        )


def counted(prompt: str, completion: str, answer: str, info: dict) -> float:
    wanted = ", ".join(str(n) for n in range(info["first"] + 1, int(answer) + 1))
    return float(prompt + completion == f"{prompt}{wanted}")


def length(completion: str) -> int:
    return len(completion)


def load_environment(max_turns: int = 4, **kwargs) -> vf.Environment:
    rubric = vf.Rubric(funcs=[counted, length], weights=[1.0, 0.0])
    rows = [
        {"prompt": "1, ", "answer": "4", "info": {"first": 1}},
        {"prompt": "7, ", "answer": "8", "info": {"first": 7}},
        {"prompt": "1, ", "answer": "9", "info": {"first": 1}},
    ]
    return CountingEnv(
        dataset=rows, message_type="completion", rubric=rubric, max_turns=max_turns, **kwargs
    )
