"""The bytes of a packed row against torch's own accounting of models whose tensors have no
storage."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from verifiers_trainer.policy.logprobs import chunked_logprobs
from verifiers_trainer.policy.sizes import CHUNK_TOKENS, FLOAT32, HALF, Architecture, RowPass


class Tracker(MemTracker):
    """That of torch, for models with frozen weights too, on which it would set hooks."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


def without_storage(model):
    """Replace the parameters of a meta model by fake ones of the CPU; tied ones stay tied."""
    fakes = {}
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None:
                if id(held) not in fakes:
                    values = torch.empty(held.shape, dtype=held.dtype, device="cpu")
                    fakes[id(held)] = torch.nn.Parameter(values, requires_grad=held.requires_grad)
                module._parameters[name] = fakes[id(held)]
        for name, held in module._buffers.items():
            if held is not None:
                module._buffers[name] = torch.empty(held.shape, dtype=held.dtype, device="cpu")


def peak(config, tokens, rank, number, checkpointing):
    """Most bytes, by torch, of the second of two rows: forward and backward pass, with gradients."""
    is_half, is_frozen = number == HALF, rank is not None
    dtype = torch.bfloat16 if is_half and is_frozen else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    lm = model
    if is_frozen:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    with FakeTensorMode(allow_non_fake_inputs=True):
        without_storage(model.train())
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
        tracker = Tracker()
        tracker.track_external(model)
        with tracker:
            for _ in range(2):
                ids = torch.zeros(1, tokens, dtype=torch.long)
                positions = torch.arange(tokens)[None]
                with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                    states = lm.model(input_ids=ids, position_ids=positions, use_cache=False)
                hidden = states.last_hidden_state[0, :-1]
                size = CHUNK_TOKENS if is_half else None
                logprobs, _ = chunked_logprobs(hidden, lm.lm_head, ids[0, 1:], chunk_tokens=size)
                logprobs.sum().backward()
                del states, hidden, logprobs
                tracker.reset_mod_stats()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


QWEN = Qwen3Config(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=32000, tie_word_embeddings=True,
)  # fmt: skip
LLAMA = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, vocab_size=32000, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tokens", "rank", "number", "checkpointing"),
    [
        (QWEN, 2048, None, FLOAT32, False),
        (QWEN, 4096, None, HALF, False),
        (LLAMA, 4096, 16, HALF, False),
        (LLAMA, 8192, 16, HALF, True),
    ],
    ids=["0.6B, all weights, float32", "0.6B, all weights", "8B, adapter", "8B, checkpointing"],
)
def test_memory_of_a_row_is_what_torch_counts(config, tokens, rank, number, checkpointing):
    """Of few layers, since each layer is as the other; real widths."""
    model = Architecture.of(config.to_dict())
    trained = model.parameters if rank is None else model.adapter_parameters(rank)
    frozen = 0 if rank is None else number * model.parameters
    copies = number * (trained if frozen else model.layers * model.layer_parameters)
    row = RowPass(rank, number, checkpointing)
    row_bytes = row.row_bytes(model, tokens)
    held = 2 * FLOAT32 * trained + frozen + copies * (number == HALF)
    measured = peak(config, tokens, rank, number, checkpointing)
    assert held + row_bytes == pytest.approx(measured, rel=0.08)
    # negative control: 34 numbers of 16 bits for a layer of GPT, and the logits of 256 tokens
    layers, kept = (1, model.layers * number) if checkpointing else (model.layers, 0)
    of_gpt = (layers * 17 * number + kept) * model.width * tokens + 1024 * model.vocabulary
    assert held + of_gpt < 0.85 * measured
