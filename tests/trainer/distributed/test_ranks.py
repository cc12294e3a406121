"""Several processes train as one does, waste no sample, and end together with the error of the one
that failed."""

import time

import numpy as np
import pytest

from support import ranks_work
from support.ranks import on_ranks, results
from support.tiny_vision import vision_folder
from support.training_child import child_context
from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.packing import pack
from verifiers_trainer.algorithm.samples import Sample
from verifiers_trainer.distributed.batch_sharing import from_bytes, to_bytes
from verifiers_trainer.distributed.ranks import Ranks
from verifiers_trainer.policy import checkpoint_files
from verifiers_trainer.settings.config import RLConfig


def sample(length):
    ids = np.arange(length, dtype=np.int32)
    mask = ids > 1
    logprobs = np.where(mask, -0.1 * ids, 0).astype(np.float32)
    return Sample(
        ids, mask, logprobs, np.ones(length, np.float32), np.zeros(length, np.int32), 1.0, 0, 0
    )


RUN = {"deterministic": True, "max_steps": 4, "save_strategy": "no", "max_off_policy_steps": 1}


@pytest.fixture(scope="module")
def children():
    return child_context()


@pytest.fixture
def on(children, tmp_path):
    """Call a function of ``ranks_work`` that takes a folder on some ranks."""

    def call(work, *arguments, world=2, name="run", **keywords):
        folder = tmp_path / f"{name}-{world}"
        return on_ranks(children, folder, work, str(folder), *arguments, world=world, **keywords)

    return call


# --- one gradient ---------------------------------------------------------------------------------

UNEQUAL = [[1, 20, 3, 7], [2, 2, 30, 5]]
FEW = [[4, 9]]


@pytest.mark.parametrize(
    ("lengths", "world", "settings"),
    [
        (UNEQUAL, 2, {}),
        (UNEQUAL, 3, {"micro_batch_size": 1, "batch_size": 12}),
        pytest.param(UNEQUAL, 2, {"packing": False}, marks=pytest.mark.slow),
        pytest.param(
            UNEQUAL, 2, {"aggregation": "sequence_mean", "packing": False}, marks=pytest.mark.slow
        ),
        (FEW, 3, {"rollouts_per_example": 2, "batch_size": 12}),
    ],
)
def test_unequal_data_gives_the_gradient_of_one_process(on, lengths, world, settings):
    several = results(on(ranks_work.gradient, lengths, world=world, **settings))
    (single,) = results(on(ranks_work.gradient, lengths, world=1, **settings))

    # none is dropped
    assert sum(r["tokens"] for r in several) == single["tokens"] == sum(map(sum, lengths))
    assert len({r["rows"] for r in several}) == 1  # and nobody waits for a rank that has fewer rows
    for r in several:
        assert r["gradient"] == several[0]["gradient"]
        np.testing.assert_allclose(
            r["gradient"], single["gradient"], rtol=1e-4, atol=1e-6 * single["norm"]
        )
        assert r["loss"] == pytest.approx(single["loss"], rel=1e-5, abs=1e-7)
        assert r["kept"] == pytest.approx(single["kept"])
    if lengths is FEW:
        assert sum(r["fillers"] for r in several) == 1


def test_a_mean_of_each_ranks_own_mean_is_another_gradient():
    """Negative control: weights are of the whole step; with weights per rank, unequal data count
    unequally."""
    tokens_of_ranks = np.array([21.0, 3.0])
    equal_weights = np.full(2, 1 / tokens_of_ranks.sum())
    rank_weights = 1 / tokens_of_ranks / 2
    assert not np.allclose(equal_weights, rank_weights)


@pytest.mark.parametrize("num_samples", [1, 2, 7, 8])
def test_no_sample_is_dropped_whatever_the_number_of_ranks(num_samples):
    samples = [sample(3 + n) for n in range(num_samples)]
    weights = [np.ones(s.num_tokens) for s in samples]
    for world in (1, 2, 3, 5):
        rows_R = pack(samples, weights, max_tokens=16, world=world)
        placed = sorted(i for rows in rows_R for row in rows for i in row.sample_indices)
        assert placed == list(range(num_samples))
        usual = num_samples // world * world  # negative control: cut to a multiple of the ranks
        assert usual == num_samples or usual < len(placed)


# --- one run --------------------------------------------------------------------------------------


