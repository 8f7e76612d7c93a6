"""Batch: ragged samples as one stream of model-input rows, plus the inputs of the loss.

A sample of n tokens gives n - 1 rows. Row t is the model input ``tokens[t]`` and its target is
``tokens[t + 1]``: nothing is predicted from the last token, so it is never an input. Routes at a
row are about the input token; the loss mask, log-probs and advantages are about the target.
"""

# torch.from_numpy is not fully typed
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pyrl_ext.loss.sampling_mask import KeptSets
from pyrl_ext.pack.route_check import first_wrong
from pyrl_ext.plan import Plan
from pyrl_ext.samples import Sample, route_dtype


@dataclass(frozen=True, eq=False)
class Batch:
    """S samples as T = sum(seqlens) rows.

    Args:
        seqlens: rows of each sample, its tokens less one.
        tokens, targets: [T] int64, model input and the token to predict from it.
        loss_mask: [T] bool, targets that the policy chose and is trained on.
        rollout_logprobs: [T] float32, of the target in the engine's distribution [nats].
        advantages: [T] float32, the sample's advantage on each of its rows.
        routes: [T, L, K] narrowest unsigned type, experts that processed the input; or None.
        layer_ids: [L] 0-based global ids of the layers that have a router.
        route_mask: [T] bool, rows that have a route.
        patches: [P, W] uint8 of all images, sample by sample; None without images.
        kept: [T] sets that the targets were drawn from; None: all of the vocabulary.
        versions: [T] int32, of the weights that sampled the target; None: they are not known.
        teacher_logprobs: [T] float32, of the target under a teacher on servers [nats]; None: there
            is none.
    """

    seqlens: tuple[int, ...]
    tokens: Tensor
    targets: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    routes: Tensor | None
    layer_ids: tuple[int, ...]
    route_mask: Tensor
    patches: Tensor | None = None
    kept: KeptSets | None = None
    versions: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        advantages: Tensor,
        *,
        num_experts: int | None = None,
        layer_ids: tuple[int, ...] | None = None,
        topk: int | None = None,
        patch_width: int | None = None,
        kept_of: int | None = None,
        versions: bool = False,
    ) -> Batch:
        """Check the samples and lay them out as rows; nothing is repaired, wrong data is refused.

        Args:
            samples: [S] rollouts with their rewards set.
            advantages: [S] float32 (`advantages_of`).
            num_experts: experts of a layer; None leaves the upper bound of the ids unchecked.
            layer_ids: [L] layers that must have routes; None takes those of the first sample.
            topk: experts of a token in a layer, K; None takes that of the first sample.
            patch_width: numbers of a patch of an image; None: nothing encodes images.
            kept_of: vocabulary of the kept sets, which all samples must have; None: no sets.
            versions: rows know which weights sampled their target.

        Syncs: if the samples are on a device, their checks read them back.

        Raises:
            ValueError: naming the sample, and where it applies the token and the layer.
        """
        if not samples:
            raise ValueError("Batch.of: 0 samples, expected at least 1")
        first = samples[0]
        device = first.tokens.device
        if first.routes is not None:
            layer_ids = first.layer_ids if layer_ids is None else layer_ids
            topk = first.routes.shape[-1] if topk is None else topk
        for sample in samples:
            sample.check()
            _check_patches(sample, patch_width)
            _check_routes_shape(sample, first.routes, layer_ids, topk)
            _check_routes_type(sample, num_experts)
            _check_kept(sample, kept_of)
        routes, route_mask = _joined_routes(samples, num_experts)
        patches = [image.patches for sample in samples for image in sample.images]
        seqlens = tuple(s.tokens.numel() - 1 for s in samples)
        counts = torch.tensor(seqlens, device=device)
        return cls(
            seqlens=seqlens,
            tokens=torch.cat([s.tokens[:-1] for s in samples]),
            targets=torch.cat([s.tokens[1:] for s in samples]),
            loss_mask=torch.cat([s.loss_mask[1:] for s in samples]),
            rollout_logprobs=torch.cat([s.rollout_logprobs[1:] for s in samples]),
            advantages=advantages.to(device).repeat_interleave(counts),
            routes=routes,
            layer_ids=layer_ids or () if routes is not None else (),
            route_mask=route_mask,
            patches=torch.cat(patches) if patches else None,
            kept=None if kept_of is None else KeptSets.joined([*map(_kept_of_targets, samples)]),
            versions=torch.cat([s.versions[1:] for s in samples]) if versions else None,
        )

    @classmethod
    def for_plan(cls, plan: Plan, samples: Sequence[Sample], advantages: Tensor) -> Batch:
        """`of`, with what this plan demands of samples."""
        tower = plan.sizes.vision
        return cls.of(
            samples,
            advantages,
            num_experts=plan.sizes.num_experts,
            layer_ids=plan.router_layers
            if plan.replay.of_engine
            else None,  # None: needs no routes
            patch_width=tower.patch_width if tower and plan.modules else None,
            kept_of=plan.sizes.vocab_size if plan.trains_on_sampling_mask else None,
            versions=plan.rollout.ahead > 0,
        )

    @cached_property
    def starts(self) -> np.ndarray:
        """[S + 1] int64, first row of each sample, then T."""
        return np.cumsum([0, *self.seqlens])

    @cached_property
    def ends(self) -> Tensor:
        """[T] int64 on the host, the row after the last one of each row's sample."""
        return torch.from_numpy(np.repeat(self.starts[1:], np.asarray(self.seqlens, np.int64)))

    def rows_ahead(self, rows: Tensor, depth: int) -> Tensor:
        """[M] int64 on the host, the row ``depth`` further in the same sample; -1: there is none.

        Args:
            rows: [M] int64 on the host, rows of the batch, -1 = padding.
        """
        moved = rows + depth
        inside = (rows >= 0) & (moved < self.ends[rows.clamp(min=0)])
        return torch.where(inside, moved, -1)


