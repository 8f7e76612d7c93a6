"""Batch: rows against a token-by-token loop, refusals by name."""

import math
from dataclasses import replace

import pytest
import torch

from pyrl_ext.pack.batch import Batch
from pyrl_ext.samples import Image, Sample
from tests.helpers.samples import EXPERTS, LAYERS, TOPK, make_sample, make_samples, with_kept


def of(samples: list[Sample], **kwargs) -> Batch:
    return Batch.of(samples, torch.arange(float(len(samples))), **kwargs)


def with_routes(sample: Sample, token: int, layer: int, experts: list[int]) -> Sample:
    assert sample.routes is not None
    routes = sample.routes.clone()
    routes[token, layer] = torch.tensor(experts).to(routes.dtype)
    return replace(sample, routes=routes)


@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
def test_of_shifts_the_tokens(num_experts):
    samples = make_samples(num_experts=num_experts)
    batch = of(samples, num_experts=num_experts, layer_ids=LAYERS, topk=TOPK)
    row = 0
    assert batch.routes is not None
    for s, sample in enumerate(samples):
        for t in range(sample.tokens.numel() - 1):
            assert batch.tokens[row] == sample.tokens[t]
            assert batch.targets[row] == sample.tokens[t + 1]
            assert batch.loss_mask[row] == (t + 1 >= sample.prompt_len)
            assert batch.rollout_logprobs[row] == sample.rollout_logprobs[t + 1]
            assert batch.advantages[row] == s
            assert batch.route_mask[row]
            assert sample.routes is not None
            assert torch.equal(batch.routes[row], sample.routes[t])
            row += 1
    assert row == batch.tokens.numel() == sum(batch.seqlens)
    assert batch.layer_ids == LAYERS
    assert batch.routes.dtype == (torch.uint8 if num_experts <= 256 else torch.uint16)


def test_of_accepts_samples_without_routes():
    samples = [
        replace(s, routes=None, layer_ids=(), route_mask=torch.zeros_like(s.route_mask))
        for s in make_samples()
    ]
    batch = of(samples)
    assert batch.routes is None and batch.layer_ids == ()
    with pytest.raises(
        ValueError, match=r"prompt 10, sample 0.* no routes, expected .*\[1, 2, 5\]"
    ):
        of(samples, layer_ids=LAYERS)
    with pytest.raises(ValueError, match=r"prompt 10, sample 1.* no routes, expected none or all"):
        of([make_sample(10, 0, 2, 3), samples[1]])


def test_of_ignores_ids_of_tokens_without_a_route():
    sample = with_routes(make_sample(3, 0, 4, 3), 1, 2, [7, 7, 7, 200])
    mask = sample.route_mask.clone()
    mask[1] = False
    batch = of([replace(sample, route_mask=mask)], num_experts=EXPERTS)
    assert int((~batch.route_mask).sum()) == 1


@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
@pytest.mark.parametrize(
    ("experts", "what"),
    [
        ([3, 9, 3, 1], r"\[3, 9, 3, 1\] repeat, expected 4 distinct ids"),
        ([5, 3, 9, 3], r"\[5, 3, 9, 3\] repeat"),
        ([0, 0, 0, 0], r"\[0, 0, 0, 0\] repeat"),
        (["E", 2, 1, 0], r"are out of range, expected ids from 0 to "),
    ],
)
def test_of_names_wrong_expert_ids(num_experts, experts, what):
    samples = make_samples(num_experts=num_experts)
    experts = [num_experts if e == "E" else e for e in experts]
    samples[5] = with_routes(samples[5], 2, 1, experts)
    match = rf"prompt 12, sample 1\), token 2, layer 2: experts .*{what}"
    with pytest.raises(ValueError, match=match):
        of(samples, num_experts=num_experts)


def test_of_checks_the_range_of_ids_only_if_known():
    sample = with_routes(make_sample(3, 0, 4, 3), 1, 2, [250, 3, 2, 1])
    assert of([sample]).routes is not None


