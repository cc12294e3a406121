"""``State``: keys, columns, computed keys; steps and tokens that store every turn once."""

import copy
import json
import pickle

import numpy as np
import pytest

import verifiers as vf
from verifiers.rollouts.state import State, Timing, TrajectoryStep, TrajectoryStepTokens
from verifiers.types import Response, ResponseTokens

ROW = {
    "prompt": [vf.UserMessage("2+2")],
    "answer": "4",
    "task": "sums",
    "info": {"n": 1},
    "example_id": 5,
}


# --- keys


def test_the_five_input_keys_are_always_there():
    assert dict(State()["input"]) == {
        "prompt": [],
        "answer": "",
        "task": "default",
        "info": {},
        "example_id": 0,
    }
    assert [State(ROW)[name] for name in State.INPUT_FIELDS] == list(ROW.values())


def test_the_flat_form_and_the_input_form_are_the_same_state():
    flat = State({**ROW, "level": 3}, model="m")
    nested = State(input={**ROW, "level": 3}, model="m")
    assert flat == nested
    assert flat["input"]["level"] == flat["level"] == 3
    assert State(**flat.copy()) == flat


def test_input_is_a_live_view():
    state = State(ROW)
    state["answer"] = "5"
    assert state["input"]["answer"] == "5"
    state["input"]["answer"] = "6"
    state["input"]["extra"] = 1
    assert (state["answer"], state["extra"], len(state["input"])) == ("6", 1, 6)
    with pytest.raises(KeyError):
        state["input"]["reward"]
    state["input"] = {"prompt": [], "answer": "7"}
    assert (state["answer"], list(state["input"])) == ("7", ["prompt", "answer"])


@pytest.mark.parametrize(
    "name", ["reward", "error", "id", "completion", "timing", "trajectory", "model", "metrics"]
)
def test_a_column_with_a_name_of_the_states_own_does_not_touch_the_state(name):
    state = State(input={**ROW, name: "from the row"}, model="m")
    assert state["input"][name] == "from the row"
    assert state[name] == State(input=ROW, model="m")[name]
    assert State(state.copy())["input"][name] == "from the row"


def test_a_column_named_like_a_key_is_the_fault_without_the_guard():
    """Negative control: in the flat form such a name is a key of the state, as for code that dumps
    and loads states."""
    assert State({**ROW, "reward": 0.5})["reward"] == 0.5


def test_old_keys_are_computed_and_cannot_be_assigned():
    state = State(ROW, trajectory=[TrajectoryStep([], [], response="r")])
    assert (state["id"], state["turn"], state["responses"]) == (5, 1, ["r"])
    assert "turn" in state
    for assign in (
        lambda: state.__setitem__("turn", 3),
        lambda: state.update(turn=3),
        lambda: state.update({"turn": 3}),
        lambda: state.__ior__({"id": 3}),
    ):
        with pytest.raises(KeyError, match="computed"):
            assign()
    assert state.setdefault("turn", 9) == 1


def test_both_names_of_the_tools_are_one_list():
    state = State(ROW, oai_tools=[1])
    assert state["tool_defs"] is state["oai_tools"]
    state["oai_tools"] = [2]
    state.update(oai_tools=[*state["tool_defs"], 3])
    assert state["tool_defs"] == [2, 3]
    assert "oai_tools" not in dict(state)


def test_update_and_setdefault_follow_the_rules_of_assignment():
    state = State(ROW)
    state |= {"board": 1}
    state.update({"input": {"answer": "8"}}, score=2)
    assert (state.setdefault("board", 5), state.setdefault("new", 6), state["answer"]) == (
        1,
        6,
        "8",
    )
    assert (state.get("absent"), state.get("turn"), state.get("oai_tools")) == (None, 0, None)


def test_timing_is_always_whole():
    state = State(ROW, timing={"model_ms": 3})
    assert (state["timing"].model_ms, state["timing"]["setup_ms"]) == (3, 0.0)
    state["timing"] = {}
    assert state["timing"] == Timing()


def test_states_do_not_share_their_containers():
    a, b = State(ROW), State(ROW)
    for key in ("trajectory", "metrics", "usage", "judge_response", "timing"):
        assert a[key] is not b[key]


