"""Single rollouts and groups by both historical forms of ``rollout``, ``run_rollout`` and
``run_group``."""

import asyncio
import math
from contextlib import nullcontext

import pytest

import verifiers as vf
from support.small_envs import Talk, add_one, exact, row, single_turn, sums
from verifiers.testing import FakeServer, ScriptedClient


def group_size(completions):
    return [float(len(completions))] * len(completions)


# --- rollout


def test_by_row_a_state_comes_back_not_scored():
    env, client = single_turn(), ScriptedClient("1")
    for state in (
        env.rollout(sums(1)[0], client, "m"),
        env.rollout(
            input=row(answer="1"), client=client, model="m", sampling_args={"temperature": 0.5}
        ),
        env.rollout_sync(row(), client, "m"),
    ):
        assert isinstance(state, vf.State)
        assert state["completion"][0].content == "1"
        assert (state["reward"], state["is_completed"]) == (None, True)
    assert client.requests[1].sampling_args["temperature"] == 0.5
    assert client.requests[1].prompt == [{"role": "user", "content": "hello"}]


def test_by_prompt_completion_and_state_come_back():
    env, client = single_turn(), ScriptedClient("4")
    prompt = [{"role": "user", "content": "2+2"}]
    completion, state = env.rollout(
        client=client, model="m", prompt=prompt, answer="4", info={"a": 1}, temperature=0.5
    )
    assert completion == [{"role": "assistant", "content": "4"}]
    assert (state["answer"], state["info"], state["task"]) == ("4", {"a": 1}, "default")
    completion, _ = env.rollout(client, "m", "2+2", "4", "sums")
    assert client.requests[1].prompt == prompt
    assert client.requests[0].sampling_args["temperature"] == 0.5
    with pytest.raises(vf.ConfigError, match="prompt="):
        env.rollout(client=client, model="m")


async def test_inside_a_loop_rollouts_are_awaited():
    env, client = single_turn(), ScriptedClient("1")
    state = await env.rollout(input=row(), client=client, model="m")
    assert (await env.a_rollout(row(), client, "m"))["completion"] == state["completion"]
    score = await env.rubric.score_rollout(state, score_sem=nullcontext())
    assert score["reward"] == state["reward"] == 0.0


async def test_the_row_of_the_caller_is_not_changed():
    class Changing(Talk):
        def setup_state(self, state):
            state["info"]["seen"] = True
            state["prompt"].append(vf.UserMessage("more"))

    passed_row = row(info={}, extra=[1])
    await Changing(max_turns=1).rollout(passed_row, ScriptedClient("x"), "m")
    assert passed_row == row(info={}, extra=[1])


async def test_many_rollouts_share_one_openai_client():
    import openai

    with FakeServer("1", delay_s=0.005) as server:
        client = openai.AsyncOpenAI(base_url=server.url, api_key="k")
        states = await asyncio.gather(
            *(single_turn().rollout(row(), client, "scripted") for _ in range(20))
        )
        assert [s["error"] for s in states] == [None] * 20
        assert all(s["client"] is client for s in states)


async def test_hooks_may_use_the_client_that_was_given():
    import openai

    class Asking(Talk):
        async def env_response(self, messages, state):
            completion = await state["client"].chat.completions.create(
                model=state["model"], messages=list(messages)
            )
            return completion.choices[0].message.content

    with FakeServer(["a", "hint", "b"]) as server:
        client = openai.AsyncOpenAI(base_url=server.url, api_key="k")
        state = await Asking(max_turns=2).rollout(row(), client, "scripted")
        results = await Asking(max_turns=2).evaluate(client, "scripted")
    assert [m["content"] for m in state["completion"]] == ["a", "hint", "b"]
    assert results["errors"] == [None]


# --- run_rollout


async def test_one_age_gets_a_state_back():
    env = single_turn()
    semaphore = asyncio.Semaphore(1)
    for keywords in (
        {"gen_sampling_args": {"temperature": 0.5}},
        {"gen_sem": semaphore, "score_sem": semaphore},
    ):
        client = ScriptedClient("1")
        state = await env.run_rollout(sums(1)[0], client, "m", **keywords)
        assert isinstance(state, vf.State)
        assert (state["reward"], state["advantage"]) == (1.0, None)
    state = await env.run_rollout(sums(1)[0], ScriptedClient("1"), "m", score=False)
    assert math.isnan(state["reward"])


