"""docs/messages.md has every message of the code; docs/troubleshooting.md treats all of them."""

from __future__ import annotations

import ast
import re

from tests.messages import PACKAGE, SECTIONS, anchor, messages, page, section, texts
from tests.readme import REPOSITORY

TROUBLE = (REPOSITORY / "docs/troubleshooting.md").read_text("utf-8")
INDEX = (REPOSITORY / "docs/messages.md").read_text("utf-8")
# what others say, and what is typed
FOREIGN = {
    "no kernel image is available",
    "address already in use",
    "ss -ltnp",
    "getent hosts NAME",
}
TYPED = re.compile(r"^(pyrl|make|pip) |[=:] |--")


def test_page_of_messages_is_current():
    """`python -m tests.messages > docs/messages.md` writes it again."""
    assert page() == INDEX


def test_troubleshooting_has_the_sections_of_messages_and_no_other():
    assert sorted(re.findall(r"^## (.*)$", TROUBLE, re.MULTILINE)) == sorted(SECTIONS)


def test_troubleshooting_quotes_messages_as_the_code_says_them():
    known = " ".join(INDEX.split())
    wrong = []
    for quoted in re.findall(r"`([^`\n]+)`", TROUBLE):
        if " " not in quoted or quoted in FOREIGN or TYPED.search(quoted):
            continue
        parts = [part.strip(" ,;") for part in quoted.split("...")]
        wrong += [quoted] if any(len(part) > 7 and part not in known for part in parts) else []
    assert not wrong


def test_section_prefers_the_longest_path():
    assert section("dist/disk.py") == "A run does not start or resume"
    assert section("dist/anything.py") == "Ranks fail or hang"
    assert anchor("NaN, infinity, or a gradient of 0") == "nan-infinity-or-a-gradient-of-0"


def test_texts_are_whole_and_without_docstrings():
    code = 'def f(x):\n    """expected"""\n    raise E(f"{x}: " + "two parts, " f"expected {x!r}")'
    assert list(texts(ast.parse(code))) == ["…: two parts, expected …"]
    found = messages(PACKAGE / "models/hf_folder.py")
    assert "…: no *.safetensors here, expected a Hugging Face checkpoint folder" in found
