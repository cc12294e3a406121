"""Import a module from its file, whether or not its folder is on the path."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def import_source(file: Path, module: str, root: Path) -> ModuleType:
    """Import ``module`` from ``file``; ``root`` is the folder that holds it or its top-level
    package.

    A name that another module has is not taken from it. ``root`` is appended to ``sys.path``, last,
    so that the files beside it can be imported and replace no installed module.
    """
    if str(root) not in sys.path:
        sys.path.append(str(root))
    top, _, submodule = module.partition(".")
    top_file = root / top / "__init__.py" if submodule or file.name == "__init__.py" else file
    is_taken = top in sys.modules or top in sys.stdlib_module_names
    if is_taken and not _is_file(sys.modules.get(top), top_file):
        top = f"local_file_{top}"
    if not _is_file(sys.modules.get(top), top_file):
        _import_file(top, top_file)
    return importlib.import_module(f"{top}.{submodule}" if submodule else top)


def _is_file(module: ModuleType | None, file: Path) -> bool:
    origin = getattr(module, "__file__", None)
    return origin is not None and os.path.realpath(origin) == os.path.realpath(file)


def _import_file(name: str, file: Path) -> None:
    folders = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # as the import statement does: a module that failed is not kept; re-raised
        sys.modules.pop(name, None)
        raise
