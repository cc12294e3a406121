"""ATIF: every kind of rollout goes out by the format's rules and comes back as it was, and other
authors' trajectories are rollouts in which what they lack is unknown."""

import asyncio
import json
import math
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings

import verifiers as vf
from support import atif
from support.any_rollouts import on_disk, rollouts
from support.atif_rollouts import KINDS, played
from verifiers.errors import JournalError
from verifiers.results import rows
from verifiers.results.atif import read_trajectory, to_trajectory
from verifiers.runs.rescoring import rescore
from verifiers.runtime import bounded
from verifiers.runtime.json import decode_row, encode_row
from verifiers.testing import ScriptedClient

# --- every kind of rollout comes back -------------------------------------------------------------


@settings(max_examples=int(os.environ.get("VF_EXAMPLES", "150")), deadline=None)
@given(rollouts())
def test_every_rollout_goes_out_by_the_rules_and_comes_back_as_it_was(output):
    document = decode_row(encode_row(to_trajectory(output, "env", "m")))
    atif.check(document)
    read = rows.saved_row(read_trajectory(document), "x")
    journal = rows.saved_row(on_disk(output), "x")
    assert on_disk(read) == on_disk(journal)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_environments_come_back_from_a_folder(kind, tmp_path):
    results = played(kind)
    for document in results.to_atif(tmp_path / "atif"):
        atif.check(document)
    results.save(tmp_path / "run")
    read, saved = vf.load_results(tmp_path / "atif"), vf.load_results(tmp_path / "run")
    assert [on_disk(output) for output in read.outputs] == [on_disk(o) for o in saved.outputs]
    assert read.metadata | {"path_to_save": ""} == saved.metadata | {"path_to_save": ""}
    for ours, theirs in zip(read.outputs, saved.outputs, strict=True):
        both = zip(ours["trajectory"].branches(), theirs["trajectory"].branches(), strict=True)
        for left, right in both:
            assert np.array_equal(left.token_ids, right.token_ids)
            assert np.array_equal(left.sampler_logprobs, right.sampler_logprobs)


def test_an_agents_other_conversations_are_embedded_trajectories():
    (document,) = played("branches").to_atif()
    conversations = [document, *document["subagent_trajectories"]]
    assert sorted(c["steps"][-1]["message"] for c in conversations) == ["a", "b", "c"]


def test_negative_control_without_what_the_format_lacks_a_rollout_is_not_the_same():
    (document,) = played("tools").to_atif()
    (output,) = played("tools").outputs
    del document["extra"]
    read = rows.saved_row(read_trajectory(document), "x")
    assert (read.answer, read.stop_condition) == (None, None)
    assert read.completion == output.completion


# --- other authors' trajectories ------------------------------------------------------------------

FOREIGN = {
    "schema_version": "ATIF-v1.5",
    "agent": {"name": "terminus-2", "version": "2.0"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "You are an agent."},
        {"step_id": 2, "source": "user", "message": "What is 2 + 3?"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "I run it.",
            "observation": {"results": [{"content": "5"}]},
        },
        {
            "step_id": 4,
            "source": "agent",
            "message": "",
            "tool_calls": [{"tool_call_id": "t1", "function_name": "say", "arguments": {"x": "5"}}],
            "observation": {"results": [{"source_call_id": "t1", "content": None}]},
        },
        {"step_id": 5, "source": "agent", "message": "5"},
    ],
}


def scored_again(env, path):
    return asyncio.run(rescore(env, path))


def foreign(folder, *answers, **changes):
    folder.mkdir(exist_ok=True)
    for number, answer in enumerate(answers):
        document = json.loads(json.dumps(FOREIGN | changes))
        document["steps"][-1]["message"] = answer
        trial = folder / f"trial-{number}" / "agent"
        trial.mkdir(parents=True)
        (trial / "trajectory.json").write_text(json.dumps(document))
        (trial / "result.json").write_text('{"reward": 1.0}')
    return folder


def test_what_a_foreign_trajectory_lacks_is_unknown(tmp_path):
    results = vf.load_results(foreign(tmp_path, "5", "6"))
    output = results.outputs[0]
    assert [message["role"] for message in output.prompt] == ["system", "user"]
    assert [message["role"] for message in output.completion] == [
        *["assistant", "user", "assistant", "tool", "assistant"]
    ]
    assert output.completion[2]["tool_calls"][0].arguments == '{"x": "5"}'
    assert math.isnan(output.reward)
    assert (output.answer, output.metrics, output.token_usage) == (None, {}, {})
    assert len(output["trajectory"]) == 3
    assert not any(step["tokens"] for step in output["trajectory"])
    assert math.isnan(results.metadata.avg_reward)
    assert len({output["example_hash"] for output in results.outputs}) == 1  # siblings
    assert [output["sibling"] for output in results.outputs] == [0, 1]
    (only,) = vf.load_results(tmp_path / "trial-0/agent/trajectory.json").outputs
    assert only.completion == output.completion


