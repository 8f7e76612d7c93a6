"""The functions that a plan names as ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def load_function(key: str, name: str, builtin: Sequence[str] = ()) -> Callable[..., Any]:
    """The function called ``name``, importable from where the run was started.

    Args:
        key:     the config key that holds the name, for messages.
        name:    ``package.module:function``.
        builtin: names that need no module, for messages.

    Raises:
        ValueError: the name has no colon, or the module or the function is not there.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        accepted = " or ".join([*builtin, "package.module:function"])
        raise ValueError(f"{key}: {name!r}, expected {accepted}")
    where = f"{key}: {name!r}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise ValueError(
                f"{where}: module {module_name} imports {missing!r}, which is missing, expected a "
                "module that imports"
            ) from error
        raise ValueError(
            f"{where}: no module {missing!r}, expected one on the Python path. Run from the folder "
            "that holds it, or set PYTHONPATH"
        ) from error
    if not hasattr(module, attribute):
        public = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
        raise ValueError(f"{where}: no {attribute!r} in {module_name}, expected one of: {public}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"{where}: a {type(function).__name__}, expected a function")
    return function
