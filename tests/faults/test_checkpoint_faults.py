"""A checkpoint is whole or absent, whoever dies when, in one process or two; a resumed run is the
run itself."""

import pickle
import signal

import pytest
import torch

from support import ranks_work
from support.ranks import on_ranks
from support.training import files_hash, losses_of, run, small_trainer
from support.training_child import SAVED, child_context
from verifiers_trainer.policy import checkpoint_files

RUN = {
    "deterministic": True,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_off_policy_steps": 1,
}
SAVED_BY_TWO = (*SAVED, "rng_1.safetensors", "pending.jsonl")


@pytest.fixture(scope="module")
def children():
    return child_context()


@pytest.fixture(scope="module")
def undisturbed(children, tmp_path_factory):
    """The folder of a run of two ranks that nobody killed."""
    folder = tmp_path_factory.mktemp("two")
    assert [
        e.exit_code for e in on_ranks(children, folder, ranks_work.train, str(folder), **RUN)
    ] == [0, 0]
    return folder


def killed_and_resumed_ends_the_same(children, undisturbed, folder, failpoint, newest):
    killing = {"failpoint": failpoint, "store_of": "rank 0"}
    ended = on_ranks(children, folder, ranks_work.train, str(folder), **killing, **RUN)
    killed = 1 if failpoint.startswith("1/") else 0
    assert ended[killed].exit_code == -signal.SIGKILL
    assert ended[1 - killed].exit_code == 1  # and not left behind
    assert ended[1 - killed].result[0] == "RunError"
    newest_checkpoint = checkpoint_files.newest_valid(folder)
    assert (newest_checkpoint and newest_checkpoint.name) == newest

    again = on_ranks(children, folder, ranks_work.train, str(folder), resume=True, **RUN)

    assert [e.exit_code for e in again] == [0, 0]
    assert again[0].result["weights"] == again[1].result["weights"]
    assert losses_of(folder) == losses_of(undisturbed)
    assert files_hash(folder / "checkpoint-6", *SAVED_BY_TWO) == files_hash(
        undisturbed / "checkpoint-6", *SAVED_BY_TWO
    )
    assert not list(folder.glob(".tmp-*"))


def test_two_ranks_killed_before_the_rename_resume_to_the_same_weights(
    children, undisturbed, tmp_path
):
    killed_and_resumed_ends_the_same(
        children, undisturbed, tmp_path, "checkpoint.before_rename:2", "checkpoint-2"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failpoint", "newest"),
    [
        ("checkpoint.before_manifest:1", None),
        ("checkpoint.before_rename:1", None),
        ("checkpoint.after_rename:1", "checkpoint-2"),
        ("checkpoint.before_manifest:2", "checkpoint-2"),
        ("checkpoint.after_rename:2", "checkpoint-4"),
        ("1/checkpoint.before_sending:2", "checkpoint-2"),
    ],
)
def test_two_ranks_killed_at_every_failpoint_resume_to_the_same_weights(
    children, undisturbed, tmp_path, failpoint, newest
):
    killed_and_resumed_ends_the_same(children, undisturbed, tmp_path, failpoint, newest)


def test_a_checkpoint_holds_the_random_generators_of_every_rank(undisturbed, tmp_path):
    torch.manual_seed(11)
    state = checkpoint_files.rng_to_bytes()
    expected = torch.rand(3)
    checkpoint_files.save_rng(tmp_path, state, 1)
    checkpoint_files.save_rng(tmp_path, rank=0)
    torch.manual_seed(5)
    checkpoint_files.load_rng(tmp_path, 1)
    assert torch.equal(torch.rand(3), expected)
    checkpoint_files.load_rng(tmp_path, 0)
    assert not torch.equal(torch.rand(3), expected)  # negative control: those of rank 0 alone
    assert (undisturbed / "checkpoint-6" / "rng_1.safetensors").is_file()


def test_two_ranks_go_on_where_one_process_was(children, tmp_path, caplog):
    """The number of processes changes no gradient, so it may change with a resume."""
    one_step = RUN | {"max_steps": 2}
    assert (
        on_ranks(children, tmp_path, ranks_work.train, str(tmp_path), world=1, **one_step)[
            0
        ].exit_code
        == 0
    )
    ended = on_ranks(
        children, tmp_path, ranks_work.train, str(tmp_path), resume=True, **RUN | {"max_steps": 4}
    )
    assert [e.result["step"] for e in ended] == [4, 4]
    checkpoint_files.load_rng(tmp_path / "checkpoint-2", 1)
    assert (
        "written by fewer processes, so rank 1 begins with fresh random generators" in caplog.text
    )


# --- negative controls ----------------------------------------------------------------------------


def test_written_in_place_a_save_that_is_killed_leaves_a_folder_that_looks_like_the_newest(
    tmp_path,
):
    run(small_trainer(tmp_path, **RUN | {"max_steps": 2}))
    torn = tmp_path / "checkpoint-4"
    torn.mkdir()
    weights = (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])  # as far as it came

    naive = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))

    assert naive == torn
    assert checkpoint_files.newest_valid(tmp_path) == tmp_path / "checkpoint-2"


def test_resumed_with_the_weights_alone_the_run_is_another(tmp_path):
    run(small_trainer(tmp_path / "whole", **RUN))
    first = small_trainer(tmp_path / "first", **RUN | {"max_steps": 2})
    run(first)
    on_from_weights = run(
        small_trainer(tmp_path / "second", model=first.model, **RUN | {"max_steps": 4})
    )
    assert on_from_weights.losses != [loss for _, loss in losses_of(tmp_path / "whole")][2:]


class Bomb:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return open, (self.canary, "w")


def test_read_as_a_pickle_a_planted_file_is_executed(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    with pytest.raises(RuntimeError, match="magic number"):  # said when it has been executed
        torch.load(tmp_path / "optimizer.pt", weights_only=False)
    assert (tmp_path / "canary").exists()
