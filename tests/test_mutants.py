"""The table of mutants names text and tests that are there; ``make mutants`` runs it."""

import ast

import pytest

from tests.mutants import MUTANTS, REPOSITORY, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_mutants_can_be_applied(mutant: Mutant):
    text = (REPOSITORY / mutant.file).read_text("utf-8")
    assert [old for old, _ in mutant.edits if text.count(old) != 1] == []
    for old, new in mutant.edits:
        text = text.replace(old, new)
    ast.parse(text, mutant.file)
    for guard in mutant.guards:
        file, name = guard.split("::")
        assert f"def {name}(" in (REPOSITORY / file).read_text("utf-8")
