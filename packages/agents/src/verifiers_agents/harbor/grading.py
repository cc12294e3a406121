"""Run a task's solution, copy what the agent left into a fresh sandbox, and run the checks there.

Promise: the checks see of the agent's sandbox only the declared artifacts, as data; the reward file
is read after every process of the checks has ended. A script that writes no reward, that writes
none that is a finite number, that overruns its time or that is killed gives no verdict:
``ScoringError``.

Limit: code of the agent that ``tests/test.sh`` itself runs shares the sandbox with the checks and
can forge them. A task avoids it with ``[[verifier.collect]]``: run the agent's program there, and
check its output.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verifiers.errors import ConfigError, SandboxError, SandboxLimit, ScoringError
from verifiers.runtime.decoding import decode_message
from verifiers.sandbox import ExecResult, Sandbox
from verifiers.sandbox.transfer import Packed, pack, put, take
from verifiers_agents.harbor.building import last_line
from verifiers_agents.harbor.task import ARTIFACTS, Artifact, HarborTask

OUTPUT_CHARS = 20_000
REWARD = "reward"
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/etc")
_DROP_LINKS = """cd / && exec find "$@" -type l -exec sh -c '
IFS="
"
for link; do
  target=$(readlink -m -- "$link")
  found=
  for folder in $ALLOWED; do case $target/ in "$folder"/*) found=1;; esac; done
  [ -n "$found" ] || rm -f -- "$link" || exit 1
done' drop {} +
"""
_TEST = (
    "rm -rf /logs/verifier && mkdir -p /logs/verifier /logs/agent /logs/artifacts && chmod +x"
    " /tests/test.sh && exec /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"
)
_SOLVE = (
    "mkdir -p /logs/agent && chmod +x /solution/solve.sh && exec /solution/solve.sh >"
    " /logs/agent/oracle.txt 2>&1"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checks of a task said."""

    rewards: Mapping[str, float]
    output: str
    """What ``tests/test.sh`` printed; of a long text the end."""

    @property
    def reward(self) -> float:
        """The reward ``reward``, or the only reward. *Raises* ScoringError when there are others
        and none of that name."""
        if REWARD in self.rewards:
            return self.rewards[REWARD]
        if len(self.rewards) != 1:
            raise ScoringError(
                f"the rewards are {', '.join(self.rewards) or 'empty'}; none is named {REWARD!r}"
            )
        return next(iter(self.rewards.values()))


async def solve(sandbox: Sandbox, task: HarborTask, timeout_s: float) -> ExecResult:
    """Run the task's own solution. *Raises* ConfigError when it has none."""
    if not (task.solution / "solve.sh").is_file():
        raise ConfigError(
            f"task {task.name} has no solution/solve.sh, which agent='oracle' runs",
            example_id=task.name,
        )
    await put(sandbox, _content(task.solution), "/solution", replace=True)
    variables = [f"{name}={value}" for name, value in task.solution_env.items()]
    return await sandbox.exec(
        ["env", "DEBIAN_FRONTEND=noninteractive", *variables, "sh", "-c", _SOLVE],
        timeout_s=timeout_s,
    )


def declared_artifacts(task: HarborTask) -> tuple[Artifact, ...]:
    """What the checks see: the task's artifacts, else its work folder. *Raises* ConfigError without
    either."""
    declared = task.artifacts
    if not declared:
        if task.build.workdir == "/":
            raise ConfigError(
                f"task {task.name} declares no artifacts and its work folder is /: declare"
                " artifacts = [\"/folder\"] in its task.toml, or pass grading='shared' to check in"
                " the agent's own sandbox",
                example_id=task.name,
            )
        declared = (Artifact(task.build.workdir),)
    if any(artifact.source == ARTIFACTS for artifact in declared):
        return declared
    return (*declared, Artifact(ARTIFACTS))


async def collect(sandbox: Sandbox, task: HarborTask) -> list[tuple[str, Packed | None]]:
    """End every process of the agent, run the task's collect commands, and pack the artifacts: path
    -> None if absent.

    An artifact above the bound (64 MB) counts as absent.
    """
    await sandbox.restart()
    for hook in task.collect:
        await sandbox.exec(["bash", "-c", hook.command], timeout_s=hook.timeout_s)
    if task.collect:
        await sandbox.restart()
    artifacts: list[tuple[str, Packed | None]] = []
    for artifact in declared_artifacts(task):
        options = [f"--exclude={pattern}" for pattern in artifact.exclude]
        try:
            packed = await take(sandbox, artifact.source, options)
        except SandboxLimit:
            packed = None
        artifacts.append((artifact.source, packed))
    return artifacts


async def deliver(sandbox: Sandbox, artifacts: Sequence[tuple[str, Packed | None]]) -> None:
    """Replace the artifacts in a fresh sandbox by those of the agent.

    Links that lead neither into an artifact nor to a system program are deleted: a link to
    ``/tests`` would show the checks their own answers.
    """
    for path, packed in artifacts:
        if packed is None or not packed.is_folder:
            await sandbox.exec(["rm", "-rf", path], timeout_s=60.0)
        if packed is not None and packed.is_folder:
            await put(sandbox, packed.archive, path, replace=True)
        elif packed is not None:
            await put(sandbox, packed.archive, posixpath.dirname(path))
    if there := [path for path, packed in artifacts if packed is not None]:
        allowed = "\n".join([*there, *SYSTEM_FOLDERS])
        result = await sandbox.exec(
            ["env", f"ALLOWED={allowed}", "sh", "-c", _DROP_LINKS, "drop", *there], timeout_s=60.0
        )
        if result.exit_code != 0:
            raise SandboxError(
                f"the links of the artifacts could not be checked: {last_line(result)}"
            )


async def run_tests(sandbox: Sandbox, task: HarborTask) -> Verdict:
    """Run ``tests/test.sh`` and read the reward that it wrote. *Raises* ScoringError when there is
    no verdict."""
    await put(sandbox, _content(task.tests), "/tests", replace=True)
    variables = [f"{name}={value}" for name, value in task.verifier_env.items()]
    result = await sandbox.exec(
        ["env", *variables, "sh", "-c", _TEST], timeout_s=task.verifier_timeout_s
    )
    if result.timed_out:
        raise ScoringError(
            f"the tests of {task.name} did not end within {task.verifier_timeout_s:g} s"
            " (verifier.timeout_sec)"
        )
    if result.exit_code is None or result.exit_code < 0 or result.limit not in (None, "output"):
        raise ScoringError(
            f"the tests of {task.name} were killed ({result.limit or f'signal {result.exit_code}'})"
        )
    await sandbox.restart()
    tail = ["tail", "-c", str(OUTPUT_CHARS), "/logs/verifier/test-stdout.txt"]
    output = (await sandbox.exec(tail, timeout_s=60.0)).stdout
    for name, read in (("reward.json", _from_json), ("reward.txt", _from_text)):
        try:
            content = await sandbox.read_file(f"/logs/verifier/{name}")
        except FileNotFoundError:
            continue
        try:
            return Verdict(read(content.decode()), output)
        except ValueError as error:
            raise ScoringError(
                f"the tests of {task.name} wrote a {name} that cannot be read: {error}"
            ) from error
    last = output.strip().splitlines()[-1:] or ["they printed nothing"]
    raise ScoringError(
        f"the tests of {task.name} wrote neither reward.json nor reward.txt: {last[0][:300]}"
    )


def _from_text(text: str) -> dict[str, float]:
    return {REWARD: _finite(float(text))}


def _from_json(text: str) -> dict[str, float]:
    read = decode_message(text)
    values = read if isinstance(read, dict) else {REWARD: read}
    for name, value in values.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}, not a number")
    return {name: _finite(float(value)) for name, value in values.items()}


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value


def _content(folder: Path) -> bytes:
    return pack([(folder, ".")])
