"""Messages of a training run on stderr: the project's log records, and no other library's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from transformers.utils import logging as transformers_logging

from verifiers.runtime.redaction import redacted_text
from verifiers.runtime.terminal import escape_control
from verifiers_trainer.policy.loading import without_progress_bars

LOGGERS = ("verifiers", "verifiers_trainer")


class ConsoleHandler(logging.Handler):
    """Print log records on the console, above the progress line."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = escape_control(redacted_text(record.getMessage()))
        self.console.print(
            f"{record.levelname.lower()}: {text}", markup=False, highlight=False, soft_wrap=True
        )


@contextmanager
def show_logs(console: Console, level: int) -> Iterator[None]:
    """Send the project's log messages of ``level`` and above to ``console``, and nowhere else,
    inside the block."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [ConsoleHandler(console)], False
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, (handlers, old, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old)


@contextmanager
def quiet_libraries(enabled: bool = True) -> Iterator[None]:
    """Silence transformers and the FutureWarnings of libraries inside the block."""
    if not enabled:
        yield
        return
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), without_progress_bars():
            warnings.simplefilter("ignore", FutureWarning)
            # it searches the Hub for builtin models
            warnings.filterwarnings("ignore", category=UserWarning, module="peft")
            yield
    finally:
        transformers_logging.set_verbosity(level)
