"""Environment workers: rollouts generated in other processes of this machine, or on a Ray cluster.

CPU-bound environments and reward functions occupy one core per process; workers use several. The
caller keeps what is shared: the model client (one retry layer, one limit of requests, any client
works), the order of the plan, the journal, and group scoring. A worker loads the environment by its
id, generates and scores rollouts, and returns them; when it dies, its rollouts are run again by
other workers.

``opening`` starts the workers, ``pool`` is the caller's side, ``serving`` the worker's;
``messages`` defines the protocol, ``channels`` and ``ray`` the transport. ``runner`` decides what
runs, and when.
"""

from verifiers.runs.workers.pool import WorkerPool

__all__ = ["WorkerPool"]
