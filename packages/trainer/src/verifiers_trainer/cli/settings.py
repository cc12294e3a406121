"""Assignments -> one checked ``TrainSettings``, and back to TOML. Reads no file, loads no model, asks no device.

Two formats are understood and come out the same: that of ``vf-rl`` (``model``, ``[env]``, ``[inference]``,
``[trainer]``, ``[eval]``) and that of hosted training (``max_steps`` and its like at the top, ``[sampling]``,
``[[env]]``, ``[wandb]``). Every unknown key and wrong type is found, not only the first. Ranges and combinations are
``RLConfig.resolve``'s, the arguments of an environment its loader's.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tomli_w
from transformers import TrainingArguments

from verifiers.cli.common.reader import Assignment, Bounds, Fields, accept, describe, fits, store, unknown_key
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import SIMILAR, close_match
from verifiers_trainer.cli.server_flags import SETTINGS as SERVER_FLAGS
from verifiers_trainer.pipeline.mixture import distinct
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.config import RLConfig, field_names, known_names

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
HOSTED: dict[tuple[str, ...], tuple[str, ...]] = {
    **{(name,): ("trainer", "args", name) for name in ("max_steps", "batch_size", "rollouts_per_example")},
    **{("sampling", name): ("trainer", "args", name) for name in SAMPLING},
    **{(name,): ("trainer", "args", name) for name in ("learning_rate", "lora_alpha")},
    ("name",): ("trainer", "args", "run_name"),
    ("oversampling_factor",): ("trainer", "args", "oversample"),
    ("max_async_level",): ("trainer", "args", "max_off_policy_steps"),
    ("checkpoints", "interval"): ("trainer", "args", "save_steps"),
    ("eval", "interval"): ("eval", "steps"),
    ("eval", "eval_base_model"): ("eval", "on_start"),
}
"""Keys of the hosted format -> ours. Its ``[wandb]`` is understood in every file."""
HOSTED_ALONE: dict[tuple[str, ...], str] = {
    ("env_file",): "secrets are read from the environment of this process",
    ("env_files",): "secrets are read from the environment of this process",
    ("trajectory_strategy",): "turns that share a prefix are merged, the others are samples of their own",
    ("checkpoints", "keep_cloud"): "nothing is kept in a cloud; trainer.args.save_total_limit bounds what is on disk",
    ("wandb", "entity"): "set WANDB_ENTITY",
    ("eval", "env"): "the evaluation set of the environment that is trained is used",
    ("val",): "[eval] is the one evaluation while training",
}
"""Keys of the hosted format that have no meaning here -> why."""
PRIME_RL = ("environment", "orchestrator", "ckpt", "weight_broadcast", "slurm")
EVAL = "eval_"
Algorithm = Literal["rl", "grpo"]
"""Values of ``trainer.algorithm``: the defaults of ``RLConfig`` or of ``GRPOConfig``."""
TRANSLATED_HINTS: dict[str, Any] = {"scale_rewards": bool | str}
"""Types of the names whose value is translated, where it is not a whole number."""
NO_SERVER = "no inference server is started: the embedded engine samples from the trainer's own weights"


@dataclass(frozen=True, slots=True)
class EnvTable:
    """One ``[[env]]`` of several: ``EnvTable("gsm8k", {"num_train_examples": 500}, "gsm8k", 3.0)``."""

    id: str
    args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    """What it is called in the metrics; its id, without owner and version, unless given."""
    weight: Annotated[float, Bounds(0, exclusive=True)] | None = None
    """Its share of the groups, relative to the other weights."""

    def to_dict(self) -> dict[str, Any]:
        """Its keys, as a file gives them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, {})}


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What a run is: ``TrainSettings("builtin:tiny", "reverse-text", {"unit": "word"}, {"max_steps": 60})``."""

    model: str
    env_id: str
    env_args: Mapping[str, Any]
    config: Mapping[str, Any]
    """Keywords of ``RLConfig`` that were given, under their canonical names."""
    algorithm: str = "rl"
    """``rl`` or ``grpo``."""
    ignored: tuple[tuple[str, str], ...] = ()
    """(key, reason) of what was given and has no effect here."""
    chosen: tuple[tuple[str, str], ...] = ()
    """(key, reason) of what was not given and follows from the rest."""
    places: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Key -> where it was set last, for messages."""
    mixture: tuple[EnvTable, ...] = ()
    """The environments when there are several; then ``env_id`` names them all."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """``[inference.args]``: flags of the server in snake_case, for when one is started."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """How many devices ``inference`` and ``trainer`` were given."""


@functools.cache
def _hints() -> dict[str, Any]:
    """Field of ``RLConfig`` -> its type."""
    return {
        name: hint
        for name, hint in typing.get_type_hints(RLConfig, include_extras=True).items()
        if name in field_names()
    }


def _hint_of(name: str) -> Any:
    """The type of a setting, under any of its names."""
    if name in compat.TRANSLATED:
        return TRANSLATED_HINTS.get(name, int | None)
    return Any if name in compat.WITHOUT_EFFECT else _hints()[compat.RENAMED.get(name, name)]


@functools.cache
def _eval_keys() -> tuple[str, ...]:
    return tuple(name.removeprefix(EVAL) for name in field_names() if name.startswith(EVAL))


def read_settings(assignments: Sequence[Assignment], num_gpus: int = 0) -> tuple[TrainSettings, list[str]]:
    """(settings, problems) of assignments in rising precedence; settings that have problems are left out.

    ``num_gpus`` says how many CUDA devices there are, on which the meaning of ``gpus`` depends.
    """
    return _Reader(num_gpus).read(assignments)


class _Reader:
    def __init__(self, num_gpus: int):
        self.num_gpus = num_gpus
        self.problems: list[str] = []
        self.ignored: dict[str, str] = {}
        self.chosen: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.env_args: dict[str, Any] = {}
        self.mixture: list[EnvTable] = []
        self.server_args: dict[str, Any] = {}
        self.gpus: dict[str, int] = {}
        self.config: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.evaluates = False
        self.algorithm: str | None = None
        self.top: dict[str, Callable[[Assignment], None]] = {
            "model": self._name("model"),
            "env": self._env,
            "inference": self._inference,
            "trainer": self._trainer,
            "eval": self._eval,
            "wandb": self._wandb,
        }

    def read(self, assignments: Sequence[Assignment]) -> tuple[TrainSettings, list[str]]:
        hosted = is_hosted(assignments)
        for given in assignments:
            if hosted and given.path in HOSTED_ALONE:
                self.ignored[given.key] = HOSTED_ALONE[given.path]
                continue
            given = _from_hosted(given) if hosted or given.is_flag else given
            if given.path[0] in self.top:
                self.top[given.path[0]](given)
            else:
                self._unknown_at_top(given, hosted)
        self._complete(hosted)
        settings = TrainSettings(
            self.names.get("model", ""),
            self.names.get("env.id", ""),
            self.env_args,
            self.config,
            self.algorithm or "rl",
            tuple(self.ignored.items()),
            tuple(self.chosen.items()),
            self.places,
            tuple(self.mixture),
            self.server_args,
            self.gpus,
        )
        return settings, self.problems

    # --- sections -----------------------------------------------------------------------------------------------

    def _env(self, given: Assignment) -> None:
        match given.path:
            case ("env", "id"):
                self._name("env.id")(given)
            case ("env", "args", _, *_):
                store(self.env_args, given.path[2:], given.value)
            case ("env", "weight" | "name"):
                self.ignored[given.key] = "there is one environment"
            case ("env",) if isinstance(given.value, list) and len(given.value) > 1:
                self._environments(given)
            case ("env",) | ("env", "args"):
                self._problem(given, f"{given.key} must be a table, not {given.value!r}")
            case _:
                self._unknown(given, ("id", "args", "weight"), 1)

    def _environments(self, given: Assignment) -> None:
        """Several ``[[env]]`` tables."""
        self.mixture = _env_tables(given, self.problems)
        self.names["env.id"], self.places["env.id"] = " + ".join(table.name for table in self.mixture), given.place
        if any(table.weight is not None for table in self.mixture):
            weights = {table.name: 1.0 if table.weight is None else table.weight for table in self.mixture}
            self.config.setdefault("env_weights", weights)

    def _trainer(self, given: Assignment) -> None:
        match given.path:
            case ("trainer", "gpus"):
                self._gpus(given)
            case ("trainer", "algorithm"):
                self.algorithm = self._checked(given, Algorithm, given.key)
                self.chosen.pop(given.key, None)
            case ("trainer", "args", name, *_):
                self._field(given, name, 2)
            case ("trainer",) | ("trainer", "args"):
                self._problem(given, f"{given.key} must be a table, not {given.value!r}")
            case _:
                self._unknown(given, ("gpus", "algorithm", "args"), 1)

    def _inference(self, given: Assignment) -> None:
        match given.path:
            case ("inference", "gpus"):
                self._gpus(given)
            case ("inference", "args", name):
                if name in SERVER_FLAGS:
                    self.server_args[name] = given.value
                    self.ignored[given.key] = NO_SERVER
                else:
                    self._unknown(given, SERVER_FLAGS, 2)
            case ("inference",) | ("inference", "args"):
                self._problem(given, f"{given.key} must be a table, not {given.value!r}")
            case _:
                self._unknown(given, ("gpus", "args"), 1)

    def _eval(self, given: Assignment) -> None:
        match given.path:
            case ("eval", name, *_) if name in _eval_keys():
                self.evaluates = True
                self._field(dataclasses.replace(given, path=("eval", EVAL + name, *given.path[2:])), EVAL + name, 1)
            case ("eval",):
                self._problem(given, f"eval must be a table, not {given.value!r}")
            case _:
                self._unknown(given, _eval_keys(), 1)

    def _wandb(self, given: Assignment) -> None:
        """``[wandb]`` switches the tracker on; ``--no-wandb`` switches it off."""
        if given.path == ("wandb",) and given.value in (True, False):
            self.config["report_to"] = "wandb" if given.value else "none"
        elif len(given.path) != 2:
            self._problem(given, f"wandb must be a table, not {given.value!r}")
        elif given.path[1] not in ("project", "name"):
            self._unknown(given, ("project", "name"), 1)
        elif (name := self._checked(given, str, given.key)) is not None:
            self.names[given.key] = name

    # --- values -------------------------------------------------------------------------------------------------

    def _name(self, key: str) -> Callable[[Assignment], None]:
        def store(given: Assignment) -> None:
            self.places[key] = given.place
            if isinstance(given.value, str) and given.value and given.key == key:
                self.names[key] = given.value
            else:
                self._problem(given, f"{key} must be a text, not {given.value!r}")

        return store

    def _gpus(self, given: Assignment) -> None:
        number = self._checked(given, Annotated[int, Bounds(0)], given.key)
        if number is None:
            return
        self.gpus[given.path[0]] = number
        if self.num_gpus == 0:
            self.ignored[given.key] = "there is no CUDA device: everything runs in one process on the CPU"
        elif given.path[0] == "inference":
            self.ignored[given.key] = NO_SERVER

    def _field(self, given: Assignment, name: str, depth: int) -> None:
        """Store a field of ``RLConfig``, found at ``given.path[depth]``."""
        if name not in known_names():
            self._unknown(given, known_names(), depth)
            return
        hint = _hint_of(name)
        if len(given.path) == depth + 1:
            value = self._checked(given, hint, name)
            if value is None:
                return
            given = dataclasses.replace(given, value=value)
        elif not fits({}, hint):
            self._problem(given, f"{name} has no parts; it must be {describe(hint)}")
            return
        self.places[name] = given.place
        if name in compat.GRPO_NAMES and self.algorithm is None:
            self.algorithm, self.chosen["trainer.algorithm"] = "grpo", f"{name} is a setting of GRPO"
        if name in compat.SPELLED:
            self._field_by_another_name(given, name)
        else:
            store(self.config, given.path[depth:], given.value)

    def _field_by_another_name(self, given: Assignment, name: str) -> None:
        def current(field: str) -> Any:
            return self.config.get(field, RLConfig.default_of(field))

        if name in compat.WITHOUT_EFFECT:
            self.ignored[given.key] = compat.WITHOUT_EFFECT[name]
            return
        try:
            made = compat.settings_of(name, given.value, current)
        except ConfigError as error:
            self._problem(given, str(error))
            return
        theirs = {twin for _, twin in compat.TWINS}
        for field_name, value in made.items():
            if field_name not in theirs:
                self.config[field_name], self.places[field_name] = value, given.place

    def _checked(self, given: Assignment, hint: Any, name: str) -> Any:
        """The value as ``hint`` wants it; None, which TOML has no word for, after a problem was noted."""
        try:
            return accept(given, hint)
        except ValueError as error:
            self._problem(given, f"{name} {error}")
            return None

    def _complete(self, hosted: bool) -> None:
        for key, how in (("model", "model = …"), ("env.id", "[env] id = …")):
            if key not in self.places:
                self.problems.append(f"{key} is missing: write {how} in the file, or give --{key}")
        for key, name in (("wandb.project", "project"), ("wandb.name", "run_name")):
            if key in self.names:
                self.config.setdefault(name, self.names[key])
                self.config.setdefault("report_to", "wandb")
        if self.evaluates and "eval_strategy" not in self.config:
            self.config["eval_strategy"] = "steps"
            self.chosen["eval.strategy"] = "there is an [eval] section"
        batch: Any = self.config.get("batch_size", 0)
        if hosted and "micro_batch_size" not in self.config and batch > 0:
            self.config["micro_batch_size"] = max(n for n in range(1, 9) if batch % n == 0)
            self.chosen["trainer.args.micro_batch_size"] = "the largest divisor of batch_size up to 8"

    # --- what is wrong ------------------------------------------------------------------------------------------

    def _problem(self, given: Assignment, sentence: str) -> None:
        self.problems.append(given.problem(sentence))

    def _unknown(self, given: Assignment, known: Iterable[str], depth: int) -> None:
        """Refuse a key whose part at ``depth`` is none of ``known``."""
        if len(given.path) <= depth:
            self._problem(given, f"{given.key} is not a setting")
            return
        wrong, table = given.path[depth], ".".join(given.path[:depth])
        if table != "trainer.args" and wrong in field_names() and not close_match(wrong, known, SIMILAR):
            known, elsewhere = (), f'; it belongs in [trainer.args]: "trainer.args.{wrong}"'
        else:
            elsewhere = ""
        self._problem(given, unknown_key(wrong, f"[{table}]", known) + elsewhere)

    def _unknown_at_top(self, given: Assignment, hosted: bool) -> None:
        wrong = given.path[0]
        known = list(dict.fromkeys([*self.top, *((keys[0] for keys in HOSTED) if hosted else ())]))
        flags = {flag.replace("-", "_"): flag for flag in FLAGS} if given.is_flag else {}
        if wrong == "sampling":
            if len(given.path) == 2:
                self._unknown(given, SAMPLING, 1)
            else:
                self._problem(given, f"sampling must be a table, not {given.value!r}")
        elif wrong in PRIME_RL:
            self._problem(given, f"[{wrong}] is known to prime-rl and has no counterpart here")
        elif match := close_match(wrong, [*known, *flags], SIMILAR):
            near = f"--{flags[match]}" if match in flags else match
            self._problem(given, f'there is no setting "{given.key}", did you mean "{near}"?')
        elif field_match := close_match(wrong, field_names()):
            self._problem(given, f'there is no setting "{given.key}", did you mean "trainer.args.{field_match}"?')
        else:
            self._problem(given, f'there is no setting "{given.key}"; known are {", ".join(known)}')


FLAGS = ("output-dir", "resume", "fresh", "dry-run", "dump-config", "json", "verbose", "quiet", "version", "help")
"""The command's own options, for suggestions."""


