"""``ToolEnv``: every call is answered in order, what goes wrong is text for the model, and nothing
blocks or floods."""

import asyncio
import itertools
import json
import math
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import verifiers as vf
from verifiers.data.tool_schema import ToolFunction
from verifiers.environments.tool import ToolEnv
from verifiers.environments.tool_answers import cut
from verifiers.errors import (
    ConfigError,
    EnvironmentFault,
    InfraError,
    ToolCallError,
    ToolError,
    ToolParseError,
)
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.testing import ScriptedClient
from verifiers.types import Message, ToolCall, ToolMessage

ROW = {"question": "What is 12 squared?", "answer": "144"}


def square(n: int) -> int:
    """Square a number."""
    return n * n


def fail(why: str = "no reason") -> str:
    """Fails."""
    raise ValueError(why)


def says_the_answer(completion, answer) -> float:
    return float(answer in (completion[-1]["content"] or ""))


def tool_env(*tools, **parameters):
    parameters.setdefault("rubric", Rubric([says_the_answer]))
    return ToolEnv(tools=tools, dataset=[ROW], **parameters)


def call(name, arguments="{}", id="c1"):
    return ToolCall(id, name, arguments)


def run(env, *replies, **options):
    return env.evaluate(ScriptedClient([*replies, "It is 144."]), "m", **options)


def answers(results):
    return [m["content"] for m in results["completions"][0] if m["role"] == "tool"]


async def respond(env, *calls, run=None):
    """The answers of one turn, without a run."""
    state = State(prompt=[], tool_defs=env.tool_defs)
    state.run = run
    message = Message(role="assistant", content=None, tool_calls=list(calls))
    return await env.env_response([message], state)


# --- the loop


def test_calls_are_answered_until_the_model_calls_nothing():
    client = ScriptedClient([[call("square", {"n": 12})], "It is 144."])
    results = tool_env(square).evaluate(client, "m")
    assert results["completions"][0][1] == {"role": "tool", "content": "144", "tool_call_id": "c1"}
    assert results["stop_conditions"] == ["no_tools_called"]
    assert results["rewards"] == [1.0]
    shown = client.requests[0].tools
    assert [tool["function"]["name"] for tool in shown] == ["square"]
    assert shown[0]["function"]["parameters"]["required"] == ["n"]


def test_the_turns_are_bounded_by_ten_unless_told_otherwise():
    forever = ScriptedClient([[call("square", {"n": 1})]])
    results = tool_env(square).evaluate(forever, "m")
    assert results["stop_conditions"] == ["max_turns_reached"]
    assert len(forever.requests) == 10


def test_calls_are_counted_beside_the_rubric_and_never_in_the_reward():
    env = tool_env(square, fail)
    results = run(
        env, [call("square", {"n": 1}), call("fail")], [call("square", {"n": 2}), call("nothing")]
    )
    counted = {name: values[0] for name, values in results["metrics"].items()}
    assert counted == {
        "says_the_answer": 1.0,
        "num_turns": 3.0,
        "total_tool_calls": 4.0,
        "square_calls": 2.0,
        "fail_calls": 1.0,
    }
    assert results["rewards"] == [1.0]
    assert env.rubric.get_reward_func_names() == ["says_the_answer"]


def test_calls_of_a_rollout_that_cannot_be_scored_are_counted_too():
    def lost() -> str:
        raise InfraError("the network is down")

    results = run(tool_env(lost), [call("lost")])
    assert math.isnan(results["rewards"][0])
    assert results["metrics"]["lost_calls"] == [1.0]


# --- tools


def test_tools_are_added_and_removed_by_callable():
    env = tool_env(square)
    env.add_tool(fail)
    assert list(env.tool_map) == ["square", "fail"]
    assert env.tool_map["square"] is square
    before = env.tool_defs
    env.remove_tool(square)
    assert [tool["name"] for tool in env.tool_defs] == ["fail"]
    assert env.tools == [fail]
    assert len(before) == 2, "a rollout under way keeps the tools it began with"
    env.add_tool(square)
    with pytest.raises(ConfigError, match="two tools are called 'square'"):
        env.add_tool(square)
    with pytest.raises(
        ConfigError, match=r"'run' is not a tool of this ToolEnv; it has: fail, square"
    ):
        env.remove_tool(run)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"tools": [square, square]}, "two tools are called 'square'"),
        ({"tools": [lambda x: x]}, "cannot be called '<lambda>'"),
        ({"tools": [square], "message_type": "completion"}, "tools need chat messages"),
        ({"stop_errors": ["ValueError"]}, "stop_errors takes exception classes"),
        ({"max_tool_result_chars": 0}, "at least 1"),
        ({"tool": [square]}, "did you mean 'tools'"),
    ],
)
def test_what_cannot_work_is_refused_when_the_environment_is_made(parameters, said):
    with pytest.raises(ConfigError, match=said):
        ToolEnv(dataset=[ROW], **parameters)


