"""Functions of older utilities that nothing but packages written for older versions calls."""

import json
import time

import pytest

import verifiers as vf
from support.small_envs import add_one, row, single_turn, sums
from verifiers.testing import FakeServer, ScriptedClient
from verifiers.types import CustomBaseModel, EvalConfig, EvalRunConfig, GenerateOutputs, TimeSpans
from verifiers.utils.client_utils import load_prime_config, setup_anthropic_client, setup_client
from verifiers.utils.data_utils import format_dataset
from verifiers.utils.error_utils import ErrorChain, get_vf_error_chain
from verifiers.utils.eval_utils import (
    load_toml_config,
    print_results,
    print_timing,
    run_evaluation,
    run_evaluations,
    sanitize_metadata,
    save_rollout_results,
    save_to_disk,
)
from verifiers.utils.install_utils import (
    check_hub_env_installed,
    install_from_hub,
    install_from_local,
    install_from_repo,
    is_hub_env,
    normalize_package_name,
)
from verifiers.utils.message_utils import (
    from_raw_message,
    message_to_printable,
    sanitize_tool_calls,
    serialize_message_for_output,
    strip_nones_from_content,
)
from verifiers.utils.message_utils import normalize_messages as normalize_raw
from verifiers.utils.path_utils import (
    find_latest_incomplete_eval_results_path,
    is_valid_eval_results_path,
)
from verifiers.utils.response_utils import (
    parse_is_truncated,
    parse_response_messages,
    parse_response_tokens,
)
from verifiers.utils.save_utils import (
    GenerateOutputsBuilder,
    extract_usage_tokens,
    load_outputs,
    make_serializable,
    save_metadata,
    save_new_outputs,
    save_outputs,
    states_to_outputs,
    validate_resume_metadata,
)


def results(count=2, **options):
    return single_turn(count).evaluate(ScriptedClient(add_one, tokens=True), "m", **options)


def test_a_formatted_dataset_is_that_of_an_environment():
    from datasets import Dataset

    made = format_dataset(
        Dataset.from_list(sums(2)), system_prompt="Add.", map_kwargs={"num_proc": 2}
    )
    assert made.to_list() == single_turn(2, system_prompt="Add.").get_dataset().to_list()


def test_tool_calls_are_written_as_text_and_read_again():
    said = vf.AssistantMessage(tool_calls=[vf.ToolCall("c", "add", {"n": 1})])
    written = sanitize_tool_calls([vf.UserMessage("hi"), said])
    assert [json.loads(call)["function"]["name"] for call in written[1]["tool_calls"]] == ["add"]
    row_of_a_dataset = vf.SingleTurnEnv(dataset=[{"prompt": written}]).sample_prompts(1)[0]
    assert row_of_a_dataset["prompt"][1].tool_calls[0].name == "add"
    assert sanitize_tool_calls("text") == strip_nones_from_content("text") == "text"


def test_nones_inside_content_are_removed():
    part = {"type": "text", "text": "a", "image_url": None}
    assert strip_nones_from_content([{"role": "user", "content": [part]}]) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]}
    ]


async def test_a_response_is_taken_apart():
    env, client = single_turn(1), ScriptedClient("1", tokens=True)
    state = await env.rollout(row(), client, "m")
    step = state["trajectory"][0]
    response = await env.get_model_response(state, state["prompt"])
    assert await parse_response_messages(response) == step["completion"]
    assert (await parse_response_tokens(response))["completion_ids"] == step["tokens"][
        "completion_ids"
    ]
    assert await parse_is_truncated(response) is False
    assert await parse_is_truncated(vf.Response(vf.AssistantMessage("x"), "length")) is True
    assert await parse_response_messages(vf.Response(vf.TextMessage("4")), "completion") == "4"
    assert await parse_response_tokens(vf.Response(vf.AssistantMessage("x"))) is None
    assert extract_usage_tokens(response) == (
        response.usage.prompt_tokens,
        response.usage.completion_tokens,
    )
    assert extract_usage_tokens(None) == (0, 0)


