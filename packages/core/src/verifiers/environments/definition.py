"""What is wrong with an environment, said before its first rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.data.examples import Example
from verifiers.data.messages import check_parts, normalize_chat
from verifiers.errors import ConfigError
from verifiers.parsers import Parser
from verifiers.parsers.parser import is_plain
from verifiers.rollouts.author_code import calls_env_response, defaults
from verifiers.rubrics import Rubric

if TYPE_CHECKING:
    from verifiers.runs.rollout import RunEnvironment


def check_parameters(
    name: str,
    *,
    has_rows: bool,
    message_type: str,
    is_introduced: bool,
    sampling_args: Mapping[str, object] | None,
) -> None:
    """*Raises* ConfigError for parameters of the class ``name`` that contradict each other;
    ``is_introduced``: it has a system prompt or examples."""
    if not has_rows:
        raise ConfigError(f"{name} needs a dataset: pass dataset=… or eval_dataset=…")
    if message_type not in ("chat", "completion"):
        raise ConfigError(f'message_type is {message_type!r}; it must be "chat" or "completion"')
    if message_type == "completion" and is_introduced:
        raise ConfigError(
            'message_type="completion" has no system_prompt and no few_shot: write them into'
            " the prompt"
        )
    if (sampling_args or {}).get("n", 1) != 1:
        raise ConfigError(
            "sampling_args['n'] must be 1: ask for siblings with rollouts_per_example"
        )


def checked_few_shot(few_shot: Sequence[Mapping[str, object]] | None) -> Any:
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


def two_parsers(parser: Parser, rubric: Rubric | None) -> str | None:
    """The warning where an environment and its rubric read answers by two parsers."""
    if rubric is None:
        return None
    name = type(parser).__name__
    if type(rubric.parser) not in (type(parser), Parser):
        return (
            f"the environment parses with {name} and its rubric with {type(rubric.parser).__name__}"
        )
    if not is_plain(parser) and (readers := _reading_plain(rubric)):
        return (
            f"the rubric's functions ({', '.join(readers)}) parse with its plain Parser, which"
            f" returns the text itself, and not with the environment's {name}: pass parser= to the"
            " Rubric too"
        )
    return None


def _reading_plain(rubric: Rubric) -> list[str]:
    """Names of the reward functions that take a parser which returns the text itself."""
    return [
        function.name
        for function in rubric.functions
        if "parser" in function.required + function.optional and is_plain(function.rubric.parser)
    ]


def check(env: RunEnvironment, sample: Sequence[Example]) -> None:
    """See ``Environment.check_definition``."""
    is_called = env.get_prompt_messages in calls_env_response and not env.has_own_loop
    is_missing = getattr(env, "env_response", None) in defaults
    if is_missing and is_called and getattr(env, "max_turns", 1) != 1:
        raise ConfigError(
            f"{type(env).__name__} has no env_response(self, messages, state), which gives the"
            " response to the model's turn: define it, or pass max_turns=1"
        )
    if env.branching is not None and env.has_own_loop:
        raise ConfigError(
            f"{type(env).__name__} runs rollouts in a loop of its own, which branching cannot enter:"
            " fork there (await state.fork(n)), or leave branching out",
            key="branching",
        )
    if env.score_rollouts and not env.has_reward:
        env.warn_once(
            "no reward function has a weight, so every reward is unknown: pass"
            " rubric=vf.Rubric(funcs=[…]), or score_rollouts=False"
        )
    readers = [f.name for f in env.rubric.functions if {"answer", "answers"} & set(f.required)]
    prepares = env.setup_state not in defaults  # may fill the answer
    if (
        readers
        and sample
        and not prepares
        and all(example.row["answer"] == "" for example in sample)
    ):
        env.warn_once(
            f"{', '.join(readers)} reads `answer`, which is empty in the data: fill the column"
            " 'answer', or name another with answer_key=; the columns are"
            f" {', '.join(sorted(sample[0].row))}"
        )
