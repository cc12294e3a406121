"""Rollouts of every kind, and what a user, a file and the trainer see of each, as plain data.

``PYTHONPATH=tests python tests/support/golden.py [KIND …]`` writes ``tests/data/golden``, a file
per kind, a rollout per line, which ``tests/compat/test_golden_rollouts.py`` compares. Commit
2889499 wrote the first; a file that is written again says in its commit what changed for whom. The
scripts are functions of the request; the clock and the ids of a run are left out.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import verifiers as vf
from compat import players
from support.agents import CLIENT, WRITER
from verifiers.rollouts.rollout import SAVED
from verifiers.rollouts.turn import TURN_FIELDS
from verifiers.testing import ByteTokenizer, FakeServer, ScriptedClient

FOLDER = Path(__file__).parents[1] / "data/golden"
PACKAGES = Path(__file__).parents[1] / "compat/packages"
OPTIONS = {"max_concurrent": 1, "state_columns": ["trajectory"]}
ADDED = {
    *("agent_failed", "judge_replies"),
    *(name for name, field in SAVED.items() if field.saved.when == "if set"),
    *(name for name, field in TURN_FIELDS.items() if field.saved.when == "if set" and field.key),
    *("failed_requests", "received"),
}
"""Metrics and columns that the dumps' commit did not have."""
OF_THE_CLOCK = {
    "timing",
    "trajectory_id",
    "time",
    "created",
    "start_time",
    "traceback",
    "run",
    "date",
    "attempts",
    "seconds",
}
LONG = 6
"""An array of more entries is dumped as its length, its ends and a checksum."""

Run = Callable[[], vf.GenerateOutputs]


# --- what is dumped -------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """JSON data without the clock, the ids of the run, and the lines of source files."""
    match value:
        case None | bool() | int():
            return value
        case float() | np.floating():
            return "NaN" if math.isnan(value) else round(float(value), 9)
        case np.integer():
            return int(value)
        case str():
            return re.sub(
                r"(\.py[:\"', a-z]*)\d+", r"\1N", re.sub(r"(/[\w.-]+)+/(\w+\.py)", r"\2", value)
            )
        case np.ndarray():
            return array(value)
        case BaseException():
            return f"{type(value).__name__}: {plain(str(value))}"
        case vf.Response():
            return plain(
                {name: value[name] for name in ("message", "finish_reason", "usage", "model")}
            )
        case vf.Usage() | vf.ResponseTokens():
            return plain({name: value[name] for name in value})
        case Mapping():
            left_out = OF_THE_CLOCK | ADDED
            return {str(key): plain(item) for key, item in value.items() if key not in left_out}
        case list() | tuple() | set() | frozenset():
            items = sorted(value) if isinstance(value, set | frozenset) else value
            is_numeric = len(items) > LONG and all(isinstance(item, int | float) for item in items)
            return array(np.asarray(items)) if is_numeric else [plain(item) for item in items]
    return f"<{type(value).__name__}>"


def array(values: np.ndarray) -> Any:
    """The entries, or for many of them ``120 entries: 259 104 … 257 260, 1a2b3c4d``."""
    items = [plain(item) for item in values.tolist()] if values.ndim else plain(values.item())
    if not values.ndim or len(items) <= LONG:
        return items
    ends = [*map(str, items[:4]), "…", *map(str, items[-3:])]
    return f"{len(items)} entries: {' '.join(ends)}, {zlib.crc32(json.dumps(items).encode()):08x}"


def dump(results: vf.GenerateOutputs) -> Iterator[dict[str, Any]]:
    """What each rollout is to a file, to an author, to the trainer and to other trainers."""
    exported = exports(results)
    for index, (row, state) in enumerate(zip(results.outputs, results["states"], strict=True)):
        rollout = state.rollout()
        yield {
            "row": plain({key: value for key, value in row.items() if key != "trajectory"}),
            "state": state_view(state),
            "rollout": rollout_view(rollout),
            "samples": samples_view(rollout),
            "exports": [
                line for line in exported if isinstance(line, dict) and line["rollout"] == index
            ],
        }


