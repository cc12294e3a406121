"""``ReasoningGymEnv``: questions of Reasoning Gym, scored by the generator of the question.

Promise: rows are generated on first use from one seed; training and evaluation rows are disjoint
indices of a sequence. Scoring generates the entry again; if the question then differs, the reward
is unknown. The isolation of scorers from model text is in ``reasoning_gym_scoring``.

A few generators (in 0.1.25: isomorphic_strings, knight_swap, polynomial_multiplication,
ransom_note, word_ladder)
depend on the hash seed of Python: with them, all processes of a run need the same
``PYTHONHASHSEED``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from verifiers.environments.integrations import extras
from verifiers.environments.keywords import RowOptions
from verifiers.environments.single_turn import SingleTurnEnv
from verifiers.errors import ConfigError, ScoringError
from verifiers.parsers import Parser, XMLParser
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.state import State
from verifiers.rubrics import Rubric
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import check_keywords, closest
from verifiers.runtime.worker_threads import call_in_thread
from verifiers.storage.identity import Free

if TYPE_CHECKING:
    from verifiers.types import Messages

MAX_CACHED_ENTRIES = 1024


@dataclass(frozen=True, slots=True)
class Generator:
    """A generator of a mixture, for example ``Generator("chain_sum", 2.0, {"max_terms": 4})``."""

    name: str
    weight: float
    config: Mapping[str, object]


class QuestionOptions(RowOptions, total=False):
    """Parameters of ``SingleTurnEnv`` that ``ReasoningGymEnv`` passes on unchanged."""

    max_turns: int
    timeout_seconds: float | None
    max_total_completion_tokens: int


class ReasoningGymEnv(SingleTurnEnv):
    """Generated questions with a verifiable answer.

    Args:
        gym: A generator's name, a list of names, or a list of ``{name, weight, config}`` (default:
            weight 1.0, no config).
        num_train_examples: Questions to train on.
        num_eval_examples: Questions to evaluate on.
        system_prompt: Default: a description of the format of the parser; ``""`` sets none.
        parser: Reads the answer out of a completion.
        seed: Seed of the questions.
        rubric: Default: the score of the generator.

    Examples::

        ReasoningGymEnv("chain_sum")
        ReasoningGymEnv(["chain_sum", "leg_counting"])
        ReasoningGymEnv([{"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 4}}, {"name": "leg_counting"}])

    The reward ``generator_score`` is the score of the parsed answer by the generator; ``task`` is
    the name of the generator. Further parameters are those of ``SingleTurnEnv``.

    *Raises* ConfigError when Reasoning Gym is not installed, for an unknown or repeated generator
    and for a configuration that a generator refuses.

    A question counts as solved at a score of 1 (``pass_threshold``): many generators pay part of it
    for a wrong answer.
    """

    @spell_out(QuestionOptions, SingleTurnEnv.__init__)
    def __init__(
        self,
        gym: str | Sequence[str | Mapping[str, object]],
        num_train_examples: Annotated[
            int, Free("how many rows; every row has a content hash")
        ] = 1000,
        num_eval_examples: Annotated[
            int, Free("how many rows; every row has a content hash")
        ] = 100,
        system_prompt: str | None = None,
        parser: Parser | None = None,
        seed: int = 0,
        rubric: Rubric | None = None,
        **parameters: Unpack[QuestionOptions],
    ):
        library = extras.REASONING_GYM.load("ReasoningGymEnv")
        for number in (num_train_examples, num_eval_examples):
            if not isinstance(number, int) or number < 0:
                raise ConfigError(f"the number of examples is {number!r}; it must be 0 or more")
        if not num_train_examples + num_eval_examples:
            raise ConfigError(
                "no training and no evaluation examples are requested; request at least one"
            )
        parser = parser if parser is not None else XMLParser(["answer"])
        self.generators = _generators(gym)
        for generator in self.generators:
            _check(generator, library.factory.DATASETS)
        self._is_mixture = not isinstance(gym, str)
        self._common = {"seed": seed, "size": num_train_examples + num_eval_examples}
        self._generator_lock = threading.Lock()
        self._entry = functools.lru_cache(maxsize=MAX_CACHED_ENTRIES)(self._generate)
        train = range(num_train_examples)
        evaluation = range(num_train_examples, self._common["size"])
        parameters.setdefault("pass_threshold", 1.0)
        super().__init__(
            dataset=(lambda: [self._row(i) for i in train]) if train else None,
            eval_dataset=(lambda: [self._row(i) for i in evaluation]) if evaluation else None,
            system_prompt=_format_prompt(parser) if system_prompt is None else system_prompt,
            parser=parser,
            rubric=rubric if rubric is not None else Rubric([self.generator_score], parser=parser),
            **parameters,
        )
        self.gym, self.seed = gym, seed

    async def generator_score(self, parser: Parser, completion: Messages, state: State) -> float:
        """Return the score of the answer by the generator of the question.

        *Raises* ScoringError when the generator does not reproduce the question of the row, and
        when its scorer fails on the reference answer too.
        """
        from verifiers.environments.integrations.reasoning_gym_scoring import score

        answer = await maybe_await(parser.parse_answer(completion))
        entry = await call_in_thread(self._entry, state["info"]["index"])
        name = entry["metadata"]["source_dataset"]
        if entry["question"] != state.get("question", entry["question"]):
            raise ScoringError(
                f"the generator {name!r} generates another question in this process than in the one"
                " that created the row; set PYTHONHASHSEED to the same number for both",
                function="generator_score",
            )
        config = next((g.config for g in self.generators if g.name == name), {})
        return await score(
            name, self._common | dict(config), entry, None if answer is None else str(answer)
        )

    # --- entries ----------------------------------------------------------------------------------

    @functools.cached_property
    def _questions(self) -> Any:
        """The generator, or the mixture of generators; created on first use."""
        library = extras.REASONING_GYM.load("ReasoningGymEnv")
        if not self._is_mixture:
            (only,) = self.generators
            return library.create_dataset(only.name, **(self._common | dict(only.config)))
        from reasoning_gym.composite import DatasetSpec

        specs = [DatasetSpec(g.name, g.weight, dict(g.config)) for g in self.generators]
        return library.create_dataset("composite", datasets=specs, **self._common)

    def _generate(self, index: int) -> dict[str, Any]:
        with self._generator_lock:
            entry: dict[str, object] = self._questions[index]
            return entry

    def _row(self, index: int) -> dict[str, object]:
        entry = self._entry(index)
        answer = entry["answer"]
        name = entry["metadata"]["source_dataset"]
        return {
            "example_id": index,
            "question": entry["question"],
            "answer": "" if answer is None else answer,
            "task": name,
            "info": {"generator": name, "index": index},
        }


def _generators(gym: object) -> list[Generator]:
    """Parse ``gym`` into generators. *Raises* ConfigError when it is invalid."""
    entries = [gym] if isinstance(gym, str) else gym
    if not isinstance(entries, Sequence) or not entries:
        raise ConfigError(
            f"gym is {gym!r}; give a generator's name, a list of names, or a list of {{name,"
            " weight}"
        )
    generators: list[Generator] = []
    for entry in entries:
        if not isinstance(entry, str | Mapping):
            raise ConfigError(
                f"gym lists {entry!r}; give a generator's name or {{name, weight, config}}",
                key="gym",
            )
        fields: dict[str, Any] = {"name": entry} if isinstance(entry, str) else dict(entry)
        check_keywords(fields, ("name", "weight", "config"), "a generator of gym")
        name, weight = fields.get("name"), fields.get("weight", 1.0)
        if not isinstance(name, str):
            raise ConfigError(f"gym lists {entry!r}, which has no name", key="gym")
        if not isinstance(weight, int | float) or not weight > 0:
            raise ConfigError(
                f"the weight of the generator {name!r} is {weight!r}; it must be above 0", key="gym"
            )
        if any(generator.name == name for generator in generators):
            raise ConfigError(
                f"gym lists the generator {name!r} twice; once is enough, with a larger weight",
                key="gym",
            )
        generators.append(Generator(name, float(weight), dict(fields.get("config") or {})))
    return generators


def _check(generator: Generator, registered: Mapping[str, tuple[object, Any]]) -> None:
    """*Raises* ConfigError for an unknown generator, or a generator that refuses its
    configuration."""
    if generator.name not in registered:
        hint = closest(generator.name, registered)
        raise ConfigError(f"Reasoning Gym has no generator {generator.name!r}{hint}", key="gym")
    try:
        config = registered[generator.name][1](**generator.config)
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the generator {generator.name!r} refuses its config: {error}", key="gym"
        ) from error


def _format_prompt(parser: Parser) -> str | None:
    show = getattr(parser, "get_format_str", None)
    if callable(show):
        return f"Solve the problem, then give your final answer alone in this format:\n{show()}"
    return None
