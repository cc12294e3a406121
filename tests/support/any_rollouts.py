"""Finished rollouts of every shape, as strategies: conversations, branches, tokens, versions, odd
values."""

import math

from hypothesis import strategies as st

import verifiers as vf
from verifiers.results import rows
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.values import Timing
from verifiers.runtime.json import decode_row, encode_row

TEXT = st.sampled_from(["", "a", "é\u2028", "\ud800", "It is 5."])
ARGUMENTS = st.sampled_from(['{"a": 1}', '{"a":1}', "{}", "no JSON", "[1]", '{"a": NaN}', ""])
CALLS = st.lists(
    st.builds(vf.ToolCall, st.sampled_from(["c1", "c2", ""]), TEXT, ARGUMENTS), max_size=2
)
IMAGE = vf.ImageUrlContentPart
IMAGES = [IMAGE("https://h/a.png?b"), IMAGE("data:image/png;base64,aGk="), IMAGE("https://h/x")]
PARTS = st.lists(st.sampled_from([vf.TextContentPart("t"), *IMAGES]), max_size=2)
CONTENT = st.one_of(TEXT, PARTS)
ANSWER = st.builds(
    vf.AssistantMessage,
    st.one_of(st.none(), CONTENT),
    st.one_of(st.none(), CALLS),
    st.one_of(st.none(), TEXT),
)
CONTEXT = st.one_of(
    st.builds(vf.SystemMessage, TEXT),
    st.builds(vf.UserMessage, CONTENT),
    st.builds(vf.ToolMessage, CONTENT, st.sampled_from(["c1", "c2", "c9"])),
    st.just({"role": "developer", "content": "d", "name": "n"}),
)
PROMPT = st.one_of(TEXT, st.lists(st.one_of(CONTEXT, ANSWER), max_size=3))
NUMBER = st.one_of(st.none(), st.just(math.nan), st.floats(-1, 1, width=32))


@st.composite
def turns(draw):
    """Turns of which each continues an earlier conversation, another, or none."""
    made, conversations, ids = [], [[vf.UserMessage("q")]], [[1, 15]]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(conversations) - 1))
        prompt = [*conversations[at], *draw(st.lists(CONTEXT, max_size=2))]
        completion = draw(st.one_of(st.lists(ANSWER, min_size=1, max_size=2), st.just([])))
        if draw(st.booleans()) and draw(st.booleans()):
            prompt, completion = "text", "more"
        num = draw(st.integers(0, 3))
        tokens = {
            "prompt_ids": [*ids[at], draw(st.integers(0, 9))],
            "completion_ids": draw(st.lists(st.integers(0, 2**31 - 1), min_size=num, max_size=num)),
            "completion_logprobs": [draw(st.floats(-9, 0, width=32)) for _ in range(num)],
            "version": draw(st.one_of(st.integers(-1, 5), st.just(list(range(num))))),
        }
        made.append(
            {
                "prompt": prompt,
                "completion": completion,
                "tokens": draw(st.one_of(st.none(), st.just(tokens))),
                "reward": draw(NUMBER),
                "is_truncated": draw(st.booleans()),
                "extras": draw(st.sampled_from([{}, {"role": "subagent"}])),
            }
        )
        if isinstance(prompt, list):
            conversations.append([*prompt, *completion])
            ids.append([*tokens["prompt_ids"], *tokens["completion_ids"]])
    return made


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "default": None}}}
INFOS = st.sampled_from(
    [{}, {"k": [1]}, {"level": 1}, {"level": 0.5, "tags": {"x": 1}}, {"tags": {}}, {"hint": None}]
)


@st.composite
def rollouts(draw):
    made = draw(turns())
    prompt, completion = draw(PROMPT), draw(st.one_of(st.none(), PROMPT))
    if (
        made and draw(st.booleans()) and isinstance(made[-1]["prompt"], list)
    ):  # its own conversation
        prompt, completion = made[0]["prompt"], []
        conversation = [*made[-1]["prompt"], *made[-1]["completion"]]
        if isinstance(prompt, list) and conversation[: len(prompt)] == prompt:
            completion = conversation[len(prompt) :]
    record = Rollout(
        Transcript(made),
        draw(NUMBER),
        {"m": 0.5, "n": math.nan},
        Status(
            draw(st.sampled_from([None, "max_turns_reached"])),
            draw(st.sampled_from([None, "ToolCallError: no"])),
        ),
        row={
            "prompt": prompt,
            "answer": draw(st.sampled_from(["5", None, 5])),
            "info": draw(INFOS),
            "example_id": draw(st.integers(0, 2)),
        },
        completion=completion,
        tool_defs=draw(
            st.sampled_from([None, [], [vf.Tool("add")], [vf.Tool("sub", "s", SCHEMA)]])
        ),
        role_rewards=draw(st.sampled_from([{}, {"white": 1.0, "black": math.nan}])),
        turn_sum=draw(st.sampled_from(["", "gained"])),
        turn_sum_weight=draw(st.sampled_from([None, 0.0, 0.5])),
        not_applicable=draw(st.sampled_from([[], ["style", "a, b"]])),
        failed_requests=draw(st.sampled_from([{}, {"refused_for_rate": 3, "unanswered": 1}])),
        tool_errors=draw(st.sampled_from([[], ["add: no"]])),
        is_unparsed=draw(st.sampled_from([None, False, True])),
        timing=draw(st.sampled_from([Timing(), Timing.of({"total_ms": 2.5})])),
        usage=draw(st.sampled_from([{}, {"input_tokens": 3, "output_tokens": 2, "cost": 0.1}])),
    )
    columns = draw(
        st.sampled_from([{}, {"column": {"x": 1}}, {"column": None}, {"column": [1, "a"]}])
    )
    saved = rows.RolloutOutput(record.fields() | {"trajectory": record.transcript, **columns})
    saved |= record.metrics  # also at the top level, as a run gives them
    if draw(st.booleans()):
        del saved["trajectory"]
    return saved


def on_disk(output):
    """The line of a rollout, decoded, without what says where it is."""
    row = decode_row(encode_row(rows.row_for_disk(output, "h", 0)))
    return {name: value for name, value in row.items() if name not in rows.DISK_FIELDS}