def state_view(state: vf.State) -> dict[str, Any]:
    """The keys of the state as an author reads them, and those of its steps."""
    keys = {
        key: plain(value)
        for key, value in state.items()
        if key not in {"trajectory", "client", "tool_defs", *OF_THE_CLOCK, *ADDED}
    }
    computed = {key: plain(state[key]) for key in ("input", "id", "turn", "timed_out")}
    steps = [plain(dict(step)) for step in state["trajectory"]]
    for step in steps:
        for name in ("prompt_mask", "completion_mask"):  # as long as the ids, all 0 and all 1
            (step["tokens"] or {}).pop(name, None)
    return {**keys, **computed, "steps": steps}


def rollout_view(rollout: Any) -> dict[str, Any]:
    """What the trainer is given."""
    turn = "prompt_ids completion_ids sampler_logprobs version is_truncated role num_tokens".split()
    names = "reward metrics stop is_truncated text turn_rewards advantage role_rewards".split()
    error = rollout.error
    return {
        "turns": [{name: plain(getattr(item, name)) for name in turn} for item in rollout.turns],
        **{name: plain(getattr(rollout, name)) for name in names},
        "error": None if error is None else plain(error.text),
        "cause": None if error is None else plain(error.cause_and_place),
        "oldest_version": rollout.oldest_version,
        "num_sampled": rollout.num_sampled,
    }


def samples_view(rollout: Any) -> Any:
    """The samples that the trainer makes of it: one advantage, one per turn, the environment's
    tokens trained too."""
    from verifiers_trainer.algorithm.samples import joined, rollout_samples

    per_turn = [(number + 1) / 4 for number in range(len(rollout.turns))]
    samples = {
        "all": rollout_samples(rollout.turns, 0.5),
        "turns": rollout_samples(
            rollout.turns, per_turn, mask_env_responses=False, temperature=0.5
        ),
        "short": rollout_samples(rollout.turns, 1.0, max_seq_len=60, mask_truncated=True),
        "roles": joined(
            {
                role: rollout_samples(rollout.of_role(role).turns, 1.0)
                for role in rollout.role_rewards or [""]
            }
        ),
    }
    names = "token_ids loss_mask sampler_logprobs versions advantages inv_temperature num_trained".split()
    return {
        name: [
            value.excluded,
            [[plain(getattr(sample, field)) for field in names] for sample in value.samples],
        ]
        for name, value in samples.items()
    }


def exports(results: vf.GenerateOutputs) -> list[Any]:
    """Lines of the exported trajectories; the sentence why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        try:
            vf.export_trajectories(results, path)
        except vf.ConfigError as error:
            return [str(error)]
        return [plain(json.loads(line)) for line in path.read_text().splitlines()]


# --- the environments -----------------------------------------------------------------------------


def sums(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [
        {"question": f"{n} + 1", "answer": str(n + 1), "info": {"number": n}, **columns}
        for n in range(count)
    ]


def exact(completion: Any, answer: str) -> float:
    return float(bool(completion) and completion[-1]["content"] == answer)


def length(completion: Any) -> float:
    return float(sum(len(message["content"] or "") for message in completion))


def add_one(request: Any) -> str:
    text = request.prompt if isinstance(request.prompt, str) else request.prompt[-1]["content"]
    digits = re.findall(r"\d+", str(text))
    return str(int(digits[-2]) + 1) if len(digits) > 1 else "12"


def by_turn(*replies: Any) -> Callable[[Any], Any]:
    """The reply after as many of the model's messages as the prompt holds."""
    return lambda request: replies[min(players.turns(request), len(replies) - 1)]


class Talk(vf.MultiTurnEnv):
    """Says how often the model has spoken."""

    def env_response(self, messages: Any, state: vf.State) -> Any:
        return [{"role": "user", "content": f"again {len(state['trajectory'])}"}]


class Forgets(Talk):
    """From the third turn on, the prompt is the question and a summary: a rewritten history."""

    async def get_prompt_messages(self, state: vf.State) -> Any:
        messages = await super().get_prompt_messages(state)
        if len(state["trajectory"]) < 2:
            return messages
        return [
            messages[0],
            vf.UserMessage(f"You said {len(state['trajectory'])} things."),
            *messages[-2:],
        ]


