"""Render a conversation by a tokenizer's chat template, within a time limit.

A template is a program, and comes with a stranger's model: a template that loops would hold its
thread, and with it the loop of an endpoint, for ever.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verifiers.errors import ConfigError

LIMIT_S = 20.0
"""Seconds that a template may take for a conversation."""


def rendered(tokenizer: Any, messages: Any, **options: Any) -> Any:
    """``tokenizer.apply_chat_template(messages, **options)``.

    *Raises* ConfigError when the template has not ended within ``LIMIT_S``, and what it raises.
    """
    with _limited(LIMIT_S):
        return tokenizer.apply_chat_template(messages, **options)


class _Expired(BaseException):
    """Raised in the thread that renders; no ``except Exception`` of a template's code keeps it."""


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    thread, lock, has_ended = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not has_ended:
                raised = ctypes.py_object(_Expired)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)

    timer = threading.Timer(limit_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            timer.cancel()
            with lock:  # from here on nothing is raised; what was is raised before the next line
                has_ended = True
    except _Expired:
        raise ConfigError(
            f"the chat template did not end within {limit_s:g} s: set tokenizer.chat_template to"
            " another"
        ) from None
