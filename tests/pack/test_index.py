"""BatchIndex: numbers of samples against loops over them, joined from the parts of ranks."""

import math
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.loss.registry import build_advantage
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.images import Images
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.plan.schema.objective import ADVANTAGES, Objective
from pyrl_ext.samples import Image, Sample
from tests.helpers import forms
from tests.helpers.samples import LAYERS, TOPK, make_sample, make_samples

GRPO = build_advantage(Objective())


def pickled(index: BatchIndex) -> BatchIndex:
    """What another rank gets."""
    return pickle.loads(pickle.dumps(index))


def nbytes(index: BatchIndex) -> int:
    """Bytes of all numbers that ranks exchange."""
    columns = [getattr(index, field.name) for field in fields(index)]
    _, of_images = index.images.__reduce__()
    columns += [*index.components.values(), *of_images]
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def test_stats_equals_counts_of_the_samples():
    samples = make_samples()
    samples[0] = replace(samples[0], reward=0.25)
    samples[1] = replace(samples[1], reward=0.25)
    missing = samples[2].route_mask.clone()
    missing[:2] = False
    samples[2] = replace(samples[2], route_mask=missing)
    stats = BatchIndex.of(samples).stats()
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


def test_stats_counts_the_tokens_of_a_pass_where_an_engine_counted():
    samples = make_samples()
    assert "rollout/tokens_per_pass" not in BatchIndex.of(samples).stats()
    samples[:2] = [replace(samples[0], passes=2), replace(samples[1], passes=3)]
    counted = len(samples[0].response) + len(samples[1].response)
    assert BatchIndex.of(samples).stats()["rollout/tokens_per_pass"] == counted / 5


def test_stats_counts_groups_of_one_trajectory():
    samples = make_samples(groups=4, size=3)
    assert BatchIndex.of(samples).stats()["rollout/single_groups"] == 0
    few = [samples[0], samples[3], *samples[6:8], *samples[9:]]  # groups of 1, 1, 2 and 3
    assert BatchIndex.of(few).stats()["rollout/single_groups"] == 2


def test_stats_leaves_routes_out_without_any():
    bare = replace(make_sample(1, 0, 2, 3), routes=None, layer_ids=())
    assert "route/coverage" not in BatchIndex.of([bare]).stats()


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_of_counts_loss_tokens_as_a_loop(depth):
    """A loss token counts at a depth if the row that predicts it is in the same sample."""
    samples = [replace(s, loss_mask=torch.rand(s.tokens.numel()) > 0.3) for s in make_samples()]
    index = BatchIndex.of(samples, depths=4)
    for s, sample in enumerate(samples):
        rows = sample.tokens.numel() - 1
        want = sum(
            bool(sample.loss_mask[row + depth + 1]) for row in range(rows) if row + depth < rows
        )
        assert index.loss_tokens[s, depth] == want


def test_joined_orders_samples_by_group_and_place():
    samples = make_samples(groups=4, size=3)
    samples = [replace(s, weight_version=7 + i) for i, s in enumerate(samples)]
    order = [g for g in (13, 10, 12, 11) for _ in range(3)]
    parts = [BatchIndex.of(samples[i::3][::-1], owner=i) for i in range(3)]
    backwards = BatchIndex.joined([BatchIndex.of(samples[::-1])], [13, 10, 12, 11])
    assert backwards.places.tolist() == [0, 1, 2] * 4
    index = BatchIndex.joined([*parts, BatchIndex.of([], owner=3)], [13, 10, 12, 11])
    assert index.groups.tolist() == order
    assert index.places.tolist() == [0, 1, 2] * 4
    assert index.owners.tolist() == [0, 1, 2] * 4
    by_name = {(s.prompt_id, s.index): s for s in samples}
    for i in range(len(index)):
        sample = by_name[int(index.groups[i]), int(index.places[i])]
        assert index.seqlens[i] == sample.tokens.numel() - 1
        assert index.rewards[i] == sample.reward
        assert index.sampled[i] == len(sample.response)
        assert index.truncated[i] == (sample.finish_reason == "length")
        assert index.versions[i] == sample.weight_version
    assert index.truncated.dtype == np.bool_
    assert index.owned_by(1).tolist() == [1, 4, 7, 10]
    assert (index.layer_ids, index.topk) == (LAYERS, TOPK)
    assert index.starts.tolist() == np.cumsum([0, *index.seqlens]).tolist()
    assert nbytes(index) <= 61 * len(index)


