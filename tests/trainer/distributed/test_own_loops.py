"""A loop in the trainer's verbs is ``train`` on two processes too, however they share the model."""

import pytest

from support import own_loops
from support.ranks import on_ranks, results
from support.training_child import child_context

RUN = {"deterministic": True, "max_steps": 3, "max_off_policy_steps": 0, "max_grad_norm": 0.05}
RUN |= {"micro_batch_size": 1, "max_seq_len": 32}  # so a step has several rows on each rank


@pytest.fixture(scope="module")
def children():
    return child_context()


@pytest.fixture
def on(children, tmp_path):
    def call(name, work=own_loops.on_rank, **settings):
        folder = tmp_path / name
        return results(on_ranks(children, folder, work, str(folder), **RUN | settings))

    return call


KINDS = {
    "whole": {},
    "fsdp2": {"shared": "fsdp2"},
    "whole, lora": {"use_lora": True},
    "fsdp2, lora": {"shared": "fsdp2", "use_lora": True},
    "zero1": {"shared": "zero1"},
    "zero2": {"shared": "zero2"},
    "zero3": {"shared": "zero3"},
}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("whole", "fsdp2") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_two_processes_in_a_loop_of_their_own_are_two_that_train(on, kind):
    if "zero" in kind:
        pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    trained, _ = on("train", **KINDS[kind])
    own, second = on("own", parts=1, **KINDS[kind])
    assert own["weights"] == second["weights"] == trained["weights"]
    assert own["metrics"] == trained["metrics"]
    assert len(own["metrics"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_batch_add_up_on_two_processes(on, kind):
    if "zero" in kind:
        pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    trained, _ = on("train", **KINDS[kind])
    own, second = on("own", parts=2, **KINDS[kind])
    assert own["weights"] == second["weights"]
    for line, line_of_train in zip(own["metrics"], trained["metrics"], strict=True):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(line_of_train[name], rel=1e-4, abs=1e-6)


def test_other_numbers_of_rows_are_refused_on_every_process(on):
    said = on("rows", own_loops.other_numbers_of_rows)
    assert len(set(said)) == 1
    assert "forward_backward got other numbers of rows" in said[0]
