"""A tracker that raises, hangs or is absent costs one warning; without the thread between, it costs
the run."""

import pytest
from transformers import TrainerCallback

from support.training import metrics_of, run, small_trainer


class NoNetwork(TrainerCallback):
    def on_log(self, args, state, control, **_):
        raise ConnectionError("no network")


def test_called_from_the_loop_itself_a_tracker_that_raises_ends_the_run(tmp_path):
    with pytest.raises(ConnectionError, match="no network"):
        run(small_trainer(tmp_path, max_steps=3, callbacks=[NoNetwork()]))
    assert len(metrics_of(tmp_path)) == 1
