"""``Environment``: a dataset, a way to act and a way to score, under one name.

An environment object is configuration. The constructor starts no thread, opens nothing and seeds
nothing; the dataset is read on first use. This class is what an author declares and overrides::

    class Countdown(vf.MultiTurnEnv):                # or vf.SingleTurnEnv, vf.ToolEnv, …
        def setup_state(self, state):                # before the first turn
            state["left"] = state["info"]["start"]

        def env_response(self, messages, state):     # the response to the model's turn
            state["left"] -= int(messages[-1].content)
            return f"{state['left']} left"

        @vf.stop
        def is_empty(self, state):                   # what ends the rollout
            return state["left"] <= 0

    def load_environment():
        return Countdown(dataset=[{"question": "Take 1 to 3 of 7.", "info": {"start": 7}}],
                         rubric=vf.Rubric(funcs=[lambda state: float(state["left"] == 0)]))

The rest of an environment is in its base classes: ``rows`` (the data), ``settings`` (``set_…``),
``rollouts.model_call`` (one model call), ``runs.facade`` (``evaluate``, ``generate``,
``rollout``), ``teardown`` (``close``). ``rollouts.loop`` runs one rollout and calls the hooks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Unpack

from verifiers.data.examples import Example
from verifiers.data.sources import DatasetLike
from verifiers.environments import definition
from verifiers.environments.keywords import Oracle, RunDefaults
from verifiers.environments.rows import Rows
from verifiers.environments.settings import Settings
from verifiers.environments.teardown import Teardown
from verifiers.parsers import Parser
from verifiers.rollouts.author_code import defaults
from verifiers.rollouts.branching import Branching
from verifiers.rollouts.contract import LoadedFrom
from verifiers.rollouts.model_call import ModelCalls
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runs.facade import RunMethods
from verifiers.runtime.redaction import remember_secrets
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.values import Flag
from verifiers.storage.identity import Free, Identified


class Environment(RunMethods, ModelCalls, Settings, Rows, Teardown, Identified):
    """Base of all environments; write a ``SingleTurnEnv`` or a ``MultiTurnEnv``, not this.

    Args:
        dataset: Rows to train on: a ``datasets.Dataset``, a list of dicts, a dict of columns, the
            path of a JSONL, JSON, CSV or Parquet file, or a function without arguments that returns
            any of these (called on first use).
        eval_dataset: Rows to evaluate on, in the same forms; default: ``dataset``.
        system_prompt: System message before every question.
        few_shot: Messages between the system message and the question, as examples.
        parser: Reads answers out of completions; default: the rubric's, else ``Parser()``.
        rubric: Scores the rollouts; default: a ``Rubric`` without functions.
        sampling_args: Sampling arguments of every request; those of a run override them.
        message_type: "chat", or "completion" for prompts and completions as plain text.
        tool_defs: Tools that the model is shown, in the wire format.
        env_id: Name of the environment in results; default: the id it was loaded by.
        env_args: Arguments of the loader, for results.
        max_seq_len: Tokens of a conversation after which a rollout ends.
        score_rollouts: False leaves rewards unknown.
        pass_threshold: A reward of at least this solves a task, where the rubric names no
            ``success``.
        oracle: ``oracle(row)`` returns replies that solve a row; see the attribute.
        question_key: Column that holds the question.
        answer_key: Column that holds the reference answer.
        timeout_seconds: Time limit of a rollout that is part of the task, in seconds; None = none.
        rollouts_per_example: Default of runs: rollouts of each example.
        max_concurrent: Default of runs: rollouts in flight.
        max_workers: Default of runs: threads for synchronous functions of the author.
        branching: Where the rollouts of a group fork (``vf.Branching``); None: they share nothing
            but the prompt.

    Further keywords become attributes, unless they nearly match a parameter (then: "did you mean").

    Raises ``ConfigError`` for contradictory or misspelt parameters, ``DatasetError`` when the data
    are first read.

    >>> from verifiers.testing import ScriptedClient
    >>> env = vf.SingleTurnEnv(dataset=[{"question": "1 + 1", "answer": "2"}], system_prompt="Add.")
    >>> env.get_dataset()["answer"][0], len(env.evaluate(ScriptedClient("2"), "m"))
    ('2', 1)
    """

    max_turns: int = -1
    rollouts_per_example: Annotated[int, Free("every rollout has a key")]
    max_concurrent: Annotated[int, Free("only how fast")]
    max_workers: Annotated[int | None, Free("only how fast")] = None
    branching: Branching | None = None
    rubric: Rubric
    oracle: Oracle | None = None
    """``oracle(row)`` returns replies that solve a row: one text, a list with one reply for each
    turn (text, a message, or a list of tool calls), or a function of the request. An audit needs it
    where the row's ``answer`` alone is no reply. Pass it to the constructor, or define it as a
    method."""
    non_solution_reward: float | None = None
    """What the best non-solution earns, for learning curves; ``vf-audit`` measures it. None:
    unknown."""

    @spell_out(RunDefaults, {})
    def __init__(
        self,
        dataset: Annotated[DatasetLike | None, Free("every row has a content hash")] = None,
        eval_dataset: Annotated[DatasetLike | None, Free("every row has a content hash")] = None,
        system_prompt: str | None = None,
        few_shot: Sequence[Mapping[str, object]] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: Mapping[str, object] | None = None,
        message_type: str = "chat",
        tool_defs: Sequence[Mapping[str, object]] | None = None,
        env_id: str | None = None,
        env_args: Mapping[str, object] | None = None,
        map_kwargs: Annotated[
            Mapping[str, object] | None, Free("accepted for older callers")
        ] = None,
        max_seq_len: Annotated[
            int | None, Flag("Tokens of a conversation after which a rollout ends.")
        ] = None,
        interleaved_rollouts: Annotated[bool, Free("accepted for older callers")] = False,
        score_rollouts: bool = True,
        pass_threshold: Annotated[
            float | None, Free("only what a statistic counts; no row holds it")
        ] = None,
        oracle: Annotated[Oracle | None, Free("only an audit calls it")] = None,
        question_key: str = "question",
        answer_key: str = "answer",
        timeout_seconds: float | None = None,
        **kwargs: Unpack[RunDefaults],
    ):
        settings = self._renamed(kwargs, tool_defs)
        definition.check_parameters(
            type(self).__name__,
            has_rows=dataset is not None or eval_dataset is not None,
            message_type=message_type,
            is_introduced=bool(system_prompt or few_shot),
            sampling_args=sampling_args,
        )
        self.logger = logging.getLogger(f"verifiers.{type(self).__name__}")
        self._warnings: set[str] = set()
        self.loaded_from: LoadedFrom | None = None
        """How it was loaded; None when it was constructed directly."""
        self.source_digests: Mapping[str, str] = {}
        """Path -> SHA-256 of the local files whose code runs, as they were when it was loaded."""
        self.changes: dict[str, Any] = {}
        """Settings that ``set_kwargs`` changed since loading; with ``loaded_from``, they rebuild
        the environment."""
        self.system_prompt, self.few_shot = system_prompt, definition.checked_few_shot(few_shot)
        self.parser = parser or (
            rubric.parser if rubric is not None and rubric.parser is not None else Parser()
        )
        self.rubric = rubric if rubric is not None else Rubric(parser=self.parser)
        self.sampling_args = {"n": 1, "extra_body": {}} | dict(sampling_args or {})
        remember_secrets(self.sampling_args)
        self.message_type = message_type
        self.tool_defs = list(settings.pop("tool_defs", None) or [])
        self.env_id, self.env_args, self.env_version = env_id or "", dict(env_args or {}), ""
        self.max_seq_len, self.interleaved_rollouts = max_seq_len, interleaved_rollouts
        self.score_rollouts, self.pass_threshold = score_rollouts, pass_threshold
        if oracle is not None:
            self.oracle = oracle
        self.timeout_seconds = timeout_seconds
        self.max_total_completion_tokens = -1
        self._take_rows(
            dataset,
            eval_dataset,
            system_prompt=system_prompt,
            few_shot=few_shot,
            message_type=message_type,
            question_key=question_key,
            answer_key=answer_key,
        )
        self.monitor_rubric = Rubric(parser=self.parser)
        """Metrics of every rollout besides those of the rubric; they change neither reward nor
        advantage."""
        self.set_kwargs(**settings)
        if parser is not None and (warning := definition.two_parsers(parser, rubric)):
            self.logger.warning("%s", warning)

    def __repr__(self) -> str:
        name = f"{self.env_id!r}, " if self.env_id else ""
        turns = f", max_turns={self.max_turns}" if self.max_turns > 0 else ""
        return f"{type(self).__name__}({name}{self.rubric!r}{turns})"

    # --- methods to override ----------------------------------------------------------------------

    @defaults
    def setup_state(self, state: State, *args: Any, **kwargs: Any) -> Any:
        """Prepare ``state`` before the first turn; a returned mapping replaces it.
        Sync or async."""
        return state

    def get_prompt_messages(self, state: State) -> Any:
        """The next prompt; ``MultiTurnEnv`` builds it from the conversation and ``env_response``.
        Sync or async."""
        raise NotImplementedError(
            f"{type(self).__name__} must define get_prompt_messages(self, state)"
        )

    def render_completion(self, state: State) -> Any:
        """Set ``state["completion"]`` when the rollout is over. Sync or async."""

    def for_row(self, row: Mapping[str, Any]) -> Environment:
        """The environment that runs a row or a state: ``self``, or a member of a group of
        environments."""
        return self

    # --- before a run -----------------------------------------------------------------------------

    @property
    def has_reward(self) -> bool:
        """Whether something gives a reward: a function with a weight, or a rubric that scores by
        itself."""
        return any(self.rubric.get_reward_weights()) or self.rubric.scores_itself

    def check_definition(self, sample: Sequence[Example]) -> None:
        """Check what the first examples of a run need of the environment; warnings go to
        ``logger``.

        *Raises* ConfigError when ``env_response`` is missing and a second turn would call it.
        """
        definition.check(self, sample)

    @property
    def max_branches(self) -> int:
        """Rollouts of a tree; of several environments the most; 0 if none branches."""
        return 0 if self.branching is None else self.branching.branches

    @property
    def has_own_loop(self) -> bool:
        """Whether a subclass overrides ``rollout``, which then replaces the rollout loop."""
        return type(self).rollout is not Environment.rollout

    def warn_once(self, message: str) -> None:
        """Log a warning, unless it was logged for this environment before."""
        if message not in self._warnings:
            self._warnings.add(message)
            self.logger.warning("%s", message)

    # --- scoring ----------------------------------------------------------------------------------

    def add_rubric(self, rubric: Rubric) -> None:
        """Score rollouts with ``rubric`` in addition to the present rubric."""
        from verifiers.rubrics import RubricGroup

        self.rubric = RubricGroup([self.rubric, rubric])

    def get_reward_funcs(self) -> list[Callable[..., object]]:
        """The rubric's functions."""
        return self.rubric.get_reward_funcs()

    def get_reward_weights(self) -> list[float]:
        """The rubric's weights."""
        return self.rubric.get_reward_weights()

    @property
    def requires_group_rollouts(self) -> bool:
        """Whether any reward function takes a whole group."""
        return self.rubric.has_group_rewards

    @property
    def provides_advantages(self) -> bool:
        """Whether the rubric computes advantages itself."""
        return self.rubric.has_advantages