def is_hosted(assignments: Sequence[Assignment]) -> bool:
    """Whether the files are in the format of hosted training: some of its keys and neither [trainer] nor [inference].

    >>> is_hosted([Assignment(("max_steps",), 5, "x.toml:1")])
    True
    """
    tops = {given.path[0] for given in assignments if not given.is_flag}
    known = {keys[0] for keys in HOSTED} - {"eval"}
    return bool(tops & known) and not tops & {"trainer", "inference"}


def _from_hosted(given: Assignment) -> Assignment:
    return dataclasses.replace(given, path=HOSTED.get(given.path, given.path))


# --- several environments -----------------------------------------------------------------------------------------


def _env_tables(given: Assignment, problems: list[str]) -> list[EnvTable]:
    """The ``[[env]]`` tables of a file; those with problems are left out."""
    found: list[EnvTable] = []
    for number, table in enumerate(given.value, 1):
        section = f"[[env]] number {number}"
        if not isinstance(table, Mapping):
            problems.append(given.problem(f"{section} must be a table, not {table!r}"))
            continue
        before = len(problems)
        members = [Assignment((key,), value, given.place) for key, value in table.items()]
        values = Fields.of(EnvTable).read(members, section, problems)
        if table.get("id") in (None, ""):
            problems.append(given.problem(f"{section} needs an id"))
        if len(problems) == before:
            found.append(EnvTable(**values))
    names = distinct([table.name or short_name(table.id) for table in found])
    return [dataclasses.replace(table, name=name) for table, name in zip(found, names, strict=True)]


