"""Resolve and import installed environments in a fresh interpreter, and print one JSON object.

``vf-install`` runs this module as a child process: a running interpreter may not see packages
installed after it started, and the child imports the environment from its installed location, never
from the working directory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from verifiers.environments import local_sources, registry
from verifiers.errors import RunError, UnknownEnvironment, VerifiersError
from verifiers.runtime.bounded import TooLong, run_captured


@dataclass(frozen=True, slots=True)
class Resolved:
    """An environment that imports: ``Resolved("sums", "vf-sums", "0.1.0",
    "vf_sums:load_environment")``."""

    id: str
    distribution: str | None
    version: str | None
    entry_point: str


def check_installed(env_ids: Sequence[str]) -> list[Resolved]:
    """Resolve and import environments in a fresh interpreter.

    *Raises* ``RunError`` with the error of the first that does not resolve or import.
    """
    try:
        child = run_captured(
            [sys.executable, "-P", "-m", "verifiers.cli.install.installed", *env_ids]
        )
    except TooLong as error:
        raise RunError(f"importing {', '.join(env_ids)} printed too much: {error}") from error
    try:
        answer = json.loads(child.stdout)
    except json.JSONDecodeError:
        last_line = child.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise RunError(
            f"importing {', '.join(env_ids)} ended the interpreter ({child.returncode}):"
            f" {last_line[0]}"
        ) from None
    if "error" in answer:
        raise RunError(answer["error"])
    return [Resolved(**facts) for facts in answer["environments"]]


def main() -> None:
    """Entry point of the child process: ids as arguments, one JSON object on stdout."""
    from verifiers.cli.common.streams import results_stream

    with results_stream(json_only=True) as out:
        try:
            answer: dict[str, object] = {
                "environments": [asdict(_resolve(env_id)) for env_id in sys.argv[1:]]
            }
        except UnknownEnvironment as error:
            reason = (
                f"no entry point of this name in {local_sources.GROUP}, and no module that binds"
                f" {local_sources.LOADER}"
            )
            answer = {
                "error": (
                    f"no installed package provides the environment {error.env_id!r}: there is"
                    f" {reason}"
                )
            }
        except VerifiersError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=out)


def _resolve(env_id: str) -> Resolved:
    location = registry.find_installed(registry.parse_env_id(env_id))
    registry.import_loader(env_id, location)
    return Resolved(
        env_id, location.distribution, location.version, f"{location.module}:{location.attribute}"
    )


if __name__ == "__main__":
    main()