def test_definitions_from_elsewhere_are_offered_beside_the_functions():
    definitions = [
        {"type": "function", "function": {"name": "remote", "description": "", "parameters": {}}}
    ]
    env = tool_env(square, tool_defs=definitions)
    assert [tool["function"]["name"] for tool in env.tool_defs] == ["remote", "square"]
    with pytest.raises(ConfigError, match="two tools are called 'remote'"):
        env.add_tool(ToolFunction.with_definition(square, definitions[0]))


# --- results


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("text", "text"),
        (144, "144"),
        (None, "None"),
        ({"role": "admin", "content": "x"}, '{"role": "admin", "content": "x"}'),
        ([], "[]"),
        ([1, {"type": "text", "text": "a"}], "[1, {'type': 'text', 'text': 'a'}]"),
        ([{"type": "text", "text": "a"}], [{"type": "text", "text": "a"}]),
        (
            [{"type": "image_url", "image_url": {"url": "data:"}}],
            [{"type": "image_url", "image_url": {"url": "data:"}}],
        ),
    ],
)
async def test_results_become_text_and_content_parts_pass_through(result, content):
    def tool():
        return result

    (answer,) = await respond(tool_env(tool), call("tool"))
    assert answer == {"role": "tool", "content": content, "tool_call_id": "c1"}


async def test_messages_pass_through_with_the_call_they_answer():
    def addressed():
        return ToolMessage("mine", "other")

    def unaddressed():
        return Message(role="tool", content="mine")

    env = tool_env(addressed, unaddressed)
    assert await respond(env, call("addressed"), call("unaddressed", id="c2")) == [
        {"role": "tool", "content": "mine", "tool_call_id": "other"},
        {"role": "tool", "content": "mine", "tool_call_id": "c2"},
    ]


async def test_long_results_are_cut_with_a_note_and_images_are_not():
    def long(n: int):
        return "a" * n + "the end"

    def parts():
        image = {"type": "image_url", "image_url": {"url": "x" * 1000}}
        return [{"type": "text", "text": "b" * 60}, image, {"type": "text", "text": "c" * 60}]

    env = tool_env(long, parts, max_tool_result_chars=100)
    short, cut_, mixed = await respond(
        env, call("long", {"n": 93}), call("long", {"n": 1_000_000}), call("parts")
    )
    assert short["content"] == "a" * 93 + "the end"
    assert len(cut_["content"]) < 200
    assert "999907 of 1000007 characters left out" in cut_["content"]
    assert cut_["content"].endswith("the end")
    first, image, last = mixed["content"]
    assert (first["text"], len(image["image_url"]["url"])) == ("b" * 60, 1000)
    assert "20 of 60 characters left out" in last["text"]
    # negative control: below the bound
    uncut = await respond(tool_env(long), call("long", {"n": 150_000}))
    assert len(uncut[0]["content"]) == 150_007


@pytest.mark.parametrize("max_chars", [0, 1, 2, 3])
def test_cutting_keeps_as_many_characters_as_allowed(max_chars):
    beginning, note, end = cut("abcdefgh", max_chars).split("\n")
    assert len(beginning + end) == max_chars
    assert "abcdefgh".startswith(beginning)
    assert "abcdefgh".endswith(end)
    assert "of 8 characters" in note


# --- what a model may get wrong


@pytest.mark.parametrize(
    ("called", "said"),
    [
        (call("square", '{"n": '), "not valid JSON"),
        (call("square", "[12]"), "one JSON object, not a list"),
        (call("square", {"n": "twelve"}), "'n': Input should be a valid integer"),
        (call("square", {}), "'n' is missing"),
        (call("square", {"n": 1, "m": 2}), "'m' is not a parameter"),
        (call("sqare", {"n": 1}), "there is no tool 'sqare'; the tools are: square, fail"),
        (call("", {"n": 1}), "there is no tool ''"),
        (call("../square\x1b[2J"), "no tool '../square\\x1b[2J'"),
        (call("x" * 5_000_000), "there is no tool 'xxx"),
        (call("square", "[" * 100_000), "nested too deeply"),
        (call("square", json.dumps({"n": "9" * 5_000_000})), "'n'"),
        (call("square", json.dumps({"n": 1, "y" * 5_000_000: 1})), "is not a parameter"),
        (call("fail", json.dumps({"why": "z" * 5_000_000})), "characters left out"),
        (call("fail"), "no reason"),
    ],
)
def test_a_bad_call_is_answered_with_a_short_text_and_the_rollout_goes_on(called, said):
    results = run(
        tool_env(square, fail, max_tool_result_chars=2000), [called], [call("square", {"n": 12})]
    )
    told, squared = answers(results)
    assert said in told
    assert len(told) < 2200
    assert squared == "144"
    assert (results["rewards"], results["errors"]) == ([1.0], [None])


