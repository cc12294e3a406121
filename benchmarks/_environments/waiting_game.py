"""An environment that waits: each rollout is scored by a function that blocks a thread for
``wait_s`` seconds."""

import socket
import time

import verifiers as vf


class WaitingGame(vf.SingleTurnEnv):
    """One turn; its state has the address of the machine that ran it."""

    async def setup_state(self, state):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # sends nothing: asks which address a packet would come from
            probe.connect(("10.77.41.254", 9))
            state["machine"] = probe.getsockname()[0]
        return state


def load_environment(
    num_examples: int = 100, wait_s: float = 1.0, at_once: int = 8
) -> vf.Environment:
    """``num_examples`` equal games, ``at_once`` of which a worker scores at a time."""

    def waits(completion) -> float:
        time.sleep(wait_s)
        return float(len(completion[-1]["content"]))

    rows = [{"question": f"Game {number}", "answer": ""} for number in range(num_examples)]
    env = WaitingGame(dataset=rows, rubric=vf.Rubric([waits]))
    env.set_max_workers(at_once)
    return env
