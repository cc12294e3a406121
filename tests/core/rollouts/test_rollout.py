"""One rollout: the hooks in every accepted form, every stop condition, both time limits, errors as
values, clean-up."""

import asyncio
import threading
import time

import pytest

import verifiers as vf
from support.small_envs import Talk, row, single_turn
from verifiers.rollouts.author_code import Hook
from verifiers.rollouts.loop import first_stop, generate, stop_conditions
from verifiers.testing import ScriptedClient


async def rollout(env, replies="ok", input_row=None, timeout_s=None, **client):
    """The played state, and the client it was played with."""
    scripted = replies if isinstance(replies, ScriptedClient) else ScriptedClient(replies, **client)
    state = await env.init_state(input_row or row(), scripted, "m")
    return await generate(env, state, timeout_s)


def texts(messages):
    return [m["content"] for m in messages]


# --- the loop


async def test_a_conversation_alternates_until_the_last_turn():
    state = await rollout(Talk(max_turns=3), ["a", "b", "c"], tokens=True)
    assert texts(state["completion"]) == ["a", "more", "b", "more", "c"]
    assert (state["stop_condition"], state["is_completed"], state["is_truncated"]) == (
        "max_turns_reached",
        True,
        False,
    )
    assert state["turn"] == 3
    assert texts(state["trajectory"][2]["prompt"]) == ["hello", "a", "more", "b", "more"]
    assert state["error"] is None
    assert state["reward"] is None
    usage = state["usage"]
    assert usage["output_tokens"] == sum(
        len(s["tokens"]["completion_ids"]) for s in state["trajectory"]
    )
    last = state["trajectory"][2]["tokens"]
    assert (usage["final_input_tokens"], usage["final_output_tokens"]) == (
        len(last["prompt_ids"]) + len(last["completion_ids"]) - usage["output_tokens"],
        usage["output_tokens"],
    )


async def test_a_single_turn_asks_once_and_never_the_environment():
    class Silent(vf.SingleTurnEnv):
        def env_response(self, messages, state):
            raise AssertionError("asked")

    state = await rollout(Silent(dataset=[row()]), "4")
    assert texts(state["completion"]) == ["4"]
    assert state["stop_condition"] == "max_turns_reached"


async def test_completion_mode_continues_text():
    class Poem(vf.MultiTurnEnv):
        def env_response(self, messages, state):
            return " /" if state["turn"] == 1 else None

    env = Poem(dataset=[{"prompt": "roses"}], message_type="completion", max_turns=3)
    state = await rollout(env, [" are red", " violets", " blue"], {"prompt": "roses"}, tokens=True)
    assert state["completion"] == " are red / violets blue"
    assert state["trajectory"][1]["prompt"] == "roses are red /"


async def test_a_finished_rollout_holds_no_prompt_twice():
    state = await rollout(Talk(max_turns=5), "x", tokens=True)
    for step in state["trajectory"]:
        assert step._prompt is None
        assert step._prompt_ids is None
    assert len(state["trajectory"][4]["prompt"]) == 9
    assert sum(len(step.new_prompt) for step in state["trajectory"]) == 5


async def test_timing_says_where_the_time_went():
    class Slow(Talk):
        async def setup_state(self, state):
            await asyncio.sleep(0.03)

        async def env_response(self, messages, state):
            await asyncio.sleep(0.02)
            return "on"

    state = await rollout(Slow(max_turns=2), "ok", delay_s=0.01)
    timing = state["timing"]
    assert timing.setup_ms >= 29
    assert timing.env_ms >= 19
    assert timing.model_ms >= 19
    assert timing.generation_ms >= timing.setup_ms + timing.env_ms + timing.model_ms
    assert abs(timing.start_time - time.time()) < 60


# --- hooks in their accepted forms


def answering(value, as_async=False, with_kwargs=False):
    """An environment of two turns whose ``env_response`` gives ``value`` (a function
    of the state)."""
    if as_async and with_kwargs:

        async def env_response(self, messages, state, **kwargs):
            return value(state)

    elif as_async:

        async def env_response(self, messages, state):
            return value(state)

    elif with_kwargs:

        def env_response(self, messages, state, **kwargs):
            return value(state)

    else:

        def env_response(self, messages, state):
            return value(state)

    return type("Answering", (Talk,), {"env_response": env_response})(max_turns=2)


