"""Hook of mkdocs: bring files outside `docs/`, which its pages link to, into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_OUTSIDE = re.compile(r'(\]\(|src="|srcset=")((?:\.\./)+)((?:benchmarks|configs)/[\w./-]+)')
_PAGES = ("configs/REFERENCE.md", "configs/ERRORS.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `configs/` and every file that a page links to outside `docs/`."""
    linked = set(_PAGES)
    for page in Path(config.docs_dir).rglob("*.md"):
        linked.update(match[3] for match in _OUTSIDE.finditer(page.read_text("utf-8")))
    for path in sorted(linked):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link to these files where the site has them."""
    if page.file.src_uri in _PAGES:
        return markdown.replace("](../docs/", "](../")
    return _OUTSIDE.sub(lambda link: link[1] + link[2].removesuffix("../") + link[3], markdown)
