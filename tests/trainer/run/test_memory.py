"""A device whose memory does not suffice: one sentence, and nothing is lost."""

import pytest
import torch

from support.training import run, small_trainer
from verifiers.errors import RunError
from verifiers_trainer.policy import checkpoint_files


def too_large(trainer, from_step):
    """Let the forward pass of a step, counted from 0, ask for more memory than there is."""

    def refuse(*_):
        if torch.is_grad_enabled() and trainer.state.global_step >= from_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nmore")

    trainer.model.get_output_embeddings().register_forward_pre_hook(refuse)
    return trainer


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({}, r"set gradient_checkpointing = true \(about [\d.e-]+ GB\)"),
        ({"gradient_checkpointing": True}, r"set micro_batch_tokens = \d+ \(about [\d.e-]+ GB\)"),
        (
            {"gradient_checkpointing": True, "packing": False},
            r"set use_lora = true \(frees about [\d.e-]+ GB of gradients and optimizer state\)",
        ),
        (
            {"gradient_checkpointing": True, "packing": False, "use_lora": True},
            r"lower max_seq_len: the longest sample has \d+ tokens",
        ),
    ],
)
def test_out_of_memory_is_a_sentence_with_the_setting_to_change_and_its_effect(
    tmp_path, settings, change
):
    trainer = too_large(small_trainer(tmp_path, **settings), 0)
    with pytest.raises(RunError, match=change) as caught, trainer:
        trainer.train()
    said = str(caught.value)
    assert "Tried to allocate 3.00 GiB" in said
    assert "\n" not in said
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_last_whole_step_is_saved_and_the_run_goes_on_from_it(tmp_path):
    trainer = too_large(small_trainer(tmp_path, max_steps=4), 2)
    with pytest.raises(RunError, match="out of memory"), trainer:
        trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    checkpoint_files.verify(tmp_path / "checkpoint-2")
    log = run(
        small_trainer(tmp_path, max_steps=4, micro_batch_tokens=64), resume_from_checkpoint=True
    )
    assert len(log.steps) == 2
