"""Convert assignments to one checked ``TrainSettings``, and back to TOML. Reads no file, loads no
model.

Two formats give the same result: that of ``vf-rl`` (``model``, ``[env]``, ``[inference]``,
``[trainer]``, ``[eval]``) and that of hosted training (top-level keys such as ``max_steps``,
``[sampling]``, ``[[env]]``, ``[wandb]``). Every unknown key and wrong type is reported.
``RLConfig.resolve`` checks ranges and combinations, the loader of an environment checks its
arguments.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w

from verifiers.cli.common.reader import Assignment, Fields, accept, store, unknown_key
from verifiers.environments.registry import find_recorded
from verifiers.errors import ConfigError
from verifiers.runtime.redaction import without_secrets
from verifiers.runtime.suggest import SIMILAR, close_match
from verifiers.runtime.values import FINITE, Range, describe, fits
from verifiers.storage.directory import read_metadata
from verifiers_trainer.cli.server_flags import SETTINGS as SERVER_FLAGS
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.compat import known_names
from verifiers_trainer.settings.fields import DECLARED, Settings, field_names

if TYPE_CHECKING:
    from verifiers_trainer.settings.config import RLConfig

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
HOSTED: dict[tuple[str, ...], tuple[str, ...]] = {
    **{
        (name,): ("trainer", "args", name)
        for name in ("max_steps", "batch_size", "rollouts_per_example")
    },
    **{("sampling", name): ("trainer", "args", name) for name in SAMPLING},
    **{(name,): ("trainer", "args", name) for name in ("learning_rate", "lora_alpha")},
    **{(name,): ("trainer", "args", name) for name in ("loss", "teacher", "saved_runs")},
    **{(name,): ("trainer", "args", name) for name in ("min_reward", "max_per_example")},
    ("name",): ("trainer", "args", "run_name"),
    ("oversampling_factor",): ("trainer", "args", "oversample"),
    ("max_async_level",): ("trainer", "args", "max_off_policy_steps"),
    ("checkpoints", "interval"): ("trainer", "args", "save_steps"),
    ("eval", "interval"): ("eval", "steps"),
    ("eval", "eval_base_model"): ("eval", "on_start"),
}
"""Keys of the hosted format, and short options -> keys of ``vf-rl``. ``[wandb]`` is read from files
of both formats."""
HOSTED_IGNORED: dict[tuple[str, ...], str] = {
    ("env_file",): "secrets are read from the environment of this process",
    ("env_files",): "secrets are read from the environment of this process",
    (
        "trajectory_strategy",
    ): "turns that share a prefix are merged, the others are separate samples",
    (
        "checkpoints",
        "keep_cloud",
    ): "checkpoints are stored on disk only; trainer.args.save_total_limit bounds their number",
    ("wandb", "entity"): "set WANDB_ENTITY",
    ("eval", "env"): "evaluation uses the evaluation set of the training environment",
    ("val",): "[eval] configures the only evaluation during training",
}
"""Keys of the hosted format without effect -> why."""
PRIME_RL = ("environment", "orchestrator", "ckpt", "weight_broadcast", "slurm")
EVAL = "eval_"
Algorithm = Literal["rl", "grpo"]
"""Values of ``trainer.algorithm``: the defaults of ``RLConfig`` or of ``GRPOConfig``."""
TOP = ("model", "env", "inference", "trainer", "eval", "wandb")
NO_SERVER = (
    "no inference server is started: the embedded engine samples from the trainer's own weights"
)


@dataclass(frozen=True, slots=True)
class EnvTable:
    """One ``[[env]]`` of several: ``EnvTable("gsm8k", {"num_train_examples": 500},
    "gsm8k", 3.0)``."""

    id: str
    args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    """Name in the metrics; default: the id without owner and version."""
    weight: Annotated[float, Range(gt=0.0, le=FINITE, noun="a number above 0")] | None = None
    """Share of the groups, relative to the other weights."""

    def to_dict(self) -> dict[str, object]:
        """Return the keys of the table in a file."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value not in (None, {})
        }


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of a run: ``TrainSettings("builtin:tiny", "reverse-text", {"unit": "word"},
    {"max_steps": 60})``."""

    model: str
    env_id: str
    env_args: Mapping[str, Any]
    config: Mapping[str, Any]
    """Explicit keywords of ``RLConfig``, under their canonical names."""
    algorithm: str = "rl"
    """``rl`` or ``grpo``."""
    ignored: tuple[tuple[str, str], ...] = ()
    """(key, reason) of settings without effect in this run."""
    derived: tuple[tuple[str, str], ...] = ()
    """(key, reason) of settings derived from the others."""
    locations: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Key -> where it was last set, for messages."""
    mixture: tuple[EnvTable, ...] = ()
    """The environments of a mixture, else empty; ``env_id`` then joins their names."""
    server_args: Mapping[str, Any] = field(default_factory=dict)
    """``[inference.args]``: flags of a server that is started, in snake_case."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Number of devices for ``inference`` and for ``trainer``."""


