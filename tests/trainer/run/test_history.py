"""``trainer.history``: the metrics of a run as rows, as a table and as a picture."""

import json

import pytest

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
