"""Pictures of the docs show the present plan and the present tables."""

from __future__ import annotations

import json
import re

import pytest

from tests.pictures import DIGESTS, PICTURES, Picture
from tests.readme import pages


def test_pictures_are_all_those_of_the_docs():
    texts = [page.read_text("utf-8") for page in pages()]
    shown = {
        name for text in texts for name in re.findall(r"(?:configs|benchmarks)/\w+\.png", text)
    }
    assert shown == {picture.path for picture in PICTURES}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.path)
def test_pictures_are_not_stale(picture: Picture):
    assert json.loads(DIGESTS.read_text())[picture.path] == picture.digest(), (
        f"{picture.path}: made from other inputs, expected the present ones. "
        + (
            f"Run {' && '.join(picture.commands)}; python -m tests.pictures --drawn {picture.path}"
            if picture.commands
            else "Run make pictures, and look at it"
        )
    )