def read_settings(
    assignments: Sequence[Assignment], num_gpus: int = 0
) -> tuple[TrainSettings, list[str]]:
    """Return (settings, problems) of assignments in rising precedence; settings with problems are
    left out.

    ``num_gpus`` is the number of CUDA devices; the meaning of ``gpus`` depends on it. Imports no
    transformers.
    """
    return _Reader(num_gpus).read(assignments)


@functools.cache
def _keys() -> dict[tuple[str, ...], Collection[str]]:
    """Table -> its keys."""
    return {
        ("env",): ("id", "args", "weight"),
        ("env", "args"): (),  # the environment's own, which its loader checks
        ("inference",): ("gpus", "args"),
        ("inference", "args"): SERVER_FLAGS,
        ("trainer",): ("gpus", "algorithm", "args"),
        ("trainer", "args"): known_names(),
        ("eval",): tuple(
            name.removeprefix(EVAL) for name in field_names() if name.startswith(EVAL)
        ),
        ("wandb",): ("project", "name"),
        ("sampling",): SAMPLING,
    }


@functools.cache
def fields_of_args() -> Fields:
    """The keys of ``[trainer.args]``, under all their names; a setting that only a newer version of
    transformers has takes any value."""
    hints = {
        **dict.fromkeys((*field_names(), *compat.WITHOUT_EFFECT), Any),
        **DECLARED,
        **dict.fromkeys(compat.TRANSLATED, int | None),
        "reward_weights": list[float] | dict[str, float],
        "scale_rewards": Literal[*compat.ADVANTAGES],
    }
    return Fields(hints, compat.RENAMED)


def _type_of(name: str) -> object:
    """The annotation of a setting under any of its names."""
    fields = fields_of_args()
    return fields.hints[fields.aliases.get(name, name)]


