"""Run in an environment with the wheel of verifiers 0.4.0: its environment client, against the
server of ours.

    python tests/real/env_client.py tcp://127.0.0.1:5000 http://127.0.0.1:8000/v1

Prints one JSON object: what the client got.
"""

import asyncio
import json
import sys
from importlib.metadata import version

import verifiers.v1 as v1
from verifiers.v1.serve.client import EnvClient


def read(episode):
    """An episode, as the classes of that release see it."""
    (trace,) = episode.traces
    return {
        "ok": episode.ok,
        "reward": trace.reward,
        "rewards": {name: reward and reward.value for name, reward in trace.rewards.items()},
        "metrics": trace.metrics,
        "errors": [error.type for error in trace.errors],
        "roles": [message.role for message in trace.messages],
        "texts": [message.content for message in trace.messages],
        "tools": [tool.name for tool in trace.tools],
        "turns": trace.num_turns,
        "is_truncated": trace.is_truncated,
        "branches": [
            {
                "token_ids": branch.token_ids,
                "sampled": branch.sampled_mask,
                "logprobs": branch.logprobs,
            }
            for branch in trace.branches
        ],
        "usage": [trace.usage.prompt_tokens, trace.usage.completion_tokens],
    }


async def main(address, endpoint):
    client = EnvClient(address)
    await client.wait_for_server_startup(timeout=60)
    evaluation = v1.EvalClientConfig(base_url=endpoint)
    training = v1.TrainClientConfig(base_url=endpoint)
    sampling = v1.SamplingConfig(temperature=0.5)
    deltas = []

    async def play(config, task, on_delta=None):
        try:
            if task.keys() <= v1.TaskData.model_fields.keys():
                data = v1.TaskData(**task).model_dump()
            else:
                data = task
            return read(await client.run(config, "m", sampling, data, on_delta=on_delta))
        except RuntimeError as error:
            return {"failed": str(error)}

    got = {"version": version("verifiers"), "health": await client.health(timeout=30)}
    got["rows"] = await asyncio.gather(*(play(training, {"idx": index}) for index in range(4)))
    got["own"] = await play(evaluation, {"prompt": "8 + 1", "answer": "9"}, deltas.append)
    got["unscored"] = await play(evaluation, {"prompt": "1 + 1", "answer": "unknown"})
    got["absent"] = await play(evaluation, {"idx": 99})
    got["image"] = await play(evaluation, {"idx": 0, "image": "debian"})
    late = asyncio.create_task(play(evaluation, {"prompt": "late", "answer": "9"}))
    await asyncio.sleep(2)
    late.cancel()
    got["cancelled"] = isinstance(
        (await asyncio.gather(late, return_exceptions=True))[0], asyncio.CancelledError
    )
    got["after"] = (await play(evaluation, {"idx": 1}))["ok"]
    got["deltas"] = [sorted(delta) for delta in deltas]
    await client.close()
    print(json.dumps(got))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
