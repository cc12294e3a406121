"""``ProposerSolverEnv``: one role writes tasks, another attempts each of them several times; both
can be trained.

The proposer earns most for tasks that are solved rarely and not never (Zhao et al., "Absolute
Zero", 2025, equation 4). The attempts at one task are compared with each other, never with attempts
at another task, which may be easier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from verifiers.data.messages import message_text
from verifiers.data.text import split_reasoning
from verifiers.environments.keywords import MultiTurnOptions
from verifiers.environments.multi_agent.env import MultiAgentEnv, Role, role_of
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import setup
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.rubrics import Rubric
from verifiers.runtime.signatures import spell_out
from verifiers.types import Message, Messages

NO_TASK_REWARD = -1.0
"""The proposer's reward for a reply that is no task."""


class ProposerSolverEnv(MultiAgentEnv):
    """A role that writes tasks, and a role that solves them; subclasses define ``task_of`` and
    ``score``.

    ``roles``: the proposer, then the solver. ``attempts``: how often the solver attempts a task, 2
    or more, each time without its other attempts before it. ``rubric`` adds metrics to these:

    * ``<proposer>``: the proposer's reward, ``task_reward`` of the scores, or ``NO_TASK_REWARD``;
    * ``is_task``: whether its reply was a task; ``solve_rate``: the mean score of the attempts, 0
      without a task;
    * ``<solver>_<n>``: the reward with which training credits attempt n: its score minus the mean
      of the other attempts at the same task (RLOO, Ahmadian et al. 2024), 0 without a task.

    ``reward`` is that of the proposer where it is trained, else the solve rate.

    *Raises* ConfigError for fewer than two attempts, and for other than two roles.

    >>> from verifiers.testing import ScriptedClient
    >>> class Sums(vf.ProposerSolverEnv):
    ...     def task_of(self, row, text): return text if "+" in text else None
    ...     def score(self, task, text): return text == str(sum(map(int, task.split("+"))))
    >>> env = Sums(attempts=2, dataset=[{"question": "Write a sum."}])
    >>> output = env.evaluate(ScriptedClient(["2+3", "5", "6"]), "m").outputs[0]
    >>> output.metrics["proposer"], output.metrics["solve_rate"], output.metrics["solver_1"]
    (0.5, 0.5, 1.0)
    """

    @spell_out(MultiTurnOptions, MultiAgentEnv.__init__)
    def __init__(
        self,
        roles: Sequence[Role | str] = ("proposer", "solver"),
        trained_roles: Sequence[str] | None = None,
        *,
        attempts: int = 4,
        **parameters: Unpack[MultiTurnOptions],
    ):
        super().__init__(roles, trained_roles, **parameters)
        if len(self.roles) != 2:
            raise ConfigError("roles takes two: the proposer, then the solver", key="roles")
        if attempts < 2:
            raise ConfigError(
                f"attempts is {attempts}, and attempts at a task are compared with each other: use"
                " 2 or more",
                key="attempts",
            )
        self.proposer, self.solver = self.roles
        self.attempts = attempts
        # and may be that of another environment too
        is_given = parameters.get("rubric") is not None
        rewards = Rubric(parser=self.parser) if is_given else self.rubric
        is_proposer_scored = self.proposer in self.trained_roles
        rewards.add_reward_func(
            _with_name(self.proposer, self._proposer_reward), weight=float(is_proposer_scored)
        )
        rewards.add_reward_func(
            _with_name("solve_rate", self._solve_rate), weight=float(not is_proposer_scored)
        )
        rewards.add_metric(
            _with_name("is_task", lambda state: float(state["proposed_task"] is not None))
        )
        for number in range(attempts):
            rewards.add_metric(_with_name(self._attempt_name(number), self._attempt_reward(number)))
        if is_given:
            self.add_rubric(rewards)

    # --- methods to override ----------------------------------------------------------------------

    def task_of(self, row: Mapping[str, Any], text: str) -> Any:
        """Return the task that the proposer's reply ``text`` to a row is; None when it is none."""
        raise NotImplementedError(f"{type(self).__name__} must define task_of(self, row, text)")

    def score(self, task: object, text: str) -> float:
        """Return how well the solver's reply ``text`` solves the task, from 0 to 1; "" when a limit
        truncated it."""
        raise NotImplementedError(f"{type(self).__name__} must define score(self, task, text)")

    def question(self, task: object) -> Messages | str:
        """Return what the solver is shown. Default: the task as text."""
        return str(task)

    def task_reward(self, scores: Sequence[float]) -> float:
        """Return the proposer's reward for a task with these scores of its attempts.

        Default: 1 minus their mean, and 0 if all are 0: a task that none solves may have no
        solution.
        """
        mean = sum(scores) / len(scores)
        return 1.0 - mean if mean > 0 else 0.0

    # --- one rollout ------------------------------------------------------------------------------

    @setup(priority=90)
    def open_task(self, state: State) -> None:
        """Set ``state["proposed_task"]``, None until there is a task, and ``state["scores"]`` of
        its attempts."""
        state["proposed_task"], state["scores"] = None, []

    def next_role(self, state: State) -> str | None:
        """The proposer, then the solver for each attempt; None after a reply that is no task."""
        if not state["trajectory"]:
            return self.proposer
        is_over = state["proposed_task"] is None or len(state["scores"]) == self.attempts
        return None if is_over else self.solver

    def observe(self, state: State, role: str) -> Messages | str | None:
        """The proposer is shown the row's prompt, the solver the task, without its
        attempts before."""
        if role == self.proposer:
            prompt: Messages | None = super().observe(state, role)
            return prompt
        self.open_view(state, role)
        return self.question(state["proposed_task"])

    def after_turn(self, state: State, role: str, message: Message) -> None:
        """Read the task, or score the attempt."""
        _, text = split_reasoning(message_text(message))
        text = "" if state["trajectory"][-1]["is_truncated"] else text
        if role == self.proposer:
            state["proposed_task"] = self.task_of(state, text)
        else:
            state["scores"].append(float(self.score(state["proposed_task"], text)))

    def continued_step(self, state: State) -> TrajectoryStep | None:
        """None: no turn continues another."""
        return None

    def add_trajectory_step(self, state: State, step: TrajectoryStep) -> Any:
        """Append ``step`` with its role, and the name of the attempt whose reward it has."""
        added = super().add_trajectory_step(state, step)
        if role_of(step) == self.solver and self.solver in self.trained_roles:
            step["extras"]["rewarded_role"] = self._attempt_name(len(state["scores"]))
        return added

    # --- rewards ----------------------------------------------------------------------------------

    def _attempt_name(self, number: int) -> str:
        return f"{self.solver}_{number + 1}"

    def _proposer_reward(self, state: State) -> float:
        scores = self._scores(state)
        return self.task_reward(scores) if scores else NO_TASK_REWARD

    def _solve_rate(self, state: State) -> float:
        scores = self._scores(state)
        return sum(scores) / max(len(scores), 1)

    def _attempt_reward(self, number: int) -> Callable[[State], float]:
        def reward(state: State) -> float:
            scores = self._scores(state)
            if not scores:
                return 0.0
            sum_of_siblings = sum(scores) - scores[number]
            return scores[number] - sum_of_siblings / (len(scores) - 1)

        return reward

    def _scores(self, state: State) -> Sequence[float]:
        """Those of all attempts; none where the reply was no task. *Raises* ValueError when some
        are missing."""
        scores: Sequence[float] = state["scores"]
        if self.next_role(state) is not None:
            raise ValueError(f"the rollout ended after {len(scores)} of {self.attempts} attempts")
        return scores


def _with_name(name: str, method: Callable[[State], float]) -> Callable[[State], float]:
    """A reward function with the name."""

    def reward(state: State) -> float:
        return method(state)

    reward.__name__ = name
    return reward
