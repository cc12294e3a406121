"""A folder of its own for every script, and one thread for torch: the models are tiny."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return tmp_path
