"""Module: one model on a grid of ranks, with its optimizer, weights, memory and checkpoint."""

from __future__ import annotations

import hashlib
import json
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.data.images import Scale
from pyrl_ext.data.prompt_dataset import image_scale
from pyrl_ext.megatron import checkpoint
from pyrl_ext.megatron.ddp import buffers, gather_shards, release, unwrap, wrap_ddp
from pyrl_ext.megatron.model import build_chunks
from pyrl_ext.megatron.optimizer import (
    build_optimizer,
    set_lr,
    state_bytes,
    state_tensors,
)
from pyrl_ext.megatron.vision import build_tower
from pyrl_ext.models import hf_folder, weight_table
from pyrl_ext.models.frozen import freeze
from pyrl_ext.models.lora_live import Adapters
from pyrl_ext.models.lora_table import RandomFactors
from pyrl_ext.models.peft_folder import read_adapter
from pyrl_ext.ops.digest import DigestLog
from pyrl_ext.ops.tensors import on_gpu
from pyrl_ext.parallel.offload import HostMemory, OffloadedStorage, storage_bytes
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.model.families.vision import VisionLanguage
from pyrl_ext.plan.phases import OFFLOADED, Offloadable
from pyrl_ext.replay.router_hook import Replay
from pyrl_ext.weights.gather import GatheredWeights, plan_buckets
from pyrl_ext.weights.modules import table_of


