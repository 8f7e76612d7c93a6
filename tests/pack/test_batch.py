"""Batch: rows against a token-by-token loop, refusals by name, sub-batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pyrl_ext.loss.advantages import grpo
from pyrl_ext.pack.batch import Batch
from pyrl_ext.samples import Sample

LAYERS, TOPK, EXPERTS = (1, 2, 5), 4, 16


def distinct_routes(rng: np.random.Generator, tokens: int, num_experts: int) -> torch.Tensor:
    order = rng.random((tokens, len(LAYERS), num_experts)).argsort(-1)[..., :TOPK]
    return torch.from_numpy(order).to(torch.uint8 if num_experts <= 256 else torch.uint16)


def make_sample(
    prompt: int, index: int, prompt_len: int, response_len: int, num_experts: int = EXPERTS
) -> Sample:
    rng = np.random.default_rng((prompt, index))
    n = prompt_len + response_len
    chosen = torch.arange(n) >= prompt_len
    logprobs = torch.from_numpy(-rng.random(n)).float()
    return Sample(
        prompt_id=prompt,
        index=index,
        tokens=torch.from_numpy(rng.integers(0, 99, n)),
        prompt_len=prompt_len,
        loss_mask=chosen,
        rollout_logprobs=torch.where(chosen, logprobs, 0),
        routes=distinct_routes(rng, n, num_experts),
        layer_ids=LAYERS,
        route_mask=torch.arange(n) < n - 1,
        weight_version=0,
        finish_reason="length" if index else "stop",
        reward=float(rng.random()),
    )


def make_samples(groups: int = 4, size: int = 2, **kwargs) -> list[Sample]:
    return [
        make_sample(10 + g, i, 2 + g, 1 + (3 * g + i) % 5, **kwargs)
        for g in range(groups)
        for i in range(size)
    ]


def of(samples: list[Sample], **kwargs) -> Batch:
    return Batch.of(samples, grpo, **kwargs)


def with_routes(sample: Sample, token: int, layer: int, experts: list[int]) -> Sample:
    assert sample.routes is not None
    routes = sample.routes.clone()
    routes[token, layer] = torch.tensor(experts).to(routes.dtype)
    return replace(sample, routes=routes)


@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
def test_of_shifts_the_tokens(num_experts):
    samples = make_samples(num_experts=num_experts)
    batch = of(samples, num_experts=num_experts, layer_ids=LAYERS, topk=TOPK)
    advantages = grpo(batch.rewards, torch.tensor([s.prompt_id for s in samples]))
    row = 0
    assert batch.routes is not None
    for s, sample in enumerate(samples):
        assert batch.rewards[s] == np.float32(sample.reward)
        for t in range(sample.tokens.numel() - 1):
            assert batch.tokens[row] == sample.tokens[t]
            assert batch.targets[row] == sample.tokens[t + 1]
            assert batch.positions[row] == t
            assert batch.loss_mask[row] == (t + 1 >= sample.prompt_len)
            assert batch.rollout_logprobs[row] == sample.rollout_logprobs[t + 1]
            assert batch.advantages[row] == advantages[s]
            assert batch.route_mask[row]
            assert sample.routes is not None
            assert torch.equal(batch.routes[row], sample.routes[t])
            row += 1
    assert row == batch.tokens.numel() == sum(batch.seqlens)
    assert batch.num_loss_tokens == sum(s.tokens.numel() - s.prompt_len for s in samples)
    assert batch.layer_ids == LAYERS
    assert batch.routes.dtype == (torch.uint8 if num_experts <= 256 else torch.uint16)


def test_stats_equal_counts_of_the_samples():
    samples = make_samples()
    samples[0] = replace(samples[0], reward=0.25)
    samples[1] = replace(samples[1], reward=0.25)
    missing = samples[2].route_mask.clone()
    missing[:2] = False
    samples[2] = replace(samples[2], route_mask=missing)
    stats = of(samples).stats()
    rewards = np.array([s.reward for s in samples], dtype=np.float32)
    rows = sum(s.tokens.numel() - 1 for s in samples)
    assert stats["reward"] == pytest.approx(rewards.mean(), rel=1e-6)
    assert stats["rollout/reward_std"] == pytest.approx(rewards.std(), rel=1e-6)
    assert stats["rollout/flat_groups"] == 0.25
    assert stats["rollout/tokens"] == rows + len(samples)
    assert stats["rollout/response_len"] == np.mean([len(s.response) for s in samples])
    assert stats["rollout/truncated"] == 0.5
    assert stats["route/fallback_rows"] == 2
    assert stats["route/coverage"] == pytest.approx(1 - 2 / rows)


def test_of_accepts_samples_without_routes():
    samples = [
        replace(s, routes=None, layer_ids=(), route_mask=torch.zeros_like(s.route_mask))
        for s in make_samples()
    ]
    batch = of(samples)
    assert batch.routes is None and batch.layer_ids == ()
    assert "route/coverage" not in batch.stats()
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
    assert batch.stats()["route/fallback_rows"] == 1


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
    "reward": (lambda s: replace(s, reward=math.nan), r"reward nan, expected a finite number"),
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


def test_of_refuses_wrong_advantages():
    with pytest.raises(ValueError, match=r"returned \[3\], expected \[8\]"):
        Batch.of(make_samples(), lambda rewards, groups: rewards[:3])
    with pytest.raises(ValueError, match="returned inf for sample 0"):
        Batch.of(make_samples(), lambda rewards, groups: rewards / 0)


def assert_same(a: Batch, b: Batch) -> None:
    for name, value in vars(a).items():
        other = getattr(b, name)
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, name


@pytest.mark.parametrize("ids", [[0], [2, 3, 4], [7, 1, 4], [3, 3], [7, 6, 5, 4, 3, 2, 1, 0]])
@pytest.mark.parametrize("num_experts", [EXPERTS, 300])
def test_select_equals_a_batch_of_those_samples(ids, num_experts):
    samples = make_samples(num_experts=num_experts)
    batch = Batch.of(samples, lambda rewards, groups: rewards * 2)
    wanted = Batch.of([samples[i] for i in ids], lambda rewards, groups: rewards * 2)
    old = torch.arange(sum(batch.seqlens)).float()
    chosen = batch.with_(old_logprobs=old).select(ids)
    assert chosen.old_logprobs is not None
    assert torch.equal(chosen.old_logprobs, torch.from_numpy(batch.rows(ids)).float())
    assert_same(chosen.with_(old_logprobs=None), wanted)


def test_of_groups_samples_by_their_prompt():
    """Groups are those of the prompt ids, in whatever order the samples come."""
    samples = make_samples(groups=3, size=2)
    samples = [samples[i] for i in (4, 0, 2, 5, 1, 3)]
    seen = []

    def advantage(rewards, groups):
        seen.append(groups.tolist())
        return rewards - 1

    batch = Batch.of(samples, advantage)
    assert seen == [[12, 10, 11, 12, 10, 11]]
    assert batch.groups == (12, 10, 11, 12, 10, 11)
    whole = of(samples)
    for s, sample in enumerate(samples):
        group = np.array([other.reward for other in samples if other.prompt_id == sample.prompt_id])
        want = (sample.reward - group.mean()) / (group.std(ddof=1) + 1e-6)
        assert whole.advantages[whole.starts[s]].item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_num_loss_tokens_ahead_equals_a_loop(depth):
    """A loss token counts at a depth if the row that predicts it is in the same sample."""
    batch = of(make_samples())
    mask = batch.loss_mask.clone()
    mask[::3] = True  # also at the first rows of samples
    batch = batch.with_(loss_mask=mask)
    want = sum(
        bool(mask[batch.starts[s] + row + depth])
        for s, n in enumerate(batch.seqlens)
        for row in range(n)
        if row + depth < n
    )
    assert batch.num_loss_tokens_ahead(depth) == want


def test_select_refuses_an_unknown_sample():
    with pytest.raises(IndexError, match="sample 8, expected 0 to 7"):
        of(make_samples()).select([0, 8])


def test_split_keeps_groups_whole_and_in_order():
    samples = make_samples(groups=4, size=2)
    samples = [samples[i] for i in (0, 2, 1, 3, 4, 6, 5, 7)]  # groups interleaved two by two
    batch = of(samples)
    parts = batch.split(4)
    assert [p.groups for p in parts] == [(10, 10), (11, 11), (12, 12), (13, 13)]
    assert_same(parts[1], batch.select([1, 3]))
    assert sum(p.num_loss_tokens for p in parts) == batch.num_loss_tokens
    assert [p.groups for p in batch.split(2)] == [(10, 11, 10, 11), (12, 13, 12, 13)]
    assert batch.split(1) == [batch]
    with pytest.raises(ValueError, match=r"3 minibatches of 4 groups \(8 samples\)"):
        batch.split(3)


def test_batch_refuses_fields_of_another_length():
    batch = of(make_samples())
    with pytest.raises(ValueError, match=r"old_logprobs has shape \[3\], expected \d+ rows"):
        batch.with_(old_logprobs=torch.zeros(3))
    with pytest.raises(ValueError, match="rewards has 2 entries, expected one for each of 8"):
        batch.with_(rewards=torch.zeros(2))
