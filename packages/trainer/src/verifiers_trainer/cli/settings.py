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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w

from verifiers.cli.common.reader import Assignment, Fields, accept, store, unknown_key
from verifiers.environments.registry import find_recorded
from verifiers.errors import ConfigError
from verifiers.runtime.redaction import without_secrets
from verifiers.runtime.suggest import SIMILAR, close_match
from verifiers.runtime.values import FINITE, Number, Range, describe, fits
from verifiers.storage.directory import read_metadata
from verifiers_trainer.cli.server_flags import SETTINGS as SERVER_FLAGS
from verifiers_trainer.settings import compat
from verifiers_trainer.settings.fields import DECLARED, Settings, field_names

if TYPE_CHECKING:
    from verifiers_trainer.settings.config import RLConfig

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
ARGS = ("trainer", "args")
EVAL = "eval_"
HOSTED: dict[tuple[str, ...], str] = {
    **{
        (name,): name
        for name in (
            *("max_steps", "batch_size", "rollouts_per_example", "learning_rate", "lora_alpha"),
            *("loss", "teacher", "teacher_context"),
            *("saved_runs", "min_reward", "max_per_example"),
        )
    },
    **{("sampling", name): name for name in SAMPLING},
    ("name",): "run_name",
    ("oversampling_factor",): "oversample",
    ("max_async_level",): "max_off_policy_steps",
    ("checkpoints", "interval"): "save_steps",
    ("eval", "interval"): "eval_steps",
    ("eval", "eval_base_model"): "eval_on_start",
}
"""Keys of the hosted format, and short options -> settings. ``[wandb]`` is read from files
of both formats."""
HOSTED_IGNORED: dict[tuple[str, ...], str] = {
    ("env_file",): "secrets are read from the environment of this process",
    ("env_files",): "secrets are read from the environment of this process",
    ("trajectory_strategy",): (
        "turns that share a prefix are merged, the others are separate samples"
    ),
    ("checkpoints", "keep_cloud"): (
        "checkpoints are stored on disk only; trainer.args.save_total_limit bounds their number"
    ),
    ("wandb", "entity"): "set WANDB_ENTITY",
    ("eval", "env"): "evaluation uses the evaluation set of the training environment",
    ("val",): "[eval] configures the only evaluation during training",
}
"""Keys of the hosted format without effect -> why."""
PRIME_RL = ("environment", "orchestrator", "ckpt", "weight_broadcast", "slurm")
Algorithm = Literal["rl", "grpo"]
"""Values of ``trainer.algorithm``: the defaults of ``RLConfig`` or of ``GRPOConfig``."""
TOP = ("model", "env", "inference", "trainer", "eval", "wandb")
GPUS = ("inference", "trainer")
"""The components with ``gpus``."""
Text = Annotated[str, Range(min_length=1)]
Table = dict[str, Any]
NO_SERVER = (
    "no inference server is started: the embedded engine samples from the trainer's own weights"
)


@dataclass(frozen=True, slots=True)
class EnvTable:
    """One ``[[env]]`` of several: ``EnvTable("gsm8k", {"num_train_examples": 500},
    "gsm8k", 3.0)``."""

    id: Text
    args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    """Name in the metrics; default: the id without owner and version."""
    weight: Annotated[float, Range(gt=0.0, le=FINITE, noun="a number above 0")] | None = None
    """Share of the groups, relative to the other weights."""
    branching: Mapping[str, Any] | None = None
    """Where its rollouts fork, as the fields of ``vf.Branching``."""

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
    branching: Mapping[str, object] | None = None
    """``[env] branching`` of the environment."""

    @property
    def environments(self) -> tuple[EnvTable, ...]:
        """The environment, or those of the mixture; empty while none is named."""
        if self.mixture or not self.env_id:
            return self.mixture
        return (EnvTable(self.env_id, dict(self.env_args), branching=self.branching),)

    def at(self, problem: str) -> str:
        """A problem, prefixed with the place of the setting that it starts with."""
        location = self.locations.get(problem.split(" ", 1)[0])
        return f"{location}: {problem}" if location else problem


