"""Inspect: what is written for it, against its recorded shapes. The real package:
``tests/real``."""

import re

import pytest

import verifiers as vf
from support.integration_envs import right, tool_env
from support.peer_double import install
from verifiers.runtime.install_lines import install_line
from verifiers.testing import ScriptedClient
from verifiers.types import ModelRequest
from verifiers_integrations.inspect import eval_log, to_inspect
from verifiers_integrations.inspect_messages import from_assistant, to_chat, to_tools
from verifiers_integrations.inspect_task import InspectClient


def plays(request):
    """Calls the tool and says what it gave; on the second example it fails."""
    asked, last = request.prompt[0]["content"], request.prompt[-1]
    if asked.startswith("1"):
        raise RuntimeError("no model")
    if last["role"] == "tool":
        return last["content"]
    call = vf.ToolCall("c1", "add", {"a": int(asked.split()[0]), "b": 1})
    return vf.AssistantMessage("", tool_calls=[call], reasoning_content="add them")


def finished(**options):
    env = tool_env(3)
    env.env_id = "sums"
    return env.evaluate(
        ScriptedClient(plays), "m", num_examples=3, rollouts_per_example=2, **options
    )


@pytest.fixture
def double(monkeypatch):
    return install(monkeypatch, "inspect_ai")


def test_a_run_becomes_a_log(double, tmp_path):
    results = finished(results_path=tmp_path / "run")
    path = to_inspect(tmp_path / "run", tmp_path / "logs" / "x.eval")
    (log, location), _ = double["write_eval_log"][0]
    assert (location, path.parent.is_dir()) == (str(path), True)
    assert (log.status, log.eval.model, log.eval.task, log.eval.config.epochs) == (
        "success",
        "m",
        "sums",
        2,
    )
    assert (log.eval.dataset.samples, log.eval.dataset.sample_ids) == (2, [0, 1])
    assert [(sample.id, sample.epoch) for sample in log.samples] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    reward = log.results.scores[0]
    assert (reward.name, reward.metrics["mean"].value) == ("reward", results.metadata["avg_reward"])
    assert (reward.scored_samples, reward.unscored_samples) == (2, 2)
    assert log.results.metadata == {"vf_unscored": 2}
    assert (log.results.total_samples, log.results.completed_samples) == (4, 2)


def test_tools_reasoning_scores_and_errors_stand_in_the_samples(double):
    log = eval_log(finished())
    good, failed = log.samples[0], log.samples[2]
    kinds = [type(message).__name__.removeprefix("ChatMessage") for message in good.messages]
    assert kinds == ["User", "Assistant", "Tool", "Assistant"]
    call = good.messages[1].tool_calls[0]
    assert (call.function, call.arguments, call.parse_error) == ("add", {"a": 0, "b": 1}, None)
    assert good.messages[1].content[0].reasoning == "add them"
    assert (good.messages[2].function, good.messages[2].tool_call_id) == ("add", "c1")
    assert (good.scores["reward"].value, good.scores["right"].answer, good.error) == (
        1.0,
        "1",
        None,
    )
    assert good.output.choices[0].message.content == "1"
    assert "reward" not in failed.scores, "an unknown reward is no score"
    assert (failed.metadata["vf_unscored"], failed.output.choices) == (True, [])
    assert "no model" in failed.error.message
    assert "Traceback" in failed.error.traceback


def test_an_unknown_reward_is_not_a_zero_in_the_mean(double):
    def sometimes(completion, answer):
        return right(completion, answer) if answer == "1" else 1 / 0

    log = eval_log(
        tool_env(2, funcs=[sometimes]).evaluate(ScriptedClient("1"), "m", num_examples=2)
    )
    assert log.results.scores[0].metrics["mean"].value == 1.0
    assert [sorted(sample.scores)[:1] for sample in log.samples] == [["add_calls"], ["add_calls"]]
    assert ["reward" in sample.scores for sample in log.samples] == [True, False]


def test_arguments_that_are_no_object_are_a_parse_error(double):
    message = vf.AssistantMessage("", tool_calls=[vf.ToolCall("c", "add", '{"a": 1')])
    (said,) = to_chat([message])
    assert said.tool_calls[0].arguments == {"raw": '{"a": 1'}
    assert "delimiter" in said.tool_calls[0].parse_error


def test_tools_are_described(double):
    (tool,) = to_tools(tool_env(1).tool_defs)
    assert (tool.name, tool.description, tool.parameters.required) == (
        "add",
        "Adds two numbers.",
        ["a", "b"],
    )


def test_only_inspects_formats_are_written(double, tmp_path):
    with pytest.raises(vf.ConfigError, match=r"must end in \.eval or \.json"):
        to_inspect(finished(), tmp_path / "x.csv")


def test_without_inspect_the_extra_is_named(tmp_path):
    import importlib.util

    if importlib.util.find_spec("inspect_ai") is not None:
        pytest.skip("inspect_ai is installed")
    with pytest.raises(ImportError, match=re.escape(install_line("verifiers", "inspect"))):
        to_inspect(finished(), tmp_path / "x.eval")


class Model:
    """What of an Inspect model the client uses."""

    def __init__(self, module, **said):
        self.module, self.said, self.asked = module, said, []

    async def generate(self, messages, *, tools, config):
        self.asked.append((messages, tools, config))
        message = self.module.ChatMessageAssistant(content="4", **self.said)
        message.text = "4"
        made = self.module.ModelOutput(model="m", choices=[None], usage=None)
        made.message, made.stop_reason = message, "max_tokens"
        return made


async def test_the_client_asks_an_inspect_model(double):
    import inspect_ai.model

    model = Model(inspect_ai.model)
    asked = {
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "stop": "END",
        "logprobs": True,
        "top_p": None,
    }
    request = ModelRequest(
        [vf.UserMessage("2 + 2")], "m", tools=tool_env(1).tool_defs, sampling_args=asked, seed=3
    )
    response = await InspectClient(model).complete(request)
    messages, tools, config = model.asked[0]
    assert (response.text, response.finish_reason, messages[0].content, tools[0].name) == (
        "4",
        "length",
        "2 + 2",
        "add",
    )
    assert (config.max_tokens, config.temperature, config.stop_seqs, config.seed) == (
        9,
        0.5,
        ["END"],
        3,
    )


async def test_what_its_model_raises_belongs_to_the_rollout(double):
    class Broken:
        async def generate(self, *args, **keywords):
            raise OSError("gone")

    with pytest.raises(vf.ModelError, match="OSError: gone"):
        await InspectClient(Broken()).complete(ModelRequest([vf.UserMessage("x")], "m"))


def test_a_tool_call_comes_back_whole(double):
    import inspect_ai.model
    from inspect_ai.tool import ToolCall

    said = inspect_ai.model.ChatMessageAssistant(
        content="", tool_calls=[ToolCall(id="c", function="add", arguments={"a": 1})]
    )
    said.text = ""
    message = from_assistant(said)
    assert (message.tool_calls[0].name, message.tool_calls[0].arguments, message.content) == (
        "add",
        '{"a": 1}',
        None,
    )
