"""Train a tiny model at Kuhn poker by self-play, and compute after every checkpoint how far it can
be exploited.

What you learn: two roles of one model, a KL penalty to a reference that follows slowly (magnetic
mirror descent, Sokota et al. 2022; a plain policy gradient circles around the equilibrium), and
reading a model's exact policy. Costs about a second of one core for each step.

    python examples/self_play.py [--seed 0] [--steps 800] [--output FOLDER]
    python examples/self_play.py --table FOLDER     # the table of docs/train/self-play.md, of the runs in the folder
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

import verifiers as vf
from verifiers_trainer.engines.role_adapters import roles_of, select
from verifiers_trainer.pipeline.warmup import warm_up
from vf_kuhn_poker import rules, view

TEMPLATE = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
"""Short prompts: the letters of the conversation, each message ended."""
NAMES = "ACDEFGHILMNO"
"""A letter for each node."""


def probability(model, tokenizer, node: str, reply: str) -> float:
    """The exact probability of the reply at a node, at temperature 1: of its tokens, then of the
    end of the turn."""
    prompt = [dict(message) for message in view(node[0], node[1:])]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    reply_ids = [*tokenizer.convert_tokens_to_ids(list(reply)), tokenizer.eos_token_id]
    was_training = model.training
    model.eval()
    if hasattr(model, "peft_config"):
        model = model.get_base_model()  # with the adapter in its layers
    if roles_of(model):
        select(model, (len(node) - 1) % 2)  # the adapter of the seat that acts at the node
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=torch.tensor([[*ids, *reply_ids[:-1]]])
        ).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden[len(ids) - 1 :]).double()
    model.train(was_training)
    return float(logits.log_softmax(-1)[range(len(reply_ids)), reply_ids].sum().exp())


def policy_of(model, tokenizer) -> rules.Policy:
    """The exact probabilities of pass and bet at each node."""
    moves = (rules.PASS, rules.BET)
    return {
        node: tuple(probability(model, tokenizer, node, move) for move in moves)
        for node in rules.NODES
    }


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
        print(
            f"step {row['step']:4}  exploitability {row['exploitability']:.4f}  illegal"
            f" {illegal:.4f}",
            flush=True,
        )


def imitate(model, tokenizer, answers: dict[str, str], target: float, seed: int) -> int:
    """Imitate the letters of ``answers`` (node -> letters) until at every node their probability
    reaches ``target``."""
    rows = [
        {"prompt": view(n[0], n[1:]), "answer": letter}
        for n, letters in answers.items()
        for letter in letters
    ]
    return warm_up(
        model,
        tokenizer,
        vf.SingleTurnEnv(dataset=rows),
        answers=lambda row: row["answer"],
        reward=lambda: min(
            sum(probability(model, tokenizer, node, letter) for letter in letters)
            for node, letters in answers.items()
        ),
        target=target,
        rows_per_step=len(rows),
        max_steps=400,
        seed=seed,
    )


def warmed_up(seed: int):
    """A model that tells the nodes apart and writes both moves equally often, and its tokenizer.

    The prompts differ by one letter, which a random network hardly notices: it learns to name the
    nodes first.
    """
    model, tokenizer = vf.get_model_and_tokenizer("builtin:tiny")
    tokenizer.chat_template = TEMPLATE
    imitate(model, tokenizer, dict(zip(rules.NODES, NAMES, strict=True)), 0.9, seed)
    imitate(model, tokenizer, dict.fromkeys(rules.NODES, rules.PASS + rules.BET), 0.99, seed)
    return model, tokenizer


def train(seed: int, steps: int, output: Path, beta: float = 0.8, **settings) -> list[dict]:
    """Train one seed; returns a row per checkpoint. ``settings`` override those below."""
    torch.manual_seed(seed)
    model, tokenizer = warmed_up(seed)
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
            "save_steps": 25,
            "save_total_limit": 1,
            "max_tokens": 2,
            "max_seq_len": 64,
            "use_lora": False,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0.05,
            "adam_beta2": (
                0.95
            ),  # at 0.999 a gradient that suddenly grows makes a step that is too long
            "max_off_policy_steps": 0,
            "zero_variance": "keep",
            "beta": beta,
            "kl_type": "k2",
            "sync_ref_model": beta > 0,
            "ref_model_sync_steps": 10,
            "ref_model_mixup_alpha": 0.2,
            **settings,
        }
    )
    env = vf.load_environment(
        "kuhn-poker", style="letters", num_train_examples=6, num_eval_examples=6
    )
    with vf.RLTrainer(model, env, config, tokenizer, callbacks=[callback]) as trainer:
        trainer.train()
    return callback.rows


def table(folder: Path) -> str:
    """The exploitability of every checkpoint of the runs in ``folder``, as a Markdown table with a
    column per seed."""
    files = sorted(folder.glob("**/exploitability-*.jsonl"))
    runs = [
        {row["step"]: row for row in map(json.loads, file.read_text().splitlines())}
        for file in files
    ]
    seeds = [file.stem.removeprefix("exploitability-") for file in files]
    lines = [
        "| step | " + " | ".join(f"seed {seed}" for seed in seeds) + " |",
        "|---" * (len(seeds) + 1) + "|",
    ]
    for step in sorted(set().union(*runs)):
        cells = [f"{run[step]['exploitability']:.3f}" if step in run else "" for run in runs]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--beta", type=float, default=0.8)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--set", type=json.loads, default={}, help="further settings of RLConfig, as JSON"
    )
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.table))
        return
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.output or Path(folder)
        train(arguments.seed, arguments.steps, output, arguments.beta, **arguments.set)


if __name__ == "__main__":
    main()
