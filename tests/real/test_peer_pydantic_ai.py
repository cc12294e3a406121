"""A framework in this process: an agent of the real Pydantic AI works through ``vf.model_gateway``.

``python3 tests/real/peers.py pydantic-ai``.
"""

import pytest

import verifiers as vf
from verifiers.testing import ScriptedClient

pytestmark = pytest.mark.real
pydantic_ai = pytest.importorskip(
    "pydantic_ai", reason="run: python3 tests/real/peers.py pydantic-ai"
)

from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

ROW = {"question": "What is 6 times 7?", "answer": "42"}
MODELS = {
    "chat": lambda url: OpenAIChatModel(
        "policy", provider=OpenAIProvider(base_url=url, api_key="unused")
    ),
    "responses": lambda url: OpenAIResponsesModel(
        "policy", provider=OpenAIProvider(base_url=url, api_key="unused")
    ),
    "messages": lambda url: AnthropicModel(
        "policy", provider=AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="unused")
    ),
}


def right(state, answer):
    return float(state["said"] == answer)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", MODELS)
def test_an_agent_with_a_tool_is_a_rollout_of_two_turns(dialect, is_streamed):
    async def agent(state):
        async with vf.model_gateway(state) as url:
            multiplying = pydantic_ai.Agent(MODELS[dialect](url), instructions="Use the tool.")

            @multiplying.tool_plain
            def times(a: int, b: int) -> int:
                """Multiply two numbers."""
                return a * b

            question = state["prompt"][-1]["content"]
            if is_streamed:
                async with multiplying.run_stream(question) as stream:
                    state["said"] = await stream.get_output()
            else:
                state["said"] = (await multiplying.run(question)).output

    def reply(request):
        last = request.prompt[-1]
        if last["role"] == "tool":
            return last["content"]
        return vf.ToolCall("c1", "times", '{"a":6,"b":7}')

    env = vf.AgentEnv(agent=agent, dialect=dialect, dataset=[ROW], rubric=vf.Rubric(funcs=[right]))
    results = env.evaluate(ScriptedClient(reply, tokens=True), "m", keep_states=True)
    (output,), (state,) = results.outputs, results.states
    assert output.error is None
    assert (output.reward, output.stop_condition) == (1.0, "agent_ended")
    assert (output["agent"]["roles"], output["agent"]["rewrites"]) == (["main", "main"], 0)
    assert output.tool_defs[0]["function"]["name"] == "times"
    first, second = state["trajectory"]
    assert second["prompt"][: len(first["prompt"]) + 1] == [*first["prompt"], *first["completion"]]