def test_reward_and_tokens_that_it_has_are_read(tmp_path):
    steps = json.loads(json.dumps(FOREIGN["steps"]))
    steps[2]["metrics"] = {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4],
        "logprobs": [-0.5, -1.0],
    }
    steps[3]["metrics"] = {"prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6]}
    final = {"total_prompt_tokens": 7, "extra": {"reward": 0.5}}
    folder = foreign(tmp_path, "5", steps=steps, final_metrics=final)
    (output,) = vf.load_results(folder).outputs
    assert (output.reward, output.token_usage) == (0.5, {"input_tokens": 7})
    (branch,) = output["trajectory"].branches()
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert branch.versions.tolist() == [-2, -2, -1, -1, -2, -1]
    assert branch.sampler_logprobs is None  # those of the second turn are unknown


def test_it_is_scored_again_with_the_answers_of_an_environment(tmp_path):
    def right(completion, answer):
        return float(completion[-1]["content"] == answer)

    rubric = vf.Rubric([right])
    data = [{"question": "Other?", "answer": "5"}, {"question": "What is 2 + 3?", "answer": "5"}]
    env = vf.SingleTurnEnv(dataset=data, rubric=rubric, system_prompt="Be brief.")
    scored = scored_again(env, foreign(tmp_path / "a", "5", "6"))
    assert scored.reward == [1.0, 0.0]
    assert scored.outputs[0].prompt[0]["content"] == "You are an agent."
    strange = foreign(tmp_path / "b", "5")
    without = vf.SingleTurnEnv(dataset=data[:1], rubric=rubric)
    with pytest.raises(
        vf.ConfigError, match="reads the answer, which the rollouts of example 0 have not"
    ):
        scored_again(without, strange)
    no_need = vf.SingleTurnEnv(dataset=data[:1], rubric=vf.Rubric([lambda completion: 0.5]))
    assert scored_again(no_need, strange).reward == [0.5]


def test_two_authors_trajectories_are_compared_by_task(tmp_path):
    final = [{"extra": {"reward": reward}} for reward in (0.0, 1.0)]
    left = vf.load_results(foreign(tmp_path / "a", "6", final_metrics=final[0]))
    right = vf.load_results(foreign(tmp_path / "b", "5", final_metrics=final[1]))
    compared = left.compare(right)
    assert "1" in str(compared)


def test_files_that_it_names_are_parts_of_it_and_no_rollouts(tmp_path):
    steps = json.loads(json.dumps(FOREIGN["steps"]))
    refs = [{"trajectory_path": name} for name in ("sub.json", "/etc/hostname", "../outside.json")]
    steps[2]["observation"]["results"][0]["subagent_trajectory_ref"] = refs
    folder = foreign(tmp_path, "5", steps=steps)
    (folder / "trial-0/agent/sub.json").write_text(json.dumps(FOREIGN))
    (output,) = vf.load_results(folder).outputs
    assert len(output["trajectory"]) == 6


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema_version": "ATIF-v1.7"}', "KeyError: 'steps'"),
        ('{"schema_version": "ATIF-v1.7", "agent": {}, "steps": [3]}', "TypeError"),
        (
            '{"schema_version": "ATIF-v1.7", "steps": ' + "[" * 5000 + "]" * 5000 + "}",
            "nested deeper",
        ),
        ('{"schema_version": "ATIF-v1.7", ', "ValueError|JSONDecodeError"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, said):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(JournalError, match=rf"x\.json.*({said})"):
        vf.load_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tool_calls": [{}]}, "step 3: KeyError: 'arguments'"),
        ({"message": [{"type": "video"}]}, "step 3: KeyError"),
        (
            {"metrics": {"prompt_token_ids": [10**30], "completion_token_ids": [1]}},
            "step 3: ValueError: the ids of its tokens are no whole numbers",
        ),
        ({"observation": {"results": 5}}, "step 3: TypeError"),
    ],
)
def test_a_strange_value_of_a_step_names_the_file_and_the_step(change, said, tmp_path):
    steps = json.loads(json.dumps(FOREIGN["steps"]))
    steps[2] |= change
    foreign(tmp_path, "5", steps=steps)
    with pytest.raises(JournalError, match=rf"trajectory\.json: .*{said}"):
        vf.load_results(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"example_hash": [1]},
        {"sibling": 10**400},
        {"sibling": "x"},
        {"rollout_key": 5},
        {"error": {"error": 5}},
        {"token_usage": {"input_tokens": 10**400}},
        {"timing": {"total_ms": "x"}},
        {"stop_condition": [1]},
        {"trajectory": "x"},
        {"trajectory": [5]},
        {"metrics": {"a": 10**400}},
    ],
    ids=str,
)
def test_strange_fields_are_read_or_refused_with_the_file(fields, tmp_path):
    foreign(tmp_path, "5", extra={"verifiers": {"fields": fields}})
    named = "trajectory.json"
    try:
        results = vf.load_results(tmp_path)
        results.summary(), list(results.to_atif())
    except JournalError as error:
        named = str(error)
    assert "trajectory.json" in named


