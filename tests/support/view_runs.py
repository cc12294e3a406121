"""Runs to look at: played by real environments with scripted models, or written by the journal in
large numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.storage.directory import RunDirectory
from verifiers.testing import ScriptedClient
from verifiers.types import AssistantMessage, ToolCall

ATTACK = (
    '<script>window.owned = 1</script><img src=x onerror="window.owned = 2">'
    '<svg onload="window.owned=3"></svg>[x](javascript:window.owned=4) &lt;b&gt; '
)
ESCAPES = (
    "\x1b[2J\x1b[31mred\x1b[0m \x1b]8;;https://evil.example\x07link\x1b]8;;\x07 \u202eevil\u202c"
    " \U000e0041 \x00"
)


def png(width: int = 48, height: int = 32) -> str:
    """A small picture as a ``data:`` URL."""
    lines = b"".join(
        b"\0" + bytes(v for x in range(width) for v in (5 * x, 6 * y, 160)) for y in range(height)
    )
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        content += (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    if b == 13:
        raise ValueError("thirteen is not allowed")
    return str(a * b)


def tool_run(
    folder: Path,
    model: str = "careful-7b",
    skill: float = 0.8,
    seed: int = 0,
    num_examples: int = 12,
) -> Path:
    """An evaluation with tools, reasoning, an attack in a completion, terminal
    escapes, and tokens."""
    chance = random.Random(seed)
    rows = [
        {"question": f"What is {n + 3} times {2 * n + 1}?", "answer": str((n + 3) * (2 * n + 1))}
        for n in range(num_examples)
    ]

    def exact(completion: Any, answer: str) -> float:
        return float(answer in str(completion[-1]["content"]))

    def brief(completion: Any) -> float:
        return 1.0 / len(completion)

    def reply(request: Any) -> Any:
        last = request.prompt[-1]
        if last["role"] == "tool":
            wrong = chance.random() > skill
            said = last["content"] if not wrong else "about a hundred"
            thought = (
                "<think>The tool gave me a number.\nI should repeat it, and check it"
                " once.</think>\n"
            )
            return f"{thought}The result is **{said}**."
        words = last["content"].rstrip("?").split()
        if words[2] == "4":
            return ATTACK + " is what I say"
        if words[2] == "5":
            return ESCAPES + "and nothing else"
        call = ToolCall("call_1", "multiply", json.dumps({"a": int(words[2]), "b": int(words[4])}))
        return AssistantMessage(
            "",
            tool_calls=[call],
            reasoning_content=f"I need {words[2]} x {words[4]}; the tool does it.",
        )

    env = vf.ToolEnv(
        tools=[multiply],
        dataset=rows,
        rubric=vf.Rubric(funcs=[exact, brief], weights=[1.0, 0.2]),
        max_turns=4,
    )
    env.env_id = "times-table"
    path = folder / "evals" / f"times-table--{model}" / "3fa9c1d2"
    env.evaluate_sync(
        ScriptedClient(reply, tokens=True),
        model=model,
        rollouts_per_example=3,
        state_columns=["trajectory"],
        results_path=path,
        save_results=True,
    )
    return path


def image_run(folder: Path) -> Path:
    """An evaluation of one row with a picture, and with an address that must not be loaded."""
    parts = [
        {"type": "text", "text": "What is on the picture?"},
        {"type": "image_url", "image_url": {"url": png()}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/secret.png"}},
        {
            "type": "image_url",
            "image_url": {"url": "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+"},
        },
    ]

    def seen(completion: Any, answer: str) -> float:
        return float(answer in completion[-1]["content"].lower())

    env = vf.SingleTurnEnv(
        dataset=[{"prompt": [{"role": "user", "content": parts}], "answer": "colours"}],
        rubric=vf.Rubric(funcs=[seen]),
    )
    env.env_id = "pictures"
    path = folder / "evals" / "pictures--sees" / "00aa11bb"
    env.evaluate_sync(
        ScriptedClient(["Colours that fade into each other."]),
        model="sees",
        results_path=path,
        save_results=True,
    )
    return path


def plain_row(number: int, chance: random.Random, sibling: int = 0) -> dict[str, Any]:
    """A row as a run of today writes it, without playing it."""
    reward = float(chance.random() < 0.6) if number % 17 else chance.random()
    failed = number % 251 == 250
    tokens = int(chance.lognormvariate(5.5, 0.6))
    return {
        "example_id": number,
        "prompt": [
            {
                "role": "user",
                "content": (
                    f"Question {number}: how many steps lead to the tower of {number * 7 % 1000}?"
                ),
            }
        ],
        "completion": (
            []
            if failed
            else [
                {
                    "role": "assistant",
                    "content": f"Counting them one by one, I get {number % 90} steps. " * 3,
                }
            ]
        ),
        "answer": str(number % 90),
        "task": "tower",
        "info": {},
        "reward": None if failed else reward,
        "advantage": None,
        "metrics": {} if failed else {"exact": reward, "format": chance.random()},
        "error": (
            {"error": "ModelUnavailable", "message": "503", "error_chain_str": "ModelUnavailable"}
            if failed
            else None
        ),
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": "has_error" if failed else "max_turns_reached",
        "timing": {
            "total_ms": tokens * 9.0,
            "model_ms": tokens * 8.5,
            "generation_ms": tokens * 8.8,
            "scoring_ms": 1.0,
        },
        "token_usage": {"input_tokens": 40, "output_tokens": tokens},
        "tool_defs": [],
        "rollout_key": f"{number:028x}{sibling:04x}",
        "example_hash": hashlib.sha256(str(number).encode()).hexdigest()[:32],
        "sibling": sibling,
        "attempts": 1,
    }


def large_run(folder: Path, num_rows: int, status: str = "complete", start: int = 0) -> Path:
    """A run of many rows, written by the run directory and the journal themselves."""
    path = folder / "evals" / "tower--big" / "50000000"
    chance = random.Random(1)
    with RunDirectory.create_or_resume(
        path,
        {
            "env_id": "tower",
            "model": "big",
            "reward_functions": ["exact", "format"],
            "reward_weights": [1.0, 0.0],
        },
    ) as run:
        with run.open_journal() as journal:
            for first in range(start, num_rows, 1000):
                journal.append_sync(
                    [plain_row(n, chance) for n in range(first, min(first + 1000, num_rows))]
                )
        run.write_metadata(
            {
                "env_id": "tower",
                "model": "big",
                "status": status,
                "date": "2026-01-01T10:00:00+00:00",
                "num_examples": num_rows,
                "rollouts_per_example": 1,
                "num_rollouts": num_rows,
                "avg_reward": 0.6,
            }
        )
    return path


def training(folder: Path, num_steps: int, first: int = 1) -> Path:
    """A training's files, by the trainer's formats: ``metrics.jsonl`` and
    ``completions/step-<n>.jsonl``."""
    chance = random.Random(first)
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    for step in range(first, first + num_steps):
        reward = 1 - 0.95**step
        rows = [
            {
                "example_id": step * 2 + n // 2,
                "prompt": [{"role": "user", "content": f"Reverse word{step}{n // 2}"}],
                "completion": [
                    {
                        "role": "assistant",
                        "content": f"{n // 2}{step}drow" if chance.random() < reward else "no",
                    }
                ],
                "answer": f"{n // 2}{step}drow",
                "reward": float(chance.random() < reward),
                "metrics": {"exact": reward},
                "advantage": chance.uniform(-1, 1),
                "stop_condition": "max_turns_reached",
                "error": None,
                "completion_tokens": 5 + n,
                "policy_version": step - 1,
            }
            for n in range(4)
        ]
        (folder / "completions" / f"step-{step}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        line = {
            "step": step,
            "policy_version": step,
            "time": 1_800_000_000.0 + step,
            "reward/mean": reward + chance.gauss(0, 0.05),
            "entropy": 1.5 * 0.98**step,
            "loss": chance.gauss(0, 0.1),
            "grad_norm": None if step == 3 else chance.uniform(0.5, 2),
            "rollouts/generated": 4,
            "rollouts/trained": 2,
            "rollouts/errors": 0,
            "tokens/completion": 26,
            "time/step": 1.0,
        }
        line |= {"tokens/trained": 20, "tokens/lag/0": 15, "tokens/untrained/no_signal": 6}
        line |= {"canary/version": step - 1, "canary/disagreement": 0.25, "canary/noise": 0.04}
        line |= {"canary/moved": 0.3, "canary/checksum": 0xABCDEF}
        if step % 10 == 0:
            line |= {"eval_reward": reward, "eval_reward_stderr": 0.03}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return folder


PROSE = r"""# Plan

