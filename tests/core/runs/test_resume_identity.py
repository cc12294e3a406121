"""An evaluation never mixes rows of two configurations: whatever was built otherwise is refused by
name."""

import json
import shutil
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.testing import FakeServer, ScriptedClient

SAVED = Path(__file__).parents[2] / "data" / "saved_0_2_0"


def rows(n):
    return [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(n)]


def exact(completion, answer) -> float:
    return float(completion[-1].content == answer)


def search(query: str) -> str:
    """Search the library."""
    return query


def look_up(query: str) -> str:
    """Search the library, another way."""
    return query.upper()


def at_least(threshold):
    def long_enough(completion) -> float:
        return float(len(completion[-1].content) >= threshold)

    return long_enough


def judged(**changes):
    settings = {
        "judge_client": ScriptedClient("<score>8</score>"),
        "judge_models": ["gpt-4.1-nano"],
    } | changes
    return {"rubric": vf.JudgeRubric(**settings)}


def rewarded(*funcs, **parameters):
    return {"rubric": vf.Rubric(funcs=list(funcs), **parameters)}


def otherwise(completion, answer) -> float:
    return float(completion[0].content == answer)


otherwise.__name__ = exact.__name__
"""A function that was edited: the same name, other code."""
otherwise.__qualname__ = exact.__qualname__


def build(kind=vf.SingleTurnEnv, n=2, **parameters):
    return kind(dataset=rows(n), **parameters)


CHANGES = {
    "another tool": (
        vf.ToolEnv,
        {"tools": [search]},
        {"tools": [look_up]},
        "environment.tools[0].function",
    ),
    "one more tool": (
        vf.ToolEnv,
        {"tools": [search]},
        {"tools": [search, look_up]},
        "environment.tools[1].function",
    ),
    "another class of parser": (
        vf.SingleTurnEnv,
        {"parser": vf.XMLParser(["answer"])},
        {"parser": vf.ThinkParser()},
        "parser.class",
    ),
    "other fields of a parser": (
        vf.SingleTurnEnv,
        {"parser": vf.XMLParser(["answer"])},
        {"parser": vf.XMLParser(["think", "answer"])},
        "parser.fields",
    ),
    "another judge": (
        vf.SingleTurnEnv,
        judged(),
        judged(judge_models=["gpt-4.1"]),
        "rubric.judge_models",
    ),
    "another prompt of the judge": (
        vf.SingleTurnEnv,
        judged(),
        judged(judge_prompt="Score {response}."),
        "rubric.judge_prompt",
    ),
    "another temperature of the judge": (
        vf.SingleTurnEnv,
        judged(judge_sampling_args={"temperature": 0}),
        judged(judge_sampling_args={"temperature": 1}),
        "rubric.judge_sampling_args.temperature",
    ),
    "an edited reward function": (
        vf.SingleTurnEnv,
        rewarded(exact),
        rewarded(otherwise),
        "rubric.funcs[0].code",
    ),
    "another value in a closure": (
        vf.SingleTurnEnv,
        rewarded(at_least(3)),
        rewarded(at_least(4)),
        "rubric.funcs[0].closure.threshold",
    ),
    "another time limit of a function": (
        vf.SingleTurnEnv,
        rewarded(exact),
        rewarded(exact, timeout_s=1.0),
        "rubric.timeout_s",
    ),
    "other examples in the prompt": (
        vf.SingleTurnEnv,
        {},
        {"few_shot": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]},
        "environment.few_shot[0].content",
    ),
    "a further keyword": (
        vf.SingleTurnEnv,
        {"difficulty": 1},
        {"difficulty": 2},
        "environment.difficulty",
    ),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_run_resumed_otherwise_is_refused_by_name(tmp_path, name):
    kind, before, after, key = CHANGES[name]
    build(kind, **before).evaluate(ScriptedClient("<answer>1</answer>"), "m", results_path=tmp_path)
    stored = {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "run.lock"
    }
    client = ScriptedClient("<answer>1</answer>")
    with pytest.raises(vf.RunMismatch) as caught:
        build(kind, n=3, **after).evaluate(client, "m", results_path=tmp_path)
    assert key in caught.value.differences
    code = key.removesuffix(".code")
    message = f"other code: {code} changed since" if code != key else f"{key} was "
    assert message in str(caught.value)
    assert " at 0x" not in str(caught.value)
    assert client.requests == []
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "run.lock"
    } == stored


@pytest.mark.parametrize("name", list(CHANGES))
def test_negative_control_the_same_configuration_built_anew_resumes(tmp_path, name):
    kind, _, parameters, _ = CHANGES[name]
    client = ScriptedClient("<answer>1</answer>")
    build(kind, **parameters).evaluate(client, "m", results_path=tmp_path)
    further = ScriptedClient("<answer>1</answer>")
    assert len(build(kind, n=3, **parameters).evaluate(further, "m", results_path=tmp_path)) == 3
    assert len(further.requests) == 1


def test_what_was_changed_after_construction_counts(tmp_path):
    build(rubric=vf.Rubric(funcs=[exact])).evaluate(ScriptedClient("1"), "m", results_path=tmp_path)
    env = build(n=3, rubric=vf.Rubric(funcs=[exact]))
    env.parser = vf.ThinkParser()
    with pytest.raises(
        vf.RunMismatch, match=r"parser\.class was 'verifiers\.Parser', now 'verifiers\.ThinkParser'"
    ):
        env.evaluate(ScriptedClient("1"), "m", results_path=tmp_path)


