"""Keys that follow from others where a file leaves them out; a plan notes each of them."""

from __future__ import annotations

from pathlib import Path

from pyrl_ext.plan.language.errors import Key, show
from pyrl_ext.plan.language.hf_hub import config_of
from pyrl_ext.plan.language.kind import has_rollouts
from pyrl_ext.plan.language.paths import is_hub_id, path_beside, relative
from pyrl_ext.plan.language.yaml_tree import Source

FILLED: dict[Key, str] = {
    ("run",): "runs/ and the file's name",
    ("model", "family"): "of model.path",
    ("model", "config"): "of model.path",
    ("rollout", "engine"): "hf with device cpu",
}
"""Key -> what it is where it is left out, for the page of all keys."""


def fill(source: Source) -> None:
    """Set what follows from other keys and from the name of the file, with a note on each."""
    tree = source.tree
    name = Path(source.path).stem
    if "run" not in tree and source.path.endswith((".yaml", ".yml")):
        tree["run"] = f"runs/{name}"
        source.notes.append(f"run is left out: the run folder is runs/{name}")
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(path := model.get("path"), str):
        shown = relative(path) if Path(path).is_absolute() else path
        source.fail(("model", "path"), f"{show(shown)}: {_not_a_model(source.path, path)}")
        stands_for = ("family", "config", "tokenizer", "weights")
        source.failed |= {("model", key) for key in stands_for if key not in model}
    rollout = tree.get("rollout")
    if not isinstance(rollout, dict) or tree.get("device") != "cpu" or not has_rollouts(tree):
        return
    if "engine" not in rollout:
        rollout["engine"] = "hf"
        source.notes.append("rollout.engine is left out: it is hf, because device is cpu")


def _not_a_model(file: str, path: str) -> str:
    """Why no model is at `path`, as the YAML `file` says it, and the rule."""
    rule = "expected a Hugging Face folder, relative to this file, with config.json in it"
    folder = Path(path_beside(file, path))
    if path.endswith(".gguf") or any(folder.glob("*.gguf")):
        return f"weights in GGUF, {rule}, or a hub id. Name the model that they were made from"
    if is_hub_id(file, path) and (problem := config_of(path).problem):
        return f"no such folder next to this file, so it is a hub id: {problem}"
    return f"no config.json with a model_type, {rule}"