def test_ten_thousand_calls_in_one_message_are_all_answered_and_few_are_run():
    seen = []

    def count(n: int):
        seen.append(n)
        return "x" * 1000

    calls = [call("count", {"n": n}, id=f"c{n}") for n in range(10_000)]
    results = run(tool_env(count), calls)
    told = [m for m in results["completions"][0] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in told] == [f"c{n}" for n in range(10_000)]
    assert seen == list(range(128))
    assert told[-1]["content"] == "not run: one message may make 128 tool calls at most"
    assert sum(len(m["content"]) for m in told) < 10_000 * 60 + 128 * 1000


async def test_without_the_bound_every_call_of_a_message_is_run():
    class Unbounded(ToolEnv):
        max_calls_per_turn = 1000

    env = Unbounded(tools=[square], dataset=[ROW])
    told = await respond(env, *(call("square", {"n": n}) for n in range(200)))
    assert [m["content"] for m in told] == [str(n * n) for n in range(200)]


async def test_an_error_without_a_message_is_told_by_its_name():
    def silent():
        raise LookupError

    (told,) = await respond(tool_env(silent), call("silent"))
    assert told["content"] == "LookupError"


def lazily():
    """A sync generator."""
    yield "a"
    yield 2


async def lazily_too():
    """An async generator."""
    yield "a"
    yield 2


def without_end():
    """An iterator that does not end."""
    return itertools.repeat("a")


async def without_end_too():
    """An async generator that does not end."""
    while True:
        yield "a"


