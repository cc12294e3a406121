"""Saved rollouts scored again: what changes, what stays, and that no model is called."""

import asyncio
import json
import math
import pickle

import pytest

import verifiers as vf
from verifiers.environments.integrations.gym import sum_step_rewards
from verifiers.errors import ScoringError
from verifiers.rollouts.transcript import UnsavedTurns
from verifiers.runs.options import RunOptions
from verifiers.runs.rescoring import rescore
from verifiers.testing import ScriptedClient

ROWS = [{"question": f"say {n}", "answer": str(n), "level": n % 2} for n in range(6)]


def exact(completion, answer) -> float:
    return float(completion[-1].content == answer)


def lenient(completion, answer) -> float:
    return float(answer in completion[-1].content)


def by_level(completion, level) -> float:
    return float(level)


def turns(state) -> float:
    return float(len(state["trajectory"]))


INTERRUPTED = []


async def once_interrupted(completion, answer) -> float:
    if answer == "2" and not INTERRUPTED:
        INTERRUPTED.append(answer)
        raise vf.RunError("the machine is going down")
    return 1.0


def environment(*functions, rubric=None, **more):
    rubric = rubric if rubric is not None else vf.Rubric(list(functions))
    return vf.SingleTurnEnv(eval_dataset=ROWS, rubric=rubric, **more)


def echo(request):
    return f"it is {request.prompt[-1].content.split()[-1]}"


def saved(folder, reply=echo, *functions, **options):
    env = environment(*(functions or (exact,)))
    return env.evaluate(ScriptedClient(reply), "m", **{"num_examples": 6, "rollouts_per_example": 2, **options},
                        results_path=folder)  # fmt: skip


def again(env, folder, target=None, **options):
    return asyncio.run(rescore(env, folder, RunOptions(results_path=target, **options)))


def test_a_changed_rubric_scores_the_same_rollouts(tmp_path):
    before = saved(tmp_path / "old")
    after = again(environment(lenient), tmp_path / "old", tmp_path / "new")
    assert (before.metadata.avg_reward, after.metadata.avg_reward) == (0.0, 1.0)
    assert after["completions"] == before["completions"]
    assert after["metrics"].keys() == {"num_turns", "lenient"}
    # measured when it was played; the turns are not saved
    assert after["metrics"]["num_turns"] == [1.0] * 12
    loaded = vf.load_results(tmp_path / "new")
    assert loaded["rewards"] == [1.0] * 12
    origin = loaded.metadata.origin
    assert (origin["path"], origin["num_rollouts"], origin["avg_reward"]) == (
        str(tmp_path / "old"),
        12,
        0.0,
    )
    assert (
        origin["fingerprint"]
        == json.loads((tmp_path / "old/config.json").read_text())["fingerprint"]
    )


def test_the_same_rubric_gives_the_same_rewards_and_pairs_with_its_origin(tmp_path):
    first = saved(tmp_path / "old", lambda request: str(len(request.prompt[-1].content) % 3))
    second = again(environment(exact), tmp_path / "old", tmp_path / "new")
    assert second["rewards"] == first["rewards"]
    pair = (
        vf.load_results(tmp_path / "old").compare(vf.load_results(tmp_path / "new")).differences[0]
    )
    assert (pair.num_examples, pair.equal) == (6, 6)


def test_the_model_is_not_called_and_a_function_that_calls_it_ends_the_run(tmp_path):
    saved(tmp_path / "old")

    async def asks(state) -> float:
        await state["client"].complete(vf.ModelRequest([vf.UserMessage("again")], "m"))
        return 1.0

    with pytest.raises(vf.RunError, match="a reward function called the evaluated model 'm'"):
        again(environment(asks), tmp_path / "old")


def test_a_judge_of_the_new_rubric_is_asked_and_its_tokens_are_counted(tmp_path):
    saved(tmp_path / "old")
    judge = ScriptedClient(
        lambda request: vf.Response(vf.AssistantMessage("<score>5</score>"), usage=vf.Usage(40, 2))
    )
    rubric = vf.JudgeRubric(judge_client=judge, judge_models=["j"])
    results = again(environment(rubric=rubric), tmp_path / "old")
    assert results["rewards"] == [0.5] * 12
    assert results.metadata.usage["judge_input_tokens"] == 40  # the mean of a rollout
    assert results.summary()["usage"]["judge_input_tokens"] == 12 * 40
    assert len(judge.requests) == 12


def test_group_functions_see_all_siblings(tmp_path):
    saved(tmp_path / "old")

    def ranks(completions) -> list[float]:
        return [float(n) for n, _ in enumerate(completions)]

    results = again(environment(ranks), tmp_path / "old", tmp_path / "new")
    assert results["rewards"] == [0.0, 1.0] * 6
    assert results["advantages"] == [-0.5, 0.5] * 6