def test_two_ranks_are_as_one_within_rounding_and_two_ranks_twice_are_bit_for_bit(on):
    two = results(on(ranks_work.train, **RUN))
    again = results(on(ranks_work.train, **RUN, name="again"))
    (single,) = results(on(ranks_work.train, **RUN, world=1))

    assert two[0]["weights"] == two[1]["weights"]  # the ranks have not drifted apart
    assert [r["weights"] for r in two] == [r["weights"] for r in again]
    assert two[0]["losses"] == again[0]["losses"]
    assert len(two[0]["losses"]) == 4
    np.testing.assert_allclose(two[0]["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(two[0]["values"], single["values"], rtol=1e-3, atol=2e-6)
    assert two[0]["epoch"] == two[1]["epoch"] == single["epoch"]


def test_two_ranks_train_on_images_as_one(on, tmp_path):
    model = str(vision_folder("qwen2_5_vl", tmp_path / "model"))
    settings = RUN | {"max_steps": 2}
    two = results(on(ranks_work.train_on_images, model, **settings))
    (single,) = results(on(ranks_work.train_on_images, model, **settings, world=1))
    assert two[0]["weights"] == two[1]["weights"]
    assert max(two[0]["ratios"]) < 1e-5
    np.testing.assert_allclose(two[0]["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(two[0]["values"], single["values"], rtol=1e-3, atol=2e-6)


def test_the_updates_of_a_batch_on_two_ranks_are_those_of_one(on):
    settings = RUN | {
        "updates_per_batch": 2,
        "num_iterations": 2,
        "loss": "ppo",
        "anchor": "recomputed",
    }
    two, (single,) = (
        results(on(ranks_work.train, **settings)),
        results(on(ranks_work.train, **settings, world=1)),
    )
    assert two[0]["weights"] == two[1]["weights"]
    assert len(set(two[0]["losses"])) == 4
    np.testing.assert_allclose(two[0]["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(two[0]["values"], single["values"], rtol=1e-3, atol=2e-6)
    assert two[0]["epoch"] == two[1]["epoch"] == single["epoch"]


def test_a_policy_that_teaches_itself_on_two_ranks_is_that_of_one(on):
    settings = RUN | {
        "loss": "gkd",
        "teacher": "self",
        "teacher_context": "support.contexts:more",
    }
    two, (single,) = (
        results(on(ranks_work.train, **settings)),
        results(on(ranks_work.train, **settings, world=1)),
    )
    assert two[0]["weights"] == two[1]["weights"]
    assert min(two[0]["losses"]) > 0
    np.testing.assert_allclose(two[0]["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(two[0]["values"], single["values"], rtol=1e-3, atol=2e-6)


def test_with_one_row_for_each_of_two_ranks_they_are_one_process_bit_for_bit(on):
    settings = RUN | {
        "batch_size": 2,
        "rollouts_per_example": 2,
        "micro_batch_size": 1,
        "packing": False,
    }
    two = results(on(ranks_work.train, **settings))
    (single,) = results(on(ranks_work.train, **settings, world=1))
    assert two[0]["weights"] == two[1]["weights"] == single["weights"]


def test_rows_travel_bit_for_bit():
    samples = [sample(5 + n) for n in range(4)]
    (rows,) = pack(samples, [np.full(s.num_tokens, 0.1) for s in samples], max_tokens=12)
    back = from_bytes(to_bytes(rows))
    assert len(back) == len(rows)
    for row, row_back in zip(rows, back, strict=True):
        for name in ("token_ids", "sampler_logprobs", "weight", "loss_mask", "sample_indices"):
            assert getattr(row, name).dtype == getattr(row_back, name).dtype
            assert getattr(row, name).tobytes() == getattr(row_back, name).tobytes()
        assert row_back.reference_logprobs is None


def test_what_a_callback_of_one_rank_decides_all_do(on):
    ended = results(on(ranks_work.train, **RUN | {"max_steps": 6}, spoil="stop"))
    assert [r["step"] for r in ended] == [2, 2]


def test_rank_0_evaluates_and_all_know(on):
    settings = RUN | {
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_num_examples": 4,
    }
    first, second = results(on(ranks_work.train, **settings))
    assert len(first["evaluations"]) == 2
    assert first["evaluations"] == second["evaluations"]


def test_an_evaluation_that_fails_ends_nobody_unless_it_is_required(on):
    settings = RUN | {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    assert [r["step"] for r in results(on(ranks_work.train, **settings, spoil="evaluation"))] == [
        2,
        2,
    ]
    ended = on(
        ranks_work.train, **settings, eval_required=True, spoil="evaluation", name="required"
    )
    assert [e.result for e in ended] == [["RunError", "the evaluation set is gone"]] * 2


# --- settings that several processes cannot use ---------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, 20, 4])
def test_a_batch_that_processes_cannot_share_is_refused_with_every_number(batch_size):
    config = RLConfig(batch_size=batch_size, rollouts_per_example=4, micro_batch_size=4)
    config.resolve(1)
    with pytest.raises(ConfigError) as raised:
        config.resolve(3)
    said = str(raised.value)
    assert f"batch_size {batch_size} is not divisible by micro_batch_size x processes = 12" in said
    assert "the nearest that are: " in said


def test_more_ranks_than_rollouts_is_refused_at_the_start(on):
    ended = on(ranks_work.train, world=3, batch_size=2, rollouts_per_example=2, micro_batch_size=1)
    for e in ended:
        kind, said = e.result
        assert kind == "ConfigError"
        assert "batch_size 2 is not divisible by micro_batch_size x processes = 3" in said


def test_a_launcher_that_starts_one_process_of_several_is_said(monkeypatch, caplog, tmp_path):
    from support.training import small_trainer

    small_trainer(tmp_path)
    assert "starts one process" not in caplog.text
    # as accelerate launch --cpu --num_processes 2 sets them
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    small_trainer(tmp_path)
    assert "accelerate launch --cpu ignores --num_processes and starts one process" in caplog.text


# --- ending together ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        ("reward", "TooManyFaults", "no judge here"),
        pytest.param(
            "nan",
            "NonFiniteLoss",
            "the sampled log-probability of step 2 is not finite",
            marks=pytest.mark.slow,
        ),
        ("bug", "RunError", "rank 1 failed: ZeroDivisionError: a bug on this rank alone"),
        pytest.param(
            "generator",
            "RunError",
            "rank 0 failed: KeyError: 'the generator is gone'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_failure_of_one_rank_is_the_failure_of_all(on, spoil, kind, said):
    started = time.monotonic()
    ended = on(ranks_work.train, **RUN, spoil=spoil)

    assert [e.exit_code for e in ended] == [1, 1]
    failed = 1 if spoil in ("nan", "bug") else 0
    assert ended[1 - failed].result[0] == kind
    assert said in ended[1 - failed].result[1]
    assert said.rpartition(": ")[2] in ended[failed].result[1]
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("spoil", ["judge", "solved"])
def test_all_ranks_save_the_last_step_together_whatever_ends_the_run(on, tmp_path, spoil):
    settings = {
        **RUN,
        "save_strategy": "no",
        "max_off_policy_steps": 0,
        "max_steps": 30,
        "no_signal_steps": 1,
    }
    ended = on(ranks_work.train, **settings, spoil=spoil)
    if spoil == "judge":
        assert {e.result[0] for e in ended} == {"TooManyFaults"}
    else:
        assert [e.exit_code for e in ended] == [0, 0]
        assert len({e.result["step"] for e in ended}) == 1
    (saved,) = tmp_path.rglob("checkpoint-*")
    checkpoint_files.verify(saved)
    assert (saved / "rng_1.safetensors").is_file()


@pytest.mark.parametrize("when", [pytest.param("kill", marks=pytest.mark.slow), "kill in backward"])
def test_a_rank_that_is_killed_ends_the_others(on, when):
    ended = on(ranks_work.train, **RUN, spoil=when, ddp_timeout=600)  # long before that
    assert [e.exit_code for e in ended] == [1, -9]
    kind, said = ended[0].result
    assert kind == "RunError"
    assert "rank 0 lost the other processes of this training" in said


def test_a_rank_that_hangs_is_waited_for_no_longer_than_allowed(on):
    started = time.monotonic()
    ended = on(ranks_work.train, **RUN, spoil="hang", ddp_timeout=3)
    assert ended[0].result[0] == "RunError"
    assert ended[0].exit_code == ended[1].exit_code == 1
    assert time.monotonic() - started < 90


SAVED = {**RUN, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped", "store_of", "said"),
    [
        (
            stopped,
            "torchrun",
            f"rank {stopped} of 2 has given no sign of life for 3 s (rank_timeout): it was killed"
            " or stopped",
        )
        for stopped in (0, 1)
    ]
    + [
        (
            0,
            "rank 0",
            "has not answered rank 1 of 2 for 3 s (rank_timeout): the process that holds it, rank 0"
            " or torchrun",
        )
    ],
)
def test_a_rank_that_is_stopped_inside_backward_ends_the_others_within_the_bound(
    on, tmp_path, stopped, store_of, said
):
    ended = on(
        ranks_work.train,
        **SAVED,
        store_of=store_of,
        spoil=f"stop {stopped} in backward",
        rank_timeout=3,
        ddp_timeout=600,
    )
    assert (ended[1 - stopped].exit_code, ended[stopped].exit_code) == (3, -9)
    folder = tmp_path / "run-2"
    written = folder / f"stderr-{1 - stopped}"
    assert said in written.read_text()
    assert (
        written.stat().st_mtime - (folder / "stopped").stat().st_mtime
        < ranks_work.KILLED_AFTER_S - 5
    )
    assert checkpoint_files.newest_valid(folder).name == "checkpoint-2"
    if stopped == 1:
        again = results(on(ranks_work.train, **SAVED, resume=True))
        uninterrupted = results(on(ranks_work.train, **SAVED, name="w"))
        assert again[0]["weights"] == again[1]["weights"] == uninterrupted[0]["weights"]


@pytest.mark.slow
def test_without_signs_of_life_a_stopped_rank_is_waited_for_until_it_is_killed(on, tmp_path):
    """Negative control: gloo notices when the connection closes, or after ddp_timeout."""
    ended = on(
        ranks_work.train, **RUN, spoil="stop 1 in backward", rank_timeout=0.0, ddp_timeout=600
    )
    assert [e.exit_code for e in ended] == [1, -9]
    result = (tmp_path / "run-2/unchanged-0").stat().st_mtime
    assert result - (tmp_path / "run-2/stopped").stat().st_mtime > ranks_work.KILLED_AFTER_S - 2


def test_a_rank_that_takes_longer_than_the_bound_and_lives_is_not_lost(on):
    """Negative control of the watch: it is the thread that beats, whatever the training does."""
    assert [
        r["step"] for r in results(on(ranks_work.train, **RUN, spoil="slow", rank_timeout=2.0))
    ] == [4, 4]


# --- the exchanges --------------------------------------------------------------------------------


def test_every_exchange(children, tmp_path):
    ended = on_ranks(children, tmp_path, ranks_work.exchange, world=3)
    assert [e.result for e in ended] == [
        [3, True, [0], [[], [1] * 3, [2] * 6], [True, False]],
        [3, True, [1, 1], [], [True, False]],
        [3, True, [2, 2, 2], [], [True, False]],
    ]


@pytest.mark.parametrize("what", ["share", "gather"])
def test_a_wait_is_bounded_and_says_for_what(children, tmp_path, what):
    ended = on_ranks(children, tmp_path, ranks_work.late, 1.0, what)
    kind, said = ended[1].result
    assert kind == "RunError"
    assert "rank 1" in said
    assert "the tea" in said


def test_while_rank_0_gives_signs_of_life_the_others_wait_longer_than_the_bound(children, tmp_path):
    ended = on_ranks(children, tmp_path, ranks_work.alive, 1.0)
    assert [e.result for e in ended] == [1, 1]


def test_an_error_keeps_its_kind_and_its_facts_on_every_rank(children, tmp_path):
    ended = on_ranks(children, tmp_path, ranks_work.raises, False)
    assert [e.result for e in ended] == [["WeightSyncError", "the server does not answer"]] * 2


def test_outside_of_together_the_others_learn_only_that_it_is_gone(children, tmp_path):
    ended = on_ranks(children, tmp_path, ranks_work.raises, True)
    assert ended[0].result[0] == "WeightSyncError"
    assert ended[1].result[0] == "RunError"
    assert "does not answer" not in ended[1].result[1].replace(
        "the other processes do not answer", ""
    )


def test_one_process_connects_nothing():
    ranks = Ranks()
    with ranks.together():
        assert ranks.share(lambda: 3, "x") == 3
        assert ranks.scatter([b"a"], "x") == b"a"
        assert ranks.collect(b"b", "x") == [b"b"]
        assert ranks.gather([1.0], "x").tolist() == [[1.0]]
    assert ranks._store is ranks._group is None