def test_reading_takes_memory_in_proportion_to_the_file(tmp_path):
    peaks = []
    for num_steps in (1000, 4000):
        steps = [{"source": "agent", "message": "x"}] * num_steps
        (tmp_path / "t.json").write_text(json.dumps(FOREIGN | {"steps": steps}))
        tracemalloc.start()
        (output,) = vf.load_results(tmp_path / "t.json").outputs
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len(output["trajectory"]) == 4000
    assert len(output["trajectory"][-1]["prompt"]) == 3999
    assert peaks[1] < 6 * peaks[0]


def test_a_part_that_many_files_name_is_a_part_of_the_first(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.json").write_text(
            json.dumps(FOREIGN | {"continued_trajectory_ref": "part.json"})
        )
    (tmp_path / "part.json").write_text(json.dumps(FOREIGN))
    read = vf.load_results(tmp_path)
    assert [len(output["trajectory"]) for output in read.outputs] == [6, 3, 3, 3, 3]


def test_trajectories_are_made_one_at_a_time(tmp_path):
    documents = played("tools").to_atif()
    assert (len(documents), documents[0], documents[-1:]) == (1, documents[-1], [documents[0]])
    assert documents == list(documents)
    with pytest.raises(IndexError):
        documents[1]


async def with_helpers(state):
    """Two helpers at once, of which the last ends with the words of the agent itself."""
    import openai

    async with (
        vf.model_gateway(state) as url,
        openai.AsyncOpenAI(base_url=url, api_key="unused") as client,
    ):

        async def ask(*texts, role="system"):
            messages = [{"role": role, "content": texts[0]}, {"role": "user", "content": texts[1]}]
            answer = await client.chat.completions.create(
                model="m", messages=[*messages, *texts[2:]], tools=[TOOL]
            )
            return answer.choices[0].message.model_dump(exclude_none=True)

        call = await ask("You lead.", "task")
        await asyncio.gather(*(ask("You help.", f"part {n}") for n in range(2)))
        result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
        await ask("You lead.", "task", call, result)
        await ask("You help.", "part 9")


TOOL = {
    "type": "function",
    "function": {"name": "task", "parameters": {"type": "object", "properties": {}}},
}


def lead_or_help(request):
    return vf.ToolCall("c1", "task", {}) if request.prompt[-1].content == "task" else "Done."


def test_the_root_is_the_conversation_of_the_agent_itself():
    env = vf.AgentEnv(agent=with_helpers, dataset=[{"question": "task", "answer": ""}])
    results = env.evaluate(
        ScriptedClient(lead_or_help, tokens=True), "m", state_columns=["trajectory"]
    )
    (document,) = results.to_atif()
    assert document["steps"][0]["message"] == "You lead."
    helpers = [each["steps"][1]["message"] for each in document["subagent_trajectories"]]
    assert (len(helpers), helpers[-1]) == (3, "part 9")


def test_a_file_without_end_is_left_at_the_limit(tmp_path, monkeypatch):
    from verifiers.results import atif as reader

    monkeypatch.setattr(reader, "MAX_ROW_BYTES", 1000)
    with pytest.raises(bounded.TooLong):
        vf.load_results(foreign(tmp_path, "5" * 2000))
    os.mkfifo(tmp_path / "pipe.json")


def test_a_folder_without_any_says_what_it_may_hold(tmp_path):
    (tmp_path / "x.json").write_text('{"version": "ATIF-v1.7"}')
    with pytest.raises(vf.ConfigError, match="a results file or ATIF trajectories"):
        vf.load_results(tmp_path)