async def test_the_other_age_gets_a_row_back():
    env = single_turn()
    for keywords in (
        {},
        {
            "sampling_args": {},
            "max_retries": 1,
            "state_columns": ["trajectory"],
            "env_client": None,
        },
    ):
        output = await env.run_rollout(
            sums(1)[0], ScriptedClient("1", tokens=True), "m", **keywords
        )
        assert isinstance(output, vf.RolloutOutput)
        assert output.reward == 1.0
        assert ("trajectory" in output) is bool(keywords)
    assert output.trajectory[0]["tokens"]["completion_ids"] == [49, 257]


async def test_the_oldest_form_has_a_semaphore_in_front():
    semaphore, client = asyncio.Semaphore(2), ScriptedClient("1")
    state = await single_turn().run_rollout(
        semaphore, sums(1)[0], client, "m", {"temperature": 0.25}
    )
    assert isinstance(state, vf.State)
    assert client.requests[0].sampling_args["temperature"] == 0.25


async def test_positional_arguments_after_the_model_are_the_older_ones():
    client = ScriptedClient("1")
    state = await single_turn().run_rollout(
        sums(1)[0], client, "m", {"temperature": 0.25}, nullcontext(), nullcontext()
    )
    assert isinstance(state, vf.State)
    assert client.requests[0].sampling_args["temperature"] == 0.25


async def test_an_unknown_keyword_is_refused():
    with pytest.raises(vf.ConfigError, match="did you mean 'gen_sampling_args'"):
        await single_turn().run_rollout(row(), ScriptedClient("1"), "m", gen_samplng_args={})


async def test_a_failure_of_its_own_is_a_value():
    output = await single_turn().run_rollout(
        row(), ScriptedClient(vf.ModelUnavailable, errors={0: OSError("x")}), "m"
    )
    assert output.error.error == "EnvironmentFault"
    assert math.isnan(output.reward)


async def test_one_rollout_under_a_group_function_is_a_group_of_one():
    env = single_turn(rubric=vf.Rubric(funcs=[exact, group_size]))
    output = await env.run_rollout(sums(1)[0], ScriptedClient("1"), "m")
    assert (output.reward, output.advantage) == (2.0, None)


async def test_the_semaphores_hold_model_calls_and_scorings_apart():
    order = []

    class Marked:
        def __init__(self, name):
            self.name = name

        async def __aenter__(self):
            order.append(f"+{self.name}")

        async def __aexit__(self, *_):
            order.append(f"-{self.name}")

    await Talk(max_turns=2).run_rollout(
        row(), ScriptedClient("1"), "m", gen_sem=Marked("gen"), score_sem=Marked("score")
    )
    assert order == ["+gen", "-gen", "+gen", "-gen", "+score", "-score"]


# --- run_group


async def test_a_group_in_either_shape_with_advantages():
    inputs = [{**sums(1)[0], "example_id": 0} for _ in range(3)]
    env, client = single_turn(), ScriptedClient(["1", "0", "0"])
    states = await env.run_group(
        group_inputs=inputs,
        client=client,
        model="tinker",
        gen_sampling_args={},
        gen_sem=nullcontext(),
        score_sem=None,
    )
    assert all(isinstance(s, vf.State) for s in states)
    assert sorted(s["advantage"] for s in states) == pytest.approx([-1 / 3, -1 / 3, 2 / 3])
    outputs = await env.run_group(inputs, client, "m", state_columns=["trajectory"])
    assert all(isinstance(o, vf.RolloutOutput) and o.trajectory for o in outputs)
    assert sorted(o.advantage for o in outputs) == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


async def test_group_functions_see_all_siblings():
    env = single_turn(rubric=vf.Rubric(funcs=[group_size]))
    outputs = await env.run_group([vf.RolloutInput(**row())] * 4, ScriptedClient("1"), "m")
    assert [o.reward for o in outputs] == [4.0] * 4


async def test_a_failed_sibling_costs_the_others_nothing():
    client = ScriptedClient(add_one, errors={1: vf.ModelUnavailable("down")})
    outputs = await single_turn().run_group([sums(1)[0]] * 3, client, "m")
    assert sorted(o.reward for o in outputs if not math.isnan(o.reward)) == [1.0, 1.0]
    assert [o.error is None for o in outputs].count(False) == 1


async def test_what_concerns_every_rollout_is_raised():
    with pytest.raises(vf.AuthenticationFailed):
        await single_turn().run_group(
            [row()], ScriptedClient("1", errors={0: vf.AuthenticationFailed("no key")}), "m"
        )
    with pytest.raises(vf.ConfigError):
        await single_turn().run_rollout(row(), object(), "m")