@pytest.mark.parametrize("as_async", [False, True])
@pytest.mark.parametrize("with_kwargs", [False, True])
@pytest.mark.parametrize(
    ("value", "added"),
    [
        (lambda state: [{"role": "user", "content": "a"}, vf.UserMessage("b")], ["a", "b"]),
        (lambda state: vf.UserMessage("a"), ["a"]),
        (lambda state: {"role": "user", "content": "a"}, ["a"]),
        (lambda state: "a", ["a"]),
        (lambda state: [], []),
        (lambda state: None, []),
        (lambda state: ([vf.UserMessage("a")], state), ["a"]),
        (lambda state: ("a", {"score": 3}), ["a"]),
        (lambda state: (vf.UserMessage("a"), vf.UserMessage("b")), ["a", "b"]),
        (
            lambda state: (vf.UserMessage("a"), vf.UserMessage("b"), vf.UserMessage("c")),
            ["a", "b", "c"],
        ),
    ],
)
async def test_env_response_in_every_form(value, added, as_async, with_kwargs):
    state = await rollout(answering(value, as_async, with_kwargs), ["x", "y"])
    assert state["error"] is None
    assert texts(state["completion"]) == ["x", *added, "y"]
    if "score" in state:
        assert state["score"] == 3


async def test_messages_given_to_a_hook_are_a_copy_of_the_list():
    class Greedy(Talk):
        def env_response(self, messages, state):
            messages.append(vf.UserMessage("smuggled"))
            messages.clear()
            return "more"

    state = await rollout(Greedy(max_turns=2), ["a", "b"])
    assert texts(state["completion"]) == ["a", "more", "b"]


def setting_up(setup_state, base=Talk):
    return type("SettingUp", (base,), {"setup_state": setup_state})(max_turns=1)


def in_place(self, state):
    state["board"] = 1


async def in_place_async(self, state, **kwargs):
    state["board"] = 1


def returning_state(self, state):
    state["board"] = 1
    return state


def returning_mapping(self, state):
    return {"board": 1, "answer": "changed"}


def returning_copy(self, state):
    return {**state.copy(), "board": 1}


def returning_new_state(self, state):
    return vf.State(state, board=1)


@pytest.mark.parametrize(
    "setup_state",
    [
        in_place,
        in_place_async,
        returning_state,
        returning_mapping,
        returning_copy,
        returning_new_state,
    ],
    ids=lambda f: f.__name__,
)
async def test_setup_state_in_every_form(setup_state):
    state = await rollout(setting_up(setup_state), "ok")
    assert state["error"] is None
    assert state["board"] == 1
    assert texts(state["completion"]) == ["ok"]
    assert state["input"]["answer"] == ("changed" if setup_state is returning_mapping else "")


async def test_setup_state_that_returns_something_else_is_the_rollouts_fault():
    state = await rollout(setting_up(lambda self, state: 3))
    assert isinstance(state["error"], vf.EnvironmentFault)
    assert "setup_state" in str(state["error"])
    assert "returned int" in str(state["error"])


async def test_setup_state_may_write_the_prompt():
    def setup_state(self, state):
        state["prompt"] = "2 + 2?"

    state = await rollout(setting_up(setup_state), "4")
    assert state["trajectory"][0]["prompt"] == [{"role": "user", "content": "2 + 2?"}]
    assert texts(state["completion"]) == ["4"]


async def test_marked_methods_run_by_priority_and_get_what_they_name():
    class Marked(Talk):
        @vf.setup
        def beta(self, state):
            state["order"].append("beta")

        @vf.setup(priority=5)
        async def alpha(self, state, task, env):
            state["order"] = [f"alpha {task} {env is self}"]

        @vf.cleanup
        def last(self, state):
            state["order"].append("last")

        @vf.cleanup(priority=1)
        async def first(self, state, env):
            state["order"].append("first")

        @vf.cleanup(stage="group")
        def with_siblings(self, states):
            raise AssertionError("not a rollout's")

        @vf.stop(priority=7)
        async def lucky(self, state, task):
            return task == "luck" and state["turn"] == 1

    state = await rollout(Marked(), "ok", row(task="luck"))
    assert state["order"] == ["alpha luck True", "beta", "first", "last"]
    assert (state["stop_condition"], state["turn"]) == ("lucky", 1)