def _refuse(sample: Sample, what: str, expected: str, at: str = "") -> None:
    where = f"Sample(prompt {sample.prompt_id}, sample {sample.index}){at}"
    raise ValueError(f"Batch.of: {where}: {what}, expected {expected}")


def _check_patches(sample: Sample, width: int | None) -> None:
    """Refuse images that no encoder of the plan reads."""
    for number, image in enumerate(sample.images):
        if width is None:
            why = "text; the plan has no encoder (modules) that would read them"
            _refuse(sample, f"{len(sample.images)} images", why)
        found = f"{list(image.patches.shape)} {image.patches.dtype}"
        if image.patches.dtype != torch.uint8 or image.patches.shape[1:] != (width,):
            rule = f"[patches, {width}] torch.uint8, as the encoder reads them"
            _refuse(sample, f"patches {found}", rule, f", image {number}")


def _check_kept(sample: Sample, vocab_size: int | None) -> None:
    """Refuse a sample without the sets that its log-probs are taken over."""
    if vocab_size is None:
        return
    if sample.kept_ids is None:
        why = "those of top-p and top-k; engine and trainer would score different distributions"
        _refuse(sample, "no kept sets", why)
    elif bool((sample.kept_ids >= vocab_size).any()):
        _refuse(sample, f"kept id {int(sample.kept_ids.max())}", f"ids below {vocab_size}")


def _kept_of_targets(sample: Sample) -> KeptSets:
    """Sets of the targets of a sample's rows; its first token, of the prompt, is no target."""
    assert sample.kept_counts is not None and sample.kept_ids is not None
    return KeptSets(sample.kept_counts[1:], sample.kept_ids)


def _check_routes_shape(
    sample: Sample, first: Tensor | None, layer_ids: tuple[int, ...] | None, topk: int | None
) -> None:
    """Refuse routes that do not fit the expected layers, K, or the first sample's type."""
    routes = sample.routes
    if routes is None or first is None:
        if routes is not first:
            have, others = ("no routes", "do") if routes is None else ("routes", "do not")
            _refuse(sample, have, f"none or all: samples before it {others} have them")
        if layer_ids:
            _refuse(sample, "no routes", f"routes of layers {list(layer_ids)}")
        return
    if sample.layer_ids != layer_ids:
        _refuse(sample, f"routes of layers {list(sample.layer_ids)}", f"{list(layer_ids or ())}")
    shape = (sample.tokens.numel(), len(sample.layer_ids), topk)
    if tuple(routes.shape) != shape:
        _refuse(sample, f"routes have shape {list(routes.shape)}", f"{list(shape)}, [T, L, K]")
    if routes.dtype != first.dtype:
        _refuse(sample, f"routes are {routes.dtype}", f"{first.dtype} as in the first sample")


def _check_routes_type(sample: Sample, num_experts: int | None) -> None:
    """Refuse routes whose type is not that of the model's expert ids: ranks exchange that."""
    if sample.routes is None or num_experts is None:
        return
    if sample.routes.dtype != (dtype := route_dtype(num_experts)):
        _refuse(sample, f"routes are {sample.routes.dtype}", f"{dtype} for {num_experts} experts")


def _joined_routes(
    samples: Sequence[Sample], num_experts: int | None
) -> tuple[Tensor | None, Tensor]:
    """The checked routes [T, L, K] of all samples, None if they have none, and their mask [T]."""
    parts = [s.routes[:-1] for s in samples if s.routes is not None]
    route_mask = torch.cat([s.route_mask[:-1] for s in samples])
    if not parts:
        return None, route_mask
    routes = torch.cat(parts)
    _check_route_ids(samples, routes, route_mask, num_experts)
    return routes, route_mask


def _check_route_ids(
    samples: Sequence[Sample], routes: Tensor, route_mask: Tensor, num_experts: int | None
) -> None:
    """Refuse expert ids out of range, or twice in one (row, layer), where there is a route."""
    wrong = first_wrong(routes, route_mask.nonzero().squeeze(1), num_experts)
    if wrong is None:
        return
    starts = np.cumsum([0, *(s.tokens.numel() - 1 for s in samples)])
    sample = int(np.searchsorted(starts, wrong.row, side="right")) - 1
    token = wrong.row - starts[sample]
    at = f", token {token}, layer {samples[sample].layer_ids[wrong.slot]}"
    _refuse(samples[sample], wrong.found, wrong.expected, at)
