import pytest
import torch

from pyrl_ext.megatron.te import l2_norm, scale_all


def tensors(*shapes):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g) for shape in shapes]


def test_l2_norm_is_that_of_all_tensors_joined():
    given = tensors((3, 5), (7,), (1, 1), (0, 4))
    got, _ = l2_norm(1, torch.zeros(1), [given], False)
    exact = torch.cat([each.flatten() for each in given]).double().norm()
    assert got.shape == (1,) and got.dtype == torch.float32
    assert got.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_scale_all_writes_what_a_product_rounded_once_has(factor):
    given = tensors((3, 5), (7,))
    targets = [torch.empty_like(each, dtype=torch.bfloat16) for each in given]
    before = [each.clone() for each in given]
    scale_all(1, torch.zeros(1), [given, targets], factor)
    assert all(torch.equal(t, (s * factor).bfloat16()) for s, t in zip(given, targets))
    assert all(torch.equal(a, b) for a, b in zip(given, before))
    scale_all(1, torch.zeros(1), [given, given], factor)
    assert all(torch.equal(a, b * factor) for a, b in zip(given, before))