def read_settings(
    assignments: Sequence[Assignment], num_gpus: int = 0
) -> tuple[TrainSettings, list[str]]:
    """Return (settings, problems) of assignments in rising precedence; settings with problems are
    left out.

    ``num_gpus`` is the number of CUDA devices; the meaning of ``gpus`` depends on it. Imports no
    transformers.
    """
    return _Reader(num_gpus, is_hosted(assignments)).read(assignments)


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


@functools.cache
def tables() -> Mapping[tuple[str, ...], Fields]:
    """Every table of a file, in either layout, with its keys; ``()`` is the file itself. What is
    read, the schema, and the tables whose keys are settings follow from it."""
    args = fields_of_args()
    of_hosted: dict[str, dict[str, Any]] = {}
    for (table, *key), name in HOSTED.items():
        if key and table not in TOP:
            of_hosted.setdefault(table, {})[key[0]] = args.hint(name)
    return {
        (): Fields({"model": Text}),
        ("env",): Fields.of(EnvTable),
        ("env", "args"): Fields({}),  # the environment's own, which its loader checks
        ("inference",): Fields({"gpus": Number, "args": Table}),
        ("inference", "args"): Fields(dict.fromkeys(sorted(SERVER_FLAGS), Any)),
        ("trainer",): Fields({"gpus": Number, "algorithm": Algorithm, "args": Table}),
        ARGS: args,
        ("eval",): Fields(
            {n.removeprefix(EVAL): args.hints[n] for n in args.hints if n.startswith(EVAL)}
        ),
        ("wandb",): Fields({"project": str, "name": str}),
        **{(table,): Fields(hints) for table, hints in of_hosted.items()},
    }


