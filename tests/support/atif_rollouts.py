"""Results of every kind of environment, for tests of their trajectories."""

import verifiers as vf
from verifiers.testing import ScriptedClient


def played(kind):
    def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    row = {"question": "2 + 3?", "answer": "5"}
    call = vf.ToolCall("c1", "add", '{"a":2, "b":3}')
    options = {"state_columns": ["trajectory"]}

    def fails(completion):
        raise ValueError("no")

    async def agent(state):
        async with vf.model_gateway(state) as url:
            import openai

            async with openai.AsyncOpenAI(base_url=url, api_key="unused") as client:
                for content in ("title?", "one", "two"):
                    await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": content}]
                    )

    shots = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    kinds = {
        "single": lambda: (vf.SingleTurnEnv(dataset=[row]), ["5"]),
        "few-shot": lambda: (vf.SingleTurnEnv(dataset=[row], few_shot=shots), ["5"]),
        "text": lambda: (
            vf.SingleTurnEnv(
                dataset=[{"prompt": "2 + 3 =", "answer": "5"}], message_type="completion"
            ),
            ["5"],
        ),
        "tools": lambda: (vf.ToolEnv(tools=[add], dataset=[row]), [call, "It is 5."]),
        "unscored": lambda: (vf.SingleTurnEnv(dataset=[row], rubric=vf.Rubric([fails])), ["5"]),
        "failed": lambda: (vf.SingleTurnEnv(dataset=[row]), [vf.ModelError("gone")]),
        "branches": lambda: (vf.AgentEnv(agent=agent, dataset=[row]), ["a", "b", "c"]),
    }
    env, replies = kinds[kind]()
    with env:
        return env.evaluate(ScriptedClient(replies, tokens=True), "m", **options)


KINDS = ["single", "few-shot", "text", "tools", "unscored", "failed", "branches"]
