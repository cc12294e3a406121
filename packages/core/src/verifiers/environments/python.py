"""``PythonEnv``: the model runs Python in an interpreter of its rollout's own, which keeps its state between calls.

Promise: what one call defines the next one has; the value of a trailing expression is shown as ``Out[n]: …`` and an
exception as its traceback; a call that takes too long is stopped and the model is told that its variables are gone.
Nothing is installed when a rollout runs: packages come from where the environment itself is installed.

Opening, closing and limits are ``environments.sandbox``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.environments.sandbox import SandboxEnv, sandbox_ready_wait_time
from verifiers.environments.sandbox_text import python_text
from verifiers.errors import ConfigError
from verifiers.state import State

DEFAULT_PACKAGES = "numpy sympy scipy"


def python_ready_wait_time(state: State) -> float:
    """Seconds until the rollout's interpreter was ready; it comes with the sandbox."""
    return sandbox_ready_wait_time(state)


class PythonEnv(SandboxEnv):
    """A ``SandboxEnv`` whose tool is ``python(code)``.

    ``pip_install_packages``: what code inside can import beside the standard library, as pip names it, separated by
    spaces or as a list. A package that is not installed beside ``verifiers`` is a ConfigError at the first rollout
    that names the command to install it. ``max_startup_wait_seconds`` bounds the start of an interpreter. Further
    parameters are ``SandboxEnv``'s.
    """

    def __init__(
        self,
        pip_install_packages: str | Sequence[str] = DEFAULT_PACKAGES,
        max_startup_wait_seconds: float = 30,
        **parameters: Any,
    ):
        self.packages = distributions(pip_install_packages)
        super().__init__(max_startup_wait_seconds=max_startup_wait_seconds, **parameters)

    def add_sandbox_tools(self) -> None:
        """Offer ``python``."""
        self.add_tool(self.python, args_to_skip=["state"])

    def measured(self) -> list[Callable[[State], float]]:
        """As in every sandbox, and the interpreter's start."""
        return [*super().measured(), python_ready_wait_time]

    async def python(self, code: str, state: State) -> str:
        """Run Python code and see what it prints. Variables stay for the next call; there is no network.

        Args:
            code: Python statements; the value of a last expression is shown without print.
        """
        result = await self.run_code(state, code)
        number = state["num_cells"] = state.get("num_cells", 0) + 1
        if result.timed_out:
            state["num_cells"] = 0  # a new interpreter counts anew
        return python_text(result, number, self.timeout_per_command_seconds)


def distributions(packages: str | Sequence[str]) -> tuple[str, ...]:
    """The names in a list of packages, without versions, each once.

    >>> distributions("numpy sympy>=1.12 numpy")
    ('numpy', 'sympy')

    *Raises* ConfigError for what is no package's name, such as an option of pip.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    names: dict[str, None] = {}
    for text in packages.split() if isinstance(packages, str) else packages:
        try:
            names[Requirement(text).name] = None
        except InvalidRequirement as error:
            raise ConfigError(
                f"pip_install_packages has {text!r}, which is no package's name; write names separated by spaces",
                key="pip_install_packages",
            ) from error
    return tuple(names)
