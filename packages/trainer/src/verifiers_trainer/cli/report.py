"""Report the outcome of a command: exit code, error message, and the object of ``--json``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from verifiers.cli.common.command import SCHEMA
from verifiers.cli.common.streams import INTERRUPTED, fail
from verifiers.errors import RunError


def rank() -> int:
    """Return the rank of this process; 0 in a single-process run. Only rank 0 prints."""
    return int(os.environ.get("RANK", "0"))


def finish(body: Callable[[dict[str, object]], int], *, verbose: bool, as_json: bool) -> int:
    """Run ``body`` and return the exit code; print an error as one paragraph on stderr (a traceback
    with ``verbose``).

    ``body`` gets the object that ``--json`` prints and fills its own keys.
    """
    result: dict[str, object] = {}
    message: str | None = None
    try:
        code = body(result)
    except KeyboardInterrupt:
        code, message = INTERRUPTED, "interrupted; nothing was trained"
        print(f"vf-train: {message}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - top level of the command: every error is printed and sets the exit code
        code, facts = fail(_with_advice(error), command="vf-train", verbose=verbose)
        message = facts["message"]
    if as_json and not rank():
        print(
            json.dumps(
                {"schema": SCHEMA, "ok": code == 0, "exit_code": code, "error": message, **result}
            )
        )
    return code


def _with_advice(error: Exception) -> Exception:
    """Add to an out-of-memory error the settings to change; return other errors unchanged."""
    # torch's; by name, so that --help does not load torch
    if type(error).__name__ != "OutOfMemoryError":
        return error
    advice = RunError(
        f"out of memory: {str(error).splitlines()[0]} Lower micro_batch_size or max_seq_len, or use"
        " LoRA (use_lora = true) and gradient_checkpointing = true"
    )
    advice.__cause__ = error
    return advice