@pytest.mark.parametrize("groups", [0, 1, 4])
def test_pickled_index_is_the_same_and_little_more_than_its_numbers(groups):
    index = BatchIndex.of(make_samples(groups), owner=3, depths=2)
    index = replace(index, groups=index.groups + (1 << 40))
    assert len(pickle.dumps(index)) <= 2500 + nbytes(index)
    read = pickled(index)
    for name, column in vars(index).items():
        got = getattr(read, name)
        if name == "images":
            assert len(got.samples) == len(column.samples) == 0
        elif isinstance(column, np.ndarray):
            assert got.dtype == column.dtype and got.shape == column.shape, name
            assert got.tolist() == column.tolist(), name
        else:
            assert got == column, name
    assert read.digest == index.digest


def test_digest_depends_on_every_number():
    index = BatchIndex.of(make_samples())
    columns = [name for name, column in vars(index).items() if isinstance(column, np.ndarray)]
    assert len(columns) == 14
    for name in columns:
        changed = getattr(index, name).copy()
        changed[3] = changed[3] == 0 if name == "truncated" else changed[3] + 1
        assert replace(index, **{name: changed}).digest != index.digest, name
    assert replace(index, topk=1).digest != replace(index, layer_ids=(1, 2, 6)).digest
    assert replace(index, topk=1).digest != index.digest


@st.composite
def samples_with_images(draw):
    """Samples of three groups, some with images: as many and as large as may be."""
    found: list[Sample] = []
    for place in range(draw(st.integers(1, 7))):
        row = 0
        images = list[Image]()
        for _ in range(draw(st.sampled_from([0, 0, 1, 2, 3]))):
            high = draw(st.integers(1, 3))
            wide = draw(st.integers(1, 3))
            row += draw(st.integers(0, 2))
            patches = torch.zeros(4 * high * wide, 3, dtype=torch.uint8)
            images.append(Image(row, high * wide, (1, 2 * high, 2 * wide), patches))
            row += high * wide
        bare = make_sample(10 + place % 3, place, row + 1, draw(st.integers(1, 4)))
        found.append(replace(bare, images=tuple(images)))
    return found


