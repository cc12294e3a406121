"""What is made of the results of a run at its end: the copy on the Hub, and ``on_results``."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from verifiers.results import GenerateOutputs, make_dataset
from verifiers.runs.options import RunOptions
from verifiers.runtime.worker_threads import call_in_thread


async def hand_over(outputs: GenerateOutputs, options: RunOptions) -> None:
    """Publish the results, and hand them to ``on_results``. A copy that was begun is ended, also
    when this task is cancelled: nothing is left writing."""
    copies: list[Callable[[GenerateOutputs], Any]] = []
    if options.push_to_hub:
        copies.append(lambda results: make_dataset(results, None, True, options.hub_name))
    if options.on_results is not None:
        copies.append(options.on_results)
    for copy in copies:
        is_async = inspect.iscoroutinefunction(copy)
        call = copy(outputs) if is_async else call_in_thread(copy, outputs)
        copying = asyncio.ensure_future(call)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.wait([copying])
            raise
