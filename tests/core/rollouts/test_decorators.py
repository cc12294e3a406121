"""Marks on methods."""

import pytest

import verifiers.rollouts.author_code as vf
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import decorated


class Game:
    @vf.stop
    def lost(self, state):
        return False

    @vf.stop(priority=5)
    def won(self, state):
        return True

    @vf.stop()
    def drawn(self, state):
        return False

    @vf.cleanup(stage="group")
    async def tidy(self, states): ...

    @vf.reward(weight=0.5)
    @vf.metric(stage="group")
    def both(self, states):
        return [1.0]


def test_marked_methods_come_by_priority_then_name():
    assert [name for name, _, _ in decorated(Game, "stop")] == ["won", "drawn", "lost"]


def test_an_object_gives_bound_methods_and_a_class_plain_ones():
    game = Game()
    _, bound, _ = decorated(game, "stop")[0]
    _, plain, _ = decorated(Game, "stop")[0]
    assert bound({}) is True
    assert plain(game, {}) is True


def test_options_read_as_keys_and_attributes():
    _, _, options = decorated(Game, "cleanup")[0]
    assert (options.stage, options["priority"], options.get("weight")) == ("group", 0, 1.0)


def test_a_method_may_carry_two_marks():
    assert decorated(Game, "reward")[0][2].weight == 0.5
    assert decorated(Game, "metric")[0][2].stage == "group"


def test_marks_are_inherited_and_lost_by_an_unmarked_override():
    class Longer(Game):
        def won(self, state):
            return False

    assert [name for name, _, _ in decorated(Longer, "stop")] == ["drawn", "lost"]


def test_attributes_of_the_instance_are_not_read():
    class Lazy(Game):
        @property
        def dataset(self):
            raise AssertionError("a property was evaluated")

    assert len(decorated(Lazy(), "stop")) == 3


def test_an_unknown_stage_is_refused_by_name():
    with pytest.raises(ConfigError, match="stage='later'"):
        vf.cleanup(stage="later")
