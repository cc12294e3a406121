"""``StatefulToolEnv``: parameters the model does not see, filled in from the rollout's state."""

import math

import pytest

from verifiers.environments.stateful_tool import StatefulToolEnv
from verifiers.environments.tool import ToolEnv
from verifiers.errors import ConfigError, ToolError
from verifiers.testing import ScriptedClient
from verifiers.types import ToolCall

ROW = {"question": "Buy fruit.", "answer": "2"}


def buy(item: str, basket: list, amount: int = 1) -> str:
    """Put something into the basket.

    Args:
        item: What.
        basket: Hidden.
    """
    basket += [item] * amount
    return f"{len(basket)} things"


class Shop(StatefulToolEnv):
    def __init__(self, **parameters):
        super().__init__(dataset=[ROW], **parameters)
        self.add_tool(buy, args_to_skip=["basket"])

    def setup_state(self, state):
        state["basket"] = []

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        state["last"] = (tool_name, messages[-1]["role"])
        return tool_args | {"basket": state["basket"]}


def call(arguments, name="buy"):
    return [ToolCall("c1", name, arguments)]


def told(results, rollout=0):
    return [m["content"] for m in results["completions"][rollout] if m["role"] == "tool"]


def test_hidden_arguments_come_from_the_state_of_each_rollout():
    client = ScriptedClient(
        lambda request: (
            "done"
            if len(request.prompt) > 4
            else call({"item": "apple", "amount": len(request.prompt)})
        )
    )
    results = Shop().evaluate(client, "m", rollouts_per_example=2)
    assert told(results, 0) == told(results, 1) == ["1 things", "4 things"]
    assert [state["last"] for state in results["states"]] == [("buy", "assistant")] * 2
    shown = client.requests[0].tools[0]["function"]["parameters"]["properties"]
    assert list(shown) == ["item", "amount"]
    assert results["metrics"]["buy_calls"] == [2.0, 2.0]


def test_a_model_cannot_set_what_is_hidden_from_it():
    results = Shop().evaluate(
        ScriptedClient([call({"item": "apple", "basket": ["stolen"]}), "done"]), "m"
    )
    assert told(results) == ["wrong arguments for buy: 'basket' is not a parameter"]
    assert results["states"][0]["basket"] == []
    # negative control: a plain ToolEnv shows every parameter
    open_shop = ToolEnv(tools=[buy], dataset=[ROW])
    results = open_shop.evaluate(
        ScriptedClient([call({"item": "apple", "basket": ["stolen"]}), "done"]), "m"
    )
    assert told(results) == ["2 things"]


def test_update_tool_args_sees_the_models_arguments_and_what_it_returns_is_checked():
    seen = []

    class Watched(Shop):
        async def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            seen.append(tool_args)
            return super().update_tool_args(tool_name, tool_args, messages, state)

    client = ScriptedClient(
        [call("{"), call({}), call({"item": "a"}, "nope"), call({"item": "a", "amount": "2"}), "x"]
    )
    results = Watched().evaluate(client, "m")
    # neither text that is no JSON nor a tool that is not there
    assert seen == [{}, {"item": "a", "amount": "2"}]
    assert told(results)[-1] == "2 things"
    assert "'item' is missing" in told(results)[-3]


class Broken(Shop):
    answer = None

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "update_tool_args returned NoneType; return a dict"),
        ({"item": "apple"}, "update_tool_args did not fill in 'basket' of the tool 'buy'"),
        (KeyError("basket"), "update_tool_args raised KeyError: 'basket'"),
    ],
)
def test_a_fault_of_the_author_is_not_told_to_the_model(answer, said):
    env = Broken()
    env.answer = answer
    results = env.evaluate(ScriptedClient([call({"item": "apple"}), "done"]), "m")
    assert results["errors"][0]["error"] == "EnvironmentFault"
    assert said in results["errors"][0]["message"]
    assert results["errors"][0]["where"] == "update_tool_args"
    assert math.isnan(results["rewards"][0])
    assert told(results) == []


def test_a_tool_error_that_the_author_raises_is_told_to_the_model():
    env = Broken()
    env.answer = ToolError("the shop is closed")
    results = env.evaluate(ScriptedClient([call({"item": "apple"}), "done"]), "m")
    assert told(results) == ["the shop is closed"]
    assert results["errors"] == [None]


def test_what_is_hidden_must_be_a_parameter():
    with pytest.raises(
        ConfigError, match="has no parameter 'baskte' to skip, did you mean \"basket\""
    ):
        Shop().add_tool(lambda_like(), args_to_skip=["baskte"])


def lambda_like():
    def sell(item: str, basket: list): ...

    return sell


def test_tools_without_hidden_parameters_need_no_hook():
    def double(n: int):
        return 2 * n

    env = StatefulToolEnv(tools=[double], dataset=[ROW])
    assert told(env.evaluate(ScriptedClient([call({"n": 4}, "double"), "done"]), "m")) == ["8"]


@pytest.mark.parametrize("is_async", [False, True])
def test_arguments_are_updated_in_the_oldest_form_without_the_tools_name(is_async):
    class Older(StatefulToolEnv):
        def update_tool_args(self, tool_args, messages, state, **kwargs):
            return {**tool_args, "factor": 10}

    class OlderAsync(StatefulToolEnv):
        async def update_tool_args(self, tool_args, messages, state, **kwargs):
            return {**tool_args, "factor": 10}

    def scale(number: int, factor: int) -> int:
        """Scale."""
        return number * factor

    env = (OlderAsync if is_async else Older)(dataset=[{"question": "?"}])
    env.add_tool(scale, args_to_skip=["factor"])
    results = env.evaluate(ScriptedClient([ToolCall("c1", "scale", {"number": 4}), "done"]), "m")
    assert results["errors"] == [None]
    assert results["completions"][0][1].content == "40"