class _Reader:
    def __init__(self, num_gpus: int):
        self.num_gpus = num_gpus
        self.problems: list[str] = []
        self.ignored: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.env_args: dict[str, Any] = {}
        self.mixture: list[EnvTable] = []
        self.server_args: dict[str, Any] = {}
        self.gpus: dict[str, int] = {}
        self.config: dict[str, Any] = {}
        self.locations: dict[str, str] = {}
        self.evaluates = False
        self.algorithm: str | None = None

    def read(self, assignments: Sequence[Assignment]) -> tuple[TrainSettings, list[str]]:
        hosted = is_hosted(assignments)
        in_files = {s.path[-1]: s.value for s in assignments if not s.is_flag}
        for setting in assignments:
            if not setting.is_flag and compat.is_unset_warmup(setting.path[-1], in_files):
                continue
            if hosted and setting.path in HOSTED_IGNORED:
                self.ignored[setting.key] = HOSTED_IGNORED[setting.path]
            elif hosted or setting.is_flag:
                self._take(replace(setting, path=HOSTED.get(setting.path, setting.path)), hosted)
            else:
                self._take(setting, hosted)
        self._complete(hosted)
        settings = TrainSettings(
            self.names.get("model", ""),
            self.names.get("env.id", ""),
            self.env_args,
            self.config,
            self.algorithm or "rl",
            tuple(self.ignored.items()),
            tuple(self.derived.items()),
            self.locations,
            tuple(self.mixture),
            self.server_args,
            self.gpus,
        )
        return settings, self.problems

    def _take(self, setting: Assignment, hosted: bool) -> None:
        match setting.path:
            case ("model", *_):
                self._name(setting, "model")
            case ("env", "id"):
                self._name(setting, "env.id")
            case ("env", "args", _, *_):
                store(self.env_args, setting.path[2:], setting.value)
            case ("env", "weight" | "name"):
                self.ignored[setting.key] = "there is one environment"
            case ("env",) if isinstance(setting.value, list) and len(setting.value) > 1:
                self._environments(setting)
            case ("trainer" | "inference", "gpus"):
                self._gpus(setting)
            case ("trainer", "algorithm"):
                self.algorithm = self._checked(setting, Algorithm, setting.key)
                self.derived.pop(setting.key, None)
            case ("trainer", "args", name, *below) if name in known_names():
                self._field(setting, name, below)
            case ("trainer", "args", name, *_) if name in compat.INSTEAD:
                try:
                    compat.changing({name: setting.value}, "[trainer.args]")
                except ConfigError as error:
                    self._problem(setting, str(error))
            case ("inference", "args", name) if name in SERVER_FLAGS:
                self.server_args[name] = setting.value
                self.ignored[setting.key] = NO_SERVER
            case ("eval", name, *below) if name in _keys()["eval",]:
                self.evaluates = True
                self._field(setting, EVAL + name, below)
            case ("wandb",) if isinstance(setting.value, bool):  # ``--wandb`` and ``--no-wandb``
                self.config["report_to"] = "wandb" if setting.value else "none"
            case ("wandb", "project" | "name"):
                if (name := self._checked(setting, str, setting.key)) is not None:
                    self.names[setting.key] = name
            case path if path in _keys():
                self._problem(setting, f"{setting.key} must be a table, not {setting.value!r}")
            case path if path in HOSTED:
                self._problem(
                    setting,
                    f"{setting.key} is a key of the layout with top-level keys; beside [trainer] or"
                    f' [inference] it is "{".".join(HOSTED[path])}": a file has one layout',
                )
            case (top, *_) if top in TOP or (top == "sampling" and len(setting.path) == 2):
                self._unknown(setting)
            case _:
                self._unknown_at_top(setting, hosted)

    # --- values -----------------------------------------------------------------------------------

    def _environments(self, setting: Assignment) -> None:
        """Read several ``[[env]]`` tables."""
        self.mixture = _env_tables(setting, self.problems)
        self.names["env.id"], self.locations["env.id"] = (
            " + ".join(table.name for table in self.mixture),
            setting.location,
        )
        if any(table.weight is not None for table in self.mixture):
            weights = {
                table.name: 1.0 if table.weight is None else table.weight for table in self.mixture
            }
            self.config.setdefault("env_weights", weights)

    def _name(self, setting: Assignment, key: str) -> None:
        self.locations[key] = setting.location
        if isinstance(setting.value, str) and setting.value and setting.key == key:
            self.names[key] = setting.value
        else:
            self._problem(setting, f"{key} must be a string, not {setting.value!r}")

    def _gpus(self, setting: Assignment) -> None:
        number = self._checked(setting, Annotated[int, Range(ge=0)], setting.key)
        if number is None:
            return
        self.gpus[setting.path[0]] = number
        if self.num_gpus == 0:
            self.ignored[setting.key] = (
                "there is no CUDA device: everything runs in one process on the CPU"
            )
        elif setting.path[0] == "inference":
            self.ignored[setting.key] = NO_SERVER

    def _field(self, setting: Assignment, name: str, below: Sequence[str]) -> None:
        """Store a field of ``RLConfig``, or its entry ``below``."""
        hint = _type_of(name)
        value = setting.value
        if not below:
            value = self._checked(setting, hint, name)
            if value is None:
                return
        elif not fits({}, hint):
            self._problem(setting, f"{name} is not a table; it must be {describe(hint)}")
            return
        self.locations[name] = setting.location
        if name in compat.GRPO_NAMES and self.algorithm is None:
            self.algorithm, self.derived["trainer.algorithm"] = (
                "grpo",
                f"{name} is a setting of GRPO",
            )
        if name in compat.WITHOUT_EFFECT:
            self.ignored[setting.key] = compat.WITHOUT_EFFECT[name]
        elif below:
            store(self.config, (compat.RENAMED.get(name, name), *below), value)
        else:
            self._translated(setting, name, value)

    def _translated(self, setting: Assignment, name: str, value: object) -> None:
        """Store a value under the canonical names of its setting."""
        try:
            fields = compat.settings_of(
                name, value, lambda field: self.config.get(field, getattr(Settings, field, None))
            )
        except ConfigError as error:
            self._problem(setting, str(error))
            return
        duplicates = {second for _, second in compat.DUPLICATES}
        for field_name, field_value in fields.items():
            if field_name not in duplicates:
                self.config[field_name], self.locations[field_name] = field_value, setting.location

    def _checked(self, setting: Assignment, hint: object, name: str) -> Any:
        """Convert the value to the type ``hint``; None, which TOML cannot express, after reporting
        a problem."""
        try:
            return accept(setting, hint)
        except ValueError as error:
            self._problem(setting, f"{name} {error}")
            return None

    def _environment_of(self, runs: str | Sequence[str]) -> None:
        """Take the environment of the first saved run, which its metadata names."""
        first = runs if isinstance(runs, str) else next(iter(runs), "")
        if not Path(first).exists():
            self.problems.append(
                f"{self.locations['saved_runs']}: saved_runs: there is no folder {first}"
            )
        stored = read_metadata(Path(first)) or {}
        if env_id := stored.get("env_id"):
            try:
                find_recorded(env_id, first, f"--env.id {env_id}")
            except ConfigError as error:
                self.problems.append(f"{self.locations['saved_runs']}: saved_runs: {error}")
                self.locations["env.id"] = first
                return
            self.names["env.id"], self.locations["env.id"] = env_id, first
            self.env_args = {**(stored.get("env_args") or {}), **self.env_args}
            self.derived["env.id"] = f"the environment of {first}"

    def _complete(self, hosted: bool) -> None:
        if "env.id" not in self.locations and (runs := self.config.get("saved_runs")):
            self._environment_of(runs)
        for key, example in (("model", "model = …"), ("env.id", "[env] id = …")):
            if key not in self.locations:
                self.problems.append(
                    f"{key} is missing: write {example} in the file, or give --{key}"
                )
        for key, name in (("wandb.project", "project"), ("wandb.name", "run_name")):
            if key in self.names:
                self.config.setdefault(name, self.names[key])
                self.config.setdefault("report_to", "wandb")
        if self.evaluates and "eval_strategy" not in self.config:
            self.config["eval_strategy"] = "steps"
            self.derived["eval.strategy"] = "there is an [eval] section"
        batch: Any = self.config.get("batch_size", 0)
        if hosted and "micro_batch_size" not in self.config and batch > 0:
            self.config["micro_batch_size"] = max(n for n in range(1, 9) if batch % n == 0)
            self.derived["trainer.args.micro_batch_size"] = (
                "the largest divisor of batch_size up to 8"
            )

    # --- problems ---------------------------------------------------------------------------------

    def _problem(self, setting: Assignment, sentence: str) -> None:
        self.problems.append(setting.problem(sentence))

    def _unknown(self, setting: Assignment) -> None:
        """Report a key that its table does not have."""
        depth = max(n for n in range(1, len(setting.path)) if setting.path[:n] in _keys())
        table, wrong = setting.path[:depth], setting.path[depth]
        keys, elsewhere = _keys()[table], ""
        if wrong in keys:
            self._problem(setting, f"{'.'.join((*table, wrong))} is not a table")
            return
        if (
            table != ("trainer", "args")
            and wrong in compat.known_names()
            and not close_match(wrong, keys, SIMILAR)
        ):
            keys, elsewhere = (), f'; it belongs in [trainer.args]: "trainer.args.{wrong}"'
        self._problem(setting, unknown_key(wrong, f"[{'.'.join(table)}]", keys) + elsewhere)

    def _unknown_at_top(self, setting: Assignment, hosted: bool) -> None:
        wrong = setting.path[0]
        keys = list(dict.fromkeys([*TOP, *((keys[0] for keys in HOSTED) if hosted else ())]))
        flags = {flag.replace("-", "_"): flag for flag in FLAGS} if setting.is_flag else {}
        if wrong == "sampling":
            self._problem(setting, f"sampling must be a table, not {setting.value!r}")
        elif wrong in PRIME_RL:
            self._problem(setting, f"[{wrong}] is a table of prime-rl without a counterpart here")
        elif match := close_match(wrong, [*keys, *flags], SIMILAR):
            near = f"--{flags[match]}" if match in flags else match
            self._problem(setting, f'there is no setting "{setting.key}", did you mean "{near}"?')
        elif hosted and wrong in compat.known_names() and not setting.is_flag:
            self._problem(
                setting,
                f"{setting.key} is not among the top-level keys of a file: write all settings of this"
                f" file into [trainer.args], or give this one as --trainer.args.{wrong}",
            )
        elif field_match := close_match(wrong, compat.known_names()):
            self._problem(
                setting,
                f'there is no setting "{setting.key}", did you mean "trainer.args.{field_match}"?',
            )
        else:
            self._problem(
                setting, f'there is no setting "{setting.key}"; known are {", ".join(keys)}'
            )


