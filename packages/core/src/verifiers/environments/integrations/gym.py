"""``GymEnv``: a Gymnasium environment, or an environment with the same interface, through text.

Promise: one environment object per rollout, reset with the seed of the row and closed after the
rollout. The reward of a step is stored on its turn. Text that ``action_parser`` cannot read ends
the episode with reward 0 for that step, and the rollout is scored. An exception of the environment
ends the rollout with an unknown reward.

``reset`` may take a seed or not, and return ``(observation, info)`` or the observation; ``step``
may return five values or, as before Gymnasium, four. Calls run on the event loop: a slow
environment blocks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from verifiers.data.messages import message_text
from verifiers.environments.integrations import extras
from verifiers.environments.integrations.episodes import add_rows, opened, seed_of
from verifiers.environments.keywords import MultiTurnOptions
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.errors import ConfigError
from verifiers.rollouts.author_code import Hook, cleanup, maybe_await, passes, sums_turns
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.rubrics import Rubric
from verifiers.rubrics.rubric import RubricOptions
from verifiers.runtime.signatures import spell_out
from verifiers.storage.identity import Free
from verifiers.types import Messages

if TYPE_CHECKING:
    from types import ModuleType


@sums_turns
def sum_step_rewards(state: State) -> float:
    """Return the sum of the rewards of the steps."""
    return sum((step["reward"] or 0.0 for step in state["trajectory"]), 0.0)


class EpisodicSumRubric(Rubric):
    """A rubric with the sum of the step rewards as a reward function, in addition to
    those passed."""

    @spell_out(RubricOptions, Rubric.__init__)
    def __init__(self, **parameters: Unpack[RubricOptions]):
        super().__init__(**parameters)
        self.add_reward_func(sum_step_rewards)


class GymEnv(MultiTurnEnv):
    """Episodes of a Gymnasium environment.

    Args:
        env_cls: An id for ``gymnasium.make``, or a class or function that is called with
            ``env_kwargs``.
        env_kwargs: Keywords of the Gymnasium environment.
        action_parser: Function from the text of a message of the model to an action; the default
            takes the answer of the parser, as an integer where the action space is discrete, and
            refuses actions outside that space. May be async.
        obs_to_text: Function from an observation to the content of a user message; default ``str``.
            May be async.
        num_train_episodes: Rows to train on.
        num_eval_episodes: Rows to evaluate on.
        max_episode_steps: Actions after which an episode ends; None = no limit here.
        seed: The seed of a row is ``seed + example_id``.

    Example::

        env = GymEnv("FrozenLake-v1", env_kwargs={"is_slippery": False}, obs_to_text=lambda obs: f"You are on {obs}.")

    The question of a row precedes the first observation. Each turn has ``reward``, and
    ``extras["terminated"]``, ``extras["truncated"]`` and ``extras["gym_info"]``, the ``info`` of
    its step; the last dict is ``state["gym_info"]``, and ``state["gym_done"]`` whether the episode
    ended. Further parameters are ``MultiTurnEnv``'s.

    *Raises* ConfigError when Gymnasium is not installed or a setting is invalid.
    """

    @spell_out(MultiTurnOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        env_cls: str | Callable[..., object],
        env_kwargs: Mapping[str, object] | None = None,
        action_parser: Callable[[str], object] | None = None,
        obs_to_text: Callable[[Any], object] | None = None,
        num_train_episodes: Annotated[
            int, Free("how many rows; every row has a content hash")
        ] = 1000,
        num_eval_episodes: Annotated[int, Free("how many rows; every row has a content hash")] = 20,
        max_episode_steps: int | None = None,
        seed: int = 0,
        **parameters: Unpack[MultiTurnOptions],
    ):
        gymnasium = extras.GYM.load("GymEnv")
        if isinstance(env_cls, str):
            _require_known(gymnasium, env_cls)
        elif not callable(env_cls):
            raise ConfigError(
                f"env_cls is {env_cls!r}; give an id such as 'CartPole-v1', a class or a function"
            )
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigError(
                f"max_episode_steps is {max_episode_steps}; it must be 1 or more, or None"
            )
        add_rows(parameters, num_train_episodes, num_eval_episodes, seed)
        if parameters.get("rubric") is None:
            parameters["rubric"] = EpisodicSumRubric()
        super().__init__(**parameters)
        self.env_cls, self.env_kwargs = env_cls, dict(env_kwargs or {})
        self.action_parser = action_parser
        if obs_to_text is not None and type(self).obs_to_text is GymEnv.obs_to_text:
            self.obs_to_text = obs_to_text  # type: ignore[assignment]
        self.max_episode_steps, self.seed = max_episode_steps, seed

    def make_env(self) -> Any:
        """Create a new environment; override to wrap it."""
        if isinstance(self.env_cls, str):
            return extras.GYM.load("GymEnv").make(self.env_cls, **self.env_kwargs)
        return self.env_cls(**self.env_kwargs)

    def obs_to_text(self, observation: Any) -> Any:
        """The content of the user message for an observation; may be async. An override wins over
        the parameter."""
        return "" if observation is None else str(observation)

    # --- one episode ------------------------------------------------------------------------------

    async def setup_state(self, state: State) -> None:
        """Create and reset ``state["gym_env"]``, and append its first observation to the prompt."""
        env = state["gym_env"] = self.make_env()
        observation, state["gym_info"] = _reset(env, seed_of(state, self.seed))
        state["gym_done"] = False
        state["prompt"] = opened(
            self.as_prompt(state["prompt"]), await maybe_await(self.obs_to_text(observation))
        )

    async def add_trajectory_step(self, state: State, step: TrajectoryStep) -> None:
        """Perform the action of the turn here, before a turn limit can end the rollout."""
        await maybe_await(super().add_trajectory_step(state, step))
        completion = step["completion"]
        text = completion if isinstance(completion, str) else message_text(completion[-1])
        try:
            action = await self._action(text, step, state)
        except Exception as error:
            if passes(error):
                raise
            step["reward"], step["extras"]["action_error"] = 0.0, f"{type(error).__name__}: {error}"
            self._end(state, f"Your action could not be read ({error}). The episode is over.")
            return
        with Hook(state, "the step of the gym environment", timing=None):
            observation, reward, terminated, truncated, state["gym_info"] = _step(
                state["gym_env"], action
            )
        truncated = truncated or len(state["trajectory"]) == self.max_episode_steps
        step["reward"] = reward
        step["extras"] |= {
            "terminated": terminated,
            "truncated": truncated,
            "gym_info": state["gym_info"],
        }
        content = await maybe_await(self.obs_to_text(observation))
        if terminated or truncated:
            self._end(state, content)
        else:
            state["gym_observation"] = content

    def env_response(self, messages: Messages, state: State, **_: object) -> Messages:
        """Return the observation after the last action."""
        return self._user_message(state["gym_observation"])

    @cleanup
    def close_gym_env(self, state: State) -> None:
        """Close the environment of the rollout."""
        state.pop("gym_observation", None)
        close = getattr(state.get("gym_env"), "close", None)
        if close is not None:
            close()

    async def _action(self, text: str, step: TrajectoryStep, state: State) -> object:
        if self.action_parser is not None:
            return await maybe_await(self.action_parser(text))
        return _default_action(
            await maybe_await(self.parser.parse_answer(step["completion"])), state["gym_env"]
        )

    def _end(self, state: State, content: object) -> None:
        state["gym_done"], state["final_env_response"] = True, self._user_message(content)

    def _user_message(self, content: Any) -> Messages:
        return (
            content
            if self.message_type == "completion"
            else self.as_prompt([{"role": "user", "content": content}])
        )


def _require_known(gymnasium: ModuleType, env_id: str) -> None:
    """*Raises* ConfigError with the message of Gymnasium ("did you mean …") for an unknown id."""
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        raise ConfigError(f"Gymnasium has no environment {env_id!r}: {error}") from error


def _default_action(answer: Any, env: object) -> object:
    """Convert an answer to an action. *Raises* ValueError unless it is in the action space."""
    if answer is None:
        raise ValueError("there is no action in it")
    space = getattr(env, "action_space", None)
    if space is None:
        return answer
    action = int(answer) if hasattr(space, "n") else answer
    if not space.contains(action):
        raise ValueError(f"{action!r} is not in {space}")
    return action


def _reset(env: Any, seed: int) -> tuple[object, object]:
    """Start an episode and return (observation, info); info is {} where the environment returns
    none."""
    parameters = inspect.signature(env.reset).parameters.values()
    if any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters):
        result = env.reset(seed=seed)
    else:
        if callable(set_seed := getattr(env, "seed", None)):
            set_seed(seed)
        result = env.reset()
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return result
    return result, {}


def _step(env: Any, action: object) -> tuple[object, float, bool, bool, object]:
    """Return (observation, reward, terminated, truncated, info). *Raises* TypeError for another
    number of values."""
    result = env.step(action)
    match result:
        case (observation, reward, terminated, truncated, info):
            return observation, float(reward), bool(terminated), bool(truncated), info
        case (observation, reward, done, info):
            cut = bool(done) and isinstance(info, Mapping) and bool(info.get("TimeLimit.truncated"))
            return observation, float(reward), bool(done) and not cut, cut, info
    kind = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
    raise TypeError(
        f"step() returned {kind}; it must return (observation, reward, terminated, truncated, info)"
    )
