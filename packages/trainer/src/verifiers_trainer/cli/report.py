"""How the command ends: exit code, one paragraph for an error, and the object of ``--json``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from verifiers.data.messages import escape_control
from verifiers.errors import VerifiersError
from verifiers.runtime.redaction import redacted_text

SCHEMA = 1
UNEXPECTED = 3
INTERRUPTED = 130


def rank() -> int:
    """Which of the processes that train together this is; 0 of one. Rank 0 speaks for all."""
    return int(os.environ.get("RANK", "0"))


def finish(body: Callable[[dict[str, Any]], int], *, verbose: bool, as_json: bool) -> int:
    """Run ``body`` and return the exit code; an error becomes one paragraph on stderr (a traceback with ``verbose``).

    ``body`` gets the object that ``--json`` prints and fills its own keys.
    """
    result: dict[str, Any] = {}
    message: str | None = None
    try:
        code = body(result)
    except KeyboardInterrupt:
        code, message = INTERRUPTED, "interrupted; nothing was trained"
    except Exception as error:  # noqa: BLE001 - the end of the command: whatever it is, it is shown and sets the code
        code, message = _explain(error)
        if verbose:
            traceback.print_exc()
    if message:
        print(escape_control(redacted_text(f"vf-train: {message}")), file=sys.stderr)
    if as_json and not rank():
        print(json.dumps({"schema": SCHEMA, "ok": code == 0, "exit_code": code, "error": message, **result}))
    return code


def _explain(error: Exception) -> tuple[int, str]:
    if isinstance(error, VerifiersError):
        return error.exit_code, str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's; by name, so that --help does not load torch
        return UNEXPECTED, (
            f"out of memory: {str(error).splitlines()[0]} Lower micro_batch_size or max_seq_len, or use LoRA "
            "(use_lora = true) and gradient_checkpointing = true"
        )
    return UNEXPECTED, f"unexpected {type(error).__name__}: {error} (run it again with -v for the traceback)"
