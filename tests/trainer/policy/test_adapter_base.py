"""An adapter whose base model is not where its file says."""

from __future__ import annotations

import json

import pytest

from verifiers.errors import ConfigError
from verifiers_trainer.policy.folder_client import load_folder


@pytest.mark.parametrize("base", ["./base", "../elsewhere/base"])
def test_the_error_names_the_adapters_file_and_the_base(tmp_path, monkeypatch, base):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        load_folder(folder)
    assert str(folder / "adapter_config.json") in str(caught.value)
    assert repr(base) in str(caught.value)
    assert "write the whole path" in str(caught.value)
