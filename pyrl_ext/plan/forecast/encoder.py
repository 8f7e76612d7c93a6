"""An encoder: parameters, memory and work of its pipeline stages.

Its microbatches are those of the language model; the images of each are spread over its replicas.
With ranks for itself it runs ahead; on those of the language model's first stage it is a part of
that stage's passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pyrl_ext.plan.forecast.hardware import Gpu
from pyrl_ext.plan.forecast.parts import reached
from pyrl_ext.plan.forecast.units import DTYPE_BYTES
from pyrl_ext.plan.model.counts import Parameters
from pyrl_ext.plan.model.towers import Tower
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.schema import Module, Parallel
from pyrl_ext.schedule.pipeline import ahead_of


@dataclass(frozen=True)
class Encoder:
    """One module of a plan that encodes images."""

    plan: Plan
    name: str

    @property
    def module(self) -> Module:
        """Its section of the YAML."""
        return self.plan.modules[self.name]

    @property
    def shared(self) -> bool:
        """True if it runs on the ranks of the language model's first stage."""
        return self.module.ranks == "shared"

    @cached_property
    def parallel(self) -> Parallel:
        """How its ranks are arranged."""
        return self.plan.grids[self.name].parallel

    @property
    def tower(self) -> Tower:
        """Its sizes."""
        tower = self.plan.sizes.vision
        if tower is None:
            raise ValueError(f"Encoder: the model has no {self.name}, expected a vision_config")
        return tower

    @property
    def layers(self) -> list[int]:
        """Layers of each pipeline stage."""
        return self.tower.stages(self.parallel.pp)

    @property
    def stage_layers(self) -> list[tuple[int, ...]]:
        """0-based ids of the layers of each pipeline stage."""
        ends = list(accumulate(self.layers))
        return [tuple(range(end - n, end)) for n, end in zip(self.layers, ends, strict=True)]

    def besides(self, stage: int) -> list[str]:
        """Parts of a stage in addition to its layers."""
        first = stage == 0
        last = stage == len(self.layers) - 1
        return ["patches"] * first + ["merger"] * last

    @property
    def row_width(self) -> int:
        """Elements that it hands over for each row of the language model."""
        return self.plan.sizes.hidden_size * (1 + len(self.tower.deepstack))

    def in_flight(self, stage: int) -> int:
        """Most microbatches of a stage whose backward pass is still to come: the language model's
        first gradient comes back after `ahead_of`, and with ranks for itself an encoder's last
        stage works on one more meanwhile."""
        if not self.module.train:
            return 1
        most = -(-self.plan.samples_per_minibatch // self.plan.parallel.dp)
        more = 0 if self.shared else self.parallel.pp - stage
        return min(ahead_of(self.plan.parallel.pp, self.plan.parallel.vpp) + more, most)

    def parameters(self, stage: int) -> Parameters:
        """Parameters of a stage: the first embeds patches, the last has the mergers."""
        tower = self.tower
        hidden = self.tower.hidden_size
        total = Parameters()
        for _ in range(self.layers[stage]):
            total += _layer(tower)
        side = self.plan.model.family == "kimi_k25"  # whose table has as many rows as columns
        if stage == 0:
            positions = tower.positions**2 if side else tower.positions
            total += Parameters(replicated=(self.tower.patch_width + 1 + positions) * hidden)
        if stage == len(self.layers) - 1:
            total += Parameters(replicated=2 * hidden * side)  # a norm behind the last layer
            total += _merger(tower, hidden, self.plan.sizes.hidden_size)
            for _ in tower.deepstack:
                total += _merger(tower, hidden * tower.merge**2, self.plan.sizes.hidden_size)
        return total

    def on_rank(self, stage: int) -> int:
        """Parameters of a stage on one rank."""
        held = self.parameters(stage)
        return held.replicated + -(-held.tensor // self.parallel.tp)

    def stepped(self, stage: int) -> int:
        """Parameters of a stage whose optimizer state one rank holds."""
        if not self.module.train:
            return 0
        dp = self.parallel.dp if self.plan.optimizer.distributed else 1
        return -(-self.on_rank(stage) // dp)

    @cached_property
    def saved(self) -> float:
        """Bytes that a layer saves for a patch: two norms with their outputs, queries, keys and
        values before and after they are rotated, attention's output, and the feed-forward part's
        input and output."""
        tower = self.tower
        each = DTYPE_BYTES[self.plan.model.dtype]
        split = 9 * tower.hidden_size + 2 * tower.intermediate_size
        return each * (4 * tower.hidden_size + split) / self.parallel.tp

    def activations(self, stage: int) -> float:
        """Bytes for a patch that a stage keeps of one microbatch for the backward pass."""
        each = DTYPE_BYTES[self.plan.model.dtype]
        kept = self.saved * self.layers[stage]
        if self.plan.model.recompute == "full":
            kept = each * self.tower.hidden_size * self.layers[stage]
        if stage == len(self.layers) - 1:
            wide = self.tower.hidden_size * (1 + len(self.tower.deepstack))
            kept += each * (3 * wide + self.row_width / self.tower.merge**2)
        return kept

    # Time ---------------------------------------------------------------------------------------

    def seconds(self, gpu: Gpu, patches: float, stage: int) -> float:
        """Seconds of a stage's forward pass over `patches` on a rank."""
        rate, _ = reached("projections", gpu.flops[self.plan.model.dtype])
        core, _ = reached("attention", gpu.flops[self.plan.model.dtype])
        tp = self.parallel.tp
        products, scores = self.flops(stage)
        return patches * (products / rate + scores / core) / tp

    def flops(self, stage: int) -> tuple[float, float]:
        """Operations of a forward pass for a patch: of matrix products, and of attention within
        images of the estimated size."""
        tower = self.tower
        held = self.layers[stage]
        products = 2.0 * _matrices(tower) * held
        if stage == 0:
            products += 2 * self.tower.patch_width * tower.hidden_size
        if stage == len(self.layers) - 1:
            wide = tower.hidden_size * tower.merge**2
            out = self.plan.sizes.hidden_size
            mergers = (1 + len(tower.deepstack)) * (wide * wide + wide * out)
            products += 2 * mergers / tower.merge**2
        scores = 4.0 * tower.hidden_size * self.plan.estimate.image_patches * held
        return products, scores

    @property
    def step_patches(self) -> float:
        """Patches of all samples of a step."""
        return self.plan.samples * self.plan.estimate.images * self.plan.estimate.image_patches

    def patches(self, microbatches: int) -> float:
        """Patches of one of a step's microbatches on the replica that gets most, on average:
        images are not split."""
        images = self.plan.samples * self.plan.estimate.images / microbatches
        each = images / self.parallel.dp
        return self.plan.estimate.image_patches * (math.ceil(each) if each > 1 else min(1, images))

    @property
    def patch_flops(self) -> float:
        """Operations of a forward pass for a patch, of all stages."""
        return sum(sum(self.flops(stage)) for stage in range(len(self.layers)))

    @property
    def passes(self) -> int:
        """Operations of a microbatch in an update, in forward passes, without recomputation."""
        return 3 if self.module.train else 1

    @property
    def update_flops(self) -> float:
        """Model FLOPs of a step's updates on all its ranks."""
        return self.passes * self.patch_flops * self.step_patches


def encoders(plan: Plan) -> list[Encoder]:
    """The encoders of a plan."""
    return [Encoder(plan, name) for name in plan.modules]


def encoder_stages(plan: Plan) -> Iterator[tuple[Encoder, int]]:
    """(encoder, its stage) of every pipeline stage that has ranks for itself, in order."""
    own = (each for each in encoders(plan) if not each.shared)
    return ((each, stage) for each in own for stage in range(len(each.layers)))


def encoder_parameters(plan: Plan) -> int:
    """Parameters of all encoders, which are published with the language model's."""
    every = ((each, stage) for each in encoders(plan) for stage in range(len(each.layers)))
    return sum(each.parameters(stage).total for each, stage in every)


def _layer(tower: Tower) -> Parameters:
    """Attention with one product for queries, keys and values, a feed-forward part of two, both
    with biases, and two norms."""
    hidden = tower.hidden_size
    split = _matrices(tower) + 3 * hidden + tower.intermediate_size
    return Parameters(replicated=4 * hidden + 2 * hidden, tensor=split)


def _matrices(tower: Tower) -> int:
    """Elements of a layer's matrices."""
    return 4 * tower.hidden_size**2 + 2 * tower.hidden_size * tower.intermediate_size


def _merger(tower: Tower, normed: int, out: int) -> Parameters:
    """A norm, and two products of `merge` x `merge` patches to a row of the language model."""
    wide = tower.hidden_size * tower.merge**2
    return Parameters(replicated=2 * normed + out, tensor=wide * wide + wide + wide * out)
