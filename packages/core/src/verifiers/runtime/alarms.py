"""Alarms outside the main thread: ``signal.signal(SIGALRM, …)``, ``signal.alarm`` and
``signal.setitimer`` of code that scores.

Python sets signal handlers in the main thread only, and reward functions run in worker threads, and
in training's event loop. The first function that fails for it replaces these three functions for
all other threads of the process: there a timer calls the handler and raises what it raises in the
thread that set the alarm. The main thread keeps the system's.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
from typing import Any

_logger = logging.getLogger(__name__)
_REFUSAL = "signal only works in main thread"
"""How the message of Python's refusal begins."""
_is_replaced = threading.Event()


def replace_alarms(error: BaseException, name: str) -> bool:
    """Whether ``name`` failed because it sets an alarm outside the main thread, and can be called
    again, since alarms work there from now on."""
    if not hasattr(signal, "setitimer") or not _is_refusal(error):
        return False
    if _is_replaced.is_set():
        return True  # it began before
    _logger.warning(
        "%s sets an alarm (signal.alarm), which Python allows in the main thread only; a timer of"
        " its own does the same here from now on",
        name,
    )
    _install()
    return True


def _is_refusal(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ValueError) and str(error).startswith(_REFUSAL):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Alarm:
    """The alarm of one thread."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self.handler: Any = signal.SIG_DFL
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def set(self, seconds: float) -> None:
        """Start it anew; 0 ends it."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(seconds, self._ring) if seconds > 0 else None
            if self._timer is not None:
                self._timer.daemon = True
                self._timer.start()

    def _ring(self) -> None:
        if not callable(self.handler):
            return
        try:
            self.handler(signal.SIGALRM, None)
        except BaseException as error:  # noqa: BLE001  raised in the thread that set the alarm
            with self._lock:
                if threading.current_thread() is self._timer:  # else it was ended meanwhile
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self.thread_id), ctypes.py_object(type(error))
                    )


_alarms = threading.local()


def _alarm_here() -> _Alarm:
    if not hasattr(_alarms, "here"):
        _alarms.here = _Alarm()
    alarm: _Alarm = _alarms.here
    return alarm


def _install() -> None:
    """Replace the functions, once."""
    set_handler, set_alarm, set_timer = signal.signal, signal.alarm, signal.setitimer

    def is_here() -> bool:
        return threading.current_thread() is not threading.main_thread()

    def signal_(number: int, handler: Any, /) -> object:
        if number != signal.SIGALRM or not is_here():
            return set_handler(number, handler)
        alarm = _alarm_here()
        before, alarm.handler = alarm.handler, handler
        return before

    def alarm_(seconds: int, /) -> int:
        if not is_here():
            return set_alarm(seconds)
        _alarm_here().set(seconds)
        return 0

    def setitimer(which: int, seconds: float, interval: float = 0.0, /) -> tuple[float, float]:
        if which != signal.ITIMER_REAL or not is_here():
            return set_timer(which, seconds, interval)
        _alarm_here().set(seconds)
        return 0.0, 0.0

    signal.signal, signal.alarm, signal.setitimer = signal_, alarm_, setitimer  # type: ignore[assignment]
    _is_replaced.set()
