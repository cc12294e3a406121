"""Environment workers: rollouts played in other processes of this machine, or on a Ray cluster.

Environments and reward functions that compute hold one core each; with workers they use as many as there are. What is
shared stays with the caller: the model client (so there is one retry layer and one limit of requests, and any client
works), the order of the plan, the journal, the scores of whole groups. A worker builds the environment by its id,
plays and scores rollouts one by one, and hands them back; when it dies, what it held is played again elsewhere.

``opening`` starts the workers, ``pool`` is the caller's side, ``serving`` the worker's; ``messages`` is all they say to
each other, ``channels`` and ``ray`` how. What is run, and when, is ``runner``'s.
"""

from verifiers.runs.workers.pool import WorkerPool

__all__ = ["WorkerPool"]
