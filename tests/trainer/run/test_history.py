"""``trainer.history``: the metrics of a run as rows, as a table and as a picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.training import small_trainer
from verifiers.errors import ConfigError
from verifiers_trainer.run.history import History


def test_rows_table_and_picture(tmp_path):
    history = History(tmp_path)
    assert history.rows == []
    with pytest.raises(ConfigError, match="train first"):
        history.plot()
    lines = [{"step": step, "reward/mean": step / 4, "entropy": 1.0} for step in range(1, 4)]
    lines.append({"step": 3, "eval_reward": 0.5, "eval_reward_stderr": 0.1})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert history.rows == lines
    assert len(history) == 4
    frame = history.to_pandas()
    assert list(frame["step"]) == [1, 2, 3, 3]
    assert frame["reward/mean"].isna().tolist() == [False, False, False, True]
    picture = history.plot()
    assert picture.path == tmp_path / "learning-curve.png"
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_a_history_shows_itself(tmp_path):
    history = History(tmp_path)
    assert repr(history) == f"History('{tmp_path}': no step yet)"
    assert "<svg" not in history._repr_html_()
    lines = [{"step": step, "reward/mean": step / 4} for step in range(1, 5)]
    lines.append({"step": 4, "eval_reward": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = "4 steps, reward 0.375 -> 0.875 (first and last 2), evaluated 0.500"
    assert repr(history) == f"History('{tmp_path}': {text})"
    page = history.html("<b>run</b>")
    assert page.count("<polyline") == 2
    assert page.count("<circle") == 1
    assert "&lt;b&gt;run" in page
    ElementTree.fromstring(page)


TRAINING = """
import verifiers as vf
from support.training import toy_env
config = vf.RLConfig(run_name="live", batch_size=8, rollouts_per_example=4, max_steps=3,
                     max_tokens=4, max_seq_len=64, use_lora=False, save_strategy="no")
vf.RLTrainer("builtin:tiny", toy_env(), config).train();
"""


def test_training_in_a_notebook_shows_its_curve_and_what_it_made(tmp_path, monkeypatch):
    manager_module = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    manager, client = manager_module.start_new_kernel(cwd=str(tmp_path))
    messages = []
    try:
        reply = client.execute_interactive(TRAINING, output_hook=messages.append, timeout=120)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", reply["content"]
    kinds = [message["msg_type"] for message in messages]
    pages = [
        message["content"]["data"]["text/html"]
        for message in messages
        if message["msg_type"] == "update_display_data"
    ]
    assert kinds.count("update_display_data") >= 2
    assert "step 3/3" in pages[-1]
    assert "<svg" in pages[-1]
    assert "learning_curve.png" in str(messages[-3:])
    assert (tmp_path / "outputs/live/learning_curve.png").is_file()


def test_training_in_a_script_prints_its_steps_and_its_end(tmp_path, capsys):
    trainer = small_trainer(tmp_path, max_steps=2, disable_tqdm=False)
    trainer.train()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "step 1/2  reward" in printed.err
    assert f"numbers         {tmp_path}/metrics.jsonl" in printed.err
    assert (tmp_path / "learning_curve.png").is_file()

    small_trainer(tmp_path / "quiet", max_steps=1, disable_tqdm=True).train()
    assert capsys.readouterr().err == ""