class _Reader:
    """Puts each assignment, checked by the annotation of its key, into ``document``, whose layout
    is that of ``vf-rl``."""

    def __init__(self, num_gpus: int, hosted: bool):
        self.num_gpus, self.hosted = num_gpus, hosted
        self.document: dict[str, Any] = {}
        for path in filter(None, tables()):
            store(self.document, path, {})
        self.args: dict[str, Any] = self.document["trainer"]["args"]
        self.problems: list[str] = []
        self.ignored: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.locations: dict[str, str] = {}
        self.mixture: list[EnvTable] = []
        self.evaluates = False

    def read(self, assignments: Sequence[Assignment]) -> tuple[TrainSettings, list[str]]:
        in_files = {s.path[-1]: s.value for s in assignments if not s.is_flag}
        for setting in assignments:
            if setting.is_flag or not compat.is_unset_warmup(setting.path[-1], in_files):
                self._take(setting)
        self._complete()
        env, trainer, inference = (self.document[name] for name in ("env", "trainer", "inference"))
        settings = TrainSettings(
            self.document.get("model", ""),
            env.get("id", ""),
            env["args"],
            trainer["args"],
            trainer.get("algorithm", "rl"),
            tuple(self.ignored.items()),
            tuple(self.derived.items()),
            self.locations,
            tuple(self.mixture),
            inference["args"],
            {name: self.document[name]["gpus"] for name in GPUS if "gpus" in self.document[name]},
            env.get("branching"),
        )
        return settings, self.problems

    def _take(self, setting: Assignment) -> None:
        if (self.hosted or setting.is_flag) and setting.path in HOSTED_IGNORED:
            self.ignored[setting.key] = HOSTED_IGNORED[setting.path]
            return
        setting = self._in_one_layout(setting)
        table = max((path for path in tables() if path == setting.path[: len(path)]), key=len)
        match setting.path:
            case ("env",) if isinstance(setting.value, list) and len(setting.value) > 1:
                self._environments(setting)
            case ("env", "weight" | "name"):
                self.ignored[setting.key] = "there is one environment"
            case ("env", "args", _, *_):
                store(self.document, setting.path, setting.value)
            case ("wandb",) if isinstance(setting.value, bool):  # ``--wandb`` and ``--no-wandb``
                self.args["report_to"] = "wandb" if setting.value else "none"
            case path if path == table:
                self._problem(setting, f"{setting.key} must be a table, not {setting.value!r}")
            case path if path in HOSTED:
                self._problem(
                    setting,
                    f"{setting.key} is a key of the layout with top-level keys; beside [trainer] or"
                    f' [inference] it is "{".".join((*ARGS, HOSTED[path]))}": a file has one layout',
                )
            case path if tables()[table].hint(path[len(table)]) is not None:
                self._store_checked(setting, table, *path[len(table) :])
            case _ if table:
                self._unknown(setting, table)
            case _:
                self._unknown_at_top(setting)

    def _in_one_layout(self, setting: Assignment) -> Assignment:
        """The assignment under its key in the layout of ``vf-rl``, and not in [eval]."""
        path = setting.path
        if self.hosted or setting.is_flag:
            for depth in (1, 2):
                if name := HOSTED.get(path[:depth]):
                    path = (*ARGS, name, *path[depth:])
                    break
        if path[0] == "eval" and tables()["eval",].hint("".join(path[1:2])) is not None:
            path = (*ARGS, EVAL + path[1], *path[2:])
        self.evaluates |= path[0] != setting.path[0] == "eval"
        return replace(setting, path=path)

    # --- values -----------------------------------------------------------------------------------

    def _store_checked(
        self, setting: Assignment, table: tuple[str, ...], name: str, *below: str
    ) -> None:
        """Store the value of a key, or of an entry ``below`` it."""
        label = name if table == ARGS else ".".join((*table, name))
        hint, value = tables()[table].hint(name), setting.value
        self.locations[label] = setting.location
        try:
            if not below:
                value = accept(setting, hint)
            elif not fits({}, hint):
                raise ValueError(f"is not a table; it must be {describe(hint)}")
        except ValueError as error:
            self._problem(setting, f"{label} {error}")
            return
        if reason := self._why_without_effect(*table, name):
            self.ignored[setting.key] = reason
        if table != ARGS:
            store(self.document, setting.path, value)
        elif name in compat.WITHOUT_EFFECT:
            return
        elif below:
            store(self.args, (compat.RENAMED.get(name, name), *below), value)
        else:
            self._translated(setting, name, value)

    def _why_without_effect(self, *path: str) -> str | None:
        if path[-1] == "gpus" and self.num_gpus == 0:
            return "there is no CUDA device: everything runs in one process on the CPU"
        return NO_SERVER if path[0] == "inference" else compat.WITHOUT_EFFECT.get(path[-1])

    def _translated(self, setting: Assignment, name: str, value: object) -> None:
        """Store a value under the canonical names of its setting."""
        try:
            fields = compat.settings_of(
                name, value, lambda field: self.args.get(field, getattr(Settings, field, None))
            )
        except ConfigError as error:
            self._problem(setting, str(error))
            return
        duplicates = {second for _, second in compat.DUPLICATES}
        for field_name in [name for name in fields if name not in duplicates]:
            self.args[field_name], self.locations[field_name] = fields[field_name], setting.location

    def _environments(self, setting: Assignment) -> None:
        """Read several ``[[env]]`` tables."""
        self.mixture = _env_tables(setting, self.problems)
        self.document["env"]["id"] = " + ".join(table.name for table in self.mixture)
        self.locations["env.id"] = setting.location
        if any(table.weight is not None for table in self.mixture):
            weights = {
                table.name: 1.0 if table.weight is None else table.weight for table in self.mixture
            }
            self.args.setdefault("env_weights", weights)

    def _environment_of(self, runs: str | Sequence[str]) -> None:
        """Take the environment of the first saved run, which its metadata names."""
        first = runs if isinstance(runs, str) else next(iter(runs), "")
        location = f"{self.locations['saved_runs']}: saved_runs"
        if not Path(first).exists():
            self.problems.append(f"{location}: there is no folder {first}")
        stored = read_metadata(Path(first)) or {}
        if env_id := stored.get("env_id"):
            self.locations["env.id"] = first
            try:
                find_recorded(env_id, first, f"--env.id {env_id}")
            except ConfigError as error:
                self.problems.append(f"{location}: {error}")
                return
            args = {**(stored.get("env_args") or {}), **self.document["env"]["args"]}
            self.document["env"] = {"id": env_id, "args": args}
            self.derived["env.id"] = f"the environment of {first}"

    def _complete(self) -> None:
        args = self.args
        of_grpo = next((name for name in self.locations if name in compat.GRPO_NAMES), None)
        if of_grpo and "algorithm" not in self.document["trainer"]:
            self.document["trainer"]["algorithm"] = "grpo"
            self.derived["trainer.algorithm"] = f"{of_grpo} is a setting of GRPO"
        if "env.id" not in self.locations and (runs := args.get("saved_runs")):
            self._environment_of(runs)
        for key, example in (("model", "model = …"), ("env.id", "[env] id = …")):
            if key not in self.locations:
                self.problems.append(
                    f"{key} is missing: write {example} in the file, or give --{key}"
                )
        for key, name in (("project", "project"), ("name", "run_name")):
            if key in self.document["wandb"]:
                args.setdefault(name, self.document["wandb"][key])
                args.setdefault("report_to", "wandb")
        if self.evaluates and "eval_strategy" not in args:
            args["eval_strategy"] = "steps"
            self.derived["eval.strategy"] = "there is an [eval] section"
        batch: Any = args.get("batch_size", 0)
        if self.hosted and "micro_batch_size" not in args and batch > 0:
            args["micro_batch_size"] = max(n for n in range(1, 9) if batch % n == 0)
            self.derived["trainer.args.micro_batch_size"] = (
                "the largest divisor of batch_size up to 8"
            )

    # --- problems ---------------------------------------------------------------------------------

    def _problem(self, setting: Assignment, sentence: str) -> None:
        self.problems.append(setting.problem(sentence))

    def _unknown(self, setting: Assignment, table: tuple[str, ...]) -> None:
        """Report a key that its table does not have."""
        wrong, keys = setting.path[len(table)], tables()[table].names
        if table == ARGS and wrong in compat.INSTEAD:
            try:
                compat.changing({wrong: setting.value}, "[trainer.args]")
            except ConfigError as error:
                self._problem(setting, str(error))
            return
        elsewhere = ""
        if wrong in compat.known_names() and not close_match(wrong, keys, SIMILAR):
            keys, elsewhere = [], f'; it belongs in [trainer.args]: "trainer.args.{wrong}"'
        self._problem(setting, unknown_key(wrong, f"[{'.'.join(table)}]", keys) + elsewhere)

    def _unknown_at_top(self, setting: Assignment) -> None:
        wrong = setting.path[0]
        keys = [*TOP, *dict.fromkeys(path[0] for path in HOSTED if self.hosted)]
        flags = {flag.replace("-", "_"): flag for flag in FLAGS} if setting.is_flag else {}
        sentence = f'there is no setting "{setting.key}"'
        if wrong in PRIME_RL:
            sentence = f"[{wrong}] is a table of prime-rl without a counterpart here"
        elif match := close_match(wrong, [*keys, *flags], SIMILAR):
            near = f"--{flags[match]}" if match in flags else match
            sentence += f', did you mean "{near}"?'
        elif self.hosted and wrong in compat.known_names() and not setting.is_flag:
            sentence = (
                f"{setting.key} is not among the top-level keys of a file: write all settings of this"
                f" file into [trainer.args], or give this one as --trainer.args.{wrong}"
            )
        elif match := close_match(wrong, compat.known_names()):
            sentence += f', did you mean "trainer.args.{match}"?'
        else:
            sentence += f"; known are {', '.join(dict.fromkeys(keys))}"
        self._problem(setting, sentence)


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
        if "id" not in table:
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
    for table in settings.environments:
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
