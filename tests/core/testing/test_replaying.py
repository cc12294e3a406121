"""A saved rollout again, with its saved replies: the same code does the same, other code is found
out."""

import asyncio
import threading

import pytest

import verifiers as vf
from support.isolated import needs_sandbox
from verifiers.testing import ScriptedClient, replay

ROWS = [{"question": f"1 + {n}", "answer": str(1 + n)} for n in range(3)]


def add(x: int, y: int) -> int:
    """Add."""
    return x + y


def right(completion, answer) -> float:
    return float(answer in (completion[-1].content or ""))


def tool_env(tool=add, function=right, rows=ROWS, **more):
    return vf.ToolEnv(tools=[tool], dataset=rows, rubric=vf.Rubric([function]), **more)


def answer(request):
    last = request.prompt[-1]
    if last.role == "tool":
        return f"It is {last.content}"
    return vf.ToolCall("c1", "add", {"x": 1, "y": int(last.content[-1])})


def saved(env, client=None, folder=None, **more):
    client = client or ScriptedClient(answer)
    run = env.evaluate(
        client, "m", num_examples=-1, results_path=folder, state_columns=["trajectory"], **more
    )
    return run if folder is None else vf.load_results(folder)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_the_same_code_does_the_same(tmp_path, is_on_disk):
    run = saved(tool_env(), folder=tmp_path / "run" if is_on_disk else None)
    for rollout in run.outputs:
        found = replay(tool_env(), rollout)
        assert found.difference is None
        assert not found.notes
        assert found.state["completion"] == rollout["completion"]
    assert str(found) == "no difference in 2 turns, their end and their scores"


def test_another_result_of_a_tool_is_found_in_its_turn():
    rollout = saved(tool_env()).rollout(1)

    def add(x: int, y: int) -> int:
        """Add."""
        return x - y

    found = replay(tool_env(add), rollout).difference
    assert (found.what, found.name, found.turn, found.message) == ("tool result", "add", 2, 3)
    assert (found.saved["content"], found.now["content"]) == ("2", "0")


def test_other_descriptions_of_tools_and_prompts_are_found():
    rollout = saved(tool_env()).rollout(1)

    def add(x: int, y: int) -> int:
        """Add two numbers."""
        return x + y

    assert replay(tool_env(add), rollout).difference.what == "tools"
    found = replay(tool_env(system_prompt="Be brief."), rollout).difference
    assert (found.what, found.turn, found.now["content"]) == ("prompt", 1, "Be brief.")


def test_fewer_and_more_turns_are_found():
    rollout = saved(tool_env()).rollout(1)
    fewer = replay(tool_env(max_turns=1), rollout).difference
    assert (fewer.what, fewer.saved) == ("turns", 2)
    assert fewer.now.startswith("1; max_turns_reached")
    rollout = saved(tool_env(max_turns=1)).rollout(1)
    more = replay(tool_env(), rollout).difference
    assert (more.what, more.saved) == ("turns", 1)
    assert "the saved rollout has 1 replies, and the code asks for another" in more.now


def test_another_reward_is_found():
    def right(completion) -> float:
        return 0.5

    found = replay(tool_env(function=right), saved(tool_env()).rollout(1)).difference
    assert (found.what, found.name, found.saved, found.now) == ("metric", "right", 1.0, 0.5)


def test_a_rollout_that_the_model_ended_does_so_again():
    client = ScriptedClient(answer, errors={1: vf.ModelError("the server is away")})
    rollout = saved(tool_env(rows=ROWS[:1]), client, max_retries=0, abort_after=0).rollout(0)
    assert rollout.error["error"] == "ModelError"
    assert replay(tool_env(), rollout).difference is None


def test_todays_row_is_run_and_said_where_it_is_another():
    rollout = saved(tool_env()).rollout(1)
    moved = [ROWS[2], ROWS[0], ROWS[1]]
    assert replay(tool_env(rows=moved), rollout).difference is None
    mended = [{**row, "answer": "9"} for row in ROWS]
    assert replay(tool_env(rows=mended), rollout).difference.name == "right"
    another = replay(tool_env(rows=[{"question": "new", "answer": "2"}] * 2), rollout)
    assert another.difference.what == "prompt"
    assert "is another one" in another.notes[0]
    without = replay(tool_env(rows=ROWS[:1]), rollout)
    assert without.difference is None
    assert "the saved row was run" in without.notes[0]