CASES = {
    "empty response": (
        lambda s: replace(s, prompt_len=s.tokens.numel()),
        r"expected .*at least one response token",
    ),
    "wrong K": (
        lambda s: replace(s, routes=s.routes[..., :3]),
        r"routes have shape \[\d+, 3, 3\], expected \[\d+, 3, 4\]",
    ),
    "wrong L": (
        lambda s: replace(s, routes=s.routes[:, :2], layer_ids=LAYERS[:2]),
        r"routes of layers \[1, 2\], expected \[1, 2, 5\]",
    ),
    "other layers": (
        lambda s: replace(s, layer_ids=(0, 2, 5)),
        r"routes of layers \[0, 2, 5\], expected \[1, 2, 5\]",
    ),
    "other type": (
        lambda s: replace(s, routes=s.routes.to(torch.uint16)),
        r"routes are torch.uint16, expected torch.uint8",
    ),
    "log-prob": (
        lambda s: replace(s, rollout_logprobs=torch.where(s.loss_mask, math.nan, 0.0)),
        r"token 4 has log-prob nan, expected a finite number",
    ),
    "image": (
        lambda s: replace(s, images=(Image(0, 1, (1, 1, 1), torch.zeros(1, 3).byte()),)),
        r"1 images, expected text; the plan has no encoder",
    ),
    "image of other patches": (
        lambda s: replace(s, images=(Image(0, 1, (1, 1, 2), torch.zeros(1, 3).byte()),)),
        r"image 0 with patches \[1, 3\], expected 2, as its grid",
    ),
    "image in the response": (
        lambda s: replace(s, images=(Image(s.prompt_len, 1, (1, 1, 1), torch.zeros(1, 3).byte()),)),
        r"image 0 at tokens \d+ to \d+, expected tokens of the prompt",
    ),
    "mask length": (lambda s: replace(s, loss_mask=s.loss_mask[1:]), r"loss_mask"),
}


@pytest.mark.parametrize("case", CASES)
def test_of_names_wrong_samples(case):
    change, match = CASES[case]
    samples = make_samples()
    samples[4] = change(samples[4])
    with pytest.raises(ValueError, match=rf"(?s)prompt 12, sample 0.*{match}"):
        of(samples)


def test_of_checks_the_layers_and_topk_it_is_given():
    samples = make_samples()
    with pytest.raises(
        ValueError, match=r"prompt 10, sample 0.*layers \[1, 2, 5\], expected \[1, 2"
    ):
        of(samples, layer_ids=(1, 2))
    with pytest.raises(ValueError, match=r"prompt 10, sample 0.*expected \[\d+, 3, 8\]"):
        of(samples, topk=8)
    with pytest.raises(ValueError, match="0 samples"):
        of([])


def test_of_refuses_ids_of_another_type():
    with pytest.raises(ValueError, match=r"routes are torch.uint8, expected torch.uint16 for 300"):
        of(make_samples(), num_experts=300)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_of_takes_patches_as_the_encoder_reads_them(dtype):
    image = Image(0, 1, (1, 2, 2), torch.arange(12).view(4, 3).to(dtype))
    samples = [replace(s, images=(image,) * (s.prompt_id == 12)) for s in make_samples()]
    if dtype == torch.uint8:
        patches = Batch.of(samples, torch.zeros(len(samples)), patch_width=3).patches
        assert patches is not None and torch.equal(patches, image.patches.repeat(2, 1))
    wrong = 4 if dtype == torch.uint8 else 3
    found = rf"prompt 12.* image 0: patches \[4, 3\] {dtype}, expected \[patches, {wrong}\] "
    with pytest.raises(ValueError, match=found):
        Batch.of(samples, torch.zeros(len(samples)), patch_width=wrong)


def test_batch_refuses_samples_without_the_sets_that_it_needs():
    samples = [with_kept(each, 120) for each in make_samples()]
    counts = samples[3].kept_counts
    ids = samples[3].kept_ids
    assert counts is not None and ids is not None
    counts = counts.clone()
    ids = torch.cat([ids, torch.tensor([130], dtype=torch.int32)])
    counts[-1] += 1
    wrong = {
        "no kept sets, expected those": replace(samples[3], kept_counts=None, kept_ids=None),
        "kept id 130, expected ids": replace(samples[3], kept_counts=counts, kept_ids=ids),
    }
    for found, each in wrong.items():
        with pytest.raises(ValueError, match=rf"prompt 11, sample 1\): {found}"):
            Batch.of([*samples[:3], each], torch.zeros(4), kept_of=120)
    kept = Batch.of(samples, torch.zeros(len(samples)), kept_of=120).kept
    assert kept is not None and Batch.of(samples, torch.zeros(len(samples))).kept is None
    ids = []
    row = 0
    for sample in samples:
        assert sample.kept_counts is not None and sample.kept_ids is not None
        end = row + len(sample.tokens) - 1
        assert kept.counts[row:end].tolist() == sample.kept_counts[1:].tolist()
        row = end
        ids = ids + sample.kept_ids.tolist()
    assert kept.ids.tolist() == ids