async def test_get_prompt_messages_may_be_overridden_with_plain_dicts():
    class Forgetful(Talk):
        async def get_prompt_messages(self, state):
            return [{"role": "user", "content": f"turn {state['turn']}", "name": None}]

    client = ScriptedClient(["a", "b"])
    state = await rollout(Forgetful(max_turns=2), client)
    assert [request.prompt for request in client.requests] == [
        [vf.UserMessage(f"turn {n}")] for n in (0, 1)
    ]
    assert all(isinstance(m, vf.Message) for m in client.requests[1].prompt)
    assert state["trajectory"][1]["prompt"] == [{"role": "user", "content": "turn 1"}]


async def test_a_prompt_that_is_extended_in_place_changes_nothing_stored():
    class Extending(Talk):
        async def get_prompt_messages(self, state):
            messages = await super().get_prompt_messages(state)
            messages.append(vf.UserMessage("please"))
            return messages

    state = await rollout(Extending(max_turns=2), ["a", "b"])
    assert texts(state["prompt"]) == ["hello"]
    assert texts(state["trajectory"][0]["prompt"]) == ["hello", "please"]
    assert texts(state["trajectory"][1]["prompt"]) == ["hello", "please", "a", "more", "please"]


@pytest.mark.parametrize("as_async", [False, True])
async def test_steps_may_be_given_rewards_and_extras(as_async):
    def add(self, state, step):
        step["reward"], step["extras"]["n"] = 0.5, state["turn"]
        state["trajectory"].append(step)

    async def add_async(self, state, step):
        add(self, state, step)

    env = type("Rewarding", (Talk,), {"add_trajectory_step": add_async if as_async else add})(
        max_turns=2
    )
    state = await rollout(env)
    assert [(s.reward, s.extras) for s in state["trajectory"]] == [(0.5, {"n": 0}), (0.5, {"n": 1})]


async def test_add_model_response_and_render_completion_may_be_overridden():
    class Quiet(Talk):
        async def add_model_response(self, state, prompt_messages, response):
            state["seen"] = [*state.get("seen", []), response.text]
            await super().add_model_response(state, prompt_messages, response)

        async def render_completion(self, state):
            state["completion"] = [vf.AssistantMessage("|".join(state["seen"]))]

    state = await rollout(Quiet(max_turns=2), ["a", "b"])
    assert texts(state["completion"]) == ["a|b"]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, None),
        ({"error": vf.Error("x")}, "has_error"),
        ({"final_env_response": "x"}, "has_final_env_response"),
        ({"prompt_too_long": True}, "prompt_too_long"),
        ({"usage": {"output_tokens": 9}}, "max_total_completion_tokens_reached"),
        (
            {"usage": {"output_tokens": 9}, "prompt_too_long": True},
            "max_total_completion_tokens_reached",
        ),
        (
            {"trajectory": [vf.TrajectoryStep(tokens=vf.TrajectoryStepTokens([1], [2, 3]))] * 2},
            "max_seq_len_reached",
        ),
        ({"n": 1}, "max_n"),
        ({"n": 1, "prompt_too_long": True}, "max_n"),
        ({"n": 1, "final_env_response": "x"}, "has_final_env_response"),
    ],
)
async def test_the_first_condition_that_holds_ends_the_rollout(values, reason):
    class Counted(Talk):
        @vf.stop
        def max_n(self, state):
            return state.get("n") == 1

    env = Counted(max_turns=5, max_total_completion_tokens=9, max_seq_len=3)
    unlimited = Counted(max_turns=5, max_total_completion_tokens=9)
    state = await env.init_state(row(), ScriptedClient("x"), "m")
    state.update(values)
    assert await first_stop(env, state, stop_conditions(Counted)) == reason
    assert await first_stop(unlimited, state, stop_conditions(Counted)) == (
        None if reason == "max_seq_len_reached" else reason
    )


