"""What is counted is what is trained, and what is out of order is said."""

import math

import numpy as np
import pytest
import torch

from support.embedded import small_model
from support.pipeline import pipeline_config
from verifiers.errors import ConfigError, TooManyFaults
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.status import Status
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.batch import Group
from verifiers_trainer.algorithm.diagnostics import RatioMeter
from verifiers_trainer.algorithm.packing import PackedRow
from verifiers_trainer.distributed.devices import DATA_SHEETS, sheet_of
from verifiers_trainer.pipeline.health import FaultMeter, SignalMeter
from verifiers_trainer.pipeline.schedule import Signal
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.logprobs import install_logprob_forward
from verifiers_trainer.policy.scoring import scored
from verifiers_trainer.run import sanity_checks
from verifiers_trainer.run.recorder import alarms, flops_utilisation
from verifiers_trainer.run.sanity_checks import Agreement


def row(**changes):
    mask = torch.tensor([False, True, True, True, True])
    return {
        "loss_mask": mask,
        "weight": mask.float(),
        "version": torch.tensor([-2, 4, 4, 3, 3]),
        "seq_ids": torch.tensor([0, 0, 0, 1, 1]),
    } | changes


def test_ratios_are_over_trained_tokens_and_agreement_over_those_of_the_present_version():
    meter = RatioMeter(4, bounds=(0.5, 2.0), cap=2.5)
    log_mu = torch.zeros(5)
    log_pi = torch.log(torch.tensor([float("nan"), 1.0, 1.1, 3.0, 0.4])).nan_to_num(99.0)
    meter.add(log_pi, log_mu, torch.tensor([9.0, 1.0, 1.0, 2.0, 2.0]), row())

    numbers = meter.summary()

    assert numbers["ratio/mean"] == pytest.approx((1 + 1.1 + 3 + 0.4) / 4)
    assert numbers["ratio/max"] == pytest.approx(3)
    assert (numbers["ratio/kept"], numbers["ratio/capped"]) == (0.5, 0.25)
    assert numbers["entropy"] == 1.5
    assert meter.num_current == 2
    assert numbers["sampler/log_ratio_abs"] == pytest.approx(math.log(1.1) / 2)
    assert numbers["sampler/mismatch_kl"] == pytest.approx((1.1 - math.log(1.1) - 1) / 2, rel=1e-3)
    assert meter.max_abs == pytest.approx(math.log(1.1))


def test_an_answer_that_began_under_older_weights_is_not_compared():
    """Its later tokens are of the present version, and follow keys and values of the older one."""
    version = torch.tensor([-2, 3, 4, 4, 4, -2, 4, 4, -2, -1, 4])
    # the prompt of 0 is 1's too, where prompts are shared
    sample = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2])
    ones = torch.ones(11)
    mask = version != -2
    row_fields = {"loss_mask": mask, "weight": mask.float(), "version": version, "seq_ids": sample}
    log_pi = torch.tensor([0.0, 9.0, 9.0, 9.0, 0.2, 0.0, 0.1, 0.3, 0.0, 9.0, 9.0])
    meter = RatioMeter(4)
    meter.add(log_pi, 0 * ones, ones, row_fields)
    assert meter.num_current == 3
    assert (meter.mean_abs, meter.max_abs) == pytest.approx((0.2, 0.3))
    by_label = log_pi[mask & (version == 4)].abs()  # negative control
    assert len(by_label) == 6
    assert float(by_label.mean()) > 4


def test_rows_add_up_and_masked_nan_stays_out():
    at_once, two = RatioMeter(4), RatioMeter(4)
    log_pi = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4])
    at_once.add(log_pi, torch.zeros(5), None, row())
    spoilt = log_pi.clone()
    spoilt[0] = float("nan")
    two.add(spoilt, torch.zeros(5), None, row(weight=torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0])))
    two.add(spoilt, torch.zeros(5), None, row(weight=torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])))
    assert at_once.summary() == pytest.approx(two.summary())