@given(samples=samples_with_images(), order=st.permutations([10, 11, 12]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_images_stay_with_their_samples_over_bytes_and_joins(samples, order, data):
    """Whatever ranks own the samples, and in whatever order groups are wanted."""
    owners = [data.draw(st.integers(0, 2)) for _ in samples]
    mine = [[s for s, o in zip(samples, owners, strict=True) if o == rank] for rank in range(3)]
    parts = [BatchIndex.of(each, rank) for rank, each in enumerate(mine)]
    read = [pickled(part) for part in parts]
    assert [nbytes(p) - nbytes(replace(p, images=Images.of(np.empty(0)))) for p in parts] == [
        24 * sum(len(s.images) for s in each) for each in mine
    ]
    index = BatchIndex.joined(read, order)
    got = index.images
    assert all(column.dtype == np.int64 for column in got)
    assert index.digest == BatchIndex.joined(parts, order).digest
    by_name = {(s.prompt_id, s.index): s for s in samples}
    want = [
        (i, image.row, image.rows, *image.grid)
        for i in range(len(index))
        for image in by_name[int(index.groups[i]), int(index.places[i])].images
    ]
    assert got.table.tolist() == [list(row) for row in want]
    assert got.patches.tolist() == [a * b * c for *_, a, b, c in want]
    some = BatchIndex.joined(read, order[1:])  # without one group
    assert some.images.table[:, 1:].tolist() == [
        list(row[1:]) for row in want if index.groups[row[0]] != order[0]
    ]
    for column in range(6 if want else 0):
        changed = got.table
        changed[-1, column] += 1
        assert replace(index, images=Images.of(changed)).digest != index.digest


def test_joined_refuses_routes_of_other_layers():
    other = replace(make_sample(11, 0, 2, 3), layer_ids=(1, 2, 4))
    parts = BatchIndex.of([make_sample(10, 0, 2, 3)]), BatchIndex.of([other], owner=1)
    with pytest.raises(ValueError, match=r"4 experts of layers \[1, 2, 4\] and 4 experts of"):
        BatchIndex.joined(parts, [10, 11])


def with_components(samples: list[Sample]) -> list[Sample]:
    return [
        replace(s, components={"format": 0.5 * s.index, "right": s.prompt_id + 0.25})
        for s in samples
    ]


def test_components_stay_with_their_samples_over_bytes_and_joins():
    samples = with_components(make_samples(groups=4, size=3))
    parts = [BatchIndex.of(samples[i::3], owner=i) for i in range(3)]
    parts = [pickled(part) for part in (*parts, BatchIndex.of([]))]
    index = BatchIndex.joined(parts, [13, 10, 12])  # not group 11
    assert [*index.components] == ["format", "right"]
    assert index.components["right"].tolist() == [g + 0.25 for g in index.groups]
    assert index.components["format"].tolist() == [0.5 * i for i in index.places]
    stats = index.stats()
    assert stats["reward/right"] == pytest.approx((13 + 10 + 12) / 3 + 0.25)
    assert stats["reward/format"] == 0.5 and index.digest != parts[0].digest
    changed = {**index.components, "right": index.components["right"] + 1}
    assert replace(index, components=changed).digest != index.digest
    images = pickled(index).images
    assert len(images.samples) == 0


def test_components_of_other_names_in_a_group_are_refused_by_their_sample():
    samples = with_components(make_samples(groups=4, size=3))
    odd = [*samples[:5], replace(samples[5], components={"right": 1.0}), *samples[6:]]
    message = (
        r"Sample\(prompt 11, sample 2\): reward with components \['right'\], "
        r"expected \['format', 'right'\] as in other samples of its group"
    )
    with pytest.raises(ValueError, match=message):
        BatchIndex.of(odd)


def test_a_component_is_averaged_over_the_groups_that_have_it():
    samples = with_components(make_samples(groups=4, size=3))
    others = [replace(s, components={"polite": 1.0 * s.index}) for s in samples[6:9]]
    whole = BatchIndex.of([*samples[:6], *others, *samples[9:]])
    parts = [BatchIndex.of(samples[:6]), BatchIndex.of(others), BatchIndex.of(samples[9:])]
    joined = BatchIndex.joined(parts, [10, 11, 12, 13])
    assert [*joined.components] == ["format", "polite", "right"]
    assert joined.digest == whole.digest
    stats = joined.stats()
    assert stats["reward/polite"] == 1.0
    assert stats["reward/right"] == pytest.approx((10 + 11 + 13) / 3 + 0.25)
    alone = BatchIndex.joined([joined], [12]).stats()
    assert alone["reward/polite"] == 1.0
    assert "reward/right" not in alone


def test_advantages_gets_rewards_and_groups_of_all_samples():
    samples = make_samples(groups=3, size=2)
    samples = [samples[i] for i in (4, 0, 2, 5, 1, 3)]
    index = BatchIndex.of(samples)
    seen = []

    def advantage(rewards, groups, tokens):
        seen.append((rewards.dtype, groups.tolist(), tokens.tolist()))
        return rewards - 1

    assert torch.equal(index.advantages(advantage), torch.tensor(index.rewards).float() - 1)
    tokens = [int(sample.loss_mask[1:].sum()) for sample in samples]
    assert seen == [(torch.float32, [12, 10, 11, 12, 10, 11], tokens)]
    for got, sample in zip(index.advantages(GRPO), samples, strict=True):
        group = np.array([other.reward for other in samples if other.prompt_id == sample.prompt_id])
        want = (sample.reward - group.mean()) / (group.std(ddof=1) + 1e-6)
        assert got.item() == pytest.approx(want, rel=1e-5)


def test_advantages_refuses_what_is_not_finite_or_not_one_a_trajectory():
    index = BatchIndex.of(make_samples())
    with pytest.raises(ValueError, match=r"returned \[3\], expected \[8\], one a trajectory"):
        index.advantages(lambda rewards, *_: rewards[:3])
    with pytest.raises(ValueError, match=r"returned inf for trajectory 0, Sample\(prompt 10, sa"):
        index.advantages(lambda rewards, *_: rewards / 0)
    samples = make_samples()
    samples[4] = replace(samples[4], reward=math.nan)
    with pytest.raises(ValueError, match=r"prompt 12, sample 0\): reward nan, expected a finite"):
        BatchIndex.of(samples).advantages(GRPO)


def test_split_keeps_groups_whole_and_in_order():
    samples = make_samples(groups=4, size=2)
    samples = [samples[i] for i in (0, 2, 1, 3, 4, 6, 5, 7)]  # groups interleaved two by two
    index = BatchIndex.of(samples)
    assert index.split(4) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert index.split(2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert index.split(1) == [[*range(8)]]
    assert BatchIndex.of(samples[::-1]).split(4) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    for n in (0, 5):
        with pytest.raises(ValueError, match=rf"{n} minibatches of 4 groups \(8 samples\)"):
            index.split(n)


# Trajectories of several samples ------------------------------------------------------------------

# (group, place): reward, and the tokens that each of its samples sampled; groups of 3, 1, 2 and 0
FANNED = {
    (10, 0): (1.0, [3, 1, 4]),
    (10, 2): (0.0, [2]),
    (10, 3): (0.5, [1, 5]),
    (11, 1): (2.0, [2, 2]),
    (13, 0): (0.0, [6]),
    (13, 1): (1.0, [1, 1, 1, 1]),
}


def fanned() -> list[Sample]:
    """One sample a turn, in any order."""
    found = []
    for (group, place), (reward, turns) in FANNED.items():
        for turn, tokens in enumerate(turns):
            sample = make_sample(group, place, 2 + 3 * turn, tokens)
            last = turn == len(turns) - 1
            reason = "length" if place == 1 else "stop"
            sample = replace(sample, turn=turn, last=last, reward=reward, finish_reason=reason)
            found.append(sample)
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def test_joined_orders_parts_of_a_trajectory_by_turn():
    samples = fanned()
    parts = [BatchIndex.of(samples[i::3], owner=i) for i in range(3)]
    index = BatchIndex.joined([pickled(p) for p in parts], [13, 10, 11])
    keys = sorted(FANNED, key=lambda key: ([13, 10, 11].index(key[0]), key[1]))
    want = [(*key, turn) for key in keys for turn in range(len(FANNED[key][1]))]
    assert [*zip(index.groups, index.places, index.turns, strict=True)] == want
    assert index.trajectories.tolist() == [keys.index(each[:2]) for each in want]
    assert index.firsts.tolist() == [want.index((*key, 0)) for key in keys]


def test_stats_count_a_trajectory_once():
    stats = BatchIndex.of(fanned()).stats()
    given = FANNED.values()
    rewards = [r for r, _ in given]
    sampled = [sum(turns) for _, turns in given]
    assert stats["reward"] == pytest.approx(np.mean(rewards))
    assert stats["rollout/reward_std"] == pytest.approx(np.std(rewards))
    assert stats["rollout/flat_groups"] == pytest.approx(1 / 3)
    assert stats["rollout/response_len"] == np.mean(sampled)
    assert stats["rollout/truncated"] == pytest.approx(2 / 6)  # once, not in each of its samples
    assert stats["rollout/samples_per_trajectory"] == pytest.approx(13 / 6)


def test_of_counts_sampled_tokens_without_observations():
    sample = replace(make_sample(10, 0, 4, 9), spans=((4, 6), (9, 12)))
    assert BatchIndex.of([sample, make_sample(10, 1, 4, 9)]).sampled.tolist() == [5, 9]


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "none"])
def test_advantages_do_not_depend_on_how_a_trajectory_is_cut(name):
    """Every sample has the number that the trajectory has as one sample of as many tokens."""
    index = BatchIndex.of(fanned())
    advantage = build_advantage(Objective(advantage=name))
    keys = [*zip(index.groups, index.places, strict=True)]
    whole = [
        replace(make_sample(*key, 2, sum(turns)), reward=reward)
        for key, (reward, turns) in FANNED.items()
    ]
    want = dict(zip(FANNED, BatchIndex.of(whole).advantages(advantage).tolist(), strict=True))
    got = index.advantages(advantage).tolist()
    assert got == pytest.approx([want[key] for key in keys], rel=1e-6)
    assert len({*got}) > 2


def test_advantages_of_a_fan_out_equal_published_numbers():
    """Reward 1 in three samples of a trajectory and 0 in one: the baseline is 0.5."""
    samples = [replace(make_sample(10, 0, 2, 1), turn=turn, reward=1.0) for turn in range(3)]
    index = BatchIndex.of([*samples, replace(make_sample(10, 1, 2, 3), reward=0.0)])
    advantage = build_advantage(Objective(normalize_std=False))
    assert index.advantages(advantage).tolist() == [0.5, 0.5, 0.5, -0.5]
    seen = []

    def own(rewards, groups, tokens):
        seen.append((rewards.tolist(), groups.tolist(), tokens.tolist()))
        return rewards

    assert index.advantages(own).tolist() == [1, 1, 1, 0]
    assert seen == [([1, 0], [10, 10], [3, 3])]


def test_advantages_over_an_observation_equal_published_numbers():
    """Returns of the reward 1 at the end of two turns, with two observed tokens between them."""
    sampled = torch.tensor([False, True, True, False, False, True, True])
    bare = make_sample(10, 0, 1, 6)
    whole = replace(bare, loss_mask=sampled, spans=((1, 3), (5, 7)), reward=1.0)
    whole = replace(whole, rollout_logprobs=whole.rollout_logprobs.where(sampled, 0))

    def rows(samples: list[Sample]) -> list[list[float]]:
        values = BatchIndex.of(samples).advantages(lambda rewards, *_: rewards)
        batch = Batch.of(samples, values)
        found = (batch.advantages * batch.loss_mask).split(list(batch.seqlens))
        return [part.tolist() for part in found]

    assert rows([whole]) == [[1, 1, 0, 0, 1, 1]]
    spans = whole.spans
    turns = [
        replace(make_sample(10, 0, begin, end - begin), turn=i, last=i == 1, reward=1.0)
        for i, (begin, end) in enumerate(spans)
    ]
    assert rows(turns) == [[1, 1], [0, 0, 0, 0, 1, 1]]
    index = BatchIndex.of([*turns, replace(make_sample(10, 1, 1, 2), reward=0.0)])
    plus = index.advantages(build_advantage(Objective(advantage="reinforce_pp"))).tolist()
    mean = 4 / 6
    std = np.std([1, 1, 1, 1, 0, 0], ddof=1) + 1e-6
    assert plus == pytest.approx([(1 - mean) / std] * 2 + [-mean / std], rel=1e-5)


def test_advantages_refuses_two_rewards_in_a_trajectory():
    samples = [replace(make_sample(10, 1, 2, 1), turn=turn, reward=turn / 2) for turn in range(2)]
    with pytest.raises(ValueError, match=r"sample 1, turn 1\): reward 0.5, expected 0.0 as in ano"):
        BatchIndex.of(samples).advantages(GRPO)


def test_split_cuts_by_prompts_whatever_the_turns_are():
    """More turns are not more optimizer steps, nor a minibatch of other prompts."""
    samples = [*fanned(), make_sample(12, 0, 2, 1)]
    index = BatchIndex.joined([BatchIndex.of(samples)], [13, 10, 12, 11])
    for n, want in (
        (1, [{13, 10, 12, 11}]),
        (2, [{13, 10}, {12, 11}]),
        (3, [{13, 10}, {12}, {11}]),
    ):
        found = index.split(n)
        assert [{*index.groups[ids].tolist()} for ids in found] == want
        assert sorted(i for ids in found for i in ids) == [*range(len(index))]


def test_merged_turns_have_the_rows_of_one_forward():
    """Two turns report the routes of a row that begins the second: filled, and counted once."""
    batch = forms.drawn((12, 30, 9))
    given = [10, 10, 11], [0.0, 1.0, 1.0]
    (whole, _), (merged, _) = (forms.cut(batch, *given, f) for f in ("concatenated", "merged"))
    for one, other in ((whole[0], merged[0]), (whole[2], merged[3])):
        mask = one.route_mask
        assert one.routes is not None and other.routes is not None and len(one.spans) > 1
        assert torch.equal(mask, other.route_mask)
        assert torch.equal(one.routes[mask], other.routes[mask])
        assert torch.equal(one.loss_mask, other.loss_mask) and one.spans == other.spans
    both = [BatchIndex.of([part[0], part[-1]]).stats() for part in (whole, merged)]
    assert both[0] == both[1] and both[0]["route/fallback_rows"] > 0
    assert [(s.turn, s.last) for s in merged[1:3]] == [(0, False), (len(merged[1].spans), True)]
