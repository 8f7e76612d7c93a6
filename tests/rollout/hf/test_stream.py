"""Samples as they finish: streams of the embedded engine that are left early, and stop strings."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch

from pyrl_ext.samples import Sample, Sampling
from tests.helpers.engines import (
    GLM,
    checkpoint,
    engine_of,
    prompts_of,
    random_model,
)

pytestmark = pytest.mark.multiprocess


PROMPTS = prompts_of([3, 7, 2, 5], 128)
UNEVEN = Sampling(16, samples_per_prompt=3, stop_ids=tuple(range(20, 32)), seed=2)


def key(sample: Sample) -> tuple[int, int]:
    return sample.prompt_id, sample.index


def test_stream_yields_samples_as_they_finish_in_a_fixed_order():
    engine = engine_of(random_model(GLM), GLM, max_num_seqs=6)
    come = list(engine.stream(PROMPTS, UNEVEN))
    order = [key(s) for s in come]
    assert order != sorted(order) and len(set(order)) == 12
    assert [key(s) for s in engine.stream(PROMPTS, UNEVEN)] == order
    whole = engine.generate(PROMPTS, UNEVEN)
    assert [key(s) for s in whole] == [(p.id, i) for p in PROMPTS for i in range(3)]
    by_key = {key(s): s for s in come}
    assert all(torch.equal(s.tokens, by_key[key(s)].tokens) for s in whole)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("count", [1, 4])
def test_stream_that_is_closed_runs_no_further_forward(error: Any, count: int):
    """The forwards that the model runs are counted: none after the stream is closed."""
    engine = engine_of(random_model(GLM), GLM, max_num_seqs=6)
    whole = engine.generate(PROMPTS, UNEVEN)
    forwards: list[int] = []
    engine.model.register_forward_hook(lambda *_: forwards.append(1))
    engine.generate(PROMPTS, UNEVEN)
    total = len(forwards)
    first = [key(s) for s in islice(engine.stream(PROMPTS, UNEVEN), count)]
    forwards.clear()

    def use() -> None:
        with closing(engine.stream(PROMPTS, UNEVEN)) as stream:
            for number, sample in enumerate(stream):
                assert key(sample) == first[number]
                if number + 1 == count:
                    if error is not None:
                        raise error
                    return

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert 0 < len(forwards) < total
    again = engine.generate(PROMPTS, UNEVEN)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(whole, again, strict=True))
    for a, b in zip(whole, again, strict=True):
        assert a.routes is not None and b.routes is not None
        assert torch.equal(a.routes, b.routes)


def test_stream_fails_when_its_weights_are_replaced():
    model = random_model(GLM)
    engine = engine_of(model, GLM, max_num_seqs=2)
    stream = engine.stream(PROMPTS, UNEVEN)
    next(stream)
    engine.load_weights(checkpoint(model).items(), version=4)
    with pytest.raises(RuntimeError, match="version 3 of the weights was replaced"):
        list(stream)


def test_stream_does_not_mix_with_another_of_the_same_engine():
    engine = engine_of(random_model(GLM), GLM, max_num_seqs=4)
    alone = {key(s): s.response for s in engine.stream(PROMPTS, UNEVEN)}
    for pair in zip(engine.stream(PROMPTS, UNEVEN), engine.stream(PROMPTS, UNEVEN)):
        assert all(s.response == alone[key(s)] for s in pair)
