"""The real verl: its ``AgentLoopWorker`` plays a tool environment on a CPU, and its GRPO advantages
of the result.

Run by ``python3 tests/real/peers.py verl``.
"""

import asyncio
import json
import os

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed: python3 tests/real/peers.py verl")

import hydra
import pyarrow.parquet as pq
import torch
import verl
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.workers.rollout.replica import TokenOutput

import verifiers as vf
from support.peer_double import differences
from verifiers_integrations.verl import export_dataset
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.slow]

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SIBLINGS = 4


class Servers:
    """verl's rollout servers, which need CUDA: the same tiny model's sampled ids, or a script that
    calls the tool."""

    tokenizer = None

    def __init__(self, tokenizer, model):
        self.tokens, self.model = tokenizer, model
        self.made = {}
        self.fail = set()

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        assert sampling_params["logprobs"] is True
        text = self.tokens.decode(prompt_ids)
        if request_id not in self.made:
            (question,) = [row for row in self.rows if row in text]
            siblings = [
                played_question
                for played_question, _, _ in self.made.values()
                if played_question == question
            ]
            self.made[request_id] = (question, len(siblings), [])
        question, sibling, turns = self.made[request_id]
        if (question, sibling) in self.fail:
            raise ConnectionError("the server is gone")
        if sibling == 0:  # the first solves the task
            ids = self.tokens("done" if turns else self.rows[question])["input_ids"]
        else:  # the others say what the model samples
            generated = self.model.generate(
                torch.tensor([prompt_ids]),
                max_new_tokens=min(6, sampling_params["max_tokens"]),
                do_sample=True,
            )
            ids = [
                token
                for token in generated[0, len(prompt_ids) :].tolist()
                if token != self.tokens.eos_token_id
            ]
        ids = [*ids, self.tokens.eos_token_id]
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt_ids, *ids]])).logits[
                0, len(prompt_ids) - 1 : -1
            ]
        logprobs = torch.log_softmax(logits.float(), -1)[range(len(ids)), ids].tolist()
        turns.append((list(prompt_ids), ids, logprobs))
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": 3},
        )


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("verl")
    model, tokenizer = build_tiny_model(layers=1, hidden=64, heads=2), build_tiny_tokenizer()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    env = vf.load_environment("tool-test", num_train_examples=3, num_eval_examples=1)
    export_dataset(env, folder / "data")
    return folder, env, Servers(tokenizer, model)


def composed(folder, **settings):
    """verl's own configuration of a PPO run."""
    defaults = {
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.prompt_length": 2200,
        "actor_rollout_ref.rollout.response_length": 600,
        "actor_rollout_ref.rollout.agent.default_agent_loop": "verifiers",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": (
            folder / "data" / "agent_loop.yaml"
        ),
        **settings,
    }
    with hydra.initialize_config_dir(
        os.path.join(os.path.dirname(verl.__file__), "trainer/config"), version_base=None
    ):
        return hydra.compose(
            "ppo_trainer", overrides=[f"{name}={value}" for name, value in defaults.items()]
        )


def batch_of(folder):
    rows = pq.read_table(folder / "data" / "train.parquet").to_pylist()
    rows = [row for row in rows for _ in range(SIBLINGS)]

    def column(values):
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array

    columns = {
        "raw_prompt": column([row["prompt"] for row in rows]),
        "extra_info": column([row["extra_info"] for row in rows]),
        "uid": column([str(row["extra_info"]["index"]) for row in rows]),
        "index": np.array([row["extra_info"]["index"] for row in rows]),
    }
    return DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": 1})


def solutions(env):
    """Question -> what solves it: its calls, one after another in one answer."""
    solutions_found = {}
    for row in env.get_dataset():
        info = json.loads(row["info"]) if isinstance(row["info"], str) else row["info"]
        said = [call["arguments"] for call in info["calls"]]
        said = [
            arguments if isinstance(arguments, str) else json.dumps(arguments) for arguments in said
        ]
        calls = [
            CALL % (call["name"], text) for call, text in zip(info["calls"], said, strict=True)
        ]
        solutions_found[row["prompt"][-1]["content"]] = "\n".join(calls)
    return solutions_found


def test_the_peer_has_what_was_recorded():
    assert differences("verl") == []


def test_its_worker_plays_the_environment_and_its_advantages_follow_the_rewards(parts):
    folder, env, servers = parts
    servers.rows = solutions(env)
    servers.fail = {(list(servers.rows)[1], 2)}
    worker = AgentLoopWorker(composed(folder), servers)
    made = asyncio.run(worker.generate_sequences(batch_of(folder)))
    masks, rewards = made.batch["response_mask"].bool(), made.batch["rm_scores"].sum(-1)
    assert made.batch["rm_scores"].shape == made.batch["responses"].shape == (12, 600)
    solved = [number for number in range(12) if rewards[number] == 1.0]
    assert [number // SIBLINGS for number in solved] == [0, 1, 2], "one of each group"
    (failed,) = np.flatnonzero(made.non_tensor_batch["vf_error"])
    assert (failed // SIBLINGS, masks[failed].any().item()) == (1, False)
    played = [turns for _, _, turns in servers.made.values()]
    for number in set(range(12)) - {failed}:
        ids = made.batch["responses"][number][masks[number]].tolist()
        turns, *_ = [
            turns
            for turns in played
            if [token for _, sampled, _ in turns for token in sampled] == ids
        ]
        assert turns, "the trained ids are ids that were sampled"
        first = turns[0][0]
        assert made.batch["prompts"][number].tolist()[-len(first) :] == first
        logprobs = made.batch["rollout_log_probs"][number][masks[number]].tolist()
        assert logprobs == pytest.approx([value for turn in turns for value in turn[2]], abs=1e-5)
    number = solved[0]
    between = made.batch["responses"][number][~masks[number]].tolist()
    assert "<tool_response>" in servers.tokens.decode(
        [token for token in between if token != servers.tokens.pad_token_id]
    )
    assert made.non_tensor_batch["calls_right"][number] == 1.0
    uid, on = made.non_tensor_batch["uid"], masks.float()
    advantages, _ = compute_grpo_outcome_advantage(made.batch["rm_scores"], on, uid)
    for number in range(12):
        expected = 0 if number == failed else 1 if number in solved else -1
        assert {int(sign) for sign in advantages[number][masks[number]].sign()} <= {expected}
    assert not advantages[failed].any(), "what failed is masked"
