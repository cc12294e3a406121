"""Loading a policy by name."""

from __future__ import annotations

import json
import re

import pytest
import torch

from verifiers.errors import ConfigError
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.policy.loading import get_model, get_model_and_tokenizer, get_tokenizer


def test_the_builtin_model_comes_with_its_tokenizer():
    model, tokenizer = get_model_and_tokenizer("builtin:tiny")
    assert model.config.vocab_size == len(tokenizer)
    assert get_tokenizer(model.name_or_path).get_vocab() == tokenizer.get_vocab()


def test_the_device_decides_the_precision_unless_told(tmp_path):
    build_tiny_model(layers=1, hidden=32).to(torch.float16).save_pretrained(tmp_path)
    default = torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    for name in ("builtin:tiny", str(tmp_path)):
        assert get_model(name).dtype == default
        assert get_model(name, model_kwargs={"dtype": torch.bfloat16}).dtype == torch.bfloat16


def test_a_local_folder_loads_with_sdpa_and_liger_is_ignored_where_it_cannot_run(tmp_path):
    build_tiny_model(layers=1, hidden=32).save_pretrained(tmp_path)
    build_tiny_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = get_model_and_tokenizer(str(tmp_path), use_liger=True)
    if not torch.cuda.is_available():
        assert model.config._attn_implementation == "sdpa"
    assert tokenizer.chat_template
    eager = get_model(str(tmp_path), model_kwargs={"attn_implementation": "eager"})
    assert eager.config._attn_implementation == "eager"


def test_a_missing_pad_token_becomes_the_end_token(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = get_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == tokenizer.eos_token_id


def test_a_misspelt_builtin_is_refused_with_a_suggestion():
    for load in (get_model, get_tokenizer):
        with pytest.raises(ConfigError, match="did you mean 'builtin:tiny'"):
            load("builtin:tyni")


def test_a_name_that_cannot_be_loaded_is_named(tmp_path):
    missing = str(tmp_path / "nothing")
    for load in (get_model, get_tokenizer):
        with pytest.raises(ConfigError, match=f"there is no folder {re.escape(missing)}"):
            load(missing)


@pytest.fixture
def model_folder(tmp_path):
    model, tokenizer = get_model_and_tokenizer("builtin:tiny")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_pickled_weights_are_not_read(model_folder):
    (model_folder / "model.safetensors").unlink()
    torch.save(get_model("builtin:tiny").state_dict(), model_folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=str(model_folder)):
        get_model(str(model_folder))
    # negative control: by the user's own word they are
    assert get_model(str(model_folder), model_kwargs={"use_safetensors": False})


def test_code_of_a_folder_is_not_run(model_folder, monkeypatch):
    mark = model_folder / "ran"
    (model_folder / "hostile.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise OSError\n")
    for name, auto in {
        "config.json": {"AutoConfig": "hostile.C", "AutoModelForCausalLM": "hostile.M"},
        "tokenizer_config.json": {"AutoTokenizer": ["hostile.T", None]},
    }.items():
        config = json.loads((model_folder / name).read_text())
        config["auto_map"] = auto
        config["model_type"] = "hostile"
        config.pop("tokenizer_class", None)
        (model_folder / name).write_text(json.dumps(config))
    for load in (get_model, get_tokenizer):
        with pytest.raises(ConfigError, match=str(model_folder)):
            load(str(model_folder))
    assert not mark.exists()
    with pytest.raises(ConfigError):  # negative control
        get_model(str(model_folder), model_kwargs={"trust_remote_code": True})
    assert mark.exists()
