"""The configs that come with the package."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

_SUFFIX = ".yaml"
_MODEL = re.compile(r"^  path: ([\w.-]+/[\w.-]+).*\n  config: (\S+)", re.MULTILINE)


def shipped_folder() -> Path:
    """The folder of `configs/` and `benchmarks/`: a wheel has them in the package, a source tree
    next to it."""
    package = Path(__file__).parents[1]
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def config_names() -> list[str]:
    """Names of the shipped configs: `tiny`, ..., and `examples/reward`, ..., sorted."""
    configs = shipped_folder() / "configs"
    files = sorted(configs.glob(f"*{_SUFFIX}")) + sorted(configs.glob(f"*/*{_SUFFIX}"))
    return [file.relative_to(configs).as_posix().removesuffix(_SUFFIX) for file in files]


def config_name(text: str) -> str:
    """`glm47` of `glm47`, `glm47.yaml` and `configs/glm47.yaml`."""
    return text.removeprefix("./").removeprefix("configs/").removesuffix(_SUFFIX)


def config_file(name: str) -> Path:
    """The YAML file of a shipped config."""
    return shipped_folder() / "configs" / f"{name}{_SUFFIX}"


def first_sentence(file: Path) -> str:
    """The first sentence of the comment at the top of a config."""
    paragraph = list[str]()
    for line in file.read_text(encoding="utf-8").splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            break
        paragraph.append(words)
    return re.split(r"(?<=\.) ", " ".join(paragraph))[0]


class ShippedModel(NamedTuple):
    """A model of the hub whose sizes come with the package."""

    hub_id: str
    config: str
    """Name of the shipped config that trains it."""
    sizes: Path
    """Its config.json."""


@cache
def shipped_models() -> dict[str, ShippedModel]:
    """By hub id, the models that shipped configs train."""
    found: dict[str, ShippedModel] = {}
    for name in config_names():
        file = config_file(name)
        if match := _MODEL.search(file.read_text(encoding="utf-8")):
            model = ShippedModel(match[1], name, file.parent / match[2])
            found.setdefault(model.hub_id, model)
    return found


def meant(path: str) -> str:
    """The file of the shipped config that is named in place of a file, or else `path`."""
    name = config_name(path)
    if Path(path).exists() or name not in config_names() or _near_file(path):
        return path
    return str(config_file(name))


def hint(path: str) -> str:
    """What to do about a config that is no file: the file or the shipped config that was meant, as
    a sentence; "" if there is none."""
    if near := _near_file(path):
        return f". Did you mean {near}?"
    close = names_like(path, config_names())
    return f". Shipped configs with a name like this: {', '.join(close)}" if close else ""


def names_like(path: str, names: Iterable[str]) -> list[str]:
    """Those of `names`, at most three, that are like the name of a config, the likeliest first."""
    return difflib.get_close_matches(config_name(path).lower(), names, n=3)


def _near_file(path: str) -> str | None:
    """The file that a name without its folder or suffix means."""
    for near in (f"{path}{_SUFFIX}", f"configs/{config_name(path)}{_SUFFIX}"):
        if near != path and Path(near).is_file():
            return near
    return None