def test_the_passes_of_a_step_add_up():
    """As of a loop of one's own that calls ``forward_backward`` twice before ``optim_step``."""
    log_pi = torch.tensor([0.0, 0.1, 0.2, 0.3, 2.4])
    entropy, terms = torch.arange(5.0), {"loss/term": torch.arange(5.0)}
    parts = [torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])]
    meters = []
    for weights in ([torch.ones(5)], parts[:1], parts[1:]):
        meters.append(meter := RatioMeter(4))
        for weight in weights:
            meter.add(log_pi, torch.zeros(5), entropy, row(weight=weight), terms)
    whole, first, second = meters
    first.extend(second)
    assert first.summary() == pytest.approx(whole.summary())
    assert (first.num_current, len(first.rows)) == (whole.num_current, 2)
    assert second.summary() != pytest.approx(whole.summary()), "negative control"


def test_without_tokens_nothing_is_known():
    numbers = RatioMeter(0).summary()
    assert math.isnan(numbers["sampler/log_ratio_abs"])
    assert numbers["ratio/mean"] == 0


def apart(*differences, x=-1.0):
    """A meter of tokens of the present version with these differences."""
    meter, d = RatioMeter(4), torch.tensor(differences)
    sampled = torch.ones(len(d), dtype=torch.bool)
    fields = {"loss_mask": sampled, "weight": sampled.float(), "version": 4 + 0 * sampled.long()}
    fields |= {"seq_ids": 0 * sampled.long(), "token_ids": torch.arange(len(d))}
    middle = torch.as_tensor(x) + 0 * d
    positions = {"position_ids": torch.arange(len(d))}
    meter.add(middle + d / 2, middle - d / 2, None, fields | positions)
    return meter


def test_a_disagreement_is_refused_and_reshaped_sampling_is_not_judged():
    meter, tokenizer = apart(*[0.01, -0.01] * 20), build_tiny_tokenizer()
    said = r"disagree by 0.01 nats per token \(0.01 at most; 0.0001 allowed\)"
    with pytest.raises(ConfigError, match=said):
        Agreement(pipeline_config(), tokenizer).check(meter, lambda *_: 1e-6)
    numbers = Agreement(pipeline_config(), tokenizer).check(meter, lambda *_: 0.008)
    assert numbers == {
        "sampler/compared": 40,
        "sampler/noise": 0.008,
        "sampler/disagreement": pytest.approx(1.25, rel=0.2),
    }
    reshaped = Agreement(pipeline_config(top_p=0.9), tokenizer)
    assert reshaped.check(meter, lambda *_: 1e-6) == {}


def test_the_noise_is_as_the_first_steps_had_it_and_measured_anew_before_anything_is_said():
    agreement, measured = Agreement(pipeline_config(), build_tiny_tokenizer()), []

    def measure(noise):
        return lambda *_: measured.append(noise) or noise

    quiet = apart(*[0.02, -0.02] * 50)
    for _ in range(4):
        agreement.check(quiet, measure(0.03))
    assert (measured, agreement.noise) == ([0.03], pytest.approx(0.02))
    louder = apart(*[0.06, -0.06] * 50)
    agreement.check(louder, measure(0.09))  # longer answers: their tokens have more noise
    assert (measured, agreement.noise) == ([0.03, 0.09], pytest.approx(0.06))
    agreement.check(quiet, measure(0.03))
    with pytest.raises(ConfigError, match=r"disagree by 0\.5 nats"):
        agreement.check(apart(*[0.5, -0.5] * 50), measure(0.03))


@pytest.mark.parametrize("differences", [[8.0], [8.0, 0.0], [8.0] * 7, [0.0] * 7])
def test_fewer_than_eight_tokens_are_unknown_and_neither_agree_nor_end_a_run(differences):
    meter = apart(*differences)
    assert math.isnan(meter.disagreement(2.5e-5))
    numbers = Agreement(pipeline_config(), build_tiny_tokenizer()).check(meter, lambda *_: 1e-6)
    assert numbers.pop("sampler/compared") == len(differences)
    assert math.isnan(numbers.pop("sampler/disagreement"))
    assert not numbers
    assert apart(*[8.0] * 8).disagreement(2.5e-5) > 4  # negative control