class TrainedModule:
    """The chunks of one model that this rank holds, and what belongs to them. Build with `build`.

    Every method is a collective over the ranks of ``topo``.

    Args:
        name: names the module in messages, checkpoints and plans.
        chunks: megatron's model chunks of this rank, one a virtual pipeline stage.

    Attributes:
        optimizer: megatron's; None in a module that is not trained.
        replay: the hooks in the routers of ``chunks``.
        table: every tensor of the checkpoint, with its place in the model.
        adapters: on a frozen base, which they are trained in place of; None: the weights are.
        mtp_layers: number of MTP layers.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        topo: Topology,
        chunks: list[Any],
        adapters: Adapters | None = None,
    ):
        self.adapters = adapters
        self.name = name
        self.plan = plan
        self.topo = topo
        self.chunks = chunks
        self.mtp_layers = 0 if self._tower else plan.num_mtp_layers
        self.table = table_of(plan, name)
        self.replay = Replay(chunks, topo.device)
        self.optimizer: Any = None
        say = _say if topo.is_main else None
        of = "" if name == "llm" else f"{name} "
        self._host = {part: HostMemory(of + part, say=say) for part in ("weights", "optimizer")}
        self._offloaded = {
            part: OffloadedStorage(self._host.get(part))
            for part in ("weights", "gradients", "optimizer")
        }

    @classmethod
    def build(
        cls,
        name: str,
        plan: Plan,
        topo: Topology,
        trainable: bool = True,
        initial: bool = True,
        offloads: bool = False,
    ) -> TrainedModule:
        """The plan's model, with an optimizer if it is ``trainable``.

        Args:
            initial: load or draw its initial weights; otherwise they are undefined until `load`.
            offloads: pin host memory for the parts that the plan offloads, while weights load.
        """
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        if topo.device.type == "cpu":
            from pyrl_ext.megatron import cpu

            cpu.install()
        groups = topo.groups
        model_parallel_cuda_manual_seed(
            plan.seed,
            tp_rank=topo.tp_rank,
            ep_rank=groups.ep.rank(),
            etp_rank=groups.expt_tp.rank(),
        )
        tower = name != "llm" and isinstance(plan.sizes, VisionLanguage)
        chunks: list[Any] = build_tower(plan, topo) if tower else build_chunks(plan, topo)
        keys = plan.modules.get(name)
        shares = keys is not None and keys.ranks == "shared"
        if trainable and keys and not keys.train:
            trainable = False
            frozen = [chunk.requires_grad_(False) for chunk in chunks]
            if not shares:  # all ranks build one for the module that only they run
                build_optimizer(plan, wrap_ddp(plan, frozen, groups), groups)
        adapters = None
        if plan.lora and not tower:
            models = [unwrap(chunk) for chunk in chunks]
            table = table_of(plan, name)
            adapters = Adapters.attach(models, table, plan.lora, topo)
        if plan.model.freeze and not tower:
            first_expert = groups.ep.rank() * plan.sizes.num_experts // topo.ep_size
            freeze([unwrap(chunk) for chunk in chunks], plan.frozen, first_expert)
        if trainable:
            chunks = wrap_ddp(plan, chunks, topo.groups, overlap=not shares)
        module = cls(name, plan, topo, chunks, adapters)
        if offloads and on_gpu(topo.device):
            module._pin_host_memory(chunks if trainable else [])
        if trainable:
            weakref.finalize(module, release, chunks)
        if not tower:
            module._check_stages()
        if initial or adapters:  # no checkpoint has the base
            module.load_initial_weights(factors=initial)
        if trainable:  # after the weights: mixed precision copies them to fp32 masters
            module.optimizer = build_optimizer(plan, chunks, topo.groups)
            module.config.grad_scale_func = module.optimizer.scale_loss
        else:
            for chunk in chunks:
                chunk.requires_grad_(False)
        return module

    @property
    def _tower(self) -> VisionLanguage | None:
        """The family of the vision tower that this module is; None: it is the language model."""
        sizes = self.plan.sizes
        return sizes if self.name != "llm" and isinstance(sizes, VisionLanguage) else None

    def _check_stages(self) -> None:
        """Compare the live routers with the plan's table of stages."""
        decoder = self.plan.sizes.num_hidden_layers
        routers = self.plan.router_layers
        for chunk, stage in enumerate(self.plan.stages[self.topo.pp_rank]):
            planned = [i for i in stage.layers if i in routers]
            planned += range(decoder, decoder + stage.mtp * bool(self.plan.sizes.num_experts))
            if (live := self.replay.layer_ids(chunk)) != tuple(planned):
                raise RuntimeError(
                    f"Module.build: {self.name}, rank {self.topo.rank}, chunk {chunk} has routers "
                    f"in layers {live}, expected {planned} as in the plan; routes would go to "
                    "other layers"
                )

    @cached_property
    def scale(self) -> Scale:
        """Scales patches in 8 bits as the model's image processor does."""
        return image_scale(self.plan)

    # weights -------------------------------------------------------------------------------------

    @property
    def models(self) -> list[torch.nn.Module]:
        """megatron's models inside the wrappers of ``chunks``."""
        return [unwrap(chunk) for chunk in self.chunks]

    @property
    def config(self) -> Any:
        """megatron's TransformerConfig, which all chunks share."""
        return self.models[0].config

    def named_parameters(self) -> dict[str, Tensor]:
        """The parameters and buffers of this rank, by their name in the whole model; without
        adapters."""
        experts = self.plan.sizes.num_experts // self.topo.ep_size
        return weight_table.named_parameters_global(
            self.models, self.topo.groups.ep.rank(), experts
        )

    def load_initial_weights(self, factors: bool = True) -> None:
        """Load ``model.weights``, or draw the weights from the plan's seed; those of adapters too,
        unless ``factors`` is false."""
        live = self.named_parameters()
        plan = self.plan
        rows = self.table
        weight_table.check_claims(self.table, live)
        if plan.weights_path is None:
            read = weight_table.RandomWeights(self.table, plan.sizes.initializer_range, plan.seed)
        else:
            read = hf_folder.SafetensorsFolder(plan.weights_path, plan.sizes.hidden_size)
            if self._tower:
                ignored = self._tower.tower_ignored()
            else:
                ignored = plan.sizes.ignored(self.mtp_layers)
            read.check(self.table, ignored)
            size = sum(t.nbytes for t in live.values())
            shown = self.topo.is_main and plan.log.progress
            rows = hf_folder.progress(rows, f"reading {plan.weights_path}", len(rows), size, shown)
        weight_table.load(rows, live, read, self.topo)
        if self.adapters and factors:
            self._load_initial_adapters(self.adapters)

    def _load_initial_adapters(self, adapters: Adapters) -> None:
        """Load ``lora.weights``, or draw the factors from the plan's seed."""
        plan = self.plan
        read = RandomFactors(adapters.table, self.plan.seed)
        assert plan.lora is not None
        if plan.lora.weights is not None:
            folder = plan.resolve(plan.lora.weights)
            ignored = plan.sizes.ignored(self.mtp_layers)
            factors = read_adapter(Path(folder), plan.lora, plan.sizes, adapters.table, ignored)
            read = factors.__getitem__
        weight_table.load(adapters.table, adapters.live(), read, self.topo)

    def share_base(self, other: TrainedModule) -> None:
        """Hold the base of ``other``, of which this is another set of adapters, in place of a copy:
        in memory once, it serves both, and training one leaves the other as it is.

        Communicates: as `base_digest`. Raises: ValueError if the bases differ.
        """
        if not (self.adapters and other.adapters) or self.base_digest != other.base_digest:
            raise ValueError(
                f"Module.share_base: {self.plan.model.weights} and {other.plan.model.weights} "
                "differ, expected adapters on the same base"
            )
        held = {name: tensor for _, _, name, tensor in weight_table.named_global(other.models)}
        for _, _, name, tensor in weight_table.named_global(self.models):
            tensor.data = held[name].data

    def weights(self) -> dict[str, Tensor]:
        """The live tensors of this rank, by their name in the whole model."""
        self.need("weights")
        return self.named_parameters()

    def gradients(self) -> dict[str, Tensor]:
        """d(loss) / d(tensor) in the gradient buffers, float32, named as `weights` and as the
        factors of adapters.

        Tensors that are not trained (the routers' selection bias, a frozen module) have zeros.

        Communicates: with the distributed optimizer an all-gather of the shards.
        """
        if self.plan.optimizer.distributed and self.optimizer is not None:
            gather_shards(self.chunks)
        return {
            name: getattr(tensor, "main_grad", torch.zeros_like(tensor, dtype=torch.float32))
            for name, tensor in (self.named_parameters() | self.factors()).items()
        }

    def factors(self) -> dict[str, Tensor]:
        """The factors of adapters on this rank, by their name in the whole model."""
        return self.adapters.live() if self.adapters else {}

    # training ------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Clear the gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        """Sum the gradient buffers over the ranks that hold the same weights, after a backward pass
        that no schedule of this module ran."""
        self.config.finalize_model_grads_func(self.chunks, pg_collection=self.topo.groups)

    def set_lr(self, updates: int) -> float:
        """Use, and return, the learning rate after ``updates`` steps."""
        lr = self.plan.learning_rate(self.name)(updates)
        if self.optimizer is not None:
            set_lr(self.optimizer, lr)
        return lr

    # memory --------------------------------------------------------------------------------------

    def _held(self) -> list[Tensor]:
        """Parameters, buffers and factors of adapters."""
        return [*self.named_parameters().values(), *self.factors().values()]

    def offload(self, part: Offloadable) -> int:
        """Free device memory for an engine until `onload`; a pass that needs the part raises.

        Args:
            part: parameters and buffers; gradients, whose contents are lost; or the optimizer's
                state with its fp32 copies of the weights.

        Returns: bytes freed on this rank.
        Syncs: once.
        """
        tensors = self._held()
        if part != "weights":
            if self.optimizer is None:  # not trained: it has neither
                return 0
            shared = {t.untyped_storage().data_ptr() for t in tensors}
            tensors = [b.grad_data for b in buffers(self.chunks)]
            if part == "optimizer":  # in fp32 it steps the weights themselves
                tensors = state_tensors(self.optimizer)
                tensors = [t for t in tensors if t.untyped_storage().data_ptr() not in shared]
        return self._offloaded[part].offload(tensors, keep=part != "gradients")

    def _pin_host_memory(self, trained: list[Any]) -> None:
        """Start to pin host memory for the parts that the plan offloads, in the background.

        Args:
            trained: the chunks if they are trained; they have no optimizer yet.
        """
        tensors = self._held()
        sizes = {"weights": storage_bytes(tensors), "optimizer": state_bytes(self.plan, trained)}
        for part in OFFLOADED[self.plan.rollout.offload_trainer]:
            if size := sizes.get(part):
                self._host[part].start(size, self.topo.device)

    def onload(self) -> int:
        """Bring everything that was offloaded back onto the device; the optimizer's state behind
        the passes that come before its step.

        Returns: bytes allocated on this rank.
        """
        return sum(
            each.onload(behind=part == "optimizer") for part, each in self._offloaded.items()
        )

    def need(self, *parts: str) -> None:
        """Wait on the device for ``parts`` that `onload` still copies; no parts: for all.

        Raises: RuntimeError if one of them is offloaded.
        """
        parts = parts or tuple(self._offloaded)
        if away := [part for part in parts if self._offloaded[part]]:
            raise RuntimeError(
                f"Policy: the {' and '.join(away)} of rank {self.topo.rank} are offloaded, "
                "expected them on the device; call onload first"
            )
        for part in parts:
            self._offloaded[part].arrive()

    @property
    def saved(self) -> checkpoint.SavedModule:
        """The part of a checkpoint that it is."""
        base = self.base_digest if self.adapters else None
        return checkpoint.SavedModule(self.models, self.optimizer, self.topo, self.adapters, base)

    @torch.no_grad()
    def take_weights(self, other: TrainedModule) -> None:
        """Copy the weights and persistent buffers of ``other``, the same module on the same ranks,
        on the device."""
        theirs = other.weights()
        for name, tensor in self.weights().items():
            tensor.copy_(theirs[name])

    @cached_property
    def base_digest(self) -> str:
        """One digest of all tensors of the base, the same under every layout.

        Communicates: as a publish of all weights does. Syncs: once.
        """
        live = self.weights()
        whole = GatheredWeights(plan_buckets(self.plan, self.table), live, self.topo)
        log = DigestLog()
        for name, tensor in whole:
            log.add(name, tensor)
        return hashlib.sha256(json.dumps(log.numbers(), sort_keys=True).encode()).hexdigest()


def _say(line: str) -> None:
    """Print ``line`` whole; threads that pin host memory say theirs at the same time."""
    print(f"{line}\n", end="", flush=True)