FLAGS = tuple(
    "output-dir resume fresh tmux cwd dry-run dump-config schema json verbose quiet version help".split()
)
"""Options of the command, for suggestions."""


def is_hosted(assignments: Sequence[Assignment]) -> bool:
    """Return whether the files are in the hosted format: some of its keys and neither [trainer] nor
    [inference].

    >>> is_hosted([Assignment(("max_steps",), 5, "x.toml:1")])
    True
    """
    tops = {setting.path[0] for setting in assignments if not setting.is_flag}
    sections = {keys[0] for keys in HOSTED} - {"eval"}
    return bool(tops & sections) and not tops & {"trainer", "inference"}


# --- several environments -------------------------------------------------------------------------


def _env_tables(setting: Assignment, problems: list[str]) -> list[EnvTable]:
    """Return the ``[[env]]`` tables of a file; those with problems are left out."""
    tables: list[EnvTable] = []
    for number, table in enumerate(setting.value, 1):
        section = f"[[env]] number {number}"
        if not isinstance(table, Mapping):
            problems.append(setting.problem(f"{section} must be a table, not {table!r}"))
            continue
        before = len(problems)
        members = [Assignment((key,), value, setting.location) for key, value in table.items()]
        values = Fields.of(EnvTable).read(members, section, problems)
        if table.get("id") in (None, ""):
            problems.append(setting.problem(f"{section} needs an id"))
        if len(problems) == before:
            tables.append(EnvTable(**values))
    from verifiers_trainer.pipeline.mixture import distinct  # late: it loads torch

    names = distinct([table.name or short_name(table.id) for table in tables])
    return [
        dataclasses.replace(table, name=name) for table, name in zip(tables, names, strict=True)
    ]