class Interleaves(Talk):
    """Every second turn belongs to another conversation."""

    async def get_prompt_messages(self, state: vf.State) -> Any:
        messages = await super().get_prompt_messages(state)
        if len(state["trajectory"]) % 2:
            return [vf.SystemMessage("You check."), *messages[1:]]
        return messages


class Paid(Talk):
    """Rewards turns, and keeps extras."""

    def add_trajectory_step(self, state: vf.State, step: Any) -> None:
        step["reward"], step["extras"]["number"] = (
            len(state["trajectory"]) / 2,
            len(state["trajectory"]),
        )
        state["trajectory"].append(step)


class Author(Talk):
    """Keys, stop conditions and a final answer of the author's own."""

    def setup_state(self, state: vf.State) -> None:
        state["seen"], state["game"] = [], {"open": True}

    def env_response(self, messages: Any, state: vf.State) -> Any:
        state["seen"].append(messages[-1]["content"])
        if messages[-1]["content"] == "give up":
            state["final_env_response"] = [vf.UserMessage("over")]
            return state["final_env_response"]
        return "go on"

    @vf.stop
    def said_done(self, state: vf.State) -> bool:
        return (
            bool(state["trajectory"])
            and state["trajectory"][-1]["completion"][-1]["content"] == "done"
        )


class Breaks(Talk):
    """Raises in the hook that the row names."""

    def setup_state(self, state: vf.State) -> None:
        self._break("setup", state)

    def env_response(self, messages: Any, state: vf.State) -> Any:
        self._break("response", state)
        return "more"

    @vf.stop
    def asks(self, state: vf.State) -> bool:
        self._break("stop", state)
        return False

    def _break(self, hook: str, state: vf.State) -> None:
        if state["info"]["hook"] == hook:
            raise (
                vf.ToolError("the tool is gone")
                if hook == "stop"
                else ValueError(f"broken in {hook}")
            )


class Keeps(vf.StatefulToolEnv):
    """A counter per rollout, which the model never sees."""

    def __init__(self, **options: Any):
        super().__init__(tools=[], **options)
        self.add_tool(self.count, args_to_skip=["counter"])

    def setup_state(self, state: vf.State) -> None:
        state["counter"] = {"value": 0}

    def update_tool_args(
        self, tool_name: str, tool_args: dict, messages: Any, state: vf.State, **_: Any
    ) -> dict:
        return {**tool_args, "counter": state["counter"]}

    def count(self, by: int, counter: dict) -> int:
        """Add to the counter.

        Args:
            by: how much
        """
        counter["value"] += by
        return counter["value"]


class Secrets(vf.MultiAgentEnv):
    """Each role is told its secret first."""

    def observe(self, state: vf.State, role: str) -> Any:
        if not any(step["extras"]["role"] == role for step in state["trajectory"]):
            return state["info"][role]
        return super().observe(state, role)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: int, b: int) -> float:
    """Divide a number by another."""
    return a / b


async def lookup(name: str) -> str:
    """Look a person up."""
    return str({"name": name, "age": len(name)})  # the text of a dict then; it is JSON now


# --- the kinds ------------------------------------------------------------------------------------


def scripted(
    env: vf.Environment, replies: Any, tokens: bool = True, client: Any = None, **options: Any
) -> Run:
    return lambda: env.evaluate(
        ScriptedClient(replies, tokens=tokens, **client or {}), "m", **OPTIONS | options
    )


def served(
    env: vf.Environment, replies: Any, kind: str = "openai_chat_completions", **options: Any
) -> Run:
    def run() -> vf.GenerateOutputs:
        with FakeServer(replies, tokens=True) as server:
            config = vf.ClientConfig(api_base_url=server.url, client_type=kind)
            return env.evaluate(config, "m", **OPTIONS | options)

    return run


def rubric(*funcs: Any, **options: Any) -> vf.Rubric:
    return vf.Rubric(funcs=list(funcs) or [exact], **options)


