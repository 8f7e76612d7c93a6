"""An encoder: parameters, memory and work of its pipeline stages.

Its microbatches are those of the language model; the images of each are spread over its replicas.
With dedicated ranks it runs ahead; on those of the language model's first stage it is a part of
that stage's passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pyrl_ext.plan.model.counts import Parameters
from pyrl_ext.plan.model.towers import Tower
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.schema import Module, Parallel
from pyrl_ext.schedule.pipeline import ahead_of


@dataclass(frozen=True)
class EncoderForecast:
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
        """Layout of its ranks."""
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

    def is_last(self, stage: int) -> bool:
        """True if the stage holds the mergers."""
        return stage == self.parallel.pp - 1

    @property
    def mergers(self) -> int:
        """Number of mergers: one, and one for each layer whose output is added."""
        return 1 + len(self.tower.deepstack)

    @property
    def row_width(self) -> int:
        """Elements that it hands over for each row of the language model."""
        return self.plan.sizes.hidden_size * self.mergers

    def in_flight(self, stage: int) -> int:
        """Most microbatches of a stage whose backward pass is still to come: the language model's
        first gradient comes back after `ahead_of`, and on dedicated ranks an encoder's last stage
        works on one more meanwhile."""
        if not self.module.train:
            return 1
        most = -(-self.plan.samples_per_minibatch // self.plan.parallel.dp)
        more = 0 if self.shared else self.parallel.pp - stage
        return min(ahead_of(self.plan.parallel.pp, self.plan.parallel.vpp) + more, most)

    def parameters(self, stage: int) -> Parameters:
        """Parameters of a stage: the first embeds patches, the last has the mergers."""
        tower = self.tower
        hidden = tower.hidden_size
        out = self.plan.sizes.hidden_size
        square = self.plan.model.family == "kimi_k25"  # its table has as many rows as columns
        # a layer has four products of attention and two of an MLP with biases, and two norms
        count = self.layers[stage]
        split = count * (_matrices(tower) + 3 * hidden + tower.intermediate_size)
        whole = count * 6 * hidden
        if stage == 0:
            positions = tower.positions**2 if square else tower.positions
            whole += (tower.patch_width + 1 + positions) * hidden
        if self.is_last(stage):
            wide = hidden * tower.merge**2
            whole += 2 * hidden * square  # a norm behind the last layer
            # the first merger norms patches, the others merged patches
            whole += 2 * hidden + 2 * wide * len(tower.deepstack) + out * self.mergers
            split += self.mergers * (wide * wide + wide + wide * out)
        return Parameters(replicated=whole, tensor=split)

    def on_rank(self, stage: int) -> int:
        """Parameters of a stage on one rank."""
        stored = self.parameters(stage)
        return stored.replicated + -(-stored.tensor // self.parallel.tp)

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
        split = 9 * tower.hidden_size + 2 * tower.intermediate_size
        elements = (4 * tower.hidden_size + split) / self.parallel.tp
        return self.plan.weight_bytes * elements

    def activations(self, stage: int) -> float:
        """Bytes for a patch that a stage keeps of one microbatch for the backward pass."""
        width = self.plan.weight_bytes
        kept = self.saved * self.layers[stage]
        if self.plan.model.recompute == "full":
            kept = width * self.tower.hidden_size * self.layers[stage]
        if self.is_last(stage):
            merged = 3 * self.tower.hidden_size * self.mergers
            kept += width * (merged + self.row_width / self.tower.merge**2)
        return kept

    # Work ---------------------------------------------------------------------------------------

    def flops(self, stage: int) -> tuple[float, float]:
        """Operations of a forward pass for a patch: of matrix products, and of attention within
        images of the estimated size."""
        tower = self.tower
        products = 2.0 * _matrices(tower) * self.layers[stage]
        if stage == 0:
            products += 2 * tower.patch_width * tower.hidden_size
        if self.is_last(stage):
            wide = tower.hidden_size * tower.merge**2
            out = self.plan.sizes.hidden_size
            products += 2 * (self.mergers * (wide * wide + wide * out)) / tower.merge**2
        scores = 4.0 * tower.hidden_size * self.plan.estimate.image_patches * self.layers[stage]
        return products, scores

    @property
    def patch_flops(self) -> float:
        """Operations of a forward pass for a patch, of all stages."""
        return sum(sum(self.flops(stage)) for stage in range(self.parallel.pp))

    @property
    def step_patches(self) -> float:
        """Patches of all samples of a step."""
        return self.plan.samples * self.plan.estimate.images * self.plan.estimate.image_patches

    def patches(self, microbatches: int) -> float:
        """Patches of one of a step's microbatches on the replica that gets most, on average:
        images are not split."""
        images = self.plan.samples * self.plan.estimate.images / microbatches
        share = images / self.parallel.dp
        whole = math.ceil(share) if share > 1 else min(1, images)
        return self.plan.estimate.image_patches * whole

    @property
    def update_flops(self) -> float:
        """Model FLOPs of an epoch's updates on all its ranks."""
        return (3 if self.module.train else 1) * self.patch_flops * self.step_patches


def encoders(plan: Plan) -> list[EncoderForecast]:
    """The encoders of a plan; a rule refuses modules of a model that has no tower."""
    return [EncoderForecast(plan, name) for name in plan.modules if plan.sizes.vision]


def encoder_stages(plan: Plan) -> Iterator[tuple[EncoderForecast, int]]:
    """(encoder, its stage) of every pipeline stage on dedicated ranks, in order."""
    for encoder in encoders(plan):
        if not encoder.shared:
            yield from ((encoder, stage) for stage in range(encoder.parallel.pp))


def encoder_parameters(plan: Plan) -> int:
    """Parameters of all encoders, which a weight sync sends with the language model's."""
    return sum(
        encoder.parameters(stage).total
        for encoder in encoders(plan)
        for stage in range(encoder.parallel.pp)
    )


def _matrices(tower: Tower) -> int:
    """Elements of a layer's matrices."""
    return 4 * tower.hidden_size**2 + 2 * tower.hidden_size * tower.intermediate_size