async def test_a_built_in_condition_that_is_overridden_is_asked():
    class Shorter(Talk):
        @vf.stop
        def max_turns_reached(self, state):
            return state["turn"] == 2

    state = await rollout(Shorter(max_turns=9), ["a", "b", "c"])
    assert (state["stop_condition"], state["turn"]) == ("max_turns_reached", 2)


async def test_is_completed_in_the_older_form_is_one_more_stop_condition():
    class Older(Talk):
        def is_completed(self, messages, state, **kwargs):
            return messages[-1]["content"] == "done"

    state = await rollout(Older(max_turns=9), ["go", "done"])
    assert (state["stop_condition"], state["turn"]) == ("is_completed", 2)


async def test_is_completed_in_the_newer_form_may_ask_the_other_conditions():
    class Newer(Talk):
        async def is_completed(self, state):
            return await super().is_completed(state) or state["turn"] == 2

    assert (await rollout(Newer(max_turns=9)))["turn"] == 2
    assert (await rollout(Newer(max_turns=1)))["turn"] == 1

    class OlderAsync(Talk):
        async def is_completed(self, history, state, **kwargs):
            return await super().is_completed(history, state, **kwargs)

    state = await rollout(OlderAsync(max_turns=2))
    assert (state["turn"], state["stop_condition"]) == (2, "is_completed")


async def test_is_completed_can_be_asked_from_outside():
    env = Talk(max_turns=1)
    state = await env.init_state(row(), ScriptedClient("x"), "m")
    assert not await env.is_completed(state)
    await generate(env, state)
    assert await env.is_completed(state)


async def test_an_is_completed_that_is_marked_itself_counts_once():
    calls = []

    class Marked(Talk):
        @vf.stop(priority=3)
        def is_completed(self, state):
            calls.append(state["turn"])
            return state["turn"] == 1

    assert (await rollout(Marked()))["stop_condition"] == "is_completed"
    assert calls == [0, 1]


# --- stop conditions


async def test_a_final_answer_of_the_environment_ends_without_another_model_call():
    class Finishing(Talk):
        def env_response(self, messages, state):
            state["final_env_response"] = [{"role": "user", "content": "you won"}]
            return state["final_env_response"]

    client = ScriptedClient("move")
    state = await rollout(Finishing(max_turns=9), client)
    assert (state["stop_condition"], len(client.requests)) == ("has_final_env_response", 1)
    assert texts(state["completion"]) == ["move", "you won"]
    assert not state["is_truncated"]


async def test_an_error_that_a_hook_sets_stops_the_rollout():
    class Setting(Talk):
        def env_response(self, messages, state):
            state["error"] = vf.ToolError("broken")
            return "x"

    state = await rollout(Setting(max_turns=9))
    assert (state["stop_condition"], state["turn"]) == ("has_error", 2)
    assert isinstance(state["error"], vf.ToolError)


@pytest.mark.parametrize("value", ["it broke", ValueError("it broke")])
async def test_an_error_set_in_another_form_becomes_one_of_ours(value):
    class Setting(Talk):
        def setup_state(self, state):
            state["error"] = value

    state = await rollout(Setting())
    assert isinstance(state["error"], vf.EnvironmentFault)
    assert "it broke" in str(state["error"])


async def test_the_token_bound_of_one_conversation():
    for tokens in (True, False):
        env = Talk(max_turns=50, max_seq_len=60)
        reply = vf.Response(vf.AssistantMessage("ten chars."), usage=vf.Usage(15, 10))
        later = vf.Response(vf.AssistantMessage("ten chars."), usage=vf.Usage(55, 10))
        replies = "ten chars." if tokens else [reply, reply, later]
        state = await rollout(env, replies, tokens=tokens)
        assert state["stop_condition"] == "max_seq_len_reached"
        assert state["is_truncated"]
        assert not state["prompt_too_long"]


async def test_a_first_prompt_beyond_the_bound_is_too_long():
    state = await rollout(
        Talk(max_turns=50, max_seq_len=5), "x", row("a long question"), tokens=True
    )
    assert (state["stop_condition"], state["prompt_too_long"], state["is_truncated"]) == (
        "prompt_too_long",
        True,
        True,
    )
    assert state["trajectory"][0]["tokens"]["overlong_prompt"]
    assert state["turn"] == 1


