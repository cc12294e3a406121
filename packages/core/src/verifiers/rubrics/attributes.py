"""Keywords a constructor does not know: they become attributes unless they look like a mistake."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from verifiers.compat import parameters_of
from verifiers.errors import ConfigError
from verifiers.suggest import close_match


def set_extra_attributes(owner: object, given: Mapping[str, Any]) -> None:
    """Set each keyword as an attribute of ``owner``.

    *Raises* ConfigError for one that nearly matches a parameter of the class or a base class, or that would hide a
    method or property.
    """
    for name, value in given.items():
        if near := close_match(name, parameters_of(type(owner))):
            raise ConfigError(f"{type(owner).__name__} has no parameter {name!r}; did you mean {near!r}?", key=name)
        member = inspect.getattr_static(type(owner), name, None)
        if callable(member) or isinstance(member, property | staticmethod | classmethod):
            raise ConfigError(f"{name!r} would hide {type(owner).__name__}.{name}; choose another name", key=name)
        setattr(owner, name, value)
