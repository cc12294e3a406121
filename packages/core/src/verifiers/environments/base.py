"""``Environment``: a dataset, a way to act and a way to score, under one name.

An environment object is configuration. The constructor starts no thread, opens nothing and seeds
nothing; the dataset is read on first use. ``verifiers.rollouts.loop`` runs one rollout and
``verifiers.runs.runner`` runs many; ``Environment`` makes the single model calls for them.
``evaluate``, ``generate`` and ``rollout`` import the module that does the work when they are
called, so that constructing an environment loads none of them.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, Self, TypedDict, Unpack

from verifiers import compat
from verifiers.clients.protocol import Client, ClientLike, ModelLike, headers_from_state
from verifiers.clients.resolve import as_client
from verifiers.clients.retry import failed_attempts
from verifiers.data.examples import Example, RowFormat, Table
from verifiers.data.kept_rows import read_kept_rows
from verifiers.data.messages import check_parts, normalize_chat, normalize_messages
from verifiers.data.sources import DatasetLike
from verifiers.errors import ConfigError
from verifiers.parsers import Parser
from verifiers.parsers.parser import is_plain
from verifiers.rollouts.author_code import calls_env_response, decorated, defaults, maybe_await
from verifiers.rollouts.contract import LoadedFrom
from verifiers.rollouts.loop import new_state
from verifiers.rollouts.state import State
from verifiers.rollouts.steps import TrajectoryStep
from verifiers.rubrics import Rubric
from verifiers.runs.options import EvaluateOptions, GenerateOptions, RunOptions
from verifiers.runtime.calls import blocking, blocking_form, dual, either
from verifiers.runtime.redaction import remember_secrets
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import close_match
from verifiers.storage.identity import Free, Identified
from verifiers.types import Message, Messages, ModelRequest, Response

if TYPE_CHECKING:
    from verifiers.results import GenerateOutputs
    from verifiers.results.rows import RolloutOutput

    class SyncOrAsyncOutputs(Awaitable[GenerateOutputs], GenerateOutputs):
        """Return type of ``evaluate`` and ``generate`` for type checkers: results that may also be
        awaited.

        At run time it is ``GenerateOutputs`` where no event loop runs, else an awaitable of it; a
        static type cannot express the difference.
        """

    def _outputs_form(
        method: Callable[Concatenate[Environment, P], Coroutine[Any, Any, GenerateOutputs]],
    ) -> Callable[Concatenate[Environment, P], SyncOrAsyncOutputs]: ...

else:
    _outputs_form = either

P = ParamSpec("P")
DEFAULTS = asdict(RunOptions())
Oracle = Callable[[Mapping[str, Any]], Any]
"""``oracle(row)``: replies that solve the row, as ``testing.ScriptedClient`` takes them."""


class RunDefaults(TypedDict, total=False):
    """Parameters of every environment that are defaults of its runs."""

    rollouts_per_example: int | None
    max_concurrent: int | None
    max_workers: int | None


class RowOptions(RunDefaults, total=False):
    """Parameters of ``Environment`` that say how its rows are read and run; see
    ``EnvironmentOptions``."""

    few_shot: Sequence[Mapping[str, Any]] | None
    sampling_args: Mapping[str, Any] | None
    message_type: str
    tool_defs: Sequence[Mapping[str, Any]] | None
    env_id: str | None
    env_args: Mapping[str, Any] | None
    map_kwargs: Mapping[str, Any] | None
    max_seq_len: int | None
    interleaved_rollouts: bool
    score_rollouts: bool
    pass_threshold: float | None
    oracle: Oracle | None
    question_key: str
    answer_key: str


class DataOptions(RowOptions, total=False):
    """Parameters of ``Environment`` that say what its rows are, and how they are read and run."""

    dataset: DatasetLike | None
    eval_dataset: DatasetLike | None


class EnvironmentOptions(DataOptions, total=False):
    """The parameters of ``Environment`` but ``timeout_seconds``, for the constructors of its
    subclasses."""

    system_prompt: str | None
    parser: Parser | None
    rubric: Rubric | None


OPTIONAL_ATTRIBUTES = tuple(RunDefaults.__annotations__)


class Environment(Identified):
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
    rubric: Rubric
    oracle: Oracle | None = None
    """``oracle(row)`` returns replies that solve a row: one text, a list with one reply for each
    turn (text, a message, or a list of tool calls), or a function of the request. An audit needs it
    where the row's ``answer`` alone is no reply. Pass it to the constructor, or define it as a
    method."""
    non_solution_reward: float | None = None
    """What the best non-solution earns, for learning curves; ``vf-audit`` measures it. None:
    unknown."""
    _torn_down = False

    @spell_out(RunDefaults, {})
    def __init__(
        self,
        dataset: Annotated[DatasetLike | None, Free("every row has a content hash")] = None,
        eval_dataset: Annotated[DatasetLike | None, Free("every row has a content hash")] = None,
        system_prompt: str | None = None,
        few_shot: Sequence[Mapping[str, Any]] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        message_type: str = "chat",
        tool_defs: Sequence[Mapping[str, Any]] | None = None,
        env_id: str | None = None,
        env_args: Mapping[str, Any] | None = None,
        map_kwargs: Annotated[Mapping[str, Any] | None, Free("accepted for older callers")] = None,
        max_seq_len: int | None = None,
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
        further: dict[str, Any] = {**kwargs}
        if tool_defs is not None:
            further["tool_defs"] = tool_defs
        settings = compat.rename(further, compat.ENVIRONMENT_PARAMETERS, type(self).__name__)
        if dataset is None and eval_dataset is None:
            raise ConfigError(
                f"{type(self).__name__} needs a dataset: pass dataset=… or eval_dataset=…"
            )
        if message_type not in ("chat", "completion"):
            raise ConfigError(
                f'message_type is {message_type!r}; it must be "chat" or "completion"'
            )
        if message_type == "completion" and (system_prompt or few_shot):
            raise ConfigError(
                'message_type="completion" has no system_prompt and no few_shot: write them into'
                " the prompt"
            )
        if (sampling_args or {}).get("n", 1) != 1:
            raise ConfigError(
                "sampling_args['n'] must be 1: ask for siblings with rollouts_per_example"
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
        self.system_prompt, self.few_shot = system_prompt, _checked_few_shot(few_shot)
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
        self.row_format = RowFormat(
            system_prompt=system_prompt,
            few_shot=few_shot,
            message_type=message_type,
            question_key=question_key,
            answer_key=answer_key,
            default_task=lambda: self.env_id or "default",
        )
        self._tables = Table.pair(dataset, eval_dataset, self.row_format)
        self.monitor_rubric = Rubric(parser=self.parser)
        """Metrics of every rollout besides those of the rubric; they change neither reward nor
        advantage."""
        self.set_kwargs(**settings)
        if rubric is None or parser is None:
            return
        name = type(parser).__name__
        if type(rubric.parser) not in (type(parser), Parser):
            self.logger.warning(
                "the environment parses with %s and its rubric with %s",
                name,
                type(rubric.parser).__name__,
            )
        elif readers := _reading_plain(rubric):
            self.logger.warning(
                "%s of the rubric parse with its plain Parser, which returns the text itself, and"
                " not with the environment's %s: pass parser= to the Rubric too",
                ", ".join(readers),
                name,
            )

    def __repr__(self) -> str:
        name = f"{self.env_id!r}, " if self.env_id else ""
        turns = f", max_turns={self.max_turns}" if self.max_turns > 0 else ""
        return f"{type(self).__name__}({name}{self.rubric!r}{turns})"

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
        is_called = self.get_prompt_messages in calls_env_response and not self.has_own_loop
        is_missing = getattr(self, "env_response", None) in defaults
        if is_missing and is_called and getattr(self, "max_turns", 1) != 1:
            raise ConfigError(
                f"{type(self).__name__} has no env_response(self, messages, state), which gives the"
                " response to the model's turn: define it, or pass max_turns=1"
            )
        if self.score_rollouts and not self.has_reward:
            self.warn_once(
                "no reward function has a weight, so every reward is unknown: pass"
                " rubric=vf.Rubric(funcs=[…]), or score_rollouts=False"
            )
        readers = [f.name for f in self.rubric.functions if {"answer", "answers"} & set(f.required)]
        prepares = type(self).setup_state is not Environment.setup_state  # may fill the answer
        if (
            readers
            and sample
            and not prepares
            and all(example.row["answer"] == "" for example in sample)
        ):
            self.warn_once(
                f"{', '.join(readers)} reads `answer`, which is empty in the data: fill the column"
                " 'answer', or name another with answer_key=; the columns are"
                f" {', '.join(sorted(sample[0].row))}"
            )

    def warn_once(self, message: str) -> None:
        """Log a warning, unless it was logged for this environment before."""
        if message not in self._warnings:
            self._warnings.add(message)
            self.logger.warning("%s", message)

    # --- runs -------------------------------------------------------------------------------------

    @spell_out(EvaluateOptions, DEFAULTS)
    async def a_evaluate(
        self,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> GenerateOutputs:
        """Run and score the evaluation set: ``num_examples`` (-1 = all), ``rollouts_per_example``
        rollouts of each.

        ``evaluate`` blocks and returns ``GenerateOutputs``; inside a running event loop it returns
        an awaitable of it. ``evaluate_sync`` always blocks, ``a_evaluate`` is a coroutine. Options
        are those of ``verifiers.runs.options.RunOptions``; sampling arguments (``temperature=…``)
        may be given by name.

        *Raises* ConfigError for invalid arguments, before the first request; RunMismatch when the
        run directory holds another configuration; RunError when no rollout can succeed.
        """
        from verifiers.runs.entry import evaluate

        return await evaluate(
            self, client, model, sampling_args, num_examples, rollouts_per_example, options
        )

    evaluate, evaluate_sync = _outputs_form(a_evaluate), blocking_form(a_evaluate)

    @spell_out(GenerateOptions, DEFAULTS)
    async def a_generate(
        self,
        inputs: DatasetLike | None = None,
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        n_samples: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateOutputs:
        """Run and score ``inputs`` (rows; default: the training set); ``n_samples`` rollouts wrap
        around the rows.

        Rows of equal ``example_id`` are siblings. Its three forms are those of ``evaluate``.
        """
        from verifiers.runs.entry import generate

        return await generate(self, inputs, client, model, sampling_args, n_samples, options)

    generate, generate_sync = _outputs_form(a_generate), blocking_form(a_generate)

    def rollout(self, *args: Any, **keywords: Any) -> Any:
        """``rollout(input, client, model, sampling_args=None) -> State``: run the row ``input``
        without scoring it.

        Its three forms are those of ``evaluate``. An override, sync or async, replaces the rollout
        loop.
        """
        from verifiers.runs.rollout import single_rollout

        return dual(lambda: single_rollout(self, *args, **keywords))

    async def a_rollout(self, *args: Any, **keywords: Any) -> Any:
        """``rollout`` as a coroutine."""
        return await maybe_await(self.rollout(*args, **keywords))

    rollout_sync = blocking_form(a_rollout)

    async def run_rollout(
        self,
        input: Mapping[str, Any],
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        *,
        max_retries: int = 0,
        state_columns: Sequence[str] = (),
    ) -> RolloutOutput:
        """Run and score one rollout of the row ``input``; records its failure."""
        from verifiers.results.rows import state_to_output
        from verifiers.runs.rollout import scored_rollout

        state = await scored_rollout(
            self, input, client, model, sampling_args, max_retries=max_retries
        )
        return state_to_output(state, state_columns)

    async def run_group(
        self,
        group_inputs: Sequence[Mapping[str, Any]],
        client: ClientLike | None = None,
        model: ModelLike | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        *,
        max_retries: int = 0,
        state_columns: Sequence[str] = (),
    ) -> list[RolloutOutput]:
        """Run and score siblings of an example, with advantages; records the failure
        of a rollout."""
        from verifiers.results.rows import state_to_output
        from verifiers.runs.rollout import scored_group

        states = await scored_group(
            self, group_inputs, client, model, sampling_args, max_retries=max_retries
        )
        return [state_to_output(state, state_columns) for state in states]

    @property
    def has_own_loop(self) -> bool:
        """Whether a subclass overrides ``rollout``, which then replaces the rollout loop."""
        return type(self).rollout is not Environment.rollout

    def make_dataset(self, results: GenerateOutputs, *args: Any, **options: Any) -> Any:
        """``results`` as a ``datasets.Dataset``; see ``verifiers.make_dataset``."""
        from verifiers.results import make_dataset

        return make_dataset(results, *args, **options)

    def process_env_results(self, *args: Any, **options: Any) -> Any:
        """Convert columns of rollouts to token rows; see
        ``verifiers.results.process_env_results``."""
        from verifiers.results import process_env_results

        return process_env_results(*args, **options)

    process_env_results_vllm = process_env_results

    # --- data -------------------------------------------------------------------------------------

    @property
    def train_table(self) -> Table | None:
        """The training examples, or None; read on first use."""
        return self._tables[0]

    @property
    def eval_table(self) -> Table:
        """The evaluation examples; the training examples, with one warning, when there are none."""
        if self._tables[1] is not None:
            return self._tables[1]
        self.warn_once(
            f"{self.env_id or type(self).__name__} has no evaluation set; its training set is used"
        )
        return self._tables[0]  # type: ignore[return-value]  # one of the two exists

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Any:
        """The training set as a ``datasets.Dataset``: ``n`` rows (-1 = all), shuffled by ``seed``;
        changes nothing.

        Raises ``DatasetError`` when there is no training set.
        """
        return Table.required(self.train_table, self).take(n, seed).to_hf()

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Any:
        """The evaluation set as a ``datasets.Dataset``; see ``get_dataset``."""
        return self.eval_table.take(n, seed).to_hf()

    @property
    def dataset(self) -> Any:
        """The formatted training set; None without a set."""
        return None if self.train_table is None else self.get_dataset()

    @property
    def eval_dataset(self) -> Any:
        """The formatted evaluation set; None without a set."""
        return None if self._tables[1] is None else self.get_eval_dataset()

    def sample_prompts(self, n: int, seed: int | None = None) -> list[dict[str, Any]]:
        """``n`` training rows without replacement, reshuffled when exhausted, from a private
        generator."""
        return Table.required(self.train_table, self).sample(n, seed)

    # --- settings ---------------------------------------------------------------------------------

    @property
    def oai_tools(self) -> list[Any]:
        return self.tool_defs

    @oai_tools.setter
    def oai_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tool_defs = list(tools)

    def set_kwargs(self, **settings: object) -> None:
        """Change settings: ``set_<name>(value)`` when there is such a method, else an attribute of
        that name."""
        self.changes.update(settings)
        for name, value in settings.items():
            setter = getattr(self, f"set_{name}", None)
            if setter is not None:
                setter(value)
                continue
            if name not in self.__dict__ and name not in OPTIONAL_ATTRIBUTES:
                cls: Any = type(self)
                parameters = compat.parameters_of(cls)
                if name not in parameters and (match := close_match(name, parameters)):
                    raise ConfigError(
                        f"{type(self).__name__} has no parameter {name!r}; did you mean {match!r}?",
                        key=name,
                    )
                if callable(getattr(type(self), name, None)) or isinstance(
                    getattr(type(self), name, None), property
                ):
                    raise ConfigError(
                        f"{name!r} is a method of {type(self).__name__}; use another name", key=name
                    )
            setattr(self, name, value)

    def _changed_names(self) -> Iterable[str]:
        return [name for name in self.changes if name in vars(self)]

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Bound the tokens of a conversation."""
        self.max_seq_len = max_seq_len

    def set_interleaved_rollouts(self, interleaved_rollouts: bool) -> None:
        """Has no effect, accepted for older callers: recorded token ids are always those of the
        server."""
        self.interleaved_rollouts = interleaved_rollouts

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        """Turn scoring on or off; without scoring, rewards stay unknown."""
        self.score_rollouts = score_rollouts

    def set_concurrency(self, concurrency: int) -> None:
        """Set the default of ``max_concurrent`` for runs."""
        self.max_concurrent = concurrency

    def set_keep_rows(self, path: str | os.PathLike[str]) -> None:
        """Keep only the training rows that a file of ``vf-audit --keep`` lists, by their content
        hash.

        *Raises* ConfigError for a file that cannot be read, for a file of another environment or of
        other arguments, and when it lists rows that the training set does not have.
        """
        self._tables = self._kept_rows("keep_rows", path), self._tables[1]

    def set_keep_eval_rows(self, path: str | os.PathLike[str]) -> None:
        """Evaluate on the training rows that a file of ``vf-audit --keep`` lists; *raises* as
        ``set_keep_rows``."""
        self._tables = self._tables[0], self._kept_rows("keep_eval_rows", path)

    def _kept_rows(self, key: str, path: str | os.PathLike[str]) -> Table:
        selection = read_kept_rows(path, key)
        table = self._tables[0] if self._tables[0] is not None else self.eval_table
        rows = selection.of(
            table, self.env_id, self.env_args if self.loaded_from is not None else None, key
        )
        setattr(self, key, selection.digest)  # part of the identity, whatever the file is called
        return rows

    def set_max_workers(self, max_workers: int | None) -> None:
        """Bound the threads that run synchronous rewards and tools; None = 32. *Raises* ConfigError
        below 1."""
        if max_workers is not None and (not isinstance(max_workers, int) or max_workers < 1):
            raise ConfigError(
                f"max_workers is {max_workers!r}; it must be at least 1, or None", key="max_workers"
            )
        self.max_workers = max_workers

    def set_max_total_completion_tokens(self, max_total_completion_tokens: int) -> None:
        """Bound the completion tokens of a rollout, over all its turns; -1 = no bound."""
        self.max_total_completion_tokens = max_total_completion_tokens

    def add_rubric(self, rubric: Rubric) -> None:
        """Score rollouts with ``rubric`` in addition to the present rubric."""
        from verifiers.rubrics import RubricGroup

        self.rubric = RubricGroup([self.rubric, rubric])

    def get_reward_funcs(self) -> list[Callable[..., Any]]:
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

    # --- one model call ---------------------------------------------------------------------------

    async def init_state(
        self,
        input: Mapping[str, Any],
        client: ClientLike | None,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
    ) -> State:
        """Create the state of a rollout of the row ``input``, which is not copied."""
        return new_state(self, input, client, model, sampling_args)

    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        client: ClientLike | None = None,
        model: str | None = None,
        tool_defs: Sequence[Mapping[str, Any]] | None = None,
        sampling_args: Mapping[str, Any] | None = None,
    ) -> Response:
        """A completion of ``prompt`` with the state's client, model, tools and sampling arguments
        as defaults.

        Raises ``ModelError`` when the endpoint returns none, ``OverlongPromptError`` when the
        prompt does not fit.
        """
        run, messages = state.run, self.as_prompt(prompt)
        answering = self.client_of(state, client)
        keys = headers_from_state(answering)
        tools = tool_defs if tool_defs is not None else state.record.tool_defs
        request = ModelRequest(
            prompt=messages,
            model=model or state.record.model,
            message_type=self.message_type,
            tools=tools or None,
            sampling_args={
                **self.sampling_args,
                **(state.record.sampling_args or {}),
                **(sampling_args or {}),
            },
            headers={name: str(state[key]) for name, key in keys.items() if key in state} or None,
            seed=run.seed_of(state) if run is not None else None,
            require_tokens=run is not None and run.require_tokens and answering is run.client,
            rollout_id=state.record.id,
            sample=run.sample_of(state) if run is not None and run.is_cached else None,
            state=state,
        )
        async with run.generation_slot if run is not None else nullcontext():
            if run is not None:
                run.check_open()
            try:
                response = await answering.complete(request)
            except BaseException as error:
                state.record.count_failed(failed_attempts(error))
                raise
        if response.attempts:
            state.record.count_failed(failed_attempts(response))
        self._count_usage(state, response)
        return response

    def client_of(self, state: State, client: ClientLike | None = None) -> Client:
        """The client that answers a call with this ``client`` argument; None means the client of
        the rollout."""
        run = state.run
        if run is not None and client is None and state["client"] in (run.client, run.given_client):
            of_run: Client = run.client
            return of_run
        return as_client(client or state["client"])

    def as_prompt(self, messages: object) -> Messages:
        """Normalize messages of any accepted type to a prompt; a list of ``Message`` objects is
        returned unchanged."""
        if (
            self.message_type == "chat"
            and type(messages) is list
            and all(isinstance(message, Message) for message in messages)
        ):
            return messages  # as nearly all are: not copied in every turn
        return normalize_messages(messages, self.message_type)

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: Response
    ) -> None:
        """Record a response as the next step of the trajectory."""
        truncated, usage = response.finish_reason == "length", response.usage
        previous = self.continued_step(state)
        completion: Messages = [response.message] if self.message_type == "chat" else response.text
        extras = {
            "logprobs": response.token_logprobs,
            "received": getattr(response.message, "received", None),
        }
        step = TrajectoryStep(
            prompt=prompt_messages,
            completion=completion,
            response=response,
            tokens=response.tokens,
            is_truncated=truncated,
            trajectory_id=state.record.id,
            previous=previous,
            timing=dict(state.record.timing),
            extras={name: value for name, value in extras.items() if value is not None},
        )
        if truncated:
            state.record.status = state.record.status.cut()
        self._count_usage(state, response)
        state.counted.clear()
        counts = state.record.usage
        if usage.total_tokens:
            sampled = usage.completion_tokens
            counts["final_output_tokens"] = num_output = (
                counts.get("final_output_tokens", 0) + sampled
            )
            counts["final_input_tokens"] = max(0, usage.prompt_tokens + sampled - num_output)
        for name in _DETAILS:
            if num_tokens := getattr(usage, name, 0):
                counts[name] = counts.get(name, 0) + num_tokens
        num_prompt = step.num_prompt if step.has_tokens else usage.prompt_tokens
        if previous is None and self.max_seq_len is not None and num_prompt > self.max_seq_len:
            state["prompt_too_long"] = True
            if step.has_tokens:
                step.token_fields = {"overlong_prompt": True}
        await maybe_await(self.add_trajectory_step(state, step))

    def continued_step(self, state: State) -> TrajectoryStep | None:
        """The step whose conversation the next turn continues: the newest step; None before the
        first."""
        return state.record.transcript[-1] if state.record.transcript else None

    def add_trajectory_step(self, state: State, step: TrajectoryStep) -> Any:
        """Append ``step``; override to set its reward or extras."""
        state.record.transcript.append(step)

    def _count_usage(self, state: State, response: Response) -> None:
        """Count the tokens of a response once, where it is received or where its turn
        is recorded."""
        for counted in state.counted:
            if counted is response:
                return
        state.counted.append(response)
        usage = response.usage
        self.increment_state_usage(state, usage.prompt_tokens, usage.completion_tokens)

    def increment_state_usage(self, state: State, input_tokens: int, output_tokens: int) -> None:
        """Add the tokens of an extra model call to the usage of the rollout."""
        usage = state.record.usage
        usage["input_tokens"] = usage.get("input_tokens", 0) + input_tokens
        usage["output_tokens"] = usage.get("output_tokens", 0) + output_tokens

    def get_state_usage(self, state: State) -> dict[str, int]:
        """Return the token counts of the rollout so far."""
        return dict(state.record.usage)

    # --- teardown ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Run the ``@teardown`` handlers of the environment and its rubric, once."""
        blocking(self.aclose)

    async def aclose(self) -> None:
        """``close`` as a coroutine. Raises the failure of the first handler, after all have run."""
        if self._torn_down:
            return
        self._torn_down = True
        _STARTED.pop(id(self), None)
        failures = []
        for name, handler, _ in decorated(self, "teardown"):
            try:
                await maybe_await(handler())
            except Exception as error:  # noqa: BLE001 - the other handlers run first; it is logged, then raised
                self.logger.warning("teardown %s failed: %s: %s", name, type(error).__name__, error)
                failures.append(error)
        await self.rubric.teardown()
        if failures:
            raise failures[0]

    def close_at_exit(self) -> None:
        """Register the handlers to run at interpreter exit; called by the first rollout of the
        environment."""
        if not self._torn_down and id(self) not in _STARTED and decorated(self, "teardown"):
            if not _STARTED:
                atexit.register(_close_started)
            _STARTED[id(self)] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_DETAILS = "cached_tokens", "cache_write_tokens", "reasoning_tokens"
"""Counts of a response that are in the usage of a rollout where they are not 0."""
_STARTED: dict[int, Environment] = {}
"""Environments with ``@teardown`` handlers that have started a rollout and were not closed, by
``id``."""


def _close_started() -> None:
    for env in list(_STARTED.values()):
        try:
            env.close()
        except Exception as error:  # noqa: BLE001 - there is no caller at interpreter exit; it is logged
            env.logger.warning("closing at exit failed: %s: %s", type(error).__name__, error)


def _reading_plain(rubric: Rubric) -> list[str]:
    """Names of the reward functions that take a parser which returns the text itself."""
    return [
        function.name
        for function in rubric.functions
        if "parser" in function.required + function.optional and is_plain(function.rubric.parser)
    ]


def _checked_few_shot(few_shot: Sequence[Mapping[str, Any]] | None) -> Any:
    """Return ``few_shot`` unchanged if it is a list of messages. *Raises* ConfigError otherwise."""
    if few_shot is None:
        return None
    try:
        if isinstance(few_shot, str | Mapping):
            raise ConfigError(f"it must be a list of messages, not {type(few_shot).__name__}")
        check_parts(normalize_chat(few_shot))
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(f"few_shot cannot be read: {error}", key="few_shot") from error
    return few_shot
