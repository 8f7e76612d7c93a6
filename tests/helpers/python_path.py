"""The module path of child processes."""

import os
from pathlib import Path


def python_path(tree: Path) -> str:
    """PYTHONPATH with ``tree`` first, then what it was: packages may be there and nowhere else."""
    return os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
