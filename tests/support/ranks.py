"""Training runs of several processes, as a launcher starts them; the imports are paid once, by a
fork server."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANG_S = 120.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended."""

    rank: int
    exit_code: int
    """0; 1 after an exception; -9 after SIGKILL."""
    result: Any
    """What the function returned, or ``[kind, message]`` of its exception; None after a kill."""


def on_ranks(
    context: Any,
    folder: Path,
    work: Callable[..., Any],
    *arguments: Any,
    world: int = 2,
    failpoint: str = "",
    store_of: str = "torchrun",
    **keywords: Any,
) -> list[Ended]:
    """Call ``work(*arguments, **keywords)`` in ``world`` processes; how each ended.

    ``failpoint`` is armed in rank 0, or as ``"1/name:n"`` in rank 1. Fails when a process still
    runs after two minutes. ``store_of`` the launcher, as with torchrun, or of "rank 0", which takes
    it along when it ends, so that a rank that is still joining reports a lost connection.
    """
    from torch.distributed import TCPStore

    folder.mkdir(parents=True, exist_ok=True)
    store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": str(store_of == "torchrun"),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if store_of != "torchrun":
        store = None  # and frees its port
    processes = [
        context.Process(
            target=_rank,
            args=(rank, variables, str(folder), failpoint, work, arguments, keywords),
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(HANG_S)
        assert all(process.exitcode is not None for process in processes), "a rank hangs"
    finally:
        for process in processes:
            process.kill()
    return [
        Ended(rank, process.exitcode, _result(folder, rank))
        for rank, process in enumerate(processes)
    ]


def results(ended: list[Ended]) -> list[Any]:
    """What each rank returned; all must have ended well."""
    assert [rank.exit_code for rank in ended] == [0] * len(ended), ended
    return [rank.result for rank in ended]


def _result(folder: Path, rank: int) -> Any:
    path = folder / f"result-{rank}.json"
    result = json.loads(path.read_text()) if path.is_file() else None
    path.unlink(missing_ok=True)
    return result


def _rank(
    rank: int,
    variables: dict[str, str],
    folder: str,
    failpoint: str,
    work: Any,
    arguments: Any,
    keywords: dict[str, Any],
) -> None:
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    from verifiers.runtime import failpoints

    torch.set_num_threads(1)
    where, _, spec = failpoint.rpartition("/")
    armed = failpoints.armed(spec) if spec and int(where or 0) == rank else nullcontext()
    path = Path(folder) / f"result-{rank}.json"
    try:
        with armed:
            path.write_text(json.dumps(work(*arguments, **keywords)))
    except BaseException as error:  # noqa: BLE001 - however a rank ends, the test is told
        traceback.print_exc()
        path.write_text(json.dumps([type(error).__name__, str(error)]))
        os._exit(1)
    os._exit(0)  # torch's process groups need no goodbye
