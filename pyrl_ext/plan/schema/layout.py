"""The sections that say how ranks are arranged: the language model's, and those of encoders."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pyrl_ext.plan.language.fields import MAX_RANKS, Positive, Section, Size, Text, bounded

Layers = Annotated[int, Field(ge=1, le=4096)]


class Parallel(Section):
    """How the ranks are arranged; the world is dp * tp * pp * cp ranks."""

    dp: Size = 1
    """data-parallel replicas [ranks]; left out, or null: what tp, pp and cp leave of torchrun's
    processes; 1 where nothing was started"""
    tp: Size = 1
    """tensor-parallel size; above 1 implies sequence parallelism [ranks]"""
    pp: Layers = 1
    """pipeline stages [ranks]"""
    vpp: Annotated[int, Field(ge=2, le=64)] | None = None
    """model chunks per pipeline stage (interleaved schedule); null: one"""
    cp: Size = 1
    """context-parallel size: ranks that share one sequence [ranks]"""
    dynamic_cp: Size | None = None
    """largest number of the dp * cp ranks that share a sample, if it is long [ranks]; null: cp"""
    ep: Size = 1
    """expert-parallel size: ranks the experts are spread over [ranks]"""
    etp: Size | None = None
    """tensor-parallel size inside an expert [ranks]; null: tp"""
    num_layers_in_first_pipeline_stage: Layers | None = None
    """decoder layers of the first pipeline stage; null: an equal share"""
    num_layers_in_last_pipeline_stage: Layers | None = None
    """decoder layers of the last pipeline stage; null: an equal share"""
    account_for_embedding_in_pipeline_split: bool = False
    """count the embedding as a layer when stages are made equal"""
    account_for_loss_in_pipeline_split: bool = False
    """count the output projection and loss as a layer when stages are made equal"""
    pipeline_model_parallel_layout: Text | None = None
    """every stage written out, such as Et*3|(tt|)*2,m|L; null: split by the keys above"""

    _world_is_bounded = bounded(("dp", "tp", "pp", "cp"), "ranks", MAX_RANKS)

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def etp_size(self) -> int:
        """Tensor-parallel size inside an expert, with null resolved."""
        return self.tp if self.etp is None else self.etp

    @property
    def vpp_size(self) -> int:
        """Model chunks per pipeline stage, with null resolved."""
        return self.vpp or 1


class ModuleParallel(Section):
    """How an encoder's ranks are arranged; it has no experts and no sequences to share."""

    dp: Size = 1
    """replicas, each of which encodes a part of the images [ranks]"""
    tp: Size = 1
    """tensor-parallel size [ranks]"""
    pp: Layers = 1
    """pipeline stages [ranks]"""

    _world_is_bounded = bounded(("dp", "tp", "pp"), "ranks", MAX_RANKS)


class Module(Section):
    """An encoder next to the language model."""

    train: bool = True
    """false: forward passes only, without gradients and optimizer state"""
    ranks: Literal["own", "shared"] = "own"
    """own: ranks after those of the language model; shared: those of its first pipeline stage"""
    patches_per_microbatch: Positive
    """most that a rank encodes in one forward pass [patches]; bounds activations"""
    lr: Annotated[float, Field(ge=0, le=100)] | None = None
    """learning rate after the warmup; null: optimizer.lr"""
    parallel: ModuleParallel = ModuleParallel()
    """how its ranks are arranged"""
