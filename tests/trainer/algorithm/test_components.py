"""The components of the loss: each a mean over its own tokens, and the gradients of imitation and
distillation.

The policy is a table of logits by the token before, in float64, so that its expectations are sums
over the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.batch import Group, build
from verifiers_trainer.algorithm.losses import LossInput, Objective, distill, resolve_loss, sft
from verifiers_trainer.settings.config import RLConfig

SIZE = 5
PROMPT = [1, 2]


def table(seed):
    return torch.randn(
        SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def logprobs(logits, row, shift=1):
    """[T], entry t of token t given the one before; ``shift=0`` is the error of one place."""
    before, token = row["token_ids"].roll(shift), row["token_ids"]
    return torch.log_softmax(logits[before], -1).gather(1, token[:, None])[:, 0]


def rollout(completion, reward=math.nan, error=None, version=0):
    turn = Turn(
        np.array(PROMPT), np.array(completion), np.full(len(completion), -1.0, np.float32), version
    )
    return Rollout((turn,), reward, status=Status(error=error))


def settings(**options):
    config = RLConfig(
        batch_size=4,
        rollouts_per_example=2,
        micro_batch_size=1,
        max_seq_len=32,
        use_lora=False,
        **options,
    )
    config.resolve()
    return config


def loss_of(batch, criterion, logits, teacher=None, shift=1):
    total = torch.zeros((), dtype=torch.float64)
    for packed in batch.rows_R[0]:
        row = packed.to_tensors()
        if teacher is not None:
            row["reference_logprobs"] = logprobs(teacher, row)
        losses = criterion(LossInput.of(row, logprobs(logits, row, shift))).losses
        total = total + (row["weight"].double() * losses).sum()
    return total


def finite_differences(function, logits, eps=1e-6):
    gradient = torch.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        up, down = logits.clone(), logits.clone()
        up[index] += eps
        down[index] -= eps
        gradient[index] = (function(up) - function(down)) / (2 * eps)
    return gradient


# --- imitation ------------------------------------------------------------------------------------

TEXTS = [[3, 4, 0], [2], [1, 1, 4, 0]]


def cross_entropy(logits, texts=TEXTS, first=0):
    """The mean over all tokens of the texts from ``first`` on, by a walk."""
    terms = []
    for text in texts:
        ids = [*PROMPT, *text]
        positions = range(len(PROMPT) - first, len(ids))
        terms += [
            -torch.log_softmax(logits[ids[position - 1]], 0)[ids[position]]
            for position in positions
        ]
    return sum(terms) / len(terms)


def test_the_gradient_of_imitation_is_that_of_the_cross_entropy_by_finite_differences():
    config = settings(loss="sft")
    batch = build([Group(n, n, (rollout(text),)) for n, text in enumerate(TEXTS)], [], config)
    criterion = Objective.of(resolve_loss("sft"), config)
    logits = table(0).requires_grad_()
    loss = loss_of(batch, criterion, logits)
    loss.backward()
    # weights are float32
    assert float(loss) == pytest.approx(float(cross_entropy(logits)), rel=1e-7)
    expected = finite_differences(cross_entropy, logits.detach())
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-7)

    # negative controls: the prompt's last token trained too, and every token one place off
    wrong = finite_differences(lambda values: cross_entropy(values, first=1), logits.detach())
    assert float((logits.grad - wrong).abs().max()) > 1e-2
    off = table(0).requires_grad_()
    loss_of(batch, criterion, off, shift=0).backward()
    assert float((off.grad - expected).abs().max()) > 1e-2


def test_rewards_and_siblings_do_not_matter_and_failed_rollouts_are_not_imitated():
    siblings = (
        rollout([3], 0.0),
        rollout([4], 0.0),
        rollout([2]),
        rollout([0], error="ModelError: gone"),
    )
    batch = build([Group(0, 0, siblings)], [], settings(loss="sft"))
    assert batch.num_tokens == 3
    assert batch.stats["groups/dead"] == 0
    # negative control
    assert build([Group(0, 0, siblings)], [], settings(loss="cispo")).num_tokens == 0


# --- distillation ---------------------------------------------------------------------------------


def reverse_kl(logits, teacher, before):
    pi = torch.log_softmax(logits[before], 0)
    return (pi.exp() * (pi - torch.log_softmax(teacher[before], 0))).sum()


@pytest.mark.parametrize("lag", [0.0, 0.3], ids=["on-policy", "sampled by an older policy"])
def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl_by_finite_differences(lag):
    """Summed over what the sampler may say after one token, with its probabilities."""
    student, teacher, before = table(1), table(2), PROMPT[-1]
    log_mu = torch.log_softmax((student + lag * table(3))[before], 0)
    logits = student.clone().requires_grad_()
    gradient_sum = torch.zeros_like(student)
    for token in range(SIZE):
        log_pi = torch.log_softmax(logits[before], 0)[token : token + 1]
        log_ref = torch.log_softmax(teacher[before], 0)[token : token + 1]
        mask, zero = torch.tensor([True]), torch.zeros(1, dtype=torch.float64)
        tokens = LossInput(
            log_pi, log_mu[token : token + 1], zero, mask, torch.tensor([0]), log_ref=log_ref
        )
        (gradient,) = torch.autograd.grad(distill(tokens).sum(), logits)
        gradient_sum += log_mu[token].exp() * gradient
    expected = finite_differences(lambda values: reverse_kl(values, teacher, before), student)
    torch.testing.assert_close(gradient_sum, expected, rtol=1e-6, atol=1e-8)
    # negative control: KL(T‖π)
    forward = finite_differences(lambda values: reverse_kl(teacher, values, before), student)
    assert float((gradient_sum - forward).abs().max()) > 1e-2


def test_a_student_equal_to_its_teacher_has_no_gradient_and_masked_teacher_values_are_not_read():
    config = settings(loss="distill", teacher="builtin:tiny")
    batch = build([Group(0, 0, (rollout([3, 4]), rollout([2])))], [], config)
    criterion = Objective.of(resolve_loss("distill"), config)
    logits = table(0).requires_grad_()
    loss_of(batch, criterion, logits, teacher=table(0)).backward()
    assert float(logits.grad.abs().max()) == 0
    (packed,) = batch.rows_R[0]
    row = packed.to_tensors()
    log_ref = logprobs(table(4), row)
    gradients = []
    for hidden in (0.0, math.nan, -math.inf):
        log_pi = logprobs(table(0), row).requires_grad_()
        fields = row | {
            "reference_logprobs": torch.where(
                row["loss_mask"], log_ref, torch.tensor(hidden).double()
            )
        }
        gradients.append(
            torch.autograd.grad(criterion(LossInput.of(fields, log_pi)).losses.sum(), log_pi)[0]
        )
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    assert gradients[0][row["loss_mask"]].abs().min() > 0
    assert not gradients[0][~row["loss_mask"]].any()


# --- several components in one batch --------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_each_component_is_a_mean_over_its_own_tokens(aggregation):
    """Twice as many demonstrations leave the weight of what was sampled as it is."""
    config = settings(loss="reinforce", aggregation=aggregation)
    played = Group(0, 0, (rollout([3, 4, 0], 1.0), rollout([2], 0.0)))

    def weights(groups, component):
        (row,) = (packed.to_tensors() for packed in build(groups, [], config).rows_R[0])
        number = row.get("component", torch.zeros_like(row["seq_ids"]))
        return row["weight"][row["loss_mask"] & (number == component)].tolist()

    def shown(count):
        return [Group(n, n, (rollout([1, 4]),), component="ce") for n in range(1, count + 1)]

    alone = weights([played], 0)
    for count in (1, 2):
        both = [played, *shown(count)]
        assert weights(both, 0) == alone
        assert weights(both, 1) == pytest.approx([1 / (2 * count)] * 2 * count)
    # negative control: one mean over both
    assert weights([played, replace(played, index=1)], 0) != alone


def test_a_batch_of_three_components_is_the_sum_of_their_losses():
    config = settings(loss="reinforce")
    config.teacher = "its log-probabilities are given below"
    teacher, logits = table(5), table(0).requires_grad_()
    groups = [
        Group(0, 0, (rollout([3, 4, 0], 1.0), rollout([2], 0.0))),
        Group(1, 1, (rollout([1, 4]),), component="ce"),
        Group(2, 2, (rollout([0, 0, 3]), rollout([4])), component="ref_kl"),
    ]
    criterion = Objective.of(resolve_loss("reinforce"), config)
    total = loss_of(build(groups, [], config), criterion, logits, teacher)
    apart = [loss_of(build([group], [], config), criterion, logits, teacher) for group in groups]
    assert float(total) == pytest.approx(float(sum(apart)), rel=1e-6)
    assert float(apart[1]) == pytest.approx(float(cross_entropy(logits, [[1, 4]])), rel=1e-6)
    assert all(abs(float(loss)) > 1e-3 for loss in apart)


@pytest.mark.parametrize("loss", ["sft", "distill", "gkd"])
def test_rollouts_to_reinforce_are_refused_under_a_loss_that_reads_no_rewards(loss):
    """They would be imitated or distilled: the objective has no policy gradient."""
    config = settings(loss=loss, **({} if loss == "sft" else {"teacher": "some/model"}))
    played = Group(3, 7, (rollout([3, 4, 0], 1.0), rollout([2], 0.0)))
    # negative control: of the loss's own component
    assert build([played], [], config).num_tokens == 4
    with pytest.raises(
        ConfigError,
        match=f"example 7 has the component 'rl', and the loss '{loss}' reads no rewards",
    ):
        build([replace(played, component="rl")], [], config)


def test_nearness_to_a_teacher_without_a_teacher_is_refused():
    """With a penalty there is a reference, the first policy, which is no teacher."""
    shown = Group(3, 7, (rollout([3, 4, 0]),), component="ref_kl")
    with pytest.raises(
        ConfigError, match="example 7 has the component 'ref_kl', and there is no teacher"
    ):
        build([shown], [], settings(loss="cispo", beta=0.1))
    assert (
        build([shown], [], settings(loss="cispo", beta=0.1, teacher="some/model")).num_tokens == 3
    )


def test_the_losses_of_the_components_ignore_what_they_do_not_read():
    tensors = (
        torch.tensor([-0.5, -1.0], dtype=torch.float64),
        torch.tensor([math.nan, -3.0], dtype=torch.float64),
    )
    tokens = LossInput(*tensors, tensors[1], torch.tensor([True, True]), torch.tensor([0, 0]))
    assert sft(tokens).tolist() == [0.5, 1.0]
