"""A model that sees learns colours from rewards alone, and does not where the pictures are those
of other rows: a minute or two."""

from __future__ import annotations

import pytest

from support.vision_learning import LEARNT, learn_colours

pytestmark = pytest.mark.slow
STEPS = 60
"""Twice what the seed took."""


def test_colours_are_learnt_and_those_of_other_pictures_are_not(tmp_path):
    curve = learn_colours("idefics3", 1, STEPS, tmp_path / "right")
    assert sum(curve.rewards[:2]) / 2 < 0.1
    assert curve.last > LEARNT
    assert curve.held_out > 0.8

    steps = len(curve.rewards)
    control = learn_colours("idefics3", 1, steps, tmp_path / "shuffled", is_shuffled=True)
    assert len(control.rewards) == steps
    assert control.last < 0.5
    assert control.held_out < 0.5