def single_turn() -> Iterator[Run]:
    few_shot = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    yield scripted(
        vf.SingleTurnEnv(dataset=sums(3), rubric=rubric(exact, length, weights=[1.0, 0.0])),
        add_one,
        rollouts_per_example=2,
    )
    yield scripted(
        vf.SingleTurnEnv(dataset=sums(2), rubric=rubric(), system_prompt="Add.", few_shot=few_shot),
        add_one,
    )
    yield scripted(vf.SingleTurnEnv(dataset=sums(2), rubric=rubric()), add_one, tokens=False)
    yield scripted(
        vf.SingleTurnEnv(
            dataset=[{"prompt": "2 + 1 =", "answer": "3"}],
            rubric=vf.Rubric(),
            message_type="completion",
        ),
        add_one,
    )
    yield scripted(
        vf.SingleTurnEnv(dataset=sums(1), rubric=rubric()),
        {"*": {"content": "1", "reasoning_content": "0 and 1 more"}},
    )
    image = [vf.TextContentPart("0 + 1"), vf.ImageUrlContentPart("http://host/a.png")]
    prompt = [{"role": "user", "content": image}]
    yield scripted(
        vf.SingleTurnEnv(dataset=[{"prompt": prompt, "answer": "1"}], rubric=rubric()), "1"
    )
    think = vf.ThinkParser()
    yield scripted(
        vf.SingleTurnEnv(
            dataset=sums(1),
            parser=think,
            rubric=rubric(think.get_format_reward_func(), parser=think),
        ),
        "<think>hm</think>1",
    )
    yield scripted(
        vf.SingleTurnEnv(dataset=sums(2), rubric=rubric()), add_one, score_rollouts=False
    )


def multi_turn() -> Iterator[Run]:
    yield scripted(Talk(dataset=sums(2), rubric=rubric(), max_turns=3), by_turn("1", "2", "1"))
    yield scripted(
        Talk(dataset=sums(1), rubric=rubric(), max_turns=4), by_turn("a", "b"), tokens=False
    )
    replies = by_turn("hm", "done")
    yield scripted(Author(dataset=sums(2), rubric=rubric(), max_turns=4), replies)
    yield scripted(Author(dataset=sums(1), rubric=rubric(), max_turns=4), by_turn("hm", "give up"))
    text = [{"prompt": "One, two", "answer": ", three"}]

    class Continues(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: vf.State) -> str:
            return " and"

    yield scripted(
        Continues(dataset=text, rubric=vf.Rubric(), message_type="completion", max_turns=3),
        ", three",
    )


def tools() -> Iterator[Run]:
    call = vf.ToolCall

    def env(count: int = 1) -> vf.Environment:
        return vf.ToolEnv(
            tools=[add, divide, lookup], dataset=sums(count), rubric=vf.ToolRubric(), max_turns=5
        )

    yield scripted(env(2), by_turn(call("c1", "add", {"a": 1, "b": 2}), "3"))
    yield scripted(env(), by_turn(call("c1", "divide", {"a": 1, "b": 0}), "it failed"))
    yield scripted(env(), by_turn(call("c1", "multiply", {"a": 1}), "no such tool"))
    yield scripted(env(), by_turn(call("c1", "add", "{not json"), "sorry"))
    both = [call("c1", "add", {"a": 1, "b": 2}), call("c2", "lookup", {"name": "Ann"})]
    yield scripted(env(), by_turn(both, [call("c3", "add", {"a": 3, "b": 3})], "6"))
    yield scripted(env(), by_turn(call("c1", "add", {"a": 1, "b": 2})), tokens=False)


def stateful_tools() -> Iterator[Run]:
    replies = by_turn(
        vf.ToolCall("c1", "count", {"by": 2}), vf.ToolCall("c2", "count", {"by": 3}), "5"
    )
    yield scripted(Keeps(dataset=sums(3), rubric=rubric(length), max_turns=5), replies)


def forks() -> Iterator[Run]:
    yield scripted(
        Forgets(dataset=sums(2), rubric=rubric(length), max_turns=5), by_turn("a", "b", "c")
    )
    yield scripted(
        Interleaves(dataset=sums(2), rubric=rubric(length), max_turns=5), by_turn("a", "b", "c")
    )
    drops = ByteTokenizer(keep_reasoning=False)
    yield scripted(
        Talk(dataset=sums(2), rubric=rubric(length), max_turns=3),
        by_turn("<think>one</think>a", "<think>two</think>b"),
        client={"tokenizer": drops},
    )


