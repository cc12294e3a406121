"""Source of an advantage with a state, and of one that forgets it: a module of a test's own."""

from __future__ import annotations

BASELINE = """
class RunningBaseline:
    compares = False
    mean, count = 0.0, 0

    def __call__(self, rewards_G, lengths_G=None):
        advantages = [rewards - self.mean for rewards in rewards_G]
        for rewards in rewards_G:
            self.count += len(rewards)
            self.mean += float((rewards - self.mean).sum()) / self.count
        return advantages

    def state(self):
        return {"mean": self.mean, "count": self.count}

    def load(self, saved):
        self.mean, self.count = saved["mean"], saved["count"]


class Forgetful(RunningBaseline):
    state = None
"""
