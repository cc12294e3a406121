"""An algorithm that remembers more than one batch is one file and one line: its object has the
state, and checkpoints have that of the object."""

import dataclasses
import json
import sys

import pytest

from support.running_baseline import BASELINE
from support.training import metrics_of, small_trainer, weights_hash
from verifiers.errors import ConfigError
from verifiers_trainer.algorithm.losses import LOSSES, register_loss
from verifiers_trainer.algorithm.state import load_state, state_of
from verifiers_trainer.settings.config import RLConfig

FILE = (
    BASELINE
    + """


class Scaled:
    # the policy gradient, over the running mean of |advantage|

    total, count = 0.0, 0

    def __call__(self, tokens):
        sizes = tokens.advantage[tokens.loss_mask].abs()
        self.total, self.count = self.total + float(sizes.sum()), self.count + len(sizes)
        scale = max(1e-3, self.total / max(1, self.count))
        return -(tokens.log_pi - tokens.log_mu).exp() * tokens.advantage / scale

    def state(self):
        return {"total": self.total, "count": self.count}

    def load(self, saved):
        self.total, self.count = saved["total"], saved["count"]


class Floored(Scaled):
    def __call__(self, tokens, *, floor=1.0):
        return super().__call__(tokens).clamp(min=floor)


class ForgetfulScaled(Scaled):
    state = None


class Mean(Scaled):
    def __call__(self, tokens):
        return super().__call__(tokens).mean()
"""
)
RUN = {"deterministic": True, "max_off_policy_steps": 0, "save_strategy": "steps", "save_steps": 2}


