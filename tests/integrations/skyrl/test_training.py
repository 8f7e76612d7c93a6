"""SkyRL trains a tiny model with our pieces: the same losses where its own are right."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.integrations.skyrl import model

pytestmark = pytest.mark.multiprocess

PRELOAD = ("tests.integrations.skyrl.model", "pyrl_ext.integrations.skyrl")
PP = {"pipeline_model_parallel_size": 2}
TP = {"tensor_model_parallel_size": 2}
CP = {"context_parallel_size": 2}


class Case(NamedTuple):
    """A run on two ranks.

    Args:
        sizes: of megatron's groups; the rest is data-parallel.
        left, samples, layers, unrouted: of `model.microbatches`.
        mtp, vpp: of `model.build`; with ``mtp`` a forward pass alone.
        recompute: all layers are recomputed in the backward.
    """

    sizes: dict[str, int]
    packed: bool = True
    left: bool = True
    samples: int = model.SAMPLES
    layers: int = model.LAYERS
    unrouted: int = model.VOCAB
    mtp: int = 0
    vpp: int | None = None
    fused: bool = False
    recompute: bool = False


EQUAL = {  # to SkyRL's
    "pp": Case(PP),
    "pp, recomputed": Case(PP, recompute=True),
    "pp, one sample, unpacked": Case(PP, packed=False, samples=1),
    "tp": Case(TP, left=False),
    "tp, fused": Case(TP, fused=True),
    "tp, fused, recomputed": Case(TP, left=False, fused=True, recompute=True),
    "tp, one sample, unpacked": Case(TP, packed=False, samples=1),
    "cp": Case(CP),
    "cp, recomputed": Case(CP, left=False, recompute=True),
    "dp": Case({}),
}
# one dense layer, two of experts, and one of experts that predicts further: 3 routers, 3 layers
GLM_FLASH = Case({}, packed=False, samples=1, layers=3, mtp=1)
SEVERAL_UNPACKED = Case({}, packed=False)
UNROUTED = Case({}, unrouted=7)
VPP = Case(PP | {"virtual_pipeline_model_parallel_size": 2}, vpp=2, samples=1)
CASES = EQUAL | {"glm": GLM_FLASH, "several": SEVERAL_UNPACKED, "unrouted": UNROUTED, "vpp": VPP}


class Outcome(NamedTuple):
    """The results of one rank.

    Args:
        metrics: SkyRL's, of each microbatch.
        wrong: what `Routed.wrong` found.
    """

    metrics: list[Any]
    wrong: list[str]


Outcomes = dict[tuple[str, str], Outcome | str]  # (case, whose) -> outcome or error


def outcomes(group: Any) -> Outcomes:
    """Ours come first: SkyRL patches megatron's dispatcher as it runs."""
    from pyrl_ext.integrations import patches, skyrl

    replaced = skyrl.install()
    found: Outcomes = {(name, "ours"): outcome(case) for name, case in CASES.items()}
    for each in replaced:
        patches.restore(each.theirs)
    for name, case in CASES.items():
        found[name, "theirs"] = outcome(case) if case.vpp is None else error_of_setup(case)
    return found


def built(case: Case) -> list[Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    model.initialize(**case.sizes)
    torch.manual_seed(5)
    fields: dict[str, Any] = {}
    if case.recompute:
        fields = {"recompute_granularity": "full", "recompute_method": "uniform"}
        fields["recompute_num_layers"] = 1
    return model.build(case.layers, mtp=case.mtp, vpp=case.vpp, **fields)


def batches_of(case: Case) -> list[dict[str, Any]]:
    return model.microbatches(case.left, case.layers, case.samples, case.unrouted)


def outcome(case: Case) -> Outcome:
    chunks = built(case)
    run = model.wrapper(chunks, case.packed, case.fused)
    routed = model.Routed(chunks)
    if case.mtp:
        run.eval()
        with torch.no_grad():
            metrics = [run.forward(batches_of(case), model.LENGTH, case.samples)]
    else:
        metrics = model.train(chunks, run, batches_of(case))
    return Outcome(metrics, routed.wrong(case.layers, case.unrouted, case.mtp))


def error_of_setup(case: Case) -> str:
    """The error of SkyRL's function, called without a schedule, in which the other rank would
    wait."""
    from skyrl.backends.skyrl_train.utils import replay_utils

    (chunk, *_) = built(case)
    batch = batches_of(case)[0]
    try:
        replay_utils.setup_per_microbatch_replay_forward(
            batch["rollout_expert_indices"], batch["attention_mask"], chunk.config, True
        )
    except AssertionError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def on_two_ranks() -> list[Outcomes]:
    return run_ranks(outcomes, 2, preload=PRELOAD)


def wrong(found: Outcomes, name: str, whose: str) -> list[str]:
    each = found[name, whose]
    assert isinstance(each, Outcome)
    return each.wrong


@pytest.mark.parametrize("name", CASES)
def test_tokens_get_their_experts_and_rows_distinct_ones(name: str, on_two_ranks: list[Outcomes]):
    assert [wrong(found, name, "ours") for found in on_two_ranks] == [[], []]


@pytest.mark.parametrize("name", EQUAL)
def test_losses_are_theirs(name: str, on_two_ranks: list[Outcomes]):
    for found in on_two_ranks:
        ours, theirs = found[name, "ours"], found[name, "theirs"]
        assert isinstance(ours, Outcome) and isinstance(theirs, Outcome)
        assert len(ours.metrics) == len(theirs.metrics) == 3 * model.MICROBATCHES
        for mine, other in zip(ours.metrics, theirs.metrics, strict=True):
            assert mine.keys() == other.keys()
            for key in mine.keys() - {"loss_fn_outputs"}:
                assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key


# Where SkyRL 0.3.0 is wrong -----------------------------------------------------------------------


def test_1392_virtual_stages_replay(on_two_ranks: list[Outcomes]):
    for found in on_two_ranks:
        ours = found["vpp", "ours"]
        assert isinstance(ours, Outcome) and len(ours.metrics) == 3 * model.MICROBATCHES
        assert "vp_stage must be provided" in str(found["vpp", "theirs"])


def test_layers_are_not_shifted_by_a_router_that_predicts_further(on_two_ranks: list[Outcomes]):
    """GLM-4.7-Flash has 47 decoder layers, of which one is dense, and 47 routers, of which one is
    for MTP. SkyRL assigns the columns in order."""
    for found in on_two_ranks:
        shifted = [text for text in wrong(found, "glm", "theirs") if "tokens had" in text]
        assert shifted == [f"layer {i}: tokens had their experts in [0, 0] of 2" for i in (1, 2)]


def test_rows_of_several_unpacked_samples_are_in_megatrons_order(on_two_ranks: list[Outcomes]):
    for found in on_two_ranks:
        assert any("tokens had" in text for text in wrong(found, "several", "theirs"))


def test_tokens_without_a_route_are_routed_by_their_router(on_two_ranks: list[Outcomes]):
    """SkyRL sends them to expert 0 alone: no row here is padding."""
    for found in on_two_ranks:
        assert wrong(found, "dp", "theirs") == []
        assert "layer 1: experts twice" in wrong(found, "unrouted", "theirs")


@pytest.mark.parametrize("name", ["pp", "tp", "cp"])
def test_padding_has_distinct_experts(name: str, on_two_ranks: list[Outcomes]):
    """All of SkyRL's goes to expert 0, once instead of K times."""
    found = [text for each in on_two_ranks for text in wrong(each, name, "theirs")]
    assert any("experts twice" in text for text in found) == (name != "pp")