def agents() -> Iterator[Run]:
    """A program in a process of its own, whose calls over HTTP are the turns; the second one asks
    anew each time."""
    asks_anew = (
        CLIENT
        + "for text in ('a', 'b'):\n    print(chat([user(sys.argv[1]), user(text)])['content'])"
    )
    call = vf.ToolCall("c1", "write", '{"text":"42"}')
    for script, replies in ((WRITER, by_turn(call, "done")), (asks_anew, "yes")):
        env = vf.AgentEnv(
            command=["python3", "agent.py", "{prompt}"],
            files={"agent.py": script},
            collect=["*.txt"],
            sandbox="unsafe_subprocess",
            dataset=sums(1),
            rubric=rubric(length),
        )
        yield scripted(env, replies)


def errors() -> Iterator[Run]:
    def raises(completion: Any) -> float:
        raise ValueError("no verdict")

    rows = [{"question": "?", "info": {"hook": hook}} for hook in ("setup", "response", "stop")]
    yield scripted(Breaks(dataset=rows, rubric=rubric(length), max_turns=3), "yes")
    yield scripted(vf.SingleTurnEnv(dataset=sums(2), rubric=rubric(exact, raises)), add_one)
    failing = {
        "errors": {1: vf.ModelError("the server is gone"), 3: vf.EmptyModelResponseError("nothing")}
    }
    yield scripted(Talk(dataset=sums(2), rubric=rubric(length), max_turns=2), "a", client=failing)


def limits() -> Iterator[Run]:
    cut = {"content": "half", "finish_reason": "length"}
    yield scripted(Talk(dataset=sums(2), rubric=rubric(length), max_turns=2), by_turn(cut, "rest"))
    yield scripted(
        Talk(dataset=sums(1), rubric=rubric(length), max_turns=50, max_seq_len=60), "ten chars."
    )
    yield scripted(Talk(dataset=sums(1), rubric=rubric(length), max_turns=50, max_seq_len=5), "x")
    yield scripted(
        Talk(dataset=sums(1), rubric=rubric(length), max_turns=50, max_total_completion_tokens=10),
        "abc",
    )
    too_long = {"errors": {1: vf.OverlongPromptError("4097 tokens")}}
    yield scripted(Talk(dataset=sums(1), rubric=rubric(length), max_turns=3), "a", client=too_long)


def time_outs() -> Iterator[Run]:
    class Waits(Talk):
        async def env_response(self, messages: Any, state: vf.State) -> Any:
            await asyncio.sleep(60)

    env = Waits(dataset=sums(2), rubric=rubric(length), max_turns=3)
    yield scripted(env, "a", rollout_timeout_s=1.0, max_concurrent=4)
    limited = Waits(dataset=sums(1), rubric=rubric(length), max_turns=3, timeout_seconds=1.0)
    yield scripted(limited, "a")


def groups() -> Iterator[Run]:
    def best(completions: Any) -> list[float]:
        lengths = [len(completion[-1]["content"]) for completion in completions]
        return [float(item == max(lengths)) for item in lengths]

    class Judged(vf.Rubric):
        @vf.advantage
        def centred(self, states: Any) -> list[float]:
            return [state["reward"] - 0.25 for state in states]

    words = ["a", "bbb", "cc", "dddd"]
    rows = [{"question": "Say.", "answer": "bbb"}, {"question": "Speak.", "answer": "dddd"}]
    yield scripted(
        vf.SingleTurnEnv(dataset=rows, rubric=rubric(exact, best)), words, rollouts_per_example=4
    )
    yield scripted(
        vf.SingleTurnEnv(dataset=rows, rubric=Judged(funcs=[exact, best])),
        words,
        rollouts_per_example=4,
    )
    both = vf.RubricGroup([rubric(exact), rubric(best, weights=[0.5])])
    yield scripted(vf.SingleTurnEnv(dataset=rows, rubric=both), words, rollouts_per_example=4)
    members = [
        vf.SingleTurnEnv(dataset=sums(1), rubric=rubric()),
        Talk(dataset=rows, rubric=rubric(length), max_turns=2),
    ]
    yield scripted(vf.EnvGroup(members, env_names=["sums", "talk"]), by_turn("1", "2"))