def test_a_column_of_the_dataset_is_found_again_by_the_hash_of_its_row(tmp_path):
    saved(tmp_path / "old")
    results = again(environment(by_level), tmp_path / "old")
    assert results["rewards"] == [0.0, 0.0, 1.0, 1.0] * 3
    other_rows = vf.SingleTurnEnv(eval_dataset=[{"question": "x"}], rubric=vf.Rubric([by_level]))
    with pytest.raises(vf.ConfigError, match="level"):
        again(other_rows, tmp_path / "old")


def test_trajectories_are_there_when_they_were_saved(tmp_path):
    saved(tmp_path / "old", state_columns=["trajectory"])
    results = again(environment(turns), tmp_path / "old", tmp_path / "new")
    assert results["rewards"] == [1.0] * 12
    assert again(environment(turns), tmp_path / "new")["rewards"] == [1.0] * 12


def test_a_failed_rollout_stays_failed_and_a_failed_score_is_forgotten(tmp_path):
    def fails(completion) -> float:
        raise ConnectionError("away")

    def reply(request):
        if request.prompt[-1].content == "say 3":
            raise vf.ModelRefused("no", status=400)
        return echo(request)

    before = saved(tmp_path / "old", reply, fails, abort_after=0)
    assert all(math.isnan(reward) for reward in before["rewards"])
    after = again(environment(lenient), tmp_path / "old", tmp_path / "new")
    assert after.metadata.num_errors == 2
    assert [error and error["error"] for error in after["errors"]] == [None] * 6 + [
        "ModelRefused"
    ] * 2 + [None] * 4
    assert after["errors"][6] == before["errors"][6]
    assert after.metadata.avg_reward == 1.0


def test_an_interrupted_rescoring_resumes(tmp_path):
    saved(tmp_path / "old")
    INTERRUPTED.clear()
    for _ in range(2):
        try:
            results = again(
                environment(once_interrupted), tmp_path / "old", tmp_path / "new", max_concurrent=1
            )
        except vf.RunError:
            continue
    assert results["rewards"] == [1.0] * 12
    assert results.metadata.resumed == 4


def test_a_run_of_the_model_cannot_resume_a_rescored_one(tmp_path):
    saved(tmp_path / "old")
    again(environment(exact), tmp_path / "old", tmp_path / "new")
    with pytest.raises(vf.RunMismatch, match="rescored"):
        saved(tmp_path / "new")


def test_nothing_to_score_is_refused(tmp_path):
    with pytest.raises(vf.ConfigError, match="does not exist"):
        again(environment(exact), tmp_path / "nowhere")


# --- functions that need the turns


class Steps(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        state["trajectory"][-1]["reward"] = 1.0
        return [{"role": "user", "content": "go on"}]


def num_replies(state):
    return float(len(state["trajectory"]))


def last_turn(state):
    return float(bool(state["trajectory"]) and state["turn"] > 1)


def of_the_text(state):
    """Needs the state, and none of its turns."""
    return float(len(state["completion"]))


def stepping(*functions):
    rows = [{"question": f"q{number}", "answer": ""} for number in range(3)]
    rubric = vf.Rubric(list(functions))
    return Steps(dataset=rows, eval_dataset=rows, rubric=rubric, max_turns=4)


@pytest.mark.parametrize("function", [sum_step_rewards, num_replies, last_turn])
async def test_without_the_turns_a_function_of_turns_is_unknown_and_says_what_to_save(
    tmp_path, function
):
    env = stepping(function)
    first = await env.evaluate(ScriptedClient("a"), "m", results_path=tmp_path / "bare")
    again = await rescore(env, tmp_path / "bare")
    assert all(math.isnan(reward) for reward in again.rewards)
    assert again.metadata.num_unscored == 3
    for error in again["errors"]:
        assert "-C trajectory" in error["message"]
    assert again.metadata.avg_metrics["num_turns"] == 4.0  # as the run measured it

    columns = ["trajectory"]
    await env.evaluate(
        ScriptedClient("a"), "m", results_path=tmp_path / "turns", state_columns=columns
    )
    assert (await rescore(env, tmp_path / "turns")).rewards == first.rewards


async def test_a_function_of_the_text_needs_no_turns(tmp_path):
    env = stepping(of_the_text)
    first = await env.evaluate(ScriptedClient("a"), "m", results_path=tmp_path)
    assert (await rescore(env, tmp_path)).rewards == first.rewards
    state = vf.State(prompt=[], completion=[{"role": "assistant", "content": "a"}])
    state.record.transcript = UnsavedTurns()
    copied = pickle.loads(pickle.dumps(state))
    with pytest.raises(ScoringError, match="-C trajectory"):
        list(copied["trajectory"])