def test_a_chain_of_errors():
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise vf.ToolCallError("outer") from inner
    except vf.ToolCallError as error:
        chain, ours = ErrorChain(error), get_vf_error_chain(error)
    assert [type(link) for link in ours] == [vf.ToolCallError]
    assert vf.ToolError in chain
    assert KeyError in chain
    assert OSError not in chain
    assert str(chain) == "ToolCallError -> KeyError"
    assert [type(link) for link in chain] == [vf.ToolCallError, KeyError]
    assert "'inner'" in repr(chain)


def test_rows_are_saved_added_and_read(tmp_path):
    outputs = states_to_outputs(results(3)["states"], ["trajectory"])
    save_outputs(outputs[:1], tmp_path / "run")
    save_new_outputs(outputs[1:], tmp_path / "run")
    read = load_outputs(tmp_path / "run")
    assert [output["reward"] for output in read] == [1.0] * 3
    assert read[0]["completion"] == outputs[0]["completion"]
    with pytest.raises(vf.ConfigError, match="mode"):
        save_outputs(outputs, tmp_path, mode="x")


def test_rows_that_are_added_take_the_place_of_a_torn_line(tmp_path):
    outputs = states_to_outputs(results(3)["states"])
    for add in (save_new_outputs, lambda rows, folder: save_outputs(rows, folder, mode="a")):
        save_outputs(outputs[:2], tmp_path)
        file = tmp_path / "results.jsonl"
        file.write_bytes(file.read_bytes()[:-30])
        add(outputs[2:], tmp_path)
        assert [row["example_id"] for row in load_outputs(tmp_path)] == [0, 2]


def test_metadata_are_saved_and_compared(tmp_path):
    builder = GenerateOutputsBuilder(env_id="sums", model="m", rollouts_per_example=2)
    builder.add_outputs(reversed(results(2, rollouts_per_example=2).outputs))
    made = builder.build(sort_by_example_id=True)
    assert made["example_ids"] == [0, 0, 1, 1]
    assert builder.build()["example_ids"] == [1, 1, 0, 0]
    assert not is_valid_eval_results_path(tmp_path)
    save_outputs(made.outputs, tmp_path)
    save_metadata(builder.build_metadata(), tmp_path)
    assert is_valid_eval_results_path(tmp_path)
    validate_resume_metadata(tmp_path, env_id="sums", model="m", rollouts_per_example=2)
    with pytest.raises(vf.RunMismatch, match="model is 'm' there, not 'n'") as caught:
        validate_resume_metadata(tmp_path, env_id="sums", model="n")
    assert caught.value.differences == {"model": ("m", "n")}
    with pytest.raises(vf.ConfigError, match=r"no metadata\.json"):
        validate_resume_metadata(tmp_path / "elsewhere", model="m")


def test_the_newest_unfinished_run_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (model, status) in enumerate(
        [("m", "interrupted"), ("m", "running"), ("m", "complete"), ("n", "running")]
    ):
        folder = tmp_path / f"outputs/evals/sums--{model}/{number}"
        save_outputs(results(1).outputs, folder)
        save_metadata(
            {"env_id": "sums", "model": model, "num_examples": 1, "status": status}, folder
        )
        time.sleep(0.02)
    path = find_latest_incomplete_eval_results_path("sums", "m", num_examples=1)
    assert path.name == "1"
    assert find_latest_incomplete_eval_results_path("sums", "m", num_examples=2) is None
    assert find_latest_incomplete_eval_results_path("other", "m") is None


def test_values_become_plain_json():
    assert make_serializable({"a": float("nan"), "b": vf.UserMessage("x")}) == {
        "a": None,
        "b": {"role": "user", "content": "x"},
    }


def test_ids_and_packages():
    assert normalize_package_name("My-Env.2") == "my_env_2"
    assert is_hub_env("owner/name")
    assert not is_hub_env("name")
    assert not check_hub_env_installed("owner/no-such-environment")


@pytest.mark.parametrize(
    "install",
    [
        lambda: install_from_hub("owner/../x"),
        lambda: install_from_local("../x", "nowhere"),
        lambda: install_from_repo("../x"),
    ],
)
def test_an_installation_that_cannot_be_says_so_and_is_false(install, capsys):
    assert install() is False
    assert "vf-install:" in capsys.readouterr().err