@pytest.fixture
def baseline(tmp_path, monkeypatch):
    """The line of the setting."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    yield "mine.py:RunningBaseline"
    sys.modules.pop("mine", None)


def trained(folder, advantage="mean", resume=False, **settings):
    trainer = small_trainer(folder, advantage=advantage, **{**RUN, **settings})
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def steps(folder):
    return {row["step"]: row["loss"].hex() for row in metrics_of(folder) if "loss" in row}


# steps of a batch, steps before the interruption: between batches, and amid one
@pytest.mark.parametrize(("per_batch", "first"), [(1, 2), (2, 2)])
def test_a_resumed_run_has_the_baseline_of_one_that_was_not_interrupted(
    tmp_path, baseline, per_batch, first
):
    shape = {"updates_per_batch": per_batch, "max_steps": 4}
    undisturbed = trained(tmp_path / "a", baseline, **shape)
    assert undisturbed.args.advantage.count == 4 // per_batch * 8
    saved = json.loads((tmp_path / "a" / "checkpoint-2" / "algorithm.json").read_text())
    assert saved["advantage"]["count"] == 2 // per_batch * 8
    trained(tmp_path / "b", baseline, **{**shape, "max_steps": first})
    resumed = trained(tmp_path / "b", baseline, True, **shape)
    assert resumed.args.advantage.state() == undisturbed.args.advantage.state()
    assert steps(tmp_path / "b") == steps(tmp_path / "a")
    assert weights_hash(resumed.model) == weights_hash(undisturbed.model)


def test_without_a_state_a_resumed_run_is_another(tmp_path, baseline):
    """Negative control."""
    forgetful = baseline.replace("RunningBaseline", "Forgetful")
    trained(tmp_path / "a", forgetful, max_steps=4)
    trained(tmp_path / "b", forgetful, max_steps=2)
    trained(tmp_path / "b", forgetful, True, max_steps=4)
    assert not (tmp_path / "b" / "checkpoint-2" / "algorithm.json").exists()
    assert steps(tmp_path / "b") != steps(tmp_path / "a")


def test_amid_a_batch_the_state_is_that_before_it(tmp_path, baseline):
    class Stops(Exception):
        pass

    shape = {"num_iterations": 2, "max_steps": 4, "save_steps": 9}
    undisturbed = trained(tmp_path / "a", baseline, **shape)
    trainer = small_trainer(tmp_path / "b", advantage=baseline, **{**RUN, **shape})
    trainer.step_metrics = lambda batch: (
        (_ for _ in ()).throw(Stops) if trainer.policy_version == 3 else {}
    )
    with pytest.raises(Stops):
        trainer.train()
    assert trainer.args.advantage.count == 16
    saved = json.loads((tmp_path / "b" / "checkpoint-3" / "algorithm.json").read_text())
    assert saved["advantage"]["count"] == 8
    resumed = trained(tmp_path / "b", baseline, True, **shape)
    assert resumed.args.advantage.state() == undisturbed.args.advantage.state()
    assert weights_hash(resumed.model) == weights_hash(undisturbed.model)


class Stops(Exception):
    pass


def stopped_at(folder, step, **settings):
    """Train until an error ends the forward passes of a step, after the first of its rows."""
    trainer = small_trainer(folder, **{**RUN, **settings})
    plain, num_rows = trainer.compute_loss, []

    def compute_loss(*arguments, **keywords):
        output = plain(*arguments, **keywords)
        num_rows.append(trainer.policy_version)
        if num_rows.count(step - 1) == 1 and trainer.policy_version == step - 1:
            raise Stops
        return output

    trainer.compute_loss = compute_loss
    with pytest.raises(Stops):
        trainer.train()
    assert trainer.policy_version == step - 1


@pytest.mark.parametrize("loss", ["Scaled", "ForgetfulScaled"])
def test_a_loss_with_a_state_goes_on_also_where_an_error_ends_a_step_within(
    tmp_path, baseline, loss
):
    shape = {"loss": f"mine.py:{loss}", "max_steps": 4}
    shape |= {"micro_batch_size": 1, "max_seq_len": 32}  # several rows a step
    undisturbed = trained(tmp_path / "a", **shape)
    stopped_at(tmp_path / "b", 4, **shape)
    saved = tmp_path / "b" / "checkpoint-3" / "algorithm.json"
    resumed = trained(tmp_path / "b", resume=True, **shape)
    has_a_state = loss == "Scaled"
    assert saved.exists() == has_a_state  # without it, the negative control, it is another run
    assert (steps(tmp_path / "b") == steps(tmp_path / "a")) == has_a_state
    assert (weights_hash(resumed.model) == weights_hash(undisturbed.model)) == has_a_state
    if has_a_state:
        counts = [json.loads(saved.read_text())["loss"]["count"], resumed.args.loss.count]
        assert 0 < counts[0] < counts[1] == undisturbed.args.loss.count


def test_two_trainers_have_two_objects_and_an_object_keeps_its_name_on_resume(baseline):
    @dataclasses.dataclass
    class Counted:
        count: int = 0

        def __call__(self, rewards_G, lengths_G=None):
            return rewards_G

        def state(self):
            return {"count": self.count}

        def load(self, saved):
            self.count = saved["count"]

    fresh, used = RLConfig(advantage=Counted()), RLConfig(advantage=Counted(7))
    assert fresh.resume_values()["advantage"] == used.resume_values()["advantage"]
    assert state_of(used) == {"advantage": {"count": 7}}
    load_state(fresh, {**state_of(used), "loss": {"of": "a part without a state"}})
    assert fresh.advantage.count == 7
    assert state_of(RLConfig()) == {}


def test_the_keywords_of_a_loss_with_a_state_are_those_of_its_call(tmp_path, baseline):
    trained(tmp_path / "a", max_steps=1, loss="mine.py:Floored", loss_kwargs={"floor": 9})
    assert float.fromhex(steps(tmp_path / "a")[1]) == pytest.approx(9.0)
    with pytest.raises(ConfigError, match=r"has 'flor', which the loss mine.py:Floored does not"):
        trained(tmp_path / "b", max_steps=1, loss="mine.py:Floored", loss_kwargs={"flor": 9})


def test_a_registered_loss_may_have_a_state(tmp_path, baseline, monkeypatch):
    monkeypatch.setitem(LOSSES, "scaled", None)  # taken back after the test
    del LOSSES["scaled"]
    register_loss("scaled")(LOSSES.resolve("mine.py:Scaled"))
    undisturbed = trained(tmp_path / "a", loss="scaled", max_steps=4)
    trained(tmp_path / "b", loss="scaled", max_steps=2)
    resumed = trained(tmp_path / "b", loss="scaled", resume=True, max_steps=4)
    assert resumed.args.loss.state() == undisturbed.args.loss.state()
    assert resumed.args.loss is not undisturbed.args.loss
    assert weights_hash(resumed.model) == weights_hash(undisturbed.model)


def test_an_error_names_the_class_of_a_loss_and_its_line(tmp_path, baseline):
    with pytest.raises(ConfigError, match=r"the loss 'Mean' \(.*mine.py:\d+\) returned shape \[\]"):
        trained(tmp_path / "a", max_steps=1, loss="mine.py:Mean")