class Cursor:
    """An iterator with a text of its own."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

    def __str__(self):
        return "3 rows"


def cursor():
    """An iterator with a text of its own."""
    return Cursor()


@pytest.mark.parametrize(
    ("tool", "text"),
    [(lazily, "['a', 2]"), (lazily_too, "['a', 2]"), (cursor, "3 rows"), (square, "4")],
)
async def test_the_values_of_an_iterator_are_told_and_not_its_address(tool, text):
    (told,) = await respond(tool_env(tool), call(tool.__name__, {"n": 2} if tool is square else {}))
    assert told["content"] == text


@pytest.mark.parametrize("tool", [without_end, without_end_too])
async def test_an_iterator_without_end_is_read_up_to_the_limit_of_a_result(tool):
    (told,) = await respond(tool_env(tool, max_tool_result_chars=100), call(tool.__name__))
    assert told["content"].startswith("['a', 'a'")
    assert "[... cut: 400 of 500 characters left out ...]" in told["content"]


async def test_the_formatter_sees_the_exception_itself():
    env = tool_env(square, fail, error_formatter=lambda error: f"<{type(error).__name__}> {error}")
    failed, unparsed = await respond(env, call("fail"), call("square", "nope"))
    assert failed["content"] == "<ValueError> no reason"
    assert unparsed["content"].startswith("<ToolParseError> the arguments are not valid JSON")
    with pytest.raises(EnvironmentFault, match="error_formatter raised ZeroDivisionError"):
        await respond(tool_env(fail, error_formatter=lambda error: 1 / 0), call("fail"))


# --- errors that end the rollout


@pytest.mark.parametrize(
    ("stop_errors", "called", "kind"),
    [
        ([ValueError], call("fail"), ToolCallError),
        ([ToolCallError], call("fail"), ToolCallError),
        ([ToolError], call("fail"), ToolCallError),
        ([Exception], call("fail"), ToolCallError),
        ([ToolCallError], call("nothing"), ToolCallError),
        ([ToolParseError], call("square", "nope"), ToolParseError),
        ([json.JSONDecodeError], call("square", "nope"), ToolParseError),
        ([KeyError, ToolError], call("square", {}), ToolCallError),
    ],
)
def test_stop_errors_end_the_rollout_and_it_is_scored(stop_errors, called, kind):
    env = tool_env(square, fail, stop_errors=stop_errors, rubric=Rubric([lambda completion: 0.25]))
    results = run(env, [called])
    assert results["errors"][0]["error"] == kind.__name__
    assert results["stop_conditions"] == ["has_error"]
    assert results["rewards"] == [0.25]
    without = run(tool_env(square, fail, stop_errors=[OSError]), [called])  # negative control
    assert without["errors"] == [None]


def test_a_failure_that_is_not_the_models_doing_leaves_the_reward_unknown():
    def search(query: str):
        raise InfraError("the index is down")

    def leave():
        raise SystemExit(1)

    def misconfigured():
        raise ConfigError("no index was given")

    for tool, kind, said in [
        (search, "InfraError", "the index is down"),
        (leave, "EnvironmentFault", "leave raised SystemExit"),
        (misconfigured, "EnvironmentFault", "misconfigured raised ConfigError"),
    ]:
        results = run(
            tool_env(tool), [call(tool.__name__, {"query": "x"} if tool is search else {})]
        )
        assert results["errors"][0]["error"] == kind
        assert said in results["errors"][0]["message"]
        assert math.isnan(results["rewards"][0])


async def test_a_tool_error_of_the_author_is_told_to_the_model():
    def refuse():
        raise ToolError("the shop is closed")

    (told,) = await respond(tool_env(refuse), call("refuse"))
    assert told["content"] == "the shop is closed"


# --- order, concurrency, threads


@pytest.mark.parametrize("parallel", [False, True])
async def test_calls_of_one_message_run_in_order_or_together_and_are_answered_in_order(parallel):
    begun, in_flight, most = [], 0, 0

    async def wait(n: int, seconds: float):
        nonlocal in_flight, most
        begun.append(n)
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(seconds)
        in_flight -= 1
        return n

    env = tool_env(wait, parallel_tool_calls=parallel)
    told = await respond(
        env, *(call("wait", {"n": n, "seconds": 0.03 - n / 100}) for n in range(4))
    )
    assert [m["content"] for m in told] == ["0", "1", "2", "3"]
    assert begun == [0, 1, 2, 3]
    assert most == (4 if parallel else 1)


async def test_a_stop_error_cancels_the_calls_beside_it():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("slow")

    env = tool_env(slow, fail, parallel_tool_calls=True, stop_errors=[ValueError])
    with pytest.raises(ToolCallError, match="no reason"):
        await asyncio.wait_for(respond(env, call("fail"), call("slow")), 5)
    assert ended == ["slow"]


@pytest.mark.parametrize("blocks_the_loop", [False, True])
async def test_a_synchronous_tool_does_not_hold_up_the_event_loop(blocks_the_loop):
    threads = []

    def sleep():
        threads.append(threading.current_thread())
        time.sleep(0.2)

    async def sleep_on_the_loop():
        time.sleep(0.2)  # noqa: ASYNC251  negative control: what a thread saves us from

    tool = sleep_on_the_loop if blocks_the_loop else sleep
    lags = []

    async def watch():
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            lags.append(time.perf_counter() - before - 0.01)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.02)
    await respond(tool_env(tool), call(tool.__name__))
    await asyncio.sleep(0.02)
    watching.cancel()
    assert (max(lags) > 0.15) is blocks_the_loop
    assert all(thread is not threading.main_thread() for thread in threads)


async def test_a_plain_function_that_returns_an_awaitable_is_awaited():
    async def later():
        return "later"

    def tool():
        return later()

    (told,) = await respond(tool_env(tool), call("tool"))
    assert told["content"] == "later"


class Waiting:
    """The tool ``wait``, and the most calls of it that ran together."""

    in_flight = most = 0

    async def wait(self):
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.02)
        self.in_flight -= 1


@pytest.mark.parametrize("limit", [2, None])
async def test_the_runs_limit_holds_over_all_rollouts(limit):
    waiting = Waiting()
    env = tool_env(waiting.wait, parallel_tool_calls=True)
    slot = nullcontext() if limit is None else asyncio.Semaphore(limit)
    run = SimpleNamespace(tool_slot=slot, rollout_timeout_s=None)
    await asyncio.gather(*(respond(env, call("wait"), call("wait"), run=run) for _ in range(4)))
    assert waiting.most == (limit or 8)


def test_the_option_max_concurrent_tools_limits_the_tools_of_a_run():
    client = ScriptedClient(
        lambda request: "done" if request.prompt[-1]["role"] == "tool" else [call("wait")]
    )
    for limit in (2, None):
        waiting = Waiting()
        env = tool_env(waiting.wait)
        env.evaluate(client, "m", rollouts_per_example=6, max_concurrent_tools=limit)
        assert waiting.most == (limit or 6)


def test_a_tool_that_hangs_ends_with_its_rollout_and_costs_no_neighbour():
    released = threading.Event()

    def hang(n: int):
        if n:
            released.wait(20)
        return "back"

    hangs = iter([True, False, False])
    client = ScriptedClient(
        lambda request: (
            "144"
            if request.prompt[-1]["role"] == "tool"
            else [call("hang", {"n": int(next(hangs))})]
        )
    )
    try:
        results = tool_env(hang).evaluate(
            client, "m", rollouts_per_example=3, rollout_timeout_s=0.5
        )
    finally:
        released.set()
    assert sorted(str(r) for r in results["rewards"]) == ["1.0", "1.0", "nan"]
    assert [e["error"] for e in results["errors"] if e] == ["RolloutTimeout"]


# --- overriding


async def test_call_tool_can_be_overridden_in_every_historical_form():
    class Routed(ToolEnv):
        async def call_tool(self, tool_name, tool_args, tool_call_id, **kwargs):
            if tool_name == "remote":
                return f"remote {tool_args} {kwargs['state']['answer']}"
            return await super().call_tool(tool_name, tool_args, tool_call_id, **kwargs)

    class Plain(ToolEnv):
        def call_tool(self, tool_name, tool_args, tool_call_id):
            return {"role": "tool", "content": tool_name, "tool_call_id": tool_call_id}

    remote = {
        "type": "function",
        "function": {"name": "remote", "description": "", "parameters": {}},
    }
    routed = Routed(tools=[square], tool_defs=[remote], dataset=[ROW])
    told = await respond(
        routed, call("remote", {"a": 1}), call("square", {"n": 3}), call("nothing")
    )
    assert [m["content"] for m in told[:2]] == ["remote {'a': 1} ", "9"]
    assert "there is no tool 'nothing'" in told[2]["content"]
    assert await respond(Plain(tools=[square], dataset=[ROW]), call("square", {"n": 3})) == [
        {"role": "tool", "content": "square", "tool_call_id": "c1"}
    ]


async def test_call_tool_works_outside_a_rollout():
    assert await tool_env(square).call_tool("square", {"n": 3}, "c9") == ToolMessage("9", "c9")
    with pytest.raises(ToolCallError, match="there is no tool"):
        await tool_env(square).call_tool("cube", {"n": 3}, "c9")


def test_a_dict_reaches_the_model_as_json():
    def look(word: str) -> dict:
        """Look it up."""
        return {"found": True, "word": "ü", "at": None}

    def odd(word: str) -> dict:
        """Not JSON."""
        return {"set": {1}}

    env = vf.ToolEnv(tools=[look, odd], eval_dataset=[{"question": "?"}])
    calls = [ToolCall(f"c{n}", name, {"word": "x"}) for n, name in enumerate(("look", "odd"))]
    completion = env.evaluate(ScriptedClient([calls, "done"]), "m")["completions"][0]
    assert [message["content"] for message in completion[1:3]] == [
        '{"found": true, "word": "ü", "at": null}',
        "{'set': {1}}",
    ]


def test_a_tool_that_asks_the_model_for_the_state_is_warned_of(caplog):
    def of_rollout(state: dict, word: str) -> str:
        """Uses the state."""
        return word

    def of_country(state: str) -> str:
        """A state of a country."""
        return state

    vf.ToolEnv(tools=[of_country], eval_dataset=[{"question": "?"}])
    assert "StatefulToolEnv" not in caplog.text  # negative control: a text
    vf.ToolEnv(tools=[of_rollout], eval_dataset=[{"question": "?"}])
    assert "'state' of the tool 'of_rollout'; a vf.StatefulToolEnv fills it in" in caplog.text
    caplog.clear()
    env = vf.StatefulToolEnv(eval_dataset=[{"question": "?"}])
    env.add_tool(of_rollout, args_to_skip=["state"])
    assert "fills it in" not in caplog.text


def test_a_check_names_a_tool_that_fails():
    def bad(word: str) -> str:
        """Always fails."""
        raise RuntimeError("no network")

    env = vf.ToolEnv(tools=[bad], eval_dataset=[{"question": "?"}])
    assert "a tool failed: bad: no network" in str(vf.check_environment(env))
