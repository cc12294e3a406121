"""The run folder of a server: what it must have to go on after it was killed.

    FOLDER/
      server.json                     the model that it serves
      sessions/SESSION.json           a client
      samplers/SAMPLER.json           what a sampling client samples with
      models/MODEL/
        model.json                    what it was made of
        weights/NAME/                 save_state: a peft adapter with its optimizer
        sampler_weights/NAME/         save_weights_for_sampler: a peft adapter
        external_weights/NAME/        the same, to be downloaded
        snapshots/NUMBER/             of sampling clients without a name; the newest are kept
        live/                         after the last optimizer step, with the results since the one before
        journal/SEQUENCE.KIND         requests that were accepted since, in order

``tinker://MODEL/weights/NAME`` names ``models/MODEL/weights/NAME``. Every folder of weights is one
of peft: it can be copied out and served, and one of peft can be copied in.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from verifiers.errors import ConfigError, ModelRefused
from verifiers.runtime.bounded import read_file
from verifiers.runtime.decoding import read_json
from verifiers.storage.files import LOCK_NAME, HeldFile, atomic_write, remove_leftovers
from verifiers_trainer.policy.adapter_files import ADAPTER, WEIGHTS
from verifiers_trainer.policy.adapter_set import ABOUT

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Folder -> the SDK's name of the kind."""
MAX_SNAPSHOTS = 8
"""Weights of sampling clients without a name that are kept of each model."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


class SessionRecord(msgspec.Struct, kw_only=True):
    """``sessions/SESSION.json``."""

    session_id: str
    created: datetime
    sdk_version: str = ""
    display_name: str | None = None
    user_metadata: dict[str, object] | None = None


class ModelRecord(msgspec.Struct, kw_only=True):
    """``models/MODEL/model.json``."""

    model_id: str
    session_id: str
    base_model: str
    created: datetime
    rank: int
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    head: bool = True
    loaded_from: str | None = None
    """The checkpoint that it began with."""
    with_optimizer: bool = True
    user_metadata: dict[str, object] | None = None


class SamplerRecord(msgspec.Struct, kw_only=True):
    """``samplers/SAMPLER.json``: a folder of weights, or the model alone."""

    sampler_id: str
    session_id: str
    weights: str | None = None
    """Path in ``models``; None for the model without an adapter."""
    model_path: str | None = None
    """The name by which a client can ask for the same again."""


class ServerRecord(msgspec.Struct, kw_only=True):
    """``server.json``."""

    model: str


class About(msgspec.Struct, kw_only=True):
    """``adapter.json`` of a folder of weights that this server wrote."""

    step: int = 0
    created: datetime | None = None
    expires_at: datetime | None = None
    user_metadata: dict[str, str] | None = None
    canary: list[float] | None = None
    """The trainer's log-probabilities of the fixed tokens."""


_Record = TypeVar("_Record", bound=msgspec.Struct)