def test_what_outlives_a_row_is_in_one_block_and_holds_no_tensor_of_the_row():
    """Small tensors among the activations of the next rows would keep the heap from shrinking: a step
    on a CPU grew by twice as much."""
    rows = [
        PackedRow(
            **{name: np.arange(4, dtype=np.int32) for name in ("token_ids", "position_ids")},
            seq_ids=np.zeros(4, np.int32), loss_mask=np.arange(4) > 0, version=np.ones(4, np.int32),
            **{name: np.ones(4, np.float32) for name in ("advantage", "weight", "inv_temperature")},
            sampler_logprobs=np.full(4, -1.0, np.float32), sample_indices=np.zeros(1, np.int32),
        ) for _ in range(3)
    ]  # fmt: skip
    roomy, lists = RatioMeter(1, num_tokens=12), RatioMeter(1)
    for row in rows:
        tensors = row.to_tensors()
        log_pi = tensors["sampler_logprobs"] + torch.tensor([9.0, 0.1, -0.2, 0.3])
        roomy.add(log_pi, tensors["sampler_logprobs"], None, tensors, packed=row)
        lists.add(log_pi, tensors["sampler_logprobs"], None, tensors)
    assert [row for row, _, _ in roomy.rows] == rows
    for number in (1, 2):
        assert len({parts[number].untyped_storage().data_ptr() for parts in roomy.rows}) == 1
        assert len({parts[number].untyped_storage().data_ptr() for parts in lists.rows}) == 3
    assert roomy.furthest() == lists.furthest()
    assert roomy.disagreement(1e-3) == lists.disagreement(1e-3)


def test_a_token_far_apart_decides_nothing_and_half_a_step_does():
    assert apart(2.0, *[0.0] * 30).disagreement(1e-2) < 1
    assert apart(*[2.0, 0.0] * 15).disagreement(1e-2) > 4


@pytest.mark.parametrize("temperature", [0.9, 1.1])
def test_a_wrong_temperature_is_found_below_the_noise_of_half_precision(temperature):
    draws = torch.Generator().manual_seed(0)
    log_pi = -torch.rand(2000, generator=draws) * 4
    noise = 0.15 * torch.randn(2000, generator=draws)
    sound = apart(*noise.tolist(), x=log_pi)
    assert sound.disagreement(0.12) < 1.5
    wrong = log_pi * (1 - 1 / temperature) + noise
    meter = apart(*wrong.tolist(), x=log_pi * (1 + 1 / temperature) / 2)
    assert meter.mean_abs < 4 * 0.12  # negative control: by the mean alone it is within
    assert meter.disagreement(0.12) > 4
    slope, _ = meter.sharpness()
    assert (1 + slope / 2) / (1 - slope / 2) == pytest.approx(temperature, abs=0.02)


def group_of(*records):
    return Group(
        0, 5, tuple(Rollout((), reward, {}, Status(error=error)) for reward, error in records)
    )


def test_a_rollout_that_has_a_reward_has_not_failed():
    meter = FaultMeter(pipeline_config(max_error_fraction=0.0))
    meter.add(group_of(*[(0.0, "ToolError: the model's own doing")] * 8))
    with pytest.raises(
        TooManyFaults,
        match="1 of the last 9 rollouts failed: ModelError; the last with ModelError: x",
    ):
        meter.add(group_of((math.nan, "ModelError: x")))


def test_failures_are_forgotten_after_four_batches_and_early_ones_are_not_judged(caplog):
    meter = FaultMeter(pipeline_config(max_error_fraction=0.25))  # batches of 8
    meter.add(group_of(*[(math.nan, "ModelError: x")] * 4))  # all of it, but less than a batch
    with pytest.raises(TooManyFaults):
        meter.add(group_of(*[(0.0, None)] * 3, (math.nan, "ModelError: x")))
    meter.add(group_of(*[(0.0, None)] * 32))
    meter.add(group_of((math.nan, "ModelError: x")))
    assert len([record for record in caplog.records if "failed" in record.message]) == 1