def test_a_state_survives_pickle_with_keys_of_any_kind():
    state = State(ROW, reward=1.0)
    state[7] = "seven"
    again = pickle.loads(pickle.dumps(state))
    assert again == state
    assert dict(again["input"]) == dict(state["input"])
    assert type(copy.deepcopy(state)) is State


def test_a_copy_is_a_plain_dict():
    assert type(State(ROW).copy()) is dict


# --- turns


def conversation(turns, words=lambda n: f"word {n} "):
    """Steps of a conversation that grows by two messages a turn, with tokens, each linked to the
    one before."""
    prompt, steps = [vf.UserMessage("begin")], []
    ids = list(range(10))
    for n in range(turns):
        reply = vf.AssistantMessage(words(n))
        sampled = [100 + n, 200 + n]
        tokens = ResponseTokens(
            np.array(ids, np.int32), np.array(sampled, np.int32), np.array([-0.5, -1], np.float32)
        )
        response = Response(reply, tokens=tokens)
        previous = steps[-1] if steps else None
        steps.append(
            TrajectoryStep(
                prompt=list(prompt),
                completion=[reply],
                response=response,
                tokens=tokens,
                previous=previous,
            )
        )
        prompt += [reply, vf.UserMessage(f"more {n}")]
        ids += [*sampled, 300 + n]
    return steps


def test_steps_give_back_the_whole_prompt_of_every_turn():
    steps = conversation(4)
    for n, step in enumerate(steps):
        assert len(step["prompt"]) == 1 + 2 * n == len(step.prompt)
        assert step["prompt"][0] == {"role": "user", "content": "begin"}
        assert step.conversation() == [*step["prompt"], *step["completion"]]
        assert len(step["tokens"]["prompt_ids"]) == 10 + 3 * n
        assert step["tokens"].num_tokens == 12 + 3 * n
    assert steps[3]["tokens"]["prompt_ids"] == [
        *range(10),
        100,
        200,
        300,
        101,
        201,
        301,
        102,
        202,
        302,
    ]
    assert steps[3]["tokens"].full_ids().tolist() == [*steps[3]["tokens"]["prompt_ids"], 103, 203]
    assert [len(step.new_prompt) for step in steps] == [1, 1, 1, 1]


def stored(steps):
    """Bytes that the steps hold beside their message objects: list slots and token arrays,
    responses included."""
    total = 0
    for step in steps:
        total += 8 * len(step.new_prompt)
        total += step.new_prompt_ids.nbytes + 8 * len(step.completion_ids)
        if step["response"].tokens is not None:
            total += step["response"].tokens.prompt_ids.nbytes
    return total


def test_storage_is_linear_in_turns():
    short, long = stored(conversation(8)), stored(conversation(64))
    assert long <= 8 * short


def test_storage_without_links_grows_with_the_square():
    """Negative control: the same turns, each kept whole."""

    def full_copies(turns):
        return sum(
            8 * len(s["prompt"]) + 4 * len(s["tokens"]["prompt_ids"]) for s in conversation(turns)
        )

    assert full_copies(64) > 20 * full_copies(8)


def test_reading_a_long_conversation_costs_what_it_is_long():
    steps = conversation(400)
    assert len(steps[-1].conversation()) == 800
    assert steps[-1]["tokens"].full_ids()[-1] == 599


def test_a_step_keeps_the_response_without_the_tokens_it_holds_itself():
    (step,) = conversation(1)
    assert step["response"].tokens is None
    assert step["response"].message == step["completion"][0]
    bare = TrajectoryStep([], [], response=Response(vf.AssistantMessage("x")))
    assert bare["response"].message.content == "x"


def test_a_prompt_that_does_not_continue_is_kept_whole():
    (first,) = conversation(1)
    second = TrajectoryStep(prompt=[vf.UserMessage("another")], completion=[], previous=first)
    assert second.shared == 0
    assert second["prompt"] == [{"role": "user", "content": "another"}]
    tokens = TrajectoryStepTokens([7, 8], [9], [-1.0], previous=first["tokens"])
    assert (tokens.shared, tokens["prompt_ids"]) == (0, [7, 8])


