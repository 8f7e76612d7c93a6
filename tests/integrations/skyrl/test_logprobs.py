"""Log-probs and entropies of SkyRL's functions, before and after `install`, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.integrations.skyrl import model

pytestmark = pytest.mark.multiprocess

VOCAB = 96
HIDDEN = 16
SHAPE = (3, 11)
TEMPERATURE = 0.7
Results = dict[str, tuple[torch.Tensor, ...]]


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, logits, targets of all ranks, and the gradient of the results."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(*SHAPE, HIDDEN, generator=g).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=g).to(dtype)
    logits = (4 * torch.randn(*SHAPE, VOCAB, generator=g)).to(dtype)
    target = torch.randint(0, VOCAB, SHAPE, generator=g)
    return hidden, weight, logits, target, torch.randn(SHAPE, generator=g)


def of_skyrl(rank: int, ranks: int, dtype: torch.dtype) -> Results:
    """Values and gradients by SkyRL's functions, as they are in this process now."""
    from megatron.core import parallel_state as mpu
    from skyrl.backends.skyrl_train.distributed.megatron import model_utils

    group = mpu.get_tensor_model_parallel_group()
    hidden, weight, logits, target, grad = drawn(dtype)
    columns = VOCAB // ranks
    first = rank * columns
    shard = logits[..., first : first + columns].contiguous().requires_grad_()
    rows = weight[first : first + columns].clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    bounds = (first, first + columns)
    found = Results()
    for name, chunk in (("whole", None), ("chunks", 4)):
        value: Any = model_utils.from_parallel_logits_to_logprobs(
            shard,
            target,
            *bounds,
            group,
            cp_group=mpu.get_context_parallel_group(),
            chunk_size=chunk,
        )
        found[name] = value, *torch.autograd.grad(value, shard, grad[:, :-1])
    value = model_utils.vocab_parallel_entropy(shard)
    found["entropy"] = value, *torch.autograd.grad(value, shard, grad)
    value = model_utils.from_parallel_hidden_to_logprobs(
        hidden,
        rows,
        target,
        *bounds,
        group,
        cp_group=mpu.get_context_parallel_group(),
        chunk_size=4,
        temperature=TEMPERATURE,
    )
    # ranks' parts of d(hidden) are added by whom SkyRL leaves it to: see test_training
    _, of_weight = torch.autograd.grad(value, (hidden, rows), grad[:, :-1])
    found["fused"] = value, of_weight
    with torch.no_grad():
        value = model_utils._fused_vocab_parallel_entropy_from_hidden(
            hidden, rows, group, chunk_size=4, temperature=TEMPERATURE
        )
        found["fused entropy"] = (value,)
    inferred = model_utils.from_parallel_logits_to_logprobs(
        shard,
        target,
        *bounds,
        group,
        inference_only=True,
        cp_group=mpu.get_context_parallel_group(),
    )
    found["inferred"] = (inferred,)
    return {name: tuple(x.detach() for x in each) for name, each in found.items()}


def exact(rank: int, ranks: int, dtype: torch.dtype) -> Results:
    """The same in float64."""
    hidden, weight, logits, target, grad = (
        x.double() if x.is_floating_point() else x for x in drawn(dtype)
    )
    columns = slice(rank * VOCAB // ranks, (rank + 1) * VOCAB // ranks)
    logits.requires_grad_()
    weight.requires_grad_()
    found = Results()
    shifted = target[:, 1:, None]

    logp = logits.log_softmax(-1)
    value = logp[:, :-1].gather(-1, shifted)[..., 0]
    (of_logits,) = torch.autograd.grad(value, logits, grad[:, :-1], retain_graph=True)
    found["whole"] = found["chunks"] = value, of_logits[..., columns]
    found["inferred"] = (value,)
    value = -(logp.exp() * logp).sum(-1)
    (of_logits,) = torch.autograd.grad(value, logits, grad)
    found["entropy"] = value, of_logits[..., columns]

    logp = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    value = logp[:, :-1].gather(-1, shifted)[..., 0]
    (of_weight,) = torch.autograd.grad(value, weight, grad[:, :-1], retain_graph=True)
    found["fused"] = value, of_weight[columns]
    found["fused entropy"] = (-(logp.exp() * logp).sum(-1),)
    return {name: tuple(x.detach() for x in each) for name, each in found.items()}


def both(group: Any, dtypes: list[torch.dtype]) -> dict[Any, Results]:
    """(dtype, "theirs", "ours" or "exact") -> results of this rank."""
    from pyrl_ext.integrations import skyrl

    model.initialize(tensor_model_parallel_size=group.size())
    place = group.rank(), group.size()
    found = {(dtype, "theirs"): of_skyrl(*place, dtype) for dtype in dtypes}
    skyrl.install()
    found |= {(dtype, "ours"): of_skyrl(*place, dtype) for dtype in dtypes}
    return found | {(dtype, "exact"): exact(*place, dtype) for dtype in dtypes}


PRELOAD = ("tests.integrations.skyrl.model", "pyrl_ext.integrations.skyrl")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=[1, 2])
def results(request: pytest.FixtureRequest) -> list[dict[Any, Results]]:
    return run_ranks(both, request.param, DTYPES, preload=PRELOAD)


def error(found: dict[Any, Results], dtype: torch.dtype, whose: str, name: str) -> float:
    """Largest error against float64."""
    pairs = zip(found[dtype, whose][name], found[dtype, "exact"][name], strict=True)
    return max((a.double() - b).abs().max().item() for a, b in pairs)


def test_values_and_gradients_are_exact(results: list[dict[Any, Results]]):
    for found in results:
        for name in found[torch.float32, "exact"]:
            assert error(found, torch.float32, "ours", name) < 3e-5, name
            assert error(found, torch.float32, "theirs", name) < 3e-4, name


def test_shapes_and_dtypes_are_theirs(results: list[dict[Any, Results]]):
    for found in results:
        for dtype in DTYPES:
            for name, theirs in found[dtype, "theirs"].items():
                ours = found[dtype, "ours"][name]
                assert [x.shape for x in ours] == [x.shape for x in theirs], name
                assert ours[0].dtype == torch.float32, name


def test_entropy_of_bfloat16_logits_is_computed_in_float32(results: list[dict[Any, Results]]):
    for found in results:
        ours = found[torch.bfloat16, "ours"]["entropy"][0]
        want = found[torch.bfloat16, "exact"]["entropy"][0]
        assert (ours - want).abs().max() < 1e-5
        theirs = found[torch.bfloat16, "theirs"]["entropy"][0]
        assert (theirs - want).abs().max() > 1e-2