async def test_a_server_that_refuses_for_length_ends_the_rollout_as_too_long():
    state = await rollout(Talk(max_turns=9), "a", errors={1: vf.OverlongPromptError("4097 tokens")})
    assert (state["stop_condition"], state["prompt_too_long"], state["is_truncated"]) == (
        "prompt_too_long",
        True,
        True,
    )
    assert state["error"] is None
    assert texts(state["completion"]) == ["a"]


async def test_the_bound_on_all_completion_tokens():
    env = Talk(max_turns=50, max_total_completion_tokens=10)
    state = await rollout(env, "x", tokens=True)
    assert state["stop_condition"] == "max_total_completion_tokens_reached"
    assert state["is_truncated"]
    assert state["usage"]["output_tokens"] >= 10


async def test_a_cut_reply_is_marked_and_does_not_stop_the_rollout():
    state = await rollout(
        Talk(max_turns=2), [{"content": "half", "finish_reason": "length"}, "whole"]
    )
    assert [s.is_truncated for s in state["trajectory"]] == [True, False]
    assert state["is_truncated"]
    assert state["stop_condition"] == "max_turns_reached"


async def test_conditions_are_asked_by_priority_then_by_name():
    class Several(Talk):
        @vf.stop
        def zebra(self, state):
            return True

        @vf.stop
        def aardvark(self, state):
            return True

        @vf.stop(priority=-1)
        def ant(self, state):
            return True

    assert (await rollout(Several()))["stop_condition"] == "aardvark"


async def test_an_environment_without_end_is_stopped_after_a_thousand_turns():
    started = time.thread_time()
    state = await rollout(Talk(max_turns=-1), "x")
    assert (state["turn"], state["stop_condition"]) == (1000, "max_turns_reached")
    assert time.thread_time() - started < 10
    assert (await rollout(Talk(max_turns=1001), "x"))["turn"] == 1001


# --- time limits


class Waiting(Talk):
    async def env_response(self, messages, state):
        if state["turn"] == 2:
            await asyncio.sleep(60)
        return "more"


async def test_the_environments_own_time_limit_is_a_stop_condition():
    state = await rollout(Waiting(max_turns=9, timeout_seconds=0.1), "x", timeout_s=30)
    assert (state["stop_condition"], state["error"], state["is_truncated"]) == (
        "timeout_reached",
        None,
        True,
    )
    assert state["turn"] == 2
    assert texts(state["completion"]) == ["x", "more", "x"]


async def test_the_runs_guard_is_an_error_that_names_what_was_awaited():
    state = await rollout(Waiting(max_turns=9, timeout_seconds=30), "x", timeout_s=0.1)
    error = state["error"]
    assert isinstance(error, vf.RolloutTimeout)
    assert (error.waiting_for, error.elapsed_s) == ("env_response", 0.1)
    assert "env_response" in str(error)
    assert "rollout_timeout_s" in str(error)
    assert (state["stop_condition"], state["turn"], state["is_truncated"]) == (
        "timeout_reached",
        2,
        True,
    )
    state = await rollout(Talk(), "x", timeout_s=0.05, delay_s=60)
    assert state["error"].waiting_for == "the model"


async def test_an_authors_own_time_out_is_not_a_time_limit():
    class Impatient(Talk):
        async def env_response(self, messages, state):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)

    state = await rollout(Impatient(timeout_seconds=30), "x", timeout_s=30)
    assert isinstance(state["error"], vf.EnvironmentFault)
    assert isinstance(state["error"].__cause__, TimeoutError)
    assert state["stop_condition"] == "has_error"


async def test_a_time_limit_that_a_hook_swallows_or_translates_holds_all_the_same():
    class Swallowing(Talk):
        async def env_response(self, messages, state):
            try:
                await asyncio.sleep(60)
            except BaseException:  # noqa: BLE001 - what careless hooks do
                return "never mind"

    class Translating(Talk):
        async def env_response(self, messages, state):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ConnectionError("broken pipe") from None

    for cls in (Swallowing, Translating):
        state = await rollout(cls(max_turns=-1, timeout_seconds=0.05), "x")
        assert (state["stop_condition"], state["error"]) == ("timeout_reached", None)
        state = await rollout(cls(max_turns=-1), "x", timeout_s=0.05)
        assert isinstance(state["error"], vf.RolloutTimeout)