def short_name(env_id: str) -> str:
    """Return an id without owner and version.

    >>> short_name("primeintellect/wordle@0.1.4")
    'wordle'
    """
    return env_id.rpartition("/")[2].partition("@")[0]


# --- back to TOML ---------------------------------------------------------------------------------

SHARED = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "max_grad_norm", "seed"),
    *("save_steps", "eval_strategy", "eval_steps"),
)
"""Fields of transformers that are always written."""
PART_OF_BATCH_SIZE = ("gradient_accumulation_steps", "per_device_train_batch_size")


def to_toml(settings: TrainSettings, config: RLConfig) -> str:
    """Return all settings of the run as TOML: explicit settings, then defaults and derived
    settings, without secrets.

    ``output_dir`` is written when it is explicit or cannot be derived from ``run_name``; a bound,
    when the loss reads it and does not define it.
    """
    explicit, left_out = without_secrets(settings.config, "trainer.args.")
    # as for RLConfig, where batch_size counts all rollouts of a step
    if settings.algorithm != "rl":
        config = config.private_copy()
        config.problems(config.world_size)
        explicit = {
            name: _plain(getattr(config, name))
            for name in explicit
            if name not in PART_OF_BATCH_SIZE
        }
    from verifiers_trainer.algorithm.losses import BOUNDS

    unwritten = BOUNDS.keys() - (config.bounds().keys() - config.bounds_of_the_source().keys())
    names = [name for name in _shown_fields() if name not in explicit and name not in unwritten]
    filled = {name: _plain(getattr(config, name)) for name in names}
    if "run_name" not in explicit:
        filled["output_dir"] = config.output_dir
    tables, of_env = [], []
    for table in settings.mixture or [EnvTable(settings.env_id, dict(settings.env_args))]:
        args, names = without_secrets(table.args, f"env.args of {table.id}: ")
        tables.append(replace(table, args=args).to_dict())
        of_env += names
    server_args, of_server = without_secrets(settings.server_args, "inference.args: ")
    document: dict[str, Any] = {
        "model": settings.model,
        "env": tables if settings.mixture else {"args": {}, **tables[0]},
        "inference": {"args": server_args} if server_args else {},
        "trainer": {
            "args": explicit | {name: value for name, value in filled.items() if value is not None}
        },
    }
    for component, number in settings.gpus.items():
        document[component] = {"gpus": number, **document[component]}
    secrets = (*left_out, *of_env, *of_server)
    comments = "".join(f"# {name} is a secret and is not printed\n" for name in secrets)
    return comments + tomli_w.dumps({name: value for name, value in document.items() if value})


def _shown_fields() -> list[str]:
    from transformers import TrainingArguments

    from verifiers_trainer.settings.config import RLConfig

    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    return [
        f.name
        for f in dataclasses.fields(RLConfig)
        if f.init and (f.name in SHARED or f.name not in inherited)
    ]


def _plain(value: object) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return getattr(value, "__name__", value)  # a function is written as its name