def test_a_run_is_printed(capsys):
    print_results(results())
    shown = capsys.readouterr().out
    assert "1.000" in shown
    assert "example" in shown
    print_results(results(), num_samples=0)
    assert len(capsys.readouterr().out) < len(shown)


def test_evaluations_of_a_file(tmp_path):
    file = tmp_path / "eval.toml"
    file.write_text('model = "m"\n[[eval]]\nenv_id = "a"\n[[eval]]\nenv_id = "b"\nmodel = "n"\n')
    assert load_toml_config(file) == [{"model": "m", "env_id": "a"}, {"model": "n", "env_id": "b"}]
    file.write_text(
        '[[ablation]]\nid = "a"\n[ablation.sweep]\ntemperature = [0.0, 1.0]\nenv_args = {n ='
        " [1, 2]}"
    )
    assert [(entry["temperature"], entry["env_args"]) for entry in load_toml_config(file)] == [
        (temperature, {"n": n}) for temperature in (0.0, 1.0) for n in (1, 2)
    ]
    for text in (
        "env_id = 'a'",
        "[eval]\nid = 'a'",
        "[[eval]]\nenv_id = 'a'\nid = 'b'",
        "[[eval]]\nid = 'a'\nx = 1",
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"\.toml"):
            load_toml_config(file)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_toml_config(tmp_path / "nowhere.toml")


def test_raw_messages_become_messages():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    message = from_raw_message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert isinstance(message, vf.AssistantMessage)
    assert (message.tool_calls[0].id, message.tool_calls[0].arguments) == ("add", '{"a": 1}')
    assert normalize_raw("hi", field_name="prompt") == [{"role": "text", "content": "hi"}]
    with pytest.raises(TypeError, match=r"prompt\[1\]"):
        normalize_raw([{"role": "user", "content": "a"}, 7], field_name="prompt")
    with pytest.raises(ValueError, match="'critic'"):
        from_raw_message({"role": "critic", "content": ""})


def test_messages_are_printed_and_saved():
    image = {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}}
    audio = {"type": "input_audio", "input_audio": {"data": "a b\nc", "format": "WAV"}}
    parts = [{"type": "text", "text": "see"}, image, audio]
    message = {"role": "user", "content": parts, "extra": 1}
    assert message_to_printable(message)["content"] == "see [image] [audio]"
    assert serialize_message_for_output(message) == {
        "role": "user",
        "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": "data:,x"}},
            {"type": "input_audio", "input_audio": {"data": "abc", "format": "wav"}},
        ],
    }
    broken = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    assert serialize_message_for_output(broken)["content"] == [{"type": "text", "text": "[audio]"}]


# --- evaluations, clients


ENVIRONMENT = """
import verifiers as vf

def load_environment(n=2):
    rows = [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(n)]
    def exact(completion, answer): return float(completion[-1].content == answer)
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([exact]))
"""


def evaluation(url, folder, **fields):
    (folder / "older_sums.py").write_text(ENVIRONMENT)
    return EvalConfig(
        env_id="older-sums",
        env_args={"n": 3},
        env_dir_path=str(folder),
        model="m",
        client_config=vf.ClientConfig(api_base_url=url),
        sampling_args={"max_tokens": 4},
        num_examples=2,
        rollouts_per_example=2,
        max_concurrent=2,
        **fields,
    )


async def test_an_evaluation_of_a_configuration_is_run_and_saved(tmp_path, capsys):
    with FakeServer(add_one) as server:
        config = evaluation(
            server.url, tmp_path, save_results=True, output_dir=str(tmp_path / "outputs")
        )
        done = await run_evaluation(config)
        assert done["rewards"] == [1.0] * 4
        assert server.requests[0]["max_completion_tokens"] == 4
        folder = done.metadata["path_to_save"]
        assert folder.parent == tmp_path / "outputs" / "evals" / "older-sums--m"
        assert len(load_outputs(folder)) == 4
        await run_evaluations(
            EvalRunConfig(evals=[config.model_copy(update={"save_results": False})])
        )
    assert "1.000" in capsys.readouterr().out
    print_timing(done)
    assert capsys.readouterr().out.startswith("Timing:\ngeneration: min - ")
    with pytest.raises(vf.ConfigError, match="heartbeat_url"):
        await run_evaluations(EvalRunConfig(evals=[], heartbeat_url="http://127.0.0.1:1"))