class Store:
    """A run folder, which one server holds at a time.

    *Raises* RunBusy; ``ConfigError`` for a folder of another model.
    """

    def __init__(self, folder: Path, model: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.absolute()
        self._lock = HeldFile(self.folder / LOCK_NAME)
        self._lock.write_holder()
        for name in ("sessions", "samplers", "models"):
            (self.folder / name).mkdir(exist_ok=True)
            remove_leftovers(self.folder / name)
        path = self.folder / "server.json"
        if not path.exists():
            self._write(path, ServerRecord(model=model))
        elif (before := self.read(path, ServerRecord).model) != model:
            self.close()
            raise ConfigError(
                f"{folder} has adapters of the model {before}, and this server has {model}: give"
                " another folder"
            )

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.release()

    def _write(self, path: Path, record: msgspec.Struct) -> None:
        atomic_write(path, msgspec.json.format(msgspec.json.encode(record), indent=1))

    def read(self, path: Path, kind: type[_Record]) -> _Record:
        """A record of the folder. *Raises* ``ConfigError``."""
        try:
            return msgspec.convert(read_json(path), kind)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    # --- records ----------------------------------------------------------------------------------

    def add_session(self, record: SessionRecord) -> None:
        """Keep a session."""
        self._write(self.folder / f"sessions/{record.session_id}.json", record)

    def add_sampler(self, record: SamplerRecord) -> None:
        """Keep what a sampling client samples with."""
        self._write(self.folder / f"samplers/{record.sampler_id}.json", record)

    def add_model(self, record: ModelRecord) -> None:
        """Keep what a model was made of."""
        folder = self.model_folder(record.model_id)
        (folder / "journal").mkdir(parents=True, exist_ok=True)
        for kind in (*KINDS, "snapshots"):
            (folder / kind).mkdir(exist_ok=True)
        self._write(folder / "model.json", record)

    def sessions(self) -> list[SessionRecord]:
        """All of them."""
        return self._records("sessions/*.json", SessionRecord)

    def samplers(self) -> list[SamplerRecord]:
        """All of them."""
        return self._records("samplers/*.json", SamplerRecord)

    def models(self) -> list[ModelRecord]:
        """All of them."""
        return self._records("models/*/model.json", ModelRecord)

    def _records(self, pattern: str, kind: type[_Record]) -> list[_Record]:
        return [self.read(path, kind) for path in sorted(self.folder.glob(pattern))]

    # --- weights ----------------------------------------------------------------------------------

    def model_folder(self, model_id: str) -> Path:
        """*Raises* ModelRefused for what is no name of a model."""
        return self.folder / "models" / checked_name(model_id)

    def folder_of(self, path: str, kinds: tuple[str, ...] = tuple(KINDS)) -> Path:
        """The folder that ``tinker://MODEL/KIND/NAME`` names, whether it is there or not.

        *Raises* ModelRefused for what is no such path.
        """
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in kinds:
            allowed = " or ".join(f"{SCHEME}MODEL/{kind}/NAME" for kind in kinds)
            raise ModelRefused(f"{path!r} is no path of weights: use {allowed}", status=400)
        return self.model_folder(parts[0]) / parts[1] / checked_name(parts[2])

    def existing(self, path: str, kinds: tuple[str, ...] = tuple(KINDS)) -> Path:
        """As ``folder_of``. *Raises* ModelRefused for a checkpoint that is not there, too."""
        folder = self.folder_of(path, kinds)
        if not (folder / ADAPTER).is_file():
            raise ModelRefused(f"there are no weights {path}", status=404)
        return folder

    def path_of(self, folder: Path) -> str:
        """The name of a folder of weights for clients."""
        return SCHEME + "/".join(folder.relative_to(self.folder / "models").parts)

    def about(self, folder: Path) -> About:
        """What is known of a folder of weights; nothing of peft's own."""
        path = folder / ABOUT
        return self.read(path, About) if path.is_file() else About()

    def checkpoints(self, model_id: str) -> Iterator[tuple[Path, About]]:
        """The checkpoints of a model with a name, the oldest first; those that have expired are
        removed."""
        listed = []
        for kind in KINDS:
            for folder in (self.model_folder(model_id) / kind).glob("*/"):
                about = self.about(folder)
                if about.expires_at is not None and about.expires_at < now():
                    shutil.rmtree(folder)
                elif (folder / ADAPTER).is_file():
                    listed.append((about.created or modified(folder), folder, about))
        for _, folder, about in sorted(listed, key=lambda each: each[:2]):
            yield folder, about

    def set_expiry(self, folder: Path, expires_at: datetime | None) -> None:
        """When a checkpoint is removed; None for never."""
        path = folder / ABOUT
        about = read_json(path) if path.is_file() else {}
        about["expires_at"] = expires_at and expires_at.isoformat()
        atomic_write(path, msgspec.json.format(msgspec.json.encode(about), indent=1))

    def new_snapshot(self, model_id: str) -> Path:
        """A folder for the weights of a sampling client without a name; the oldest is removed."""
        parent = self.model_folder(model_id) / "snapshots"
        numbers = sorted(int(path.name) for path in parent.iterdir() if path.name.isdigit())
        for number in numbers[: len(numbers) + 1 - MAX_SNAPSHOTS]:
            shutil.rmtree(parent / f"{number:08d}")
        return parent / f"{(numbers[-1] + 1 if numbers else 0):08d}"

    # --- the journal ------------------------------------------------------------------------------

    def keep_request(self, model_id: str, sequence: int, kind: str, body: bytes) -> None:
        """Keep a request, durably."""
        atomic_write(self.model_folder(model_id) / f"journal/{sequence:09d}.{kind}", body)

    def requests(self, model_id: str) -> list[tuple[int, str, bytes]]:
        """(sequence, kind, body) of what was kept and not forgotten, in order."""
        folder = self.model_folder(model_id) / "journal"
        remove_leftovers(folder)
        requests = []
        for path in sorted(folder.iterdir()):
            number, _, kind = path.name.partition(".")
            if number.isdigit():
                requests.append((int(number), kind, read_file(path)))
        return requests

    def forget_requests(self, model_id: str, through: int) -> None:
        """Remove the requests up to a number, which is in ``live``."""
        for path in (self.model_folder(model_id) / "journal").iterdir():
            number = path.name.partition(".")[0]
            if number.isdigit() and int(number) <= through:
                path.unlink()


def checked_name(name: str) -> str:
    """*Raises* ModelRefused for a name that is no name of one folder."""
    if not _NAME.fullmatch(name):
        raise ModelRefused(
            f"{name[:80]!r} is no name: use letters, digits, '.', '_', ':' and '-', at most 200",
            status=400,
        )
    return name


def link_weights(source: Path, target: Path) -> None:
    """Have the adapter of ``source`` in ``target`` too, without its optimizer and without a copy."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for name in (ADAPTER, WEIGHTS, ABOUT):
        os.link(source / name, temporary / name)
    os.rename(temporary, target)


def now() -> datetime:
    """In UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def modified(path: Path) -> datetime:
    """When a folder was changed."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def expiry(ttl_seconds: int | None) -> datetime | None:
    """When a checkpoint that lives so long is removed. *Raises* ModelRefused."""
    if ttl_seconds is None:
        return None
    if not 0 < ttl_seconds <= 10 * 366 * 24 * 3600:
        raise ModelRefused(
            f"ttl_seconds={ttl_seconds} must be above 0 and at most ten years", status=400
        )
    return now() + timedelta(seconds=ttl_seconds)
