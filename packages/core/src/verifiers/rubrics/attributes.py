"""Keywords a constructor does not know: they become attributes unless they look like a mistake."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from verifiers.compat import parameters_of
from verifiers.errors import ConfigError
from verifiers.runtime.suggest import close_match


def set_extra_attributes(owner: Any, given: Mapping[str, Any]) -> None:
    """Set each keyword as an attribute of ``owner``.

    *Raises* ConfigError for one that nearly matches a parameter of the class or a base class, or that would hide a
    method or property.
    """
    cls: Any = type(owner)
    for name, value in given.items():
        if near := close_match(name, parameters_of(cls)):
            raise ConfigError(f"{cls.__name__} has no parameter {name!r}; did you mean {near!r}?", key=name)
        member = inspect.getattr_static(cls, name, None)
        if callable(member) or isinstance(member, property | staticmethod | classmethod):
            raise ConfigError(f"{name!r} would hide {cls.__name__}.{name}; choose another name", key=name)
        setattr(owner, name, value)