def test_rewards_of_groups_are_not_compared_and_it_says_so():
    def best(completions) -> list[float]:
        return [float(n) for n in range(len(completions))]

    rollout = saved(tool_env(function=best), rollouts_per_example=2).rollout(1, 1)
    found = replay(tool_env(function=best), rollout)
    assert rollout.reward == 1.0
    assert found.difference is None
    assert found.notes[0].startswith("best and the reward are not compared")


def test_token_ids_are_those_that_were_sampled():
    env = tool_env()
    rollout = saved(env, ScriptedClient(answer, tokens=True)).rollout(0)
    turns = replay(env, rollout).state["trajectory"]
    for turn, before in zip(turns, rollout["trajectory"], strict=True):
        assert turn["tokens"]["completion_ids"] == before["tokens"]["completion_ids"]
        assert turn["tokens"]["prompt_ids"] == before["tokens"]["prompt_ids"]


def test_text_and_cut_replies_come_back():
    env = vf.SingleTurnEnv(dataset=[{"prompt": "2 + 2 = "}], message_type="completion")
    assert replay(env, saved(env, ScriptedClient("4")).rollout(0)).difference is None
    env = vf.SingleTurnEnv(dataset=ROWS)
    cut = {"role": "assistant", "content": "1 + ", "finish_reason": "length"}
    found = replay(env, saved(env, ScriptedClient([cut])).rollout(0))
    assert found.difference is None
    assert found.state["is_truncated"]


class Pair(vf.MultiTurnEnv):
    """Two agents that ask at once, in an order that is a setting."""

    names = ("a", "b")

    async def setup_state(self, state):
        async def ask(name):
            await asyncio.sleep(0.01 * self.names.index(name) if name in self.names else 0)
            prompt = [vf.UserMessage(name)]
            response = await self.get_model_response(state, prompt)
            await self.add_model_response(state, prompt, response)

        await asyncio.gather(*map(ask, self.names))
        await ask("both")
        return state

    @vf.stop
    async def is_over(self, state):
        return True

    async def env_response(self, messages, state):
        return []


def test_calls_that_come_in_another_order_get_their_own_replies():
    env = Pair(dataset=ROWS)
    rollout = saved(env, ScriptedClient(lambda request: request.prompt[0].content * 2)).rollout(0)
    env.names = ("b", "a")
    found = replay(env, rollout)
    assert found.difference is None
    said = [turn["completion"][0].content for turn in found.state["trajectory"]]
    assert said == ["bb", "aa", "bothboth"]


def test_the_code_runs_in_the_thread_that_calls():
    threads = []

    class Watched(vf.SingleTurnEnv):
        async def setup_state(self, state):
            threads.append(threading.current_thread())
            return state

    env = Watched(dataset=ROWS)
    rollout = saved(env, ScriptedClient("2")).rollout(0)
    replay(env, rollout)
    assert threads[-1] is threading.main_thread()


def test_a_rollout_without_turns_is_refused_with_the_flag_that_saves_them():
    run = tool_env().evaluate(ScriptedClient(answer), "m", num_examples=1)
    with pytest.raises(vf.ConfigError, match="-C trajectory"):
        replay(tool_env(), run.rollout(0))


def test_a_sandbox_is_opened_again_and_its_times_are_no_difference():
    env = vf.PythonEnv(dataset=ROWS[:1], pip_install_packages="", sandbox=needs_sandbox())
    code = {"code": "print(6 * 7)"}
    rollout = saved(env, ScriptedClient([vf.ToolCall("c1", "python", code), "42"])).rollout(0)
    assert rollout["sandbox_ready_wait_time"] > 0
    result = replay(env, rollout)
    assert result.difference is None
    turn = rollout["trajectory"].turns[1]
    turn.prompt = [*turn.prompt[:2], {**turn.prompt[2], "content": "41"}]
    assert replay(env, rollout).difference.name == "python"