def test_results_are_written_where_their_metadata_says(tmp_path):
    done = results(2)
    with pytest.raises(vf.ConfigError, match="path_to_save"):
        save_rollout_results(done)
    done.metadata["path_to_save"] = tmp_path / "run"
    save_rollout_results(done)
    assert vf.load_results(tmp_path / "run")["rewards"] == done["rewards"]
    save_to_disk(vf.make_dataset(done), sanitize_metadata(done.metadata), tmp_path / "plain")
    assert len(load_outputs(tmp_path / "plain")) == 2


def test_clients_of_the_first_generations(monkeypatch, tmp_path):
    monkeypatch.setenv("A_KEY", "k")
    by_fields = setup_client(api_base_url="http://127.0.0.1:1/v1", api_key_var="A_KEY", timeout=7.0)
    by_config = setup_client(
        vf.ClientConfig(api_base_url="http://127.0.0.1:1/v1", api_key_var="A_KEY")
    )
    assert (by_fields.api_key, str(by_fields.base_url)) == (
        by_config.api_key,
        str(by_config.base_url),
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_prime_config() == {}
    (tmp_path / ".prime").mkdir()
    (tmp_path / ".prime" / "config.json").write_text('{"team_id": "t"}')
    assert load_prime_config() == {"team_id": "t"}


def test_an_anthropic_client():
    pytest.importorskip("anthropic")
    made = setup_anthropic_client(vf.ClientConfig(client_type="anthropic_messages", max_retries=3))
    assert (made.max_retries, str(made.base_url)) == (3, "https://api.anthropic.com")


def test_results_of_columns_say_what_is_wrong():
    with pytest.raises(vf.ConfigError, match="different lengths: prompt 1, reward 2"):
        GenerateOutputs(prompt=["a"], reward=[0.0, 1.0])
    with pytest.raises(vf.ConfigError, match="not both; leave 'reward' out"):
        GenerateOutputs(results(1).outputs, reward=[0.0])
    assert len(GenerateOutputs()) == 0


def test_fields_of_a_model_read_by_key():
    class Point(CustomBaseModel):
        x: int

    point = Point(x=1)
    point["x"] = 2
    assert (point["x"], point.get("y", 3), "x" in point, "y" in point) == (2, 3, True, False)
    assert TimeSpans(spans=[{"start": 1.0, "end": 3.0}, {"start": 0.0, "end": 1.0}]).duration == 3.0


def test_rows_saved_with_spans_in_seconds_are_read_in_milliseconds(tmp_path):
    """As 0.1.14 saved them; a row of 0.1.9 has milliseconds at its top level."""
    from verifiers.utils.save_utils import load_outputs

    spans = {
        name: {"start": 10.0, "end": 10.5, "duration": 0.5}
        for name in ("setup", "generation", "scoring")
    }
    timing = {
        "start_time": 10.0,
        **spans,
        "model": {"spans": [], "duration": 0.25},
        "total": 1.0,
        "overhead": 0.125,
    }
    rows = [
        {"example_id": 0, "timing": timing},
        {"example_id": 1, "generation_ms": 5.0, "total_ms": 7.0},
    ]
    (tmp_path / "results.jsonl").write_text(
        "".join(json.dumps({**row, "reward": 1.0}) + "\n" for row in rows)
    )

    newer, older = load_outputs(tmp_path)

    assert newer["timing"] == {
        "start_time": 10.0,
        **dict.fromkeys(("setup_ms", "generation_ms", "scoring_ms"), 500.0),
        "model_ms": 250.0,
        "total_ms": 1000.0,
        "overhead_ms": 125.0,
    }
    assert (newer["timing"].model.duration, newer["timing"]["total"]) == (0.25, 1.0)
    assert older["timing"] == {"generation_ms": 5.0, "total_ms": 7.0}
    with pytest.raises(AttributeError):
        _ = older["timing"].model
    with pytest.raises(KeyError, match="duration alone"):
        newer["timing"].model["start"]
