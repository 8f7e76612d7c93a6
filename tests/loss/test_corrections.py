"""Corrections against numbers of published tests, over ranks that share samples."""

import pytest
import torch
from torch import Tensor

from pyrl_ext.loss.corrections import correct
from pyrl_ext.plan.schema.objective import Objective

OLD = torch.tensor([-1, -1.5, -0.5])
ROLLOUT = torch.tensor([-1.5, -1, -1.5])


def run(config: Objective, mask: Tensor, samples: Tensor) -> Tensor:
    return correct(config, OLD, ROLLOUT, mask, samples, 2, lambda sums: sums)[0]


def test_correct_equals_published_weights():
    one = torch.zeros(3, dtype=torch.int64)
    all_tokens = torch.ones(3) > 0
    token = run(Objective(tis_cap=2.0), all_tokens, one)
    assert token.tolist() == pytest.approx([1.6487, 0.6065, 2.0], abs=5e-5)
    sequence = run(Objective(tis="sequence", tis_cap=100.0), all_tokens, one)
    assert sequence.tolist() == pytest.approx([2.7183] * 3, abs=5e-5)


def test_correct_adds_up_samples_over_ranks():
    """Two ranks hold a part of the same sample; each knows sums of both through ``over_ranks``."""
    config = Objective(tis="sequence", tis_cap=100.0, veto=0.65, sequence_bounds=(0.1, 9.0))
    samples = torch.tensor([0, 0, 1])
    mask = torch.tensor([True, True, True])
    whole = correct(config, OLD, ROLLOUT, mask, samples, 2, lambda sums: sums)
    parts = [slice(0, 1), slice(1, 3)]
    tables = list[Tensor]()

    def collected(sums: Tensor) -> Tensor:
        tables.append(sums)
        return sums

    def of_part(part: slice, over_ranks) -> tuple[Tensor, dict[str, Tensor]]:
        rows = (OLD[part], ROLLOUT[part], mask[part], samples[part])
        return correct(config, *rows, 2, over_ranks)

    for part in parts:
        of_part(part, collected)
    total = sum(tables[1:], tables[0])
    found = [of_part(part, lambda sums: total) for part in parts]
    assert torch.equal(torch.cat([weights for weights, _ in found]), whole[0])
    assert whole[0][:2].tolist() == [0, 0] and whole[0][2] > 1  # 0.6065 is below the veto
    for name, value in whole[1].items():
        assert sum(float(counts[name]) for _, counts in found) == pytest.approx(float(value))


def test_correct_never_reads_masked_rows():
    mask = torch.tensor([True, False, True])
    poisoned = torch.tensor([-1.5, float("nan"), -1.5])
    config = Objective(tis_cap=2.0, mask_ratio=(0.5, 1.7), veto=0.1)
    samples = torch.zeros(3, dtype=torch.int64)
    weights, _ = correct(config, OLD, poisoned, mask, samples, 1, lambda sums: sums)
    assert weights.tolist() == pytest.approx([1.6487, 0, 0], abs=5e-5)


@pytest.mark.parametrize("bounds", [(1.0, 2.0), (0.5, 1.0)])
def test_correct_keeps_what_is_on_a_bound(bounds: tuple[float, float]):
    config = Objective(mask_ratio=bounds, sequence_bounds=bounds)
    mask = torch.ones(3) > 0
    samples = torch.zeros(3, dtype=torch.int64)
    weights, _ = correct(config, OLD, OLD, mask, samples, 1, lambda sums: sums)
    assert weights.tolist() == [1, 1, 1]