def test_a_prompt_that_shares_only_the_beginning_forks_there():
    steps = conversation(3)
    start = steps[1]["prompt"][:2]
    fork = TrajectoryStep(
        prompt=[*start, vf.UserMessage("edited")], completion=[], previous=steps[2]
    )
    assert fork.shared == 2
    assert fork["prompt"] == [*start, {"role": "user", "content": "edited"}]
    after = TrajectoryStep(
        prompt=[*fork["prompt"], vf.UserMessage("on")], completion=[], previous=fork
    )
    assert [m["content"] for m in after["prompt"]] == ["begin", "word 0 ", "edited", "on"]


def test_tokens_of_a_fork_are_whole_too():
    steps = conversation(3)
    ids = steps[2]["tokens"]["prompt_ids"][:11]
    fork = TrajectoryStepTokens([*ids, 5], [6], [-1.0], previous=steps[2]["tokens"])
    assert (fork.shared, fork["prompt_ids"], fork.full_ids().tolist()) == (
        11,
        [*ids, 5],
        [*ids, 5, 6],
    )


def test_reading_a_step_gives_copies_of_its_prompt():
    steps = conversation(2)
    for step in steps:
        before = len(step["prompt"])
        step["prompt"].append(vf.UserMessage("mine"))
        assert len(step["prompt"]) == before


def test_a_step_reads_as_a_dict_and_pickles_whole():
    step = conversation(3)[2]
    plain = dict(step)
    assert plain["prompt"] == step["prompt"] == step.get("prompt")
    again = pickle.loads(pickle.dumps(step))
    assert again["prompt"] == step["prompt"]
    assert again["tokens"]["prompt_ids"] == step["tokens"]["prompt_ids"]
    assert TrajectoryStep(**plain)["completion"] == step["completion"]


def test_every_reader_of_a_dict_sees_what_a_step_shows():
    step = conversation(2)[1]
    step["response"] = None
    plain = json.loads(json.dumps(step))
    assert plain["prompt"] == step["prompt"]
    assert plain["tokens"] == dict(step["tokens"]) == json.loads(json.dumps(step["tokens"]))
    assert {**step}.keys() == dict(step).keys() == set(step) == plain.keys()
    assert (step | {"reward": 2.0})["reward"] == 2.0
    step |= {"reward": 0.5, "mine": 1}
    assert (step["reward"], step.reward, step["mine"], step.mine) == (0.5, 0.5, 1, 1)
    state = State(ROW, trajectory=[step])
    assert json.loads(json.dumps(state))["trajectory"][0] == json.loads(json.dumps(step))


def test_writes_to_a_step_and_its_tokens_reach_the_turn():
    state = State(ROW, trajectory=conversation(2))
    tokens = state["trajectory"][1]["tokens"]
    tokens["completion_ids"], tokens["completion_logprobs"] = [8, 9, 10], [-1.0, -2.0, -3.0]
    (branch,) = state.rollout().transcript.branches()
    assert branch.token_ids[branch.sampled].tolist() == [100, 200, 8, 9, 10]
    state["trajectory"][0]["tokens"] = None
    assert len(state.rollout().turns) == 1


def test_completion_mode_shares_text():
    first = TrajectoryStep("once", " upon")
    second = TrajectoryStep("once upon a", " time", previous=first)
    assert (second.new_prompt, second["prompt"], second.conversation()) == (
        " a",
        "once upon a",
        "once upon a time",
    )


def test_step_tokens_are_lists_when_read_and_arrays_inside():
    tokens = TrajectoryStepTokens([1, 2], [3], [-0.25], version=4)
    assert tokens["prompt_mask"] == [0, 0]
    assert tokens["completion_mask"] == [1]
    assert tokens.completion_logprobs == [-0.25]
    assert tokens.get("version") == 4
    prompt, completion, logprobs = tokens.arrays()
    assert (prompt.dtype, completion.dtype, logprobs.dtype) == (np.int32, np.int32, np.float64)
    tokens["prompt_ids"] = [9]
    assert tokens["prompt_ids"] == [9]


def test_responses_without_tokens_leave_none():
    step = TrajectoryStep([], [], response=Response(vf.AssistantMessage("x")))
    assert step["tokens"] is None
    assert not step.has_tokens
