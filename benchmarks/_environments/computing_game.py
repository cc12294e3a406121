"""A CPU-bound environment: each of its replies computes for ``work_ms`` milliseconds
of CPU time."""

import time

import verifiers as vf


class ComputingGame(vf.MultiTurnEnv):
    """Two turns with one computation between them."""

    def __init__(self, work_ms: float, **settings):
        super().__init__(**settings)
        self.work_ms = work_ms

    async def env_response(self, messages, state):
        until = time.thread_time() + self.work_ms / 1000
        count = 0
        while time.thread_time() < until:
            count += 1
        return [{"role": "user", "content": f"counted to {min(count, 9)}"}]

    @vf.stop
    def two_turns(self, state):
        return len(state["trajectory"]) >= 2


def load_environment(num_examples: int = 100, work_ms: float = 20.0) -> vf.Environment:
    """``num_examples`` equal games."""
    rows = [{"question": f"Game {number}", "answer": ""} for number in range(num_examples)]
    return ComputingGame(
        work_ms, dataset=rows, rubric=vf.Rubric([lambda completion: float(len(completion))])
    )