# --- errors as values

HOOKS = (
    "setup_state env_response get_prompt_messages add_model_response add_trajectory_step"
    " render_completion".split()
)
RAISED = [
    ValueError("bad"),
    SystemExit(3),
    RecursionError("deep"),
    MemoryError(),
    asyncio.CancelledError(),
    TimeoutError(),
]


def raising(hook, error):
    def fail(self, *args, **kwargs):
        raise error

    return type("Raising", (Talk,), {hook: fail})(max_turns=2)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", RAISED, ids=lambda e: type(e).__name__)
async def test_whatever_a_hook_raises_is_the_rollouts_error(hook, error):
    state = await rollout(raising(hook, error))
    fault = state["error"]
    assert isinstance(fault, vf.EnvironmentFault)
    assert fault.__cause__ is error
    assert fault.hook == ("add_model_response" if hook == "add_trajectory_step" else hook)
    assert type(error).__name__ in str(fault)
    assert state["is_completed"]


@pytest.mark.parametrize("kind", ["setup", "stop", "cleanup"])
async def test_whatever_a_marked_method_raises_is_the_rollouts_error(kind):
    def broken(self, state):
        raise SystemExit("out")

    env = type("Raising", (Talk,), {"broken": getattr(vf, kind)(broken)})()
    state = await rollout(env)
    assert (state["error"].hook, type(state["error"].__cause__)) == ("broken", SystemExit)


async def test_a_real_recursion_without_end_is_the_rollouts_error():
    class Deep(Talk):
        def env_response(self, messages, state):
            return self.env_response(messages, state)

    state = await rollout(Deep())
    assert isinstance(state["error"].__cause__, RecursionError)


async def test_errors_of_our_own_tree_are_kept_as_they_are():
    error = vf.ToolCallError("the tool broke")
    state = await rollout(raising("env_response", error))
    assert state["error"] is error
    state = await rollout(Talk(), "x", errors={0: vf.ModelUnavailable("down", status=503)})
    assert isinstance(state["error"], vf.ModelUnavailable)
    assert (state["stop_condition"], state["completion"]) == ("has_error", [])


async def test_what_a_hook_returns_wrongly_is_the_rollouts_error_too():
    for wrong in (3, [{"content": "no role"}], [object()], b"x"):
        state = await rollout(answering(lambda state, wrong=wrong: wrong))
        assert isinstance(state["error"], vf.EnvironmentFault), wrong
        assert state["error"].hook == "env_response"
        assert isinstance(state["error"].__cause__, vf.ConfigError)


@pytest.mark.parametrize(
    "error", [vf.AuthenticationFailed("no key"), vf.JournalError("disk")], ids=lambda e: str(e)
)
async def test_what_concerns_the_whole_run_is_raised(error):
    for env in (
        raising("env_response", error),
        raising("setup_state", error),
        raising("render_completion", error),
    ):
        with pytest.raises(type(error)):
            await rollout(env)
    with pytest.raises(type(error)):
        await rollout(Talk(), "x", errors={0: error})


async def test_a_setting_that_no_rollout_can_work_with_is_raised_by_setup_and_by_the_model_call():
    with pytest.raises(vf.ConfigError, match="pip install"):
        await rollout(raising("setup_state", vf.ConfigError("pip install it")))
    with pytest.raises(vf.MissingKeyError):
        await rollout(Talk(), "x", errors={0: vf.MissingKeyError("set the variable")})
    state = await rollout(raising("env_response", vf.ConfigError("odd")))
    assert isinstance(state["error"], vf.EnvironmentFault)


async def test_an_interrupt_is_never_recorded():
    with pytest.raises(KeyboardInterrupt):
        with Hook(vf.State(), "env_response"):
            raise KeyboardInterrupt


async def test_an_exception_that_cannot_be_printed_is_named():
    class Unprintable(Exception):
        def __str__(self):
            raise ValueError("no text")

    state = await rollout(raising("env_response", Unprintable()))
    assert "Unprintable: its message cannot be shown" in str(state["error"])


