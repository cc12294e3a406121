"""Older forms of present classes: methods and attributes of older names, and hooks that older code
awaits.

Native modules know nothing of them. ``legacy.modules`` calls the functions ``adapt_…`` once, when
the module of the class has been imported; subclasses of ``Environment`` are adapted when they are
created. Nothing is chosen while a rollout runs. What an older method needs is imported on its first
call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from verifiers import compat

OLDER_FORM = "Older form; see"
"""How the docstring of a method of ``add_methods`` begins; the reference leaves these out."""


def adapt_environments(module: ModuleType) -> None:
    """Add the older names, and adapt the environments of this package and those that authors
    define."""
    from verifiers.legacy.calls import older_rollout, older_run
    from verifiers.legacy.hooks import adapt

    base = module.Environment
    add_methods(base, compat.ENVIRONMENT_METHODS)
    add_properties(base, compat.ENVIRONMENT_PROPERTIES)
    base.oai_tools = property(
        lambda env: env.tool_defs,
        lambda env, tools: setattr(env, "tool_defs", list(tools)),
        doc="Older name of ``tool_defs``.",
    )
    base.rollout = older_rollout(base.rollout)
    base.run_rollout, base.run_group = older_run(base.run_rollout), older_run(base.run_group)

    def __init_subclass__(cls: object, /, **keywords: object) -> None:
        super(base, cls).__init_subclass__(**keywords)
        adapt(cls)

    base.__init_subclass__ = classmethod(__init_subclass__)
    adapt(base)


def adapt_tool_environments(module: ModuleType) -> None:
    """Add the older names of attributes."""
    add_properties(module.ToolEnv, compat.TOOL_PROPERTIES)


def adapt_clients(module: ModuleType) -> None:
    """A subclass of ``Client`` that defines no ``complete`` has the methods of ``TemplateClient``."""
    client = module.Client

    def __init_subclass__(cls: Any, /, **keywords: object) -> None:
        super(client, cls).__init_subclass__(**keywords)
        if client in cls.__bases__ and cls.complete is client.complete:
            from verifiers.legacy.template_client import TemplateClient

            bases = (TemplateClient if base is client else base for base in cls.__bases__)
            cls.__bases__ = tuple(bases)

    client.__init_subclass__ = classmethod(__init_subclass__)


def add_methods(cls: type, table: Mapping[str, str]) -> None:
    """Add the methods of older versions in ``table`` to ``cls``.

    Its values are current methods, looked up when called, so that overrides in subclasses count; or
    functions ``module:name``, imported when called, with the object as first argument.
    """
    for old, new in table.items():

        def call(self: object, *args: object, _new: str = new, **kwargs: object) -> Any:
            function = (
                functools.partial(compat.load(_new), self) if ":" in _new else getattr(self, _new)
            )
            return function(*args, **kwargs)

        call.__name__ = old
        call.__doc__ = f"{OLDER_FORM} ``{new}``."
        setattr(cls, old, call)


def add_properties(cls: type, table: Mapping[str, str]) -> None:
    """Add the older names of attributes in ``table`` to ``cls``; they read and assign the present
    attributes.

    Those of functions ``module:name``, which take the object, can only be read.
    """
    for old, new in table.items():

        def read(self: object, _new: str = new) -> Any:
            return compat.load(_new)(self) if ":" in _new else getattr(self, _new)

        def assign(self: object, value: object, _new: str = new) -> None:
            setattr(self, _new, value)

        setattr(
            cls,
            old,
            property(read, None if ":" in new else assign, doc=f"Older name of ``{new}``."),
        )
