"""GRPO in one file: dataset -> rollouts -> advantages -> samples -> packed rows -> loss ->
optimizer step.

A model of half a million parameters learns to write words backwards, on a CPU, without a network,
in about a minute:

    python examples/grpo_from_scratch.py --steps 60

Environment, inference engine, advantages, losses and packing are the library's; the loop is written
out here, top to bottom. ``vf.RLTrainer`` runs the same loop and adds what long runs need:
generation while the trainer computes, checkpoints, many processes, servers, checks. In comments G
is the number of groups (prompts) of a step, N the rollouts of a group, T the tokens of a row.
"""

import argparse
import random

import numpy as np
import torch

import verifiers as vf
from verifiers.rollouts.rollout import Rollout
from verifiers_trainer.algorithm.advantages import compute_advantages
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.losses import LossInput, resolve_loss
from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments, pack
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.engines.inference import policy_client
from verifiers_trainer.pipeline.warmup import warm_up
from verifiers_trainer.policy.logprobs import install_logprob_forward, uninstall

GROUPS, ROLLOUTS = 16, 8  # G prompts, N rollouts of each: 128 rollouts in a step
TEMPERATURE, MAX_TOKENS, MAX_SEQ_LEN = 1.0, 12, 48
LEARNING_RATE, LR_WARMUP_STEPS = 3e-4, 10
# sampled ids and their log-probabilities
WITH_TOKENS = {"logprobs": True, "return_tokens_as_token_ids": True}
ROW_TOKENS = 512  # tokens of a packed row; it bounds memory and changes no gradient


def generate(
    env: vf.Environment, engine: EmbeddedEngine, prompts: list[dict], siblings: int
) -> list[list[Rollout]]:
    """``siblings`` scored rollouts of each prompt, with token ids and log-probabilities exactly as
    sampled."""
    results = env.generate(
        prompts,
        client=policy_client(engine),
        model=engine.served_model,
        sampling_args={"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, **WITH_TOKENS},
        rollouts_per_example=siblings,
        keep_states=True,
    )
    rollouts = [state.rollout() for state in results["states"]]
    return [rollouts[start : start + siblings] for start in range(0, len(rollouts), siblings)]


def mean_reward(groups: list[list[Rollout]]) -> float:
    return float(np.mean([rollout.reward for group in groups for rollout in group]))


def packed_rows(groups: list[list[Rollout]]) -> list[PackedRow]:
    """Turn rollouts into packed rows; no text is read and nothing is tokenised again."""
    # Rewards to advantages: reward minus the mean of the group, over its standard deviation (GRPO,
    # arXiv 2402.03300). A group whose rewards are all equal has no signal: its advantages are NaN,
    # and its rollouts give no samples.
    rewards_G = [
        np.array([rollout.reward for rollout in group]) for group in groups
    ]  # G arrays of shape [N]
    advantages_G = compute_advantages("mean_std", rewards_G)

    # Turns to samples: one token sequence per rollout (more where turns do not continue each
    # other), a mask that is True on sampled tokens, the sampler's log-probability and the advantage
    # of each token.
    samples = []
    for group, (rollouts, advantages) in enumerate(zip(groups, advantages_G, strict=True)):
        for number, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
            result = rollout_samples(
                rollout.turns,
                advantage,
                rollout=group * ROLLOUTS + number,
                group=group,
                temperature=TEMPERATURE,
            )
            samples += result.samples

    # Weights of all tokens of the step sum to 1, so that the sum over rows below is one mean over
    # the step's tokens, however the samples are split into rows.
    weights = step_weights(samples, "token_mean").weights

    # Samples to rows: laid end to end, without padding. One process trains, so there is one rank.
    (rows,) = pack(samples, weights, max_tokens=ROW_TOKENS, share_prompts=True)
    return rows


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[PackedRow]
) -> float:
    """One optimizer step over all rows; returns the loss."""
    loss_of = resolve_loss("ppo", epsilon_low=0.2, epsilon_high=0.28)  # a LossInput to losses [T]
    total = 0.0
    for packed in rows:
        row = packed.to_tensors()  # name -> tensor [T]
        # [T], entry t of token t, under the current weights
        logprobs = model(**forward_arguments(row)).logprobs
        # [T], 0 where masked; the ratio is against sampler_logprobs
        losses = loss_of(LossInput.of(row, logprobs))
        loss = (row["weight"] * losses).sum()
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def main(steps: int = 60, warm_up_target: float = 0.4, seed: int = 0) -> list[float]:
    """Train for ``steps`` optimizer steps; returns the mean reward of every step's rollouts."""
    torch.manual_seed(seed)
    order = random.Random(seed)
    env = vf.load_environment("reverse-text", unit="word", min_chars=3, max_chars=5, seed=seed)
    prompts = [example.row for example in env.train_table]
    held_out = [example.row for example in env.eval_table]
    model, tokenizer = vf.get_model_and_tokenizer("builtin:tiny", model_kwargs={"seed": seed})
    rewards = []
    # The engine samples from the very parameters that are trained: an optimizer step is all the
    # "weight sync" there is.
    engine = EmbeddedEngine(
        model, tokenizer, mode="padded", max_seq_len=MAX_SEQ_LEN, concurrency=GROUPS * ROLLOUTS
    )
    with engine:
        # A randomly initialised model gets no reward. Fine-tune it on correct answers until it
        # sometimes does.
        warm_up(
            model,
            tokenizer,
            env,
            reward=lambda: mean_reward(generate(env, engine, prompts[:64], 1)),
            target=warm_up_target,
            max_steps=200,
            learning_rate=7e-4,
            seed=seed,
            on_step=lambda step, loss, reward: (
                reward and print(f"warm-up {step:3d}  loss {loss:.3f}  reward {reward:.3f}")
            ),
        )
        before = mean_reward(generate(env, engine, held_out, 1))
        # from here on model(...) returns log-probabilities of packed rows
        install_logprob_forward(model)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / LR_WARMUP_STEPS)
        )
        for step in range(1, steps + 1):
            groups = generate(env, engine, order.sample(prompts, GROUPS), ROLLOUTS)
            rewards.append(mean_reward(groups))
            with engine.pause():  # nothing samples while the weights change
                loss = train_step(model, optimizer, packed_rows(groups))
                engine.set_version(step)
            schedule.step()
            print(
                f"step {step:3d}  reward {rewards[-1]:.3f}  loss {loss:+.4f} "
                f" {'#' * round(60 * rewards[-1])}"
            )
        uninstall(model)
        after = mean_reward(generate(env, engine, held_out, 1))
        print(
            f"{len(held_out)} held-out words: mean reward {before:.3f} before, {after:.3f} after"
            f" {steps} steps"
        )
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up-target", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
