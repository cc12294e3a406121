"""Rollouts as trajectories of the Agent Trajectory Interchange Format (ATIF 1.7), and back.

A message is a step, with the results of its tools as its observation; a turn's token ids,
log-probabilities and policy versions are its metrics; turns beside the rollout's own conversation
(sub-agents, rewritten histories, side calls) are embedded trajectories. What the format has no
field for, and where reading a step would give other values, is under ``extra["verifiers"]``: a
rollout of ours comes back as it was. Of other authors' trajectories what they lack is unknown:
None, or NaN for a reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verifiers.data.images import FORMATS
from verifiers.data.media import split_data_url
from verifiers.data.messages import message_text
from verifiers.errors import JournalError
from verifiers.results.rows import (
    FIELDS,
    READ_ERRORS,
    content_hash,
    remainder_of,
    with_remainder,
)
from verifiers.rollouts.transcript import Transcript
from verifiers.rollouts.values import reported
from verifiers.runtime.bounded import MAX_ROW_BYTES, read_file
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.json import decode_row, encode_row
from verifiers.storage.configurations import rollout_key
from verifiers.storage.images import StoredImages, check_stands_alone

VERSION = "ATIF-v1.7"
OURS = "verifiers"
"""Key of ``extra`` for what the format has no field for."""
_ROLES = {"system": "system", "user": "user", "assistant": "agent"}
_IMAGES = {end: kind for kind, end in FORMATS.items()} | {"jpeg": "image/jpeg"}
_TOTALS = (
    ("total_prompt_tokens", "input_tokens"),
    ("total_completion_tokens", "output_tokens"),
)
_UNKNOWN: dict[str, Any] = {"reward": None, "advantage": None, "is_truncated": False, "extras": {}}
"""What a step says of a turn beside its messages and tokens."""

Json = dict[str, Any]
T = TypeVar("T")


# --- writing --------------------------------------------------------------------------------------


def to_trajectory(output: Mapping[str, Any], agent: str = "", model: str = "") -> Json:
    """A finished rollout as a trajectory: plain JSON, in which unknown numbers are null."""
    metrics = output.get("metrics") or {}
    row = {name: value for name, value in output.items() if name in FIELDS or name not in metrics}
    written = turns = None
    if "trajectory" in row:
        transcript = Transcript(row.pop("trajectory") or ())
        written = decode_row(check_stands_alone(encode_row({"turns": transcript.to_json()})))[
            "turns"
        ]
        turns = _full_turns(transcript, written)
    row = decode_row(check_stands_alone(encode_row(row)))
    prompt, completion = (
        _messages(row.get("prompt"), "user"),
        _messages(row.get("completion"), "assistant"),
    )
    conversation = [*prompt, *completion]
    chains = _chains(turns or ())
    mains = [c for c in reversed(chains) if is_main_turn(c[-1][2])]
    main = next((c for c in mains if _is_prefix(c[-1][1], conversation)), [])
    if not main and completion:  # an agent writes the prompt of its calls itself
        main = next((c for c in mains if c[-1][1][-1:] == completion[-1:]), [])
        if main:
            prompt, conversation = _messages(main[0][2]["prompt"], "user"), main[-1][1]
    usage = reported(row.get("token_usage"))
    version = metadata.version("verifiers")
    who: Json = {"name": agent or OURS, "version": version, "model_name": model or None}
    if isinstance(row.get("tool_defs"), list):
        who["tool_definitions"] = row["tool_defs"]
    document: Json = {
        "schema_version": VERSION,
        "session_id": row.get("rollout_key"),
        "agent": {name: value for name, value in who.items() if value is not None},
        "steps": _steps(conversation, len(prompt), main, turns is not None),
        "final_metrics": {
            **{name: usage[key] for name, key in _TOTALS if isinstance(usage.get(key), int)},
            "extra": {"reward": row.get("reward"), "metrics": row.get("metrics")},
        },
        "subagent_trajectories": [
            {
                "schema_version": VERSION,
                "trajectory_id": f"turns-{c[0][0]}",
                "agent": {"name": agent or OURS, "version": version},
                "steps": _steps(c[-1][1], len(c[0][2]["prompt"]), c, True),
            }
            for c in chains
            if c is not main
        ],
    }
    document = {name: value for name, value in document.items() if value or name == "steps"}
    return _with_remainder(document, row if written is None else row | {"trajectory": written})


def _with_remainder(document: Json, row: Json) -> Json:
    """The document with what reading it would give otherwise."""
    for turn, (read, step) in zip(row.get("trajectory") or (), _turns_of(document), strict=False):
        if changed := remainder_of(turn, read).get("fields"):
            _ours(step)["fields"] = changed
    document.setdefault("extra", {})[OURS] = {"fields": {}, "absent": []} | remainder_of(
        row, read_trajectory(document)
    )
    return document


def is_main_turn(turn: Mapping[str, Any]) -> bool:
    """Whether a turn is of the conversation of the rollout itself, not of a sub-agent or aside."""
    return turn["extras"].get("role") not in ("subagent", "summary", "side")


def _full_turns(transcript: Transcript, written: Sequence[Json]) -> list[Json]:
    """The written turns, each with its whole prompt."""
    full = []
    for turn, step in zip(transcript.turns, written, strict=True):
        prompt = decode_row(encode_row({"prompt": turn.prompt}))["prompt"]
        tokens = step["tokens"] and step["tokens"] | {"prompt_ids": turn.prompt_ids.tolist()}
        full.append(step | {"prompt": prompt, "tokens": tokens})
    return full


Chain = list[tuple[int, list[Any], Json]]
"""Turns that continue each other: (index, the conversation with its completion, the turn)."""


def _chains(turns: Sequence[Json]) -> list[Chain]:
    chains: list[Chain] = []
    for index, turn in enumerate(turns):
        prompt = _messages(turn["prompt"], "user")
        conversation = [*prompt, *_messages(turn["completion"], "assistant")]
        for earlier in reversed(chains):
            if _is_prefix(earlier[-1][1], prompt):
                earlier.append((index, conversation, turn))
                break
        else:
            chains.append([(index, conversation, turn)])
    return chains


def _is_prefix(start: Sequence[object], messages: Sequence[object]) -> bool:
    return list(messages[: len(start)]) == list(start)


def _messages(value: object, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return value if isinstance(value, list) else []


def _steps(messages: Sequence[Json], num_prompt: int, turns: Chain, has_turns: bool) -> list[Json]:
    """The steps of a conversation, each with what its messages have beyond a step."""
    at = {len(_messages(turn["prompt"], "user")): (index, turn) for index, _, turn in turns}
    steps: list[Json] = []
    originals: list[list[Json]] = []
    for position, message in enumerate(messages):
        if message.get("role") == "tool" and steps:
            _add_result(steps[-1], message)
            originals[-1].append(message)
            continue
        step = _step(message)
        if step["source"] == "agent":
            if position in at:
                index, turn = at[position]
                _ours(step)["turn"] = index
                step |= _metrics(turn.get("tokens"))
            elif position < num_prompt:
                step["is_copied_context"] = True
            elif has_turns:
                step["llm_call_count"] = 0
                step.pop("reasoning_content", None)  # the format has none beside it
        steps.append(step)
        originals.append([message])
    for step, original in zip(steps, originals, strict=True):
        if _messages_of(step) != original:
            _ours(step)["messages"] = original
    steps = steps or [{"source": "system", "message": "", "extra": {OURS: {"messages": []}}}]
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def _step(message: Json) -> Json:
    source = _ROLES.get(str(message.get("role")), "user")
    step: Json = {"source": source, "message": _content(message.get("content"))}
    if source != "agent":
        return step
    if isinstance(reasoning := message.get("reasoning_content"), str):
        step["reasoning_content"] = reasoning
    if calls := [_call(call) for call in message.get("tool_calls") or ()]:
        step["tool_calls"] = calls
    return step


def _call(call: Json) -> Json:
    function = call.get("function") or {}
    text = function.get("arguments")
    try:
        arguments = decode_json(text) if isinstance(text, str) else text
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        arguments = None
    arguments = arguments if isinstance(arguments, dict) else {}
    written: Json = {
        "tool_call_id": str(call.get("id") or ""),
        "function_name": str(function.get("name") or ""),
        "arguments": arguments,
    }
    if text != json.dumps(arguments):
        written["extra"] = {OURS: {"arguments": text}}
    return written


def _content(content: object) -> str | list[Json]:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = []
    for part in content:
        url = ((part.get("image_url") or {}) if isinstance(part, dict) else {}).get("url")
        if isinstance(url, str) and (kind := _image_type(url)):
            source = {"media_type": kind, "path": url}
            parts.append({"type": "image", "source": source})
        else:  # it is with the message as it was
            text = message_text({"content": [part]}) or f"[{dict(part).get('type', 'part')}]"
            parts.append({"type": "text", "text": text})
    return parts


def _image_type(url: str) -> str:
    """The media type of the image at a URL; "" where the format has no such type.

    A data URL is a URL; where trajectories are written to a folder it becomes the path of a file.
    """
    if (split := split_data_url(url)) is not None:
        return split[0] if split[0] in FORMATS else ""
    end = url.partition("?")[0].rpartition(".")[2].lower()
    return _IMAGES.get(end, "") if "://" in url else ""


def _add_result(step: Json, message: Json) -> None:
    ids = {call["tool_call_id"] for call in step.get("tool_calls") or ()}
    call_id = message.get("tool_call_id")
    source = {"source_call_id": call_id} if call_id in ids else {}
    results = step.setdefault("observation", {"results": []})["results"]
    results.append(source | {"content": _content(message.get("content"))})


def _metrics(tokens: Json | None) -> Json:
    if tokens is None:
        return {}
    prompt, completion = tokens["prompt_ids"], tokens["completion_ids"]
    metrics: Json = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(completion),
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "extra": {"version": tokens.get("version", -1)},
    }
    logprobs = tokens.get("completion_logprobs")
    if logprobs and None not in logprobs:
        metrics["logprobs"] = logprobs
    return {"metrics": metrics}


def _ours(part: Json) -> Json:
    ours: Json = part.setdefault("extra", {}).setdefault(OURS, {})
    return ours


# --- reading --------------------------------------------------------------------------------------


def read_trajectory(document: Mapping[str, Any]) -> Json:
    """The row of a saved rollout that a trajectory holds; its turns have whole prompts.

    *Raises* ValueError, TypeError, LookupError or AttributeError for a value of another shape.
    """
    steps = list(document["steps"])
    messages = [_of_step(_messages_of, step, number) for number, step in enumerate(steps, 1)]
    start = next((n for n, step in enumerate(steps) if _is_sampled(step)), len(steps))
    final = document.get("final_metrics") or {}
    more = final.get("extra") or {}
    usage = {key: final[name] for name, key in _TOTALS if final.get(name) is not None}
    row: Json = {
        "prompt": list(chain.from_iterable(messages[:start])),
        "completion": list(chain.from_iterable(messages[start:])),
        "answer": None,
        "task": "default",
        "info": {},
        "reward": more.get("reward"),
        "metrics": more.get("metrics") if isinstance(more.get("metrics"), dict) else {},
        "error": None,
        "is_completed": True,
        "token_usage": usage,
        "tool_defs": document["agent"].get("tool_definitions"),
        "trajectory": [turn for turn, _ in _turns_of(document)],
    }
    return with_remainder(row, (document.get("extra") or {}).get(OURS) or {})


def _turns_of(document: Mapping[str, object]) -> list[tuple[Json, Json]]:
    """(the turn, its step) of every turn, of embedded trajectories too, in their order.

    A turn is as in a journal: it names the turn before it in its conversation, and has what follows
    that, so that a trajectory takes memory in proportion to its steps.
    """
    turns: list[tuple[Json, Json, Json | None, Any]] = []
    for trajectory in _with_embedded(document):
        previous: Json | None = None
        ids: np.ndarray | None = None
        num_before, new = 0, list[Json]()
        for number, step in enumerate(trajectory["steps"], 1):
            messages = _of_step(_messages_of, step, number)
            if not _is_sampled(step):
                new += messages
                continue
            ours = (step.get("extra") or {}).get(OURS) or {}
            tokens, before = _of_step(_tokens, step, number), ids
            ids = None if tokens is None else _of_step(_ids_of, tokens, number)
            if tokens is not None:
                shared = 0 if before is None else _num_common(before, tokens["prompt_ids"])
                tokens |= {"prompt_ids": tokens["prompt_ids"][shared:], "shared": shared}
            turn: Json = {"shared": num_before, "prompt": new, "completion": messages[:1]}
            turn |= {"tokens": tokens, **_UNKNOWN, "trajectory_id": ""}
            turns.append((turn, step, previous, ours))
            previous, num_before, new = turn, num_before + len(new) + 1, messages[1:]
    order = [ours.get("turn") for *_, ours in turns]
    if sorted(map(str, order)) == sorted(map(str, range(len(turns)))):
        turns.sort(key=lambda each: each[3]["turn"])
    index_of = {id(turn): index for index, (turn, *_) in enumerate(turns)}
    for index, (turn, _, parent, ours) in enumerate(turns):
        number_of_parent = None if parent is None else index_of[id(parent)]
        if number_of_parent is not None and number_of_parent >= index:
            raise ValueError(f"turn {index} continues turn {number_of_parent}, which is later")
        turn["parent"] = number_of_parent
        if turn["tokens"] is not None:
            has_shared = turn["tokens"]["shared"] > 0
            turn["tokens"]["parent"] = turn["parent"] if has_shared else None
        turn |= dict(ours.get("fields") or {})
    return [(turn, step) for turn, step, *_ in turns]


def _of_step(read: Callable[[Any], T], value: object, number: int) -> T:
    """``read(value)``. *Raises* ValueError, or TypeError, that names the step."""
    if not isinstance(value, Mapping):
        raise TypeError(f"step {number} is a {type(value).__name__}, and no object")
    try:
        return read(value)
    except READ_ERRORS as error:
        raise ValueError(f"step {number}: {type(error).__name__}: {error}") from error


def _ids_of(tokens: Mapping[str, Any]) -> np.ndarray:
    """The ids of a turn, prompt and completion, int32 [T]. *Raises* ValueError."""
    ids: np.ndarray = np.asarray([*tokens["prompt_ids"], *tokens["completion_ids"]])
    if ids.ndim != 1 or ids.dtype.kind != "i" or not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError("the ids of its tokens are no whole numbers from 0 to 2147483647")
    return ids


def _num_common(before: np.ndarray, prompt_ids: Sequence[int]) -> int:
    """How many ids two sequences begin with in common."""
    size = min(len(before), len(prompt_ids))
    differs = before[:size] != np.asarray(prompt_ids[:size])
    return int(np.argmax(differs)) if differs.any() else size


def _with_embedded(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield document
    for embedded in document.get("subagent_trajectories") or ():
        yield from _with_embedded(embedded)


def _is_sampled(step: Mapping[str, object]) -> bool:
    """Whether a model answered in this step."""
    is_agent = step["source"] == "agent" and not step.get("is_copied_context")
    return is_agent and step.get("llm_call_count") != 0


def _messages_of(step: Mapping[str, Any]) -> list[Json]:
    ours = (step.get("extra") or {}).get(OURS) or {}
    if (messages := ours.get("messages")) is not None:
        return list(messages)
    role = "assistant" if step["source"] == "agent" else str(step["source"])
    message: Json = {"role": role, "content": _parts(step["message"])}
    if calls := [_wire_call(call) for call in step.get("tool_calls") or ()]:
        message["content"] = message["content"] or None
        message["tool_calls"] = calls
    if step.get("reasoning_content") is not None:
        message["reasoning_content"] = step["reasoning_content"]
    results = (step.get("observation") or {}).get("results") or ()
    return [message, *map(_result, results)]


def _result(result: Mapping[str, Any]) -> Json:
    content = _parts(result.get("content"))
    if (call_id := result.get("source_call_id")) is None:  # no call in the standard format
        return {"role": "user", "content": content}
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _wire_call(call: Mapping[str, Any]) -> Json:
    ours = (call.get("extra") or {}).get(OURS) or {}
    arguments = ours.get("arguments", json.dumps(call["arguments"]))
    function = {"name": call["function_name"], "arguments": arguments}
    return {"id": call["tool_call_id"], "type": "function", "function": function}


def _parts(content: str | Sequence[Mapping[str, Any]] | None) -> object:
    if content is None or isinstance(content, str):
        return content or ""
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "image_url", "image_url": {"url": part["source"]["path"]}}
        for part in content
    ]


def _tokens(step: Mapping[str, Any]) -> Json | None:
    """The tokens of a turn; None unless both its prompt and its completion have ids."""
    metrics = step.get("metrics") or {}
    prompt, completion = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
    if not prompt or completion is None:
        return None
    logprobs = metrics.get("logprobs") or []
    return {
        "parent": None,
        "shared": 0,
        "prompt_ids": prompt,
        "completion_ids": completion,
        "completion_logprobs": logprobs if len(logprobs) == len(completion) else [],
        "overlong_prompt": False,
        "is_truncated": False,
        "version": (metrics.get("extra") or {}).get("version", -1),
    }


def load_trajectories(source: Path) -> list[tuple[str, Json]]:
    """(file, row) of the trajectories in a file or below a folder; empty if there is none.

    A file to which a trajectory refers is a part of it, of the first that refers to it. *Raises*
    JournalError that names the file, and the step, for one that is damaged, or of another shape.
    """
    documents = dict(_documents(source))
    parts: dict[Path, list[Path]] = {}
    embedded: set[Path] = set()
    for path, document in documents.items():
        referred = dict.fromkeys(path.parent / name for name in _references(document))
        parts[path] = [each for each in referred if each in documents and each not in embedded]
        parts[path] = [each for each in parts[path] if each != path]
        embedded |= {each for each in referred if each != path}
    rows: list[tuple[str, Json]] = []
    examples: dict[str, set[int]] = {}
    for path, document in documents.items():
        if path in embedded:
            continue
        try:
            more = [documents[part] for part in parts[path]]
            all_parts = [*(document.get("subagent_trajectories") or ()), *more]
            row = read_trajectory({**document, "subagent_trajectories": all_parts})
            _number(row, examples)
        except READ_ERRORS as error:
            raise _damaged(path, error) from error
        rows.append((str(path), row))
    return rows


def _documents(source: Path) -> Iterator[tuple[Path, Json]]:
    is_folder = source.is_dir()
    for path in sorted(source.rglob("*.json")) if is_folder else [source]:
        if not path.is_file():
            continue
        content = read_file(path, MAX_ROW_BYTES)
        if b"ATIF-v" not in content:
            continue
        try:
            document = StoredImages(path.parent).restored(decode_json(content))
        except ValueError as error:
            raise _damaged(path, error) from error
        version = document.get("schema_version") if isinstance(document, dict) else None
        if isinstance(version, str) and version.startswith("ATIF-v"):
            yield path, document


def _damaged(path: Path, error: Exception) -> JournalError:
    return JournalError(
        f"{path}: this file is no ATIF trajectory ({type(error).__name__}: {error}); restore the"
        " file or leave it out",
        path=str(path),
    )


def _references(value: object) -> Iterator[str]:
    """Relative paths of other files that a trajectory names as its parts."""
    if isinstance(value, dict):
        for name, member in value.items():
            if name in ("trajectory_path", "continued_trajectory_ref") and isinstance(member, str):
                if not Path(member).is_absolute() and ".." not in Path(member).parts:
                    yield member
            elif name != "extra":
                yield from _references(member)
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_references, value))


def _number(row: Json, examples: dict[str, set[int]]) -> None:
    """Give a rollout of another author ids by which those of one task are siblings.

    ``examples``: the siblings of each hash so far.
    """
    key, sibling = row.get("example_hash"), row.get("sibling")
    if not isinstance(key, str) or not key:
        columns = {name: row.get(name) for name in ("prompt", "answer", "task", "info")}
        key = row["example_hash"] = content_hash(columns)
    siblings = examples.setdefault(key, set())
    if not isinstance(row.get("example_id"), int | str):
        row["example_id"] = len(examples) - 1
    if type(sibling) is not int or not 0 <= sibling < 2**31:
        sibling = row["sibling"] = len(siblings)
    siblings.add(sibling)
    if not isinstance(row.get("rollout_key"), str):
        row["rollout_key"] = rollout_key(key, sibling)