GOOD = {
    "sampler/disagreement": 1.1,
    "ratio/kept": 0.9,
    "groups/live": 4,
    "groups/dead": 4,
    "rollouts/generated": 64,
    "rollouts/errors": 1,
    "packing/rows": 4,
    "packing/fill": 0.9,
    "time/wait_generation": 1.0,
    "time/step": 2.0,
}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sampler/disagreement": 2.1}, "mismatch"),
        ({"ratio/kept": 0.4}, "ratio"),
        ({"groups/dead": 17}, "dead_groups"),
        ({"rollouts/errors": 7}, "errors"),
        ({"rollouts/truncated": 33}, "truncated"),
        ({"rollouts/unparsed": 33}, "unparsed"),
        ({"rollouts/calls_as_text": 33}, "calls_as_text"),
        ({"packing/fill": 0.6}, "fill"),
        ({"time/wait_generation": 1.7}, "waiting"),
    ],
)
def test_what_is_out_of_order_raises_its_alarm_alone(change, name):
    assert alarms(GOOD) == {}
    assert alarms(GOOD | {"sampler/disagreement": math.nan}) == {}
    assert list(alarms(GOOD | change)) == [name]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *((name, name) for name in DATA_SHEETS),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("rtx3090ti", "RTX 3090 Ti"),
        ("rtx3090", "RTX 3090"),
        ("5090", "RTX 5090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_a_device_is_found_by_the_words_of_its_name(device, name):
    assert sheet_of(device) is DATA_SHEETS[name]


@pytest.mark.parametrize(
    "device", ["NVIDIA RTX A1000", "cpu", "", "NVIDIA GeForce RTX 4090 Laptop GPU"]
)
def test_a_device_of_another_name_has_no_sheet(device):
    assert sheet_of(device) is None


def test_the_share_of_a_devices_peak():
    million = 10**6
    full = flops_utilisation(million, million, 1000.0, "NVIDIA H100 80GB HBM3")
    assert full == pytest.approx(6 * million * 1000 / 989e12)
    assert flops_utilisation(million, 0, 1000.0, "NVIDIA H100 PCIe") == pytest.approx(full * 4 / 6)
    assert flops_utilisation(million, million, 1000.0, "a device of tomorrow") is None


def test_batches_without_signal_are_said_at_growing_intervals_and_their_end_is_said_too(caplog):
    meter = SignalMeter(pipeline_config(), Signal())
    same = Group(0, 0, tuple(Rollout((), 1.0, {}, Status("stop")) for _ in range(2)))
    meter.note_nothing([same])
    meter.note_batch([same])
    assert len(caplog.records) == 1
    for _ in range(5):
        meter.note_nothing([same])
    meter.note_batch([same])
    meter.note_batch([same])
    assert len(caplog.records) == 5  # after 1, 1, 2 and 4 batches, and the end
    assert (
        "(4 batches, 8 rollouts, 0 s since the last one with a signal; rewards: 1 x 8; a reward"
        " above 1 in" in caplog.records[3].message
    )
    assert caplog.records[-1].message.startswith(
        "skipped 5 batches in a row without a learning signal"
    )


def rollouts_of_turns(num_turns, rewards=()):
    turns = [Turn(np.array([1]), np.array([2]), np.array([-0.5])) for _ in range(num_turns)]
    for turn, env_reward in zip(turns, rewards, strict=False):
        turn.env_reward = env_reward
    return Group(0, 0, (Rollout(turns, 1.0), Rollout(turns, 0.0)))


def test_that_gamma_0_trains_the_last_turn_alone_is_said_once_with_the_first_turns(caplog):
    meter = SignalMeter(pipeline_config(credit="turn", gamma=0.0), Signal())
    meter.note_batch([rollouts_of_turns(1)])  # its only turn is the last
    assert not caplog.records
    meter.note_batch([rollouts_of_turns(2), rollouts_of_turns(2)])
    meter.note_batch([rollouts_of_turns(2)])
    (said,) = caplog.records
    assert said.message.startswith("gamma=0 trains the last turn of each rollout alone")


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"credit": "turn", "gamma": 0.0}, (0.0, 1.0)),
        ({"credit": "turn", "gamma": 0.5}, ()),
        ({}, ()),
    ],
)
def test_with_rewards_of_turns_or_another_gamma_nothing_is_said(caplog, settings, rewards):
    """Negative control."""
    SignalMeter(pipeline_config(**settings), Signal()).note_batch([rollouts_of_turns(2, rewards)])
    assert not caplog.records


def test_noise_is_that_of_all_answers_of_a_canary_and_of_at_most_four_rows_of_a_step():
    model = small_model().bfloat16()
    install_logprob_forward(model)
    answers = [Turn(np.full(6, 5 + n), np.full(6, 9), np.full(6, -1.0), 0) for n in range(9)]

    def noise_of(*indices):
        conversations = [[answers[n]] for n in indices]
        return sanity_checks.noise_of(model, scored(model, conversations, 0, "cpu"))

    each = [noise_of(n) for n in range(9)]
    assert len({total for total, _ in each}) > 5
    assert noise_of(0, 1) == pytest.approx(np.sum(each[:2], axis=0))
    assert noise_of(*range(9))[1] == 4 * 6
    assert noise_of(0, 1)[0] != pytest.approx(2 * each[0][0])  # negative control: the first alone
