"""Older ``verifiers.utils.save_utils``: convert, write, read and collect saved rollouts.

Runs save rollouts durably, as they finish (``results_path``). These functions are for code that
manages its own files.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import verifiers
from verifiers.clients.protocol import ClientConfig
from verifiers.data.tool_schema import shortened
from verifiers.errors import ConfigError, RunMismatch
from verifiers.legacy.usage import StateUsageTracker
from verifiers.results import GenerateMetadata, GenerateOutputs, load_results, make_dataset
from verifiers.results import rows as native
from verifiers.results.rows import RolloutOutput, json_ready
from verifiers.rollouts.state import State
from verifiers.runtime.json import UNSERIALIZABLE, encode_row
from verifiers.storage.directory import METADATA_NAME, RESULTS_NAME, read_metadata
from verifiers.storage.files import append_lines, atomic_write

FACTS = (
    "env_id env_args model base_url num_examples rollouts_per_example sampling_args state_columns"
    " version_info pass_threshold"
).split()
"""Attributes of ``GenerateOutputsBuilder`` that are fields of the metadata."""
ENV_VERSIONS = ("env_version", "env_commit")
USAGE_NAMES = (("input_tokens", "prefill_tokens"), ("output_tokens", "decode_tokens"))
"""Names of the two counts of a state, the later where the earlier is absent."""


# --- rollouts


def state_to_output(state: State, state_columns: Sequence[str] | None = None) -> RolloutOutput:
    """A finished state as a saved rollout, its error also as text: ``error_chain``,
    ``long_error_chain``.

    ``token_usage`` is that of ``state["usage_tracker"]``, else of ``token_usage`` or ``usage``,
    else the sum over the trajectory. *Raises* ValueError for a state column that JSON cannot
    represent.
    """
    output = native.state_to_output(state, state_columns)
    for name in state_columns or ():
        if name != "trajectory" and UNSERIALIZABLE.encode() in encode_row({name: output[name]}):
            raise ValueError(
                f"JSON cannot represent the state column {name!r}: {shortened(state[name])}"
            )
    output["token_usage"] = _usage_of(state)
    if output["error"] is not None:
        output["error_chain"] = output["error"]["error_chain_repr"]
        output["long_error_chain"] = output["error"]["error_chain_str"]
    return output


def states_to_outputs(
    states: Iterable[State], state_columns: Sequence[str] | None = None
) -> list[RolloutOutput]:
    """``state_to_output`` of each finished state."""
    return [state_to_output(state, state_columns) for state in states]


def make_serializable(value: object) -> object:
    """A value that ``json.dumps`` takes: dates and paths as text, exceptions as ``repr``, other
    objects as ``str``.

    >>> make_serializable(ValueError("x")), make_serializable(Path("a/b"))
    ("ValueError('x')", 'a/b')
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | Mapping):
        return json_ready(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    if isinstance(value, datetime.date):  # and every datetime
        return value.isoformat()
    if isinstance(value, PurePath):
        return value.as_posix()
    return repr(value) if isinstance(value, BaseException) else str(value)


def is_json_serializable(value: object) -> bool:
    """Whether a value is plain JSON data: text, numbers, lists, and mappings with text as keys."""
    if isinstance(value, dict):
        return all(
            isinstance(key, str) and is_json_serializable(member) for key, member in value.items()
        )
    if isinstance(value, list | tuple):
        return all(map(is_json_serializable, value))
    return value is None or isinstance(value, str | int | float)


def serialize_timing(timing: object) -> dict[str, object]:
    """The times of a state as plain data. *Raises* TypeError for what is no mapping."""
    if not isinstance(timing, Mapping):
        raise TypeError(f"timing must be a mapping, not {type(timing).__name__}")
    return dict(json_ready(timing))


# --- files


def load_outputs(results_path: str | Path) -> list[RolloutOutput]:
    """The saved rollouts of a run directory or a results file; a torn last line is left out."""
    return load_results(results_path).outputs


def save_outputs(
    outputs: Sequence[Mapping[str, object]], results_path: str | Path, mode: str = "w"
) -> None:
    """Write rollouts to ``results.jsonl`` in the folder ``results_path``; mode ``"a"`` appends, in
    place of a torn last line."""
    if mode not in ("w", "a"):
        raise ConfigError(f'mode is {mode!r}; it must be "w" or "a"', key="mode")
    folder = Path(results_path)
    folder.mkdir(parents=True, exist_ok=True)
    lines = b"".join(encode_row(native.encoded_output(output)) + b"\n" for output in outputs)
    if mode == "w":
        atomic_write(folder / RESULTS_NAME, lines)
        return
    append_lines(folder / RESULTS_NAME, lines)


def save_new_outputs(new_outputs: Sequence[Mapping[str, object]], results_path: str | Path) -> None:
    """Append rollouts to ``results.jsonl`` in the folder ``results_path``, in place of a torn last
    line."""
    save_outputs(new_outputs, results_path, mode="a")


def save_metadata(metadata: Mapping[str, object], result_path: str | Path) -> None:
    """Write ``metadata.json`` in the folder ``result_path``."""
    folder = Path(result_path)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(
        folder / METADATA_NAME, json.dumps(json_ready(dict(metadata)), indent=2).encode() + b"\n"
    )


def validate_resume_metadata(
    results_path: str | Path,
    env_id: str | None = None,
    model: str | None = None,
    num_examples: int | None = None,
    rollouts_per_example: int | None = None,
) -> None:
    """Compare the metadata in a folder with the facts of a run that would continue there.

    More examples than saved are allowed. *Raises* OtherRun, a ValueError, naming the differences;
    ConfigError when the folder has no metadata file or a broken file.
    """
    if not Path(results_path, METADATA_NAME).is_file():
        raise ConfigError(
            f"{results_path} has no {METADATA_NAME}; pass the directory of a run",
            path=str(results_path),
        )
    stored = read_metadata(results_path)
    if stored is None:
        raise ConfigError(
            f"{Path(results_path, METADATA_NAME)} is no JSON object; restore it",
            path=str(results_path),
        )
    facts = {"env_id": env_id, "model": model, "rollouts_per_example": rollouts_per_example}
    pairs = {name: (stored.get(name), fact) for name, fact in facts.items() if fact is not None}
    if (
        num_examples is not None
        and (saved := stored.get("num_examples")) is not None
        and 0 <= num_examples < saved
    ):
        pairs["num_examples"] = (saved, num_examples)
    if differences := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        text = "; ".join(
            f"{name} is {stored_value!r} there, not {value!r}"
            for name, (stored_value, value) in differences.items()
        )
        raise OtherRun(f"{results_path} contains another run: {text}", differences=differences)


# --- results


class OtherRun(RunMismatch, ValueError):
    """A folder has the rollouts of another run."""


class GenerateOutputsBuilder:
    """Collects saved rollouts into ``GenerateOutputs``; the arguments are facts of its metadata."""

    def __init__(
        self,
        env_id: str = "",
        env_args: Mapping[str, object] | None = None,
        model: str = "",
        client: object = None,
        num_examples: int | None = None,
        rollouts_per_example: int | None = None,
        state_columns: Sequence[str] | None = None,
        sampling_args: Mapping[str, object] | None = None,
        results_path: str | Path | None = None,
        pass_threshold: float = 0.5,
    ):
        self.env_id = env_id
        self.env_args = dict(env_args or {})
        self.model = model
        self.client = client
        self.num_examples, self.rollouts_per_example = num_examples, rollouts_per_example
        self.state_columns = list(state_columns or ())
        self.sampling_args = dict(sampling_args or {})
        self.results_path, self.pass_threshold = results_path, pass_threshold
        self.base_url = self.compute_base_url(client)
        self.version_info = {
            "vf_version": verifiers.__version__,
            **dict.fromkeys(("vf_commit", *ENV_VERSIONS)),
        }
        self.started = datetime.datetime.now(datetime.UTC)
        self.outputs: list[RolloutOutput] = []

    @staticmethod
    def format_base_url(urls: Sequence[str]) -> str:
        """The URLs joined by commas."""
        return ",".join(urls)

    @staticmethod
    def tools_key(tools: Sequence[object] | None) -> str | None:
        """A text that is equal for equal sets of tools; None without tools."""
        return json.dumps(json_ready(list(tools)), sort_keys=True) if tools else None

    def compute_base_url(self, client: object) -> str:
        """The URL of a client or of its settings, several joined by commas; "" if
        it has none."""
        if isinstance(client, ClientConfig):
            return self.format_base_url(
                [endpoint.api_base_url for endpoint in client.endpoint_configs or [client]]
            )
        return str(getattr(client, "base_url", "") or "")

    def add_outputs(self, new_outputs: Iterable[RolloutOutput]) -> None:
        """Add finished rollouts; missing fields become None."""
        self.outputs += [
            RolloutOutput(dict.fromkeys(native.ALWAYS) | {"metrics": {}} | row)
            for row in new_outputs
        ]

    def build_outputs(self, sort_by_example_id: bool = False) -> list[RolloutOutput]:
        """The rollouts so far, in order of arrival or by example."""
        if sort_by_example_id:
            return sorted(self.outputs, key=lambda o: o["example_id"])
        return list(self.outputs)

    def build_metadata(self) -> GenerateMetadata:
        """The metadata of the rollouts so far; ``tools`` only where every rollout had the same."""
        keys = {self.tools_key(output["tool_defs"]) for output in self.outputs}
        is_common = len(keys) == 1 and None not in keys
        return GenerateMetadata.of(
            self.outputs,
            **{name: getattr(self, name) for name in FACTS},
            path_to_save=self.results_path,
            tools=self.outputs[0]["tool_defs"] if is_common else None,
            date=self.started.isoformat(timespec="seconds"),
            time=(datetime.datetime.now(datetime.UTC) - self.started).total_seconds(),
        )

    def build(self, sort_by_example_id: bool = False) -> GenerateOutputs:
        """The rollouts so far as results, in order of arrival or by example."""
        return GenerateOutputs(self.build_outputs(sort_by_example_id), self.build_metadata())


def sanitize_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """The metadata as plain data, without the date and the path of the run."""
    return {
        name: value
        for name, value in json_ready(metadata).items()
        if name not in ("date", "path_to_save")
    }


def get_hf_hub_dataset_name(results: GenerateOutputs) -> str:
    """The name under which results are published unless a name is given: ``gsm8k_gpt-5_n20_r3``."""
    facts = results.metadata
    model = str(facts["model"]).replace("/", "-")
    return f"{facts['env_id']}_{model}_n{facts['num_examples']}_r{facts['rollouts_per_example']}"


def push_results_to_hf_hub(results: GenerateOutputs, dataset_name: str | None = None) -> None:
    """Publish results as a data set of the Hugging Face Hub."""
    make_dataset(
        results, push_to_hub=True, hub_name=dataset_name or get_hf_hub_dataset_name(results)
    )


def save_rollout_results(
    results: GenerateOutputs, push_to_hf_hub: bool = False, hf_hub_dataset_name: str | None = None
) -> None:
    """Write results to their ``metadata["path_to_save"]``, and publish them if wanted."""
    path = results.metadata["path_to_save"]
    if path is None:
        raise ConfigError(
            "the results have no path_to_save; write them with results.save(path)",
            key="path_to_save",
        )
    results.save(path)
    if push_to_hf_hub:
        push_results_to_hf_hub(results, hf_hub_dataset_name)


def save_to_disk(
    dataset: Any, metadata_dict: Mapping[str, object], path_to_save: str | Path
) -> None:
    """Write the rows of a ``datasets.Dataset`` and a run's metadata into a folder."""
    save_outputs(dataset.to_list(), path_to_save)
    save_metadata(metadata_dict, path_to_save)


def _usage_of(state: State) -> dict[str, float] | None:
    tracker = dict.get(state, "usage_tracker")
    if isinstance(tracker, StateUsageTracker):
        return tracker.snapshot()
    for name in ("token_usage", "usage"):
        if counts := state.get(name):
            first = [
                next((counts[key] for key in keys if key in counts), 0) for keys in USAGE_NAMES
            ]
            totals = {
                key: value
                for key, value in counts.items()
                if not any(key in keys for keys in USAGE_NAMES)
            }
            return {"input_tokens": first[0], "output_tokens": first[1], **totals}
    summed = StateUsageTracker()
    for step in state["trajectory"]:
        summed.increment_from_response(step["response"])
    return summed.snapshot()
