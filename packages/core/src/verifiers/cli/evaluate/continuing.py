"""How to go on after an interruption or a failure: the command that does what is left, on stderr."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from verifiers.cli.evaluate.arguments import CommandLine
from verifiers.cli.evaluate.planning import Prepared
from verifiers.cli.evaluate.sets import CommandSet
from verifiers.runtime.redaction import HIDDEN, redacted_words

MORE = "MORE"
"""Stands in a command for the number that the user decides; no number, so that it cannot be run as
it is."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Says how a command is continued."""

    line: CommandLine
    argv: Sequence[str]
    runs: CommandSet

    def say_how_to_resume(self, what: str, remaining: Sequence[Prepared]) -> None:
        """Print where the finished rollouts are, and the command that resumes the run."""
        if not remaining:
            print(f"vf-eval: {what}; every run is complete", file=sys.stderr)
            return
        current, words = remaining[0], self._words()
        if self.runs.is_set and self.runs.is_open:
            print(
                f"vf-eval: {what}; {self.runs.line()}\nto resume: {self._command(words)}",
                file=sys.stderr,
            )
            return
        if current.path is None or not current.path.exists():
            print(f"vf-eval: {what}; nothing was saved", file=sys.stderr)
            return
        env_ids, targets = [run.env_id for run in remaining], self.line.targets
        if targets and len(env_ids) < len(targets):
            words = [",".join(env_ids) if word.split(",") == targets else word for word in words]
        if current.settings.fresh and len(env_ids) == 1:
            words += ["--resume", str(current.path)]
        print(
            f"vf-eval: {what}; finished rollouts are in {current.path}"
            f"\nto resume: {self._command(words)}",
            file=sys.stderr,
        )

    def say_how_to_repeat(self) -> None:
        """Print the command that runs what failed or is pending, and nothing else."""
        is_pending = not self.runs.is_complete
        words = self._words() + ([] if is_pending else ["--retry-errors"])
        what = "what failed or is pending" if is_pending else "the rollouts with errors"
        print(f"to run {what}, and nothing else: {self._command(words)}", file=sys.stderr)

    def _words(self) -> list[str]:
        """The words of the command, without those that begin a new run, and with ``MORE`` as the limit
        that is used up."""
        words = [word for word in self.argv if word not in ("--fresh", "--new")]
        is_fresh = self.runs.prepared[0].settings.fresh
        if self.line.files and is_fresh:  # a file set it
            words.append("--no-fresh")
        if self.runs.used_up is None:
            return words
        flag = f"--{self.runs.used_up.replace('_', '-')}"
        other_words = [
            word
            for before, word in zip([None, *words], words, strict=False)
            if flag not in (before, word) and not word.startswith(f"{flag}=")
        ]
        return [*other_words, flag, MORE]

    def _command(self, words: list[str]) -> str:
        command = shlex.join(["vf-eval", *redacted_words(words)])
        hint = f"\nvf-eval: write the secrets again where {HIDDEN} stands"
        return command + (hint if HIDDEN in command else "")
