"""The configs that come with the package."""

from __future__ import annotations

import re
from pathlib import Path

_SUFFIX = ".yaml"


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


def hint(path: str) -> str:
    """What to do about a config that is no file: the file or the shipped config that was meant, as
    a sentence; "" if there is none."""
    name = config_name(path)
    for near in (f"{path}{_SUFFIX}", f"configs/{name}{_SUFFIX}"):
        if near != path and Path(near).is_file():
            return f". Did you mean {near}?"
    if name in config_names():
        return f". `pyrl configs --copy {name}` writes the config of that name to configs/"
    return ""
