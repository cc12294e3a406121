"""Train a tiny model at Kuhn poker by self-play, and compute after every checkpoint how far it can be exploited.

What you learn: two roles that one model plays against itself, a KL penalty to a slowly moving reference (magnetic mirror
descent, Sokota et al. 2022), and reading a model's exact policy. Plain policy gradient circles around the equilibrium
(``--beta 0`` shows it). Costs a few minutes on one core.

    python examples/self_play.py [--seed 0] [--steps 200] [--output FOLDER]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

import verifiers as vf
from verifiers_trainer.pipeline.warmup import warm_up
from vf_kuhn_poker import rules, view

MOVES = (rules.PASS, rules.BET)


def policy_of(model, tokenizer) -> rules.Policy:
    """The exact probabilities of pass and bet at each node: of the move's token, then of the end of the turn."""
    policy, end = {}, tokenizer.eos_token_id
    for node in rules.NODES:
        prompt = [dict(message) for message in view(node[0], node[1:])]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        policy[node] = tuple(probability(model, ids, [tokenizer.convert_tokens_to_ids(move), end]) for move in MOVES)
    return policy


def probability(model, prompt_ids, completion_ids) -> float:
    """The probability that the model continues ``prompt_ids`` with ``completion_ids``, at temperature 1."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([[*prompt_ids, *completion_ids[:-1]]])).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden)
    model.train(was_training)
    log_probabilities = logits[len(prompt_ids) - 1 :].double().log_softmax(-1)
    return float(log_probabilities[range(len(completion_ids)), completion_ids].sum().exp())


def exploitability(model, tokenizer) -> float:
    return rules.exploitability(policy_of(model, tokenizer))


class Exploitability(TrainerCallback):
    """Appends a line to ``file`` at every checkpoint."""

    def __init__(self, file: Path):
        self.file, self.rows, self.started = file, [], time.process_time()

    def on_save(self, args, state, control, model=None, processing_class=None, **_):
        policy = policy_of(model, processing_class)
        illegal = max(1 - sum(moves) for moves in policy.values())
        row = {
            "step": state.global_step,
            "exploitability": rules.exploitability(policy),
            "first_player_wins": rules.game_value((policy, policy)),
            "illegal": illegal,
            "cpu_s": time.process_time() - self.started,
            "policy": policy,
        }
        self.rows.append(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"step {row['step']:4}  exploitability {row['exploitability']:.4f}  illegal {illegal:.4f}", flush=True)


def learn_to_write_moves(model, tokenizer, seed: int) -> int:
    """Imitate both moves at every node equally often, until nearly every reply is a move."""
    rows = [
        {"prompt": view(node[0], node[1:]), "answer": move} for node in rules.NODES for move in MOVES for _ in range(2)
    ]
    return warm_up(
        model,
        tokenizer,
        vf.SingleTurnEnv(dataset=rows),
        answers=lambda row: row["answer"],
        reward=lambda: min(sum(moves) for moves in policy_of(model, tokenizer).values()),
        target=0.99,
        rows_per_step=48,
        max_steps=300,
        seed=seed,
    )


def train(seed: int, steps: int, output: Path, beta: float = 0.8, **settings) -> list[dict]:
    """Train one seed; returns a row per checkpoint. ``settings`` override those below."""
    torch.manual_seed(seed)
    model, tokenizer = vf.get_model_and_tokenizer("builtin:tiny")
    warm_steps = learn_to_write_moves(model, tokenizer, seed)
    print(f"seed {seed}: {warm_steps} warm-up steps, exploitability {exploitability(model, tokenizer):.4f}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    callback = Exploitability(output / f"exploitability-{seed}.jsonl")
    config = vf.RLConfig(
        **{
            "run_name": f"kuhn-{seed}",
            "output_dir": str(output / f"seed-{seed}"),
            "seed": seed,
            "batch_size": 6 * 32,
            "rollouts_per_example": 32,
            "max_steps": steps,
            "save_steps": 10,
            "save_total_limit": 1,
            "max_tokens": 2,
            "max_seq_len": 64,
            "use_lora": False,
            "learning_rate": 1e-3,
            "max_off_policy_steps": 0,
            "zero_variance": "keep",
            "beta": beta,
            "kl_type": "k2",
            "sync_ref_model": beta > 0,
            "ref_model_sync_steps": 25,
            "ref_model_mixup_alpha": 0.5,
            **settings,
        }
    )
    env = vf.load_environment("kuhn-poker", num_train_examples=6, num_eval_examples=6)
    with vf.RLTrainer(model, env, config, tokenizer, callbacks=[callback]) as trainer:
        trainer.train()
    return callback.rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--beta", type=float, default=0.8)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--set", type=json.loads, default={}, help="further settings of RLConfig, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.output or Path(folder)
        train(arguments.seed, arguments.steps, output, arguments.beta, **arguments.set)


if __name__ == "__main__":
    main()
