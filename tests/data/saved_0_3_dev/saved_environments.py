"""The environments whose runs are saved beside this file. It is part of their identity: an edit is another run.

``write(folder)`` ran them, and trained two roles for four steps, with commit 2889499.
"""

import json
import re
import shutil

import numpy as np

import verifiers as vf
from verifiers.testing import ScriptedClient


def exact(completion, answer):
    return float(bool(completion) and completion[-1]["content"] == answer)


def sums(count):
    return [
        {"question": f"{n} + 1", "answer": str(n + 1), "info": {"number": n}} for n in range(count)
    ]


def num_turns(request):
    return sum(message["role"] == "assistant" for message in request.prompt)


def by_turn(*replies):
    """The reply after as many of the model's messages as the prompt holds."""
    return lambda request: replies[min(num_turns(request), len(replies) - 1)]


class Talk(vf.MultiTurnEnv):
    def env_response(self, messages, state):
        return f"again {len(state['trajectory'])}"


class Forgets(Talk):
    """From the third turn on, the prompt begins anew."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if len(state["trajectory"]) < 2:
            return messages
        return [
            messages[0],
            vf.UserMessage(f"You said {len(state['trajectory'])} things."),
            *messages[-2:],
        ]


class Pays(Talk):
    def add_trajectory_step(self, state, step):
        step["reward"], step["extras"]["number"] = (
            len(state["trajectory"]) / 2,
            len(state["trajectory"]),
        )
        state["trajectory"].append(step)


class Breaks(Talk):
    """Raises for every second row."""

    def env_response(self, messages, state):
        if state["info"]["number"] % 2:
            raise ValueError("broken")
        return "more"


class Secrets(vf.MultiAgentEnv):
    def observe(self, state, role):
        if not any(step["extras"]["role"] == role for step in state["trajectory"]):
            return f"You are {role}."
        return super().observe(state, role)


def ann(state):
    return 1.0


def bob(state):
    return -1.0


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def changing_versions(request):
    """A completion of four tokens, of which the last two are of a later policy."""
    number = num_turns(request)
    prompt = [int(digit) for digit in re.findall(r"\d", str(request.prompt))][: 6 + 5 * number]
    tokens = vf.ResponseTokens(
        prompt, [7, 8, 9, 10 + number], np.full(4, -0.5, np.float32), version=np.array([3, 3, 4, 4])
    )
    return vf.Response(vf.AssistantMessage("abc"), tokens=tokens, version=3)


SCRIPTS = {
    "talk": (Talk, by_turn("1", "2", "1")),
    "forks": (Forgets, by_turn("a", "b", "c")),
    "turn_rewards": (Pays, by_turn("1", "2", "3")),
    "errors": (Breaks, by_turn("1", "2")),
    "tools": (vf.ToolEnv, by_turn(vf.ToolCall("c1", "add", {"a": 1, "b": 2}), "3")),
    "roles": (Secrets, lambda request: f"said {num_turns(request)}"),
    "versions": (Talk, changing_versions),
}


def evaluate(name, folder):
    """Run the rest of three rows of two rollouts, saved in the folder; the results and the requests."""
    kind, replies = SCRIPTS[name]
    options = {"tools": [add]} if name == "tools" else {}
    arguments = [("ann", "bob")] if name == "roles" else []
    rubric = (
        vf.Rubric([ann, bob], weights=[1.0, 0.0]) if name == "roles" else vf.Rubric(funcs=[exact])
    )
    env = kind(*arguments, dataset=sums(3), rubric=rubric, max_turns=4, **options)
    client = ScriptedClient(replies, tokens=name != "versions")
    results = env.evaluate(
        client,
        "m",
        rollouts_per_example=2,
        max_concurrent=1,
        state_columns=["trajectory"],
        save_results=True,
        results_path=folder,
    )
    return results, client.requests


def train(folder, **options):
    """Losses of the steps of a training of two roles, as hex."""
    import torch

    from support.training import pair, run, small_trainer

    settings = {
        "deterministic": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_off_policy_steps": 1,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(
            small_trainer(folder, pair(), max_steps=4, log_completions=True, **settings), **options
        ).losses
    finally:
        torch.set_num_threads(threads)


def write(folder):
    for name in SCRIPTS:
        evaluate(name, folder / name)
        (folder / name / "run.lock").unlink(missing_ok=True)
    (folder / "training-losses.json").write_text(json.dumps(train(folder / "training")) + "\n")
    shutil.rmtree(folder / "training/checkpoint-4")