def short_name(env_id: str) -> str:
    """An id without owner and version.

    >>> short_name("primeintellect/wordle@0.1.4")
    'wordle'
    """
    return env_id.rpartition("/")[2].partition("@")[0]


# --- back to TOML -------------------------------------------------------------------------------------------------

SHARED = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "max_grad_norm", "seed"),
    *("save_steps", "eval_strategy", "eval_steps"),
)
"""Fields of transformers whose defaults are worth seeing."""
SECRET = ("hub_token",)
PART_OF_BATCH_SIZE = ("gradient_accumulation_steps", "per_device_train_batch_size")


def to_toml(settings: TrainSettings, config: RLConfig) -> str:
    """The run in full: the given settings, then those that follow from them. Secrets are left out.

    ``output_dir`` is there when it was given, or when no ``run_name`` leads to it again.
    """
    given = {name: value for name, value in settings.config.items() if name not in SECRET}
    if settings.algorithm != "rl":  # said in the terms of RLConfig, where batch_size is all the rollouts of a step
        config = config.private_copy()
        config.problems(config.world_size)
        given = {name: _plain(getattr(config, name)) for name in given if name not in PART_OF_BATCH_SIZE}
    filled = {name: _plain(getattr(config, name)) for name in _shown_fields() if name not in given}
    if "run_name" not in given:
        filled["output_dir"] = config.output_dir
    document = {
        "model": settings.model,
        "env": [table.to_dict() for table in settings.mixture]
        or {"id": settings.env_id, "args": dict(settings.env_args)},
        "trainer": {"args": given | {name: value for name, value in filled.items() if value is not None}},
    }
    return tomli_w.dumps(document)


def _shown_fields() -> list[str]:
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    return [f.name for f in dataclasses.fields(RLConfig) if f.init and (f.name in SHARED or f.name not in inherited)]


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return getattr(value, "__name__", value)  # a function is its name