def roles() -> Iterator[Run]:
    def ann(state: vf.State) -> float:
        return 1.0

    def bob(state: vf.State) -> float:
        if state["info"]["fails"]:
            raise ValueError("no verdict")
        return -1.0

    rows = [
        {"question": "Begin.", "info": {"ann": "a", "bob": "b", "fails": fails}}
        for fails in (False, True)
    ]
    env = Secrets(
        ("ann", "bob"), dataset=rows, rubric=vf.Rubric([ann, bob], weights=[1.0, 0.0]), max_turns=5
    )
    yield scripted(env, [f"said {number}" for number in range(5)])
    coached = (vf.Role("ann", system_prompt="You are Ann."), "bob")
    yield scripted(
        Secrets(coached, dataset=rows[:1], rubric=vf.Rubric([ann]), max_turns=3), ["x", "y", "z"]
    )


def turn_rewards() -> Iterator[Run]:
    yield scripted(
        Paid(dataset=sums(2), rubric=rubric(length), max_turns=3), by_turn("a", "b", "c")
    )


def versions() -> Iterator[Run]:
    def reply(request: Any) -> vf.Response:
        text = "ab"[players.turns(request) % 2] * 3
        prompt = ByteTokenizer().apply_chat_template(request.prompt, add_generation_prompt=True)
        ids = [*text.encode(), ByteTokenizer.eos_token_id]
        changed = np.arange(4) // 2 + 3 + players.turns(request)
        tokens = vf.ResponseTokens(prompt, ids, np.full(4, -0.5, np.float32), version=changed)
        return vf.Response(vf.AssistantMessage(text), tokens=tokens, version=int(changed.min()))

    yield scripted(Talk(dataset=sums(2), rubric=rubric(length), max_turns=3), reply, tokens=False)
    yield scripted(vf.SingleTurnEnv(dataset=sums(2), rubric=rubric(length)), reply, tokens=False)


def over_http() -> Iterator[Run]:
    yield served(Talk(dataset=sums(2), rubric=rubric(), max_turns=3), by_turn("1", "2", "1"))
    yield served(
        vf.SingleTurnEnv(dataset=sums(2), rubric=rubric()), add_one, kind="openai_responses"
    )
    yield served(
        vf.SingleTurnEnv(dataset=sums(2), rubric=rubric()), add_one, kind="anthropic_messages"
    )
    calls = by_turn(vf.ToolCall("c1", "add", {"a": 1, "b": 2}), "3")
    yield served(
        vf.ToolEnv(tools=[add], dataset=sums(1), rubric=rubric(length), max_turns=3), calls
    )


def packages() -> Iterator[Run]:
    sys.path.insert(0, str(PACKAGES))
    for path in sorted(PACKAGES.glob("*.py")):
        yield lambda name=path.stem: package(name)


def package(name: str) -> vf.GenerateOutputs:
    """The evaluation set of a package as it was written for an older version."""
    with FakeServer(players.strict_judge) as judge:
        env = vf.load_environment(
            name, **({"judge_base_url": judge.url} if name == "answer_judge" else {})
        )
        client = ScriptedClient(getattr(players, name), tokens=name != "text_continuation")
        return env.evaluate(client, "m", num_examples=4, **OPTIONS)


KINDS: dict[str, Callable[[], Iterator[Run]]] = {
    kind.__name__: kind
    for kind in (
        single_turn,
        multi_turn,
        tools,
        stateful_tools,
        forks,
        agents,
        errors,
        limits,
        time_outs,
        groups,
        roles,
        turn_rewards,
        versions,
        over_http,
        packages,
    )
}


def dumps_on_disk(kind: str) -> list[dict[str, Any]]:
    """The dumps of a kind, as they were written."""
    return [
        json.loads(line)
        for line in (FOLDER / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def dumps_of_now(kind: str) -> list[tuple[vf.GenerateOutputs, list[dict[str, Any]]]]:
    """Each run of a kind, with the dumps of its rollouts."""
    ran = [run() for run in KINDS[kind]()]
    return [(results, json.loads(json.dumps(list(dump(results))))) for results in ran]


def write(kinds: Sequence[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for kind in kinds:
        lines = [
            json.dumps(item, ensure_ascii=False)
            for _, dumps in dumps_of_now(kind)
            for item in dumps
        ]
        (FOLDER / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{kind}: {len(lines)} rollouts")


if __name__ == "__main__":
    write(sys.argv[1:] or list(KINDS))