def test_a_client_that_asks_for_another_completion_is_refused(tmp_path):
    with FakeServer("1") as server:
        for_variant = [
            vf.OpenAIChatCompletionsClient(base_url=server.url, headers={"X-Variant": variant})
            for variant in "aab"
        ]
        build().evaluate(for_variant[0], "scripted", results_path=tmp_path)
        build(n=3).evaluate(for_variant[1], "scripted", results_path=tmp_path)
        with pytest.raises(
            vf.RunMismatch, match=r"extra_headers\.X-Variant was '\*\*\* \w{8}', now '\*\*\* \w{8}'"
        ):
            build(n=4).evaluate(for_variant[2], "scripted", results_path=tmp_path)
        assert server.count == 3


def test_negative_control_a_client_may_move_and_be_slower(tmp_path):
    with FakeServer("1") as server, FakeServer("1") as moved:
        build().evaluate(
            vf.OpenAIChatCompletionsClient(base_url=server.url), "scripted", results_path=tmp_path
        )
        slower = vf.OpenAIChatCompletionsClient(
            base_url=moved.url, api_key="sk-another", timeout=9, max_retries=1, keep_raw=True
        )
        assert len(build(n=3).evaluate(slower, "scripted", results_path=tmp_path)) == 3
        assert moved.count == 1


def test_no_secret_of_a_client_or_an_environment_is_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "f00dface-f00dface")
    with FakeServer("1") as server:
        client = vf.OpenAIChatCompletionsClient(
            base_url=server.url,
            api_key="sk-0123456789abcdefghij",
            headers={"Authorization": "Bearer 0123456789"},
        )
        env = build(
            search_key="f00dface-f00dface", service={"token": "t0pt0pt0p", "url": "http://x"}
        )
        env.evaluate(client, "scripted", results_path=tmp_path)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for secret in (b"0123456789", b"f00dface", b"t0pt0pt0p"):
        assert secret not in written
    assert (
        json.loads((tmp_path / "config.json").read_text())["config"]["environment"]["service"][
            "url"
        ]
        == "http://x"
    )


# --- runs of version 0.2.0 ------------------------------------------------------------------------


def saved(name, tmp_path):
    return Path(shutil.copytree(SAVED / name, tmp_path / name))


def test_an_evaluation_saved_by_0_2_0_loads_and_resumes(tmp_path):
    folder, said = saved("evaluation", tmp_path), []
    before = vf.load_results(folder)
    assert (len(before), before.metadata["env_id"]) == (4, "reverse-text")
    env = vf.load_environment("reverse-text", unit="word", num_eval_examples=4)
    client = ScriptedClient(lambda request: request.prompt[-1].content[::-1])
    results = env.evaluate(
        client,
        "scripted",
        num_examples=4,
        rollouts_per_example=2,
        results_path=folder,
        on_log=said.append,
    )
    assert (len(results), len(client.requests)) == (8, 4)
    old_rows = (SAVED / "evaluation" / "results.jsonl").read_bytes()
    assert (folder / "results.jsonl").read_bytes().startswith(old_rows)
    assert any(
        "configuration are not compared: code, environment, parser, rubric" in text for text in said
    )
    stored = json.loads((folder / "config.json").read_text())
    assert (
        json.loads((folder / "metadata.json").read_text())["fingerprint"] == stored["fingerprint"]
    )


def test_a_run_of_tools_saved_by_0_2_0_loads_and_resumes(tmp_path):
    folder = saved("tools", tmp_path)
    assert len(vf.load_results(folder)) == 4
    client = ScriptedClient("I call nothing")
    env = vf.load_environment("tool-test")
    assert (
        len(
            env.evaluate(
                client, "scripted", num_examples=4, rollouts_per_example=2, results_path=folder
            )
        )
        == 8
    )
    assert len(client.requests) == 4


def test_what_a_run_of_0_2_0_stored_is_still_compared(tmp_path):
    folder = saved("evaluation", tmp_path)
    env = vf.load_environment("reverse-text", unit="sentence", num_eval_examples=4)
    with pytest.raises(vf.RunMismatch) as caught:
        env.evaluate(
            ScriptedClient("x"), "scripted", temperature=0.5, num_examples=4, results_path=folder
        )
    assert list(caught.value.differences) == [
        "env_args.unit",
        "sampling_args.temperature",
        "system_prompt",
    ]


def test_an_unfinished_run_of_0_2_0_is_found_in_the_default_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "evals" / "reverse-text--scripted" / "25aa106f"
    shutil.copytree(SAVED / "evaluation", folder)
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(metadata | {"status": "interrupted"}))
    env = vf.load_environment("reverse-text", unit="word", num_eval_examples=4)
    client = ScriptedClient("x")
    results = env.evaluate(
        client, "scripted", num_examples=3, rollouts_per_example=2, save_results=True
    )
    assert (len(results), len(client.requests)) == (6, 2)
    assert [path.name for path in folder.parent.iterdir()] == ["25aa106f"]
    env.evaluate(client, "scripted", num_examples=3, rollouts_per_example=2, save_results=True)
    # a finished run is not extended: the next one is new
    assert len(list(folder.parent.iterdir())) == 2
