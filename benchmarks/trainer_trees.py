"""Prefix trees: forward and backward of samples that begin with the same tokens, over separate rows.

    python benchmarks/trainer_trees.py [--quick] [--pairs 5] [--width 256] [--store]

Four loads of 32 rollouts, eight to a group: one turn; two turns, of which the first is shared by
four rollouts that fork from it; five turns whose history is written anew in each (so that a rollout
is five samples, each with the beginning of the next); and prompts that no two rollouts share, where
a tree must cost nothing. CPU time of forward and backward, and tokens computed, each over the same
samples in rows without trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from _measure import Report, Stopwatch, interleaved, options, parse, print_table, ratio, versions

PROMPT, ANSWER, SAID = 100, 60, 20
LOADS = ("one turn", "forked after a turn", "five turns, history anew", "nothing in common")


def turns_of(load: str, rng, vocabulary: int) -> list[list]:
    """The turns of 32 rollouts."""
    import numpy as np

    from verifiers.rollouts.turn import Turn

    def tokens(count: int):
        return rng.integers(3, vocabulary, count)

    def turn(prompt, answer) -> Turn:
        return Turn(prompt, answer, -np.ones(len(answer)), 0)

    rollouts = []
    for number in range(32):
        if number % 8 == 0 or load == "nothing in common":
            prompt = tokens(PROMPT)
        if load in ("one turn", "nothing in common"):
            rollouts.append([turn(prompt, tokens(ANSWER))])
        elif load == "forked after a turn":
            if number % 4 == 0:
                answer, said = tokens(ANSWER), tokens(SAID)
            first = turn(prompt, answer)
            rollouts.append([first, turn(np.concatenate([prompt, answer, said]), tokens(ANSWER))])
        else:  # what the model thought is not shown to it again: half of its answer
            history, turns = prompt, []
            for _ in range(5):
                answer = tokens(ANSWER)
                turns.append(turn(history, answer))
                history = np.concatenate([history, answer[ANSWER // 2 :], tokens(SAID)])
            rollouts.append(turns)
    return rollouts


def samples_of(load: str, vocabulary: int) -> list:
    import numpy as np

    from verifiers_trainer.algorithm.samples import rollout_samples

    rng = np.random.default_rng(0)
    return [
        sample
        for number, turns in enumerate(turns_of(load, rng, vocabulary))
        for sample in rollout_samples(
            turns, float(rng.normal()), rollout=number, group=number // 8
        ).samples
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--width", type=int, default=256, help="hidden size of the model")
    args = parse(parser)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from verifiers_trainer.algorithm.aggregation import step_weights
    from verifiers_trainer.algorithm.batch import ROW_TOKENS_CPU
    from verifiers_trainer.algorithm.packing import PackedRow, forward_arguments, pack, shared
    from verifiers_trainer.policy.logprobs import install_logprob_forward

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 64 if args.quick else args.width
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    install_logprob_forward(model)
    report = Report("trainer_trees", args)
    print(f"width {width}, {versions('torch', 'transformers')}")

    def passes(rows: Sequence[PackedRow]):
        model.zero_grad()
        with Stopwatch() as watch:
            for row in rows:
                tensors = row.to_tensors()
                out = model(**forward_arguments(tensors, row))
                (out.logprobs * tensors["advantage"] * tensors["weight"]).sum().backward()
        return watch.cost

    table = []
    for load in LOADS[:1] if args.quick else LOADS:
        samples = samples_of(load, 1000)
        weights = step_weights(samples, "token_mean").weights
        bound = max(ROW_TOKENS_CPU, *(sample.num_tokens for sample in samples))
        (apart,) = pack(samples, weights, max_tokens=bound)
        trees_R = pack(samples, weights, max_tokens=bound, share_prompts=True)
        contenders = {"apart": partial(passes, apart), "trees": partial(passes, trees_R[0])}
        costs = interleaved(contenders, args.pairs)
        over = ratio(costs["trees"], costs["apart"], "cpu_s")
        report.figure(f"{load}, CPU over separate rows", over)
        table.append(
            [
                load,
                str(sum(sample.num_tokens for sample in samples)),
                f"{1 - shared(trees_R, samples, weights):.2f}",
                f"{over:.2f}",
            ]
        )
    print_table("trees over separate rows", ["load", "tokens", "computed", "CPU"], table)
    report.close()


if __name__ == "__main__":
    main()