The **area** is $\frac{1}{2} a h$, so *both* `sides` count; it costs $5 and $10.

1. First, $$\sum_{i=1}^{n} i = \frac{n(n+1)}{2}$$
2. then \(x \in \mathbb{R}\)
   - a nested **point**

| side | value |
|:-----|------:|
| a    |  1.5  |

> A quote, with <b>HTML</b> and [a link](https://evil.example/x) and ![a picture](https://evil.example/y.png)

```python
def area(a, h):
    return a * h / 2  # <script>window.owned = 5</script>
```

The board:
# . #
. O .
# . #
\[ \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix} \unknowncommand \]
Done: $\boxed{42}$"""


def prose_run(folder: Path) -> Path:
    """An evaluation of two turns whose replies hold Markdown, formulas and a grid."""

    class Twice(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> list[dict[str, str]]:
            state["trajectory"][-1]["reward"] = 0.25
            return [{"role": "user", "content": "Go on."}]

    env = Twice(
        dataset=[{"question": "How large is it?"}],
        rubric=vf.Rubric(funcs=[lambda: 1.0]),
        max_turns=2,
    )
    env.env_id = "areas"
    path = folder / "evals" / "areas--writer" / "11bb22cc"
    env.evaluate_sync(
        ScriptedClient([PROSE, "Yes.", PROSE, "No."], tokens=True),
        model="writer",
        rollouts_per_example=2,
        max_concurrent=1,
        state_columns=["trajectory"],
        results_path=path,
        save_results=True,
    )
    return path