async def test_a_hook_that_ruins_the_state_ruins_only_its_rollout():
    class Ruining(Talk):
        def env_response(self, messages, state):
            state["trajectory"] = None
            return "x"

    state = await rollout(Ruining())
    assert isinstance(state["error"], vf.EnvironmentFault)


async def test_an_environment_that_cannot_prompt_says_what_to_define():
    class Bare(vf.Environment):
        pass

    state = await rollout(Bare(dataset=[row()]))
    assert "must define get_prompt_messages" in str(state["error"])


# --- clean-up


class Tidy(Talk):
    """Counts its clean-ups and can be slow at them."""

    def __init__(self, pause_s=0.0, **parameters):
        self.log, self.pause_s = [], pause_s
        super().__init__(**parameters)

    @vf.cleanup(priority=1)
    async def close_game(self, state):
        self.log.append("begun")
        await asyncio.sleep(self.pause_s)
        self.log.append("ended")

    @vf.cleanup
    def note(self, state):
        self.log.append(state["stop_condition"])


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        ({"replies": "x"}, "max_turns_reached"),
        ({"replies": "x", "errors": {1: vf.ModelUnavailable("down")}}, "has_error"),
        ({"replies": "x", "errors": {0: vf.OverlongPromptError("long")}}, "prompt_too_long"),
        ({"replies": "x", "delay_s": 60}, "timeout_reached"),
    ],
)
async def test_clean_up_runs_once_however_it_ends(client, reason):
    env = Tidy()
    await rollout(env, ScriptedClient(**client), timeout_s=0.2)
    assert env.log == ["begun", "ended", reason]


@pytest.mark.parametrize("cancellations", [1, 4])
async def test_clean_up_runs_once_and_to_its_end_when_cancelled(cancellations):
    env = Tidy(pause_s=0.1)
    task = asyncio.ensure_future(rollout(env, "x", delay_s=60))
    await asyncio.sleep(0.02)
    for _ in range(cancellations):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.log == ["begun", "ended", None]


async def test_a_clean_up_that_is_awaited_plainly_is_cut_off():
    """Negative control: without the shield the second cancellation ends the handler half way."""
    env = Tidy(pause_s=0.1)

    async def plain():
        try:
            await asyncio.sleep(60)
        finally:
            await env.close_game({})

    task = asyncio.ensure_future(plain())
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.log == ["begun"]


async def test_a_failing_clean_up_does_not_keep_the_others_from_running(caplog):
    class Failing(Tidy):
        @vf.cleanup(priority=9)
        def broken(self, state):
            raise OSError("gone")

    env = Failing()
    state = await rollout(env)
    assert env.log == ["begun", "ended", "max_turns_reached"]
    assert state["error"].hook == "broken"
    assert "broken" in caplog.text
    earlier = vf.ModelUnavailable("down")
    assert (await rollout(env, "x", errors={0: earlier}))["error"] is earlier


async def test_a_clean_up_that_hangs_is_bounded(monkeypatch):
    monkeypatch.setattr("verifiers.rollouts.loop.CLEANUP_S", 0.05)
    env = Tidy(pause_s=60)
    state = await rollout(env)
    assert env.log == ["begun", "max_turns_reached"]
    assert state["error"].hook == "close_game"


async def test_a_cancelled_rollout_ends_at_once_and_asks_the_model_no_more():
    class Stubborn(Talk):
        async def env_response(self, messages, state):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return "on with it"

    client = ScriptedClient("x")
    task = asyncio.ensure_future(rollout(Stubborn(max_turns=-1), client))
    await asyncio.sleep(0.05)
    task.cancel()
    started = time.perf_counter()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - started < 1
    assert len(client.requests) == 1


# --- isolation


async def test_a_rollout_starts_no_thread():
    before = threading.active_count()
    await rollout(Talk())
    assert threading.active_count() == before


async def test_two_environments_side_by_side():
    states = await asyncio.gather(rollout(Talk(max_turns=2), "a"), rollout(single_turn(), "b"))
    assert [s["turn"] for s in states] == [2, 1]
