"""The shipped configs, and models that differ from theirs."""

import json
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = CONFIGS / "tiny.yaml"


def hf_config(model: str) -> dict[str, Any]:
    """The config of a shipped model, such as ``tiny`` or ``glm47``."""
    return json.loads((CONFIGS / model / "config.json").read_text())


def write_config(folder: str | Path, hf: dict[str, Any]) -> str:
    """Write the config of a model; the override that names it."""
    path = Path(folder, "config.json")
    path.write_text(json.dumps(hf))
    return f"model.config={path}"
