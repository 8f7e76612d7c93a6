"""Policy: the passes of training over packed microbatches: scores and updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.loss.corrections import correct
from pyrl_ext.loss.inputs import LossFn, LossInputs
from pyrl_ext.megatron import checkpoint
from pyrl_ext.megatron.logprob_head import TeacherOutput, score_tokens
from pyrl_ext.megatron.optimizer import join_build_optimizer, step_all
from pyrl_ext.megatron.p2p import KnownShapes
from pyrl_ext.models import hf_folder
from pyrl_ext.ops.tensors import on_gpu, to_device
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.pack.shard import BatchShard, TeacherHead
from pyrl_ext.parallel.buckets import BucketStream
from pyrl_ext.parallel.reduce import sum_over_ranks
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.plan import Plan
from pyrl_ext.plan.phases import Offloadable
from pyrl_ext.replay.router_hook import Agreement, Recorded
from pyrl_ext.schedule.pipeline import ahead_of
from pyrl_ext.trainer.encoder import Features, encode
from pyrl_ext.trainer.module import TrainedModule
from pyrl_ext.trainer.module_pipe import Edges, build_edges
from pyrl_ext.trainer.prefetch import MicrobatchPrefetcher
from pyrl_ext.weights.modules import LiveParams, ModuleTensors

REFERENCE = "reference"  # its name in a checkpoint
Reduced = tuple[Tensor, Tensor, Any]
"""Of a microbatch: the sum of its loss, the number of its tokens, anything."""


@dataclass(frozen=True)
class Scores:
    """A forward pass over the rows of a shard.

    Args:
        logprobs:  [N] fp32 on the host, of each row's target; empty before the last stage.
        entropy:   [N] fp32 on the host, of each row's distribution [nats]; empty as above.
        agreement: layer id -> how far the router agreed with the routes it replayed.
        recorded:  the experts that this rank's routers used; None: they were not recorded.
    """

    logprobs: Tensor
    entropy: Tensor
    agreement: dict[int, Agreement] = field(default_factory=dict)
    recorded: Recorded | None = None


class Policy:
    """The modules that this rank runs, its edges to others, and the passes. Build with `build`.

    Every method is a collective: all ranks call it, each with its shard of the same step.

    Args:
        modules: by name, that of ``topo`` first: the language model's, or an encoder's on ranks of
            its own; then encoders that share this rank.
        edges: from each encoder to the language model, those of this rank; see `Edges`.

    Attributes:
        module: the first.
        step: rollout steps finished.
        updates: optimizer steps finished.
        reference: a frozen copy that steps refresh, so that `save` and `load` include it; None:
            there is none.
        level_starts: source of prompts -> its `RisingTask.starts`, which checkpoints keep.
        scored: the rows of the last update before it, where the plan takes old log-probs from the
            update's forward passes (`Plan.scores_in_update`); else None.
        stream: on which the modules were built, see `need_stream`.
    """

    def __init__(self, modules: Mapping[str, TrainedModule], edges: Edges | None = None):
        self.modules = modules
        self.edges = edges or {}
        self.module = next(iter(modules.values()))
        self.step = self.updates = 0
        self.reference: Policy | None = None
        self.level_starts: dict[str, list[int]] = {}
        self.scored: Scores | None = None
        self._flat = False  # the gradient of the last update was exactly 0
        self.stream = stream_of(self.topo.device)

    @property
    def llm(self) -> TrainedModule:
        """The language model; an error on an encoder's own ranks."""
        return self.modules["llm"]

    @property
    def plan(self) -> Plan:
        return self.module.plan

    @property
    def topo(self) -> Topology:
        return self.module.topo

    @classmethod
    def build(
        cls,
        plan: Plan,
        topo: Topology,
        trainable: bool = True,
        initial: bool = True,
        offloads: bool = False,
    ) -> Policy:
        """The plan's model with its initial weights; without ``trainable``, a frozen reference.

        Args:
            initial: without, the weights are undefined until `load`.
            offloads: see `TrainedModule.build`.
        """
        options = trainable, initial, offloads
        modules = {topo.module: TrainedModule.build(topo.module, plan, topo, *options)}
        for name, keys in plan.modules.items():
            if place := topo.colocated.get(name):
                modules[name] = TrainedModule.build(name, plan, place, *options)
            elif keys.ranks == "shared" and keys.train and trainable:
                join_build_optimizer(topo)
        return cls(modules, build_edges(plan, topo, trainable))

    @cached_property
    def tensors(self) -> ModuleTensors:
        """The checkpoint tensors of all modules, also of those that other ranks run."""
        known = {name: module.table for name, module in self.modules.items()}
        return ModuleTensors(self.plan, self.topo, known)

    def live(self) -> dict[str, LiveParams]:
        """The tensors of the modules that this rank runs."""
        return {n: LiveParams(m.weights(), m.topo, m.adapters) for n, m in self.modules.items()}

    def weights(self, only: Set[str] | None = None) -> BucketStream:
        """Every checkpoint tensor (HF name, value) of all modules, adapters merged, whole on every
        rank; may alias live parameters.

        Args:
            only: names of the wanted tensors; None: all.

        Communicates: see `GatheredWeights`.
        """
        return self.tensors.whole(self.live(), only=only)

    def gradients(self) -> BucketStream:
        """The gradients that `accumulate` left, float32, named and shaped as in `weights`; see
        `TrainedModule.gradients`."""
        live = {n: LiveParams(m.gradients(), m.topo) for n, m in self.modules.items()}
        return self.tensors.whole(live, torch.float32)

    def offload(self, part: Offloadable) -> int:
        """See `TrainedModule.offload`."""
        self._need_stream("offload")
        return sum(module.offload(part) for module in self.modules.values())

    def onload(self) -> int:
        """See `TrainedModule.onload`."""
        self._need_stream("onload")
        return sum(module.onload() for module in self.modules.values())

    def need(self, *parts: str) -> None:
        """See `TrainedModule.need`."""
        for module in self.modules.values():
            module.need(*parts)

    def _need_stream(self, call: str) -> None:
        need_stream(f"Policy.{call}", self.stream, stream_of(self.topo.device))

    def take_weights(self, other: Policy) -> None:
        """Copy the weights of ``other``, a policy of the same plan; see
        `TrainedModule.take_weights`."""
        self._need_stream("take_weights")
        for name, module in self.modules.items():
            module.take_weights(other.modules[name])

    def _saved(self) -> list[checkpoint.SavedModule]:
        """The modules of this rank as a checkpoint holds them, then those of the reference."""
        parts = [module.saved for module in self.modules.values()]
        if self.reference is not None:
            copies = self.reference.modules.values()
            parts += [module.saved._replace(copy=REFERENCE) for module in copies]
        return parts

    def save(self, folder: Path) -> None:
        """Write models, optimizers and counters to ``folder``, whole or not at all; with
        ``checkpoint.hf`` also the weights in Hugging Face's format, to ``folder/hf``."""
        self.need()
        if self.reference is not None:
            self.reference.need()
        plan = self.plan
        topo = self.topo
        known = self.step + plan.rollout.ahead  # what follows from rewards of finished steps
        starts = {n: [s for s in each if s <= known] for n, each in self.level_starts.items()}
        counters = {"step": self.step, "updates": self.updates, "level_starts": starts}
        also: list[Callable[[Path], None]] = []
        if plan.checkpoint.hf:
            also = [lambda at: hf_folder.write_hf(at / "hf", self.weights(), plan, topo)]
        checkpoint.save(folder, self._saved(), counters, plan, topo, *also)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, under this or another layout. A reference that was not
        saved stays as it is."""
        self.need()
        counters = checkpoint.load(folder, self._saved(), self.plan, self.topo)
        saved = Plan.read(folder / checkpoint.PLAN)
        self.step = counters["step"]
        # the place in the schedule of the learning rate, if a step has other updates now
        now = self.plan.batching.updates
        self.updates = counters["updates"] * now // saved.batching.updates
        for name, starts in counters.get("level_starts", {}).items():
            if name in self.level_starts:
                self.level_starts[name][:] = starts

    def start_from(self, folder: Path, optimizer: bool) -> None:
        """Take the weights that another run saved to ``folder``, under this or another layout; with
        ``optimizer`` its optimizer state too. ``step`` and ``updates`` stay 0."""
        self.need()
        parts = [module.saved for module in self.modules.values()]
        checkpoint.load_weights(folder, parts, self.topo, optimizer)

    def need_finite(self) -> None:
        """Check the weights of this rank. Raises: FloatingPointError naming one with NaN or
        infinity."""
        for module in self.modules.values():
            for name, tensor in (module.weights() | module.factors()).items():
                if not tensor.isfinite().all():
                    raise FloatingPointError(f"{name} is not finite")

    # passes --------------------------------------------------------------------------------------

    def scores(
        self, shard: BatchShard, replay: bool = True, record: bool = False, every: bool = True
    ) -> Scores:
        """Log-prob and entropy of the rows of ``shard`` under the current weights.

        Args:
            replay: routers use the routes in ``shard``; else they choose.
            record: keep the experts that the routers used.
            every: False: the head scores rows under the loss mask alone; others may be NaN.

        Communicates: one all-reduce of the agreement counts. Syncs: reads them and the scores.
        """
        self.need("weights")
        self._need_stream("scores")
        replay_hooks = self.module.replay

        def reduce(micro: Microbatch, scored: tuple[Tensor, Tensor], _mtp: list[Tensor]) -> Reduced:
            assert micro.inputs is not None  # the last stage has them
            return scored[0].sum(), micro.inputs.loss_mask.sum().int(), _row_values(micro, scored)

        self._set_training(False)
        with torch.no_grad(), replay_hooks.session(replay, record):
            parts = self._run(shard, reduce, replay, forward_only=True, every=every)
            recorded = replay_hooks.recorded() if record else None
            scores = self._scores(parts, shard, replay)
        return replace(scores, recorded=recorded)

    def _scores(
        self, parts: list[tuple[Tensor, Tensor]], shard: BatchShard, replay: bool
    ) -> Scores:
        """The scores of a pass, within its session.

        Args:
            parts: `_row_values` of each microbatch.
            replay: the pass counted how far the routers agree with the routes in ``shard``.
        """
        layers = self.plan.sizes.num_hidden_layers + self.plan.num_mtp_layers
        agreement = self.module.replay.agreement(layers) if replay else {}
        logprobs, entropy = self._in_order(parts, len(shard.rows.tokens)).cpu().T.contiguous()
        return Scores(logprobs, entropy, agreement)

    def hidden_states(self, shard: BatchShard, columns: int) -> tuple[Tensor, TeacherHead] | None:
        """Hidden states of every row of ``shard`` before the LM head, and the head. This policy is
        a teacher. None before the last stage.

        Args:
            columns: of the student's shard of the vocabulary.

        Returns: [N, H] in the model's dtype on the host; the head with ``columns`` rows.
        Syncs: waits for the hidden states.
        """
        self.need("weights")
        self._need_stream("hidden_states")
        taken = TeacherOutput(self.topo.groups.tp)
        held: list[Tensor] = []  # one tensor, once the width is known
        device = self.topo.device
        total = len(shard.rows.tokens)

        def reduce(micro: Microbatch, output: tuple[Tensor], _mtp: list[Tensor]) -> Reduced:
            real = to_device((micro.at >= 0).nonzero()[:, 0], device)
            assert taken.head is not None  # every pass has a microbatch
            # megatron's Float16Module returns float32
            rows = output[0].index_select(0, real).to(taken.head.dtype)
            if not held:
                size = (total, rows.shape[1])
                held.append(torch.empty(size, dtype=rows.dtype, pin_memory=on_gpu(device)))
            if len(rows):  # a microbatch has consecutive rows of the shard
                first = int(micro.at.max()) + 1 - len(rows)
                held[0][first : first + len(rows)].copy_(rows, non_blocking=True)
            return rows.new_zeros(()), real.new_ones((), dtype=torch.int32), None

        self._set_training(False)
        with torch.no_grad(), self.module.replay.session(False):
            self._run(shard, reduce, False, forward_only=True, output=taken)
        if not shard.role.last_stage:
            return None
        head = taken.head_for(columns)
        if on_gpu(device):
            torch.get_device_module(device).synchronize(device)
        return held[0], TeacherHead(head, self.plan.sizes.vocab_size)

    def _in_order(self, parts: list[tuple[Tensor, Tensor]], num_rows: int) -> Tensor:
        """[N, 2] values of the rows of a shard; [0, 2] before the last stage.

        Args:
            parts: (place of each row in the shard [M] on the host, its values [M, 2]) of each
                microbatch.
        """
        device = self.topo.device
        if not parts:
            return torch.empty(0, 2, device=device)
        at = torch.cat([at for at, _ in parts])
        values = torch.cat([x for _, x in parts])
        real = to_device((at >= 0).nonzero()[:, 0], device)
        places = to_device(at[at >= 0], device)
        return values.new_empty(num_rows, 2).index_copy_(0, places, values.index_select(0, real))

    def update(self, minibatch: BatchShard, loss: LossFn) -> dict[str, float]:
        """One optimizer step on ``minibatch``; token means are over all ranks' rows of it.

        Returns: loss, grad_norm, lr and the loss function's metrics.
        Raises: FloatingPointError when the loss (before the step) or the gradient is not finite.
        """
        metrics = self.accumulate(minibatch, loss)
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(
                f"Policy.update: the loss of update {self.updates} is {metrics['loss']}; "
                "the weights are as they were before it"
            )
        metrics |= self.step_optimizer()
        flat = metrics["grad_norm"] == 0
        if flat and not self._flat and self.topo.is_main:
            print(
                f"update {self.updates - 1}: the gradient is exactly 0, nothing is trained. Unless "
                "all advantages are 0, look for a loss that detaches log-probs or frozen weights. "
                "(Not repeated until a gradient is not 0)",
                flush=True,
            )
        self._flat = flat
        return metrics

    def step_optimizer(self) -> dict[str, float]:
        """Apply the gradients that `accumulate` left to the weights.

        Returns: grad_norm (before clipping) and lr.
        Raises: FloatingPointError when the gradient is not finite.
        """
        self.need()
        self._need_stream("step_optimizer")
        modules = self.modules.values()
        lr, *_ = [module.set_lr(self.updates) for module in modules]
        applied, norm = step_all([(module.optimizer, module.topo) for module in modules])
        if not applied or not math.isfinite(norm):
            raise FloatingPointError(
                f"Policy.update: the gradient norm of update {self.updates} is {norm}. Resume from "
                "the last checkpoint: the same command with a lower optimizer.lr and --allow "
                "optimizer.lr; or with objective.tis_cap and --allow objective.tis_cap"
            )
        self.updates += 1
        return {"grad_norm": norm, "lr": lr}

    def accumulate(self, minibatch: BatchShard, loss: LossFn) -> dict[str, float]:
        """Compute the gradient of the mean token loss of ``minibatch`` into the gradient buffers,
        reduced over ranks.

        MTP layers add ``mtp_coef`` times the mean, over depths, of their mean negative log-prob,
        each over the loss tokens that its depth can predict.

        If the plan takes old log-probs from the update (`Plan.scores_in_update`), ``minibatch`` is
        the whole step, the ratio is 1, and `scored` is set: NaN or anything outside the loss mask.

        Returns: loss, and metrics that any token has; ``mtp_loss`` with MTP layers [nats].
        """
        (loss_tokens,) = minibatch.loss_tokens
        if not loss_tokens[0]:
            raise ValueError("Policy.update: the minibatch has no token under its loss mask")
        self.need("weights", "gradients")
        self._need_stream("accumulate")
        in_chunk = loss if self.plan.loss_in_chunk else None
        in_update = self.plan.scores_in_update
        replay = self.plan.replay.train

        def reduce(micro: Microbatch, scored: tuple[Any, ...], mtp: list[Tensor]) -> Reduced:
            inputs = micro.inputs
            assert inputs is not None  # the last stage has them
            corrected: dict[str, Tensor] = {}
            if in_update:
                inputs, corrected = self._with_old(inputs, scored[0].detach())
            total, count, sums = scored if in_chunk else loss(scored[0], scored[1], inputs)
            sums = {"loss": (total.detach(), count), **sums}
            sums |= {name: (value, count) for name, value in corrected.items()}
            if mtp:
                extra, sums["mtp_loss"] = self._mtp_loss(micro, mtp, loss_tokens)
                total = total + extra
            table = torch.stack([torch.stack([s.double(), c.double()]) for s, c in sums.values()])
            rows = _row_values(micro, scored) if in_update else None
            return total, count.int(), {"names": list(sums), "sums": table, "rows": rows}

        trained = [module for module in self.modules.values() if module.optimizer is not None]
        for module in trained:
            module.zero_grad()
        self._set_training(True)
        with self.module.replay.session(counting=in_update and replay):
            every = not self.plan.objective.is_token_wise
            parts = self._run(minibatch, reduce, replay, in_chunk=in_chunk, every=every)
            if in_update:
                rows = [part["rows"] for part in parts]
                self.scored = self._scores(rows, minibatch, replay)
        sums = self._sums(parts)
        for module in trained:
            if module is not self.module:
                module.reduce_gradients()
            if module.name != "llm":  # megatron divided the language model's
                for chunk in module.chunks:
                    chunk.scale_gradients(1 / max(1, sums["loss"][1]))
        return {name: total / tokens for name, (total, tokens) in sums.items() if tokens}

    def _with_old(
        self, inputs: LossInputs, logprobs: Tensor
    ) -> tuple[LossInputs, dict[str, Tensor]]:
        """The inputs of a loss with the current log-probs as old ones, and corrections that follow
        from them; the sums of these by metric."""
        inputs = replace(inputs, old_logprobs=logprobs)
        objective = self.plan.objective
        if not objective.corrects:
            return inputs, {}
        of_engine = inputs.rollout_logprobs
        weights, found = correct(objective, logprobs, of_engine, inputs.loss_mask)
        return replace(inputs, corrections=weights.float()), found

    def _mtp_loss(
        self, micro: Microbatch, ahead: list[Tensor], loss_tokens: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(this microbatch's part of the loss, (negative log-probs, tokens) over all depths)."""
        extra, missed, tokens = ahead[0].new_zeros(3).unbind()
        for depth, (logprobs, part) in enumerate(zip(ahead, micro.mtp, strict=True), start=1):
            lost = -torch.where(part.loss_mask, logprobs, 0).sum()
            # megatron divides by the minibatch's loss tokens; fewer can be predicted from afar
            extra = extra + lost * (loss_tokens[0] / max(1, loss_tokens[depth]))
            missed = missed + lost.detach()
            tokens = tokens + part.loss_mask.sum()
        return extra * (self.plan.objective.mtp_coef / len(ahead)), (missed, tokens)

    def _prefetch(self, shard: BatchShard, replayed: bool, depths: int = 0) -> MicrobatchPrefetcher:
        axes = bool(self.plan.sizes.rope_sections)
        return MicrobatchPrefetcher(shard, self.topo, self.llm.replay, replayed, depths, axes)

    def _run(
        self,
        shard: BatchShard,
        reduce: Callable[..., Reduced],
        replayed: bool,
        forward_only: bool = False,
        in_chunk: LossFn | None = None,
        output: TeacherOutput | None = None,
        every: bool = True,
    ) -> list[Any]:
        """Run megatron's schedule over the microbatches of ``shard``.

        Args:
            every: score all rows; otherwise the log-probs of rows without loss may be NaN.
            reduce: called on the last stage with a microbatch, its (log-probs, entropies) and the
                log-probs of each MTP depth; returns (loss sum, token count, anything).
            in_chunk: a loss to compute chunk by chunk in the LM head; ``reduce`` then gets its
                result in place of the log-probs.
            output: takes hidden states in place of log-probs; ``reduce`` gets its result.

        Returns: the last thing that ``reduce`` returned, for each microbatch; [] on other stages
            and of encoders.
        """
        module = self.module
        depths = 0 if forward_only else self.plan.num_mtp_layers
        edges = {key: edge for key, edge in self.edges.items() if key[1] <= depths}
        if module.name != "llm":
            ahead = ahead_of(self.plan.parallel.pp, self.plan.parallel.vpp)
            frozen = module.optimizer is None
            encode(module, shard, edges, ahead, forward_only or frozen)
            parts = []
        else:
            prefetch = self._prefetch(shard, replayed, depths)
            images = Features(self.modules, edges, shard)
            head = in_chunk, output, every
            parts = self._run_llm(prefetch, images, reduce, forward_only, *head)
        for edge in self.edges.values():
            edge.finish()
        return parts

    def _run_llm(
        self,
        prefetch: MicrobatchPrefetcher,
        images: Features,
        reduce: Callable[..., Reduced],
        forward_only: bool,
        in_chunk: LossFn | None,
        output_processor: TeacherOutput | None,
        every: bool,
    ) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(
            iterator: Iterator[Any], chunk: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Any], Reduced]]:
            index, ready = next(iterator)
            self.llm.replay.use(index, ready.routes)
            micro = ready.micro
            packed = ready.packed
            tokens = micro.tokens[None]
            positions = packed.positions[None]
            head = output_processor
            if head is None:
                head = partial(score_tokens, self.plan, self.topo.groups.tp, micro, every, in_chunk)
            more: dict[str, Any] = {"packed_seq_params": packed, "output_processor": head}
            if images.edges:
                packed.ahead = images.next(index)
                more["features"] = packed.ahead.pop(0, ())
            output = chunk(tokens, positions, None, **more)
            prefetch.prepare_next()  # copied while a GPU computes what was launched above

            def of_output(output: Any) -> Reduced:
                """On the last stage: what `score_tokens` made of each depth."""
                first, *others = output if isinstance(output, list) else [output]
                with record_function("pyrl: loss"):
                    return reduce(micro, first, [logprobs for logprobs, _ in others])

            return output, of_output

        chunks = self.llm.chunks
        topo = self.topo
        shape_of = partial(prefetch.handed_on, self.plan)
        iterators: list[Iterator[Any]] = [prefetch.microbatches(i) for i in range(len(chunks))]
        single = len(chunks) == 1
        return get_forward_backward_func(topo.pp_size, topo.vpp_size)(
            forward_step_func=step,
            data_iterator=iterators[0] if single else iterators,
            model=chunks[0] if single else chunks,
            num_microbatches=len(prefetch),
            seq_length=0,  # ignored: variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=KnownShapes(topo.groups.pp, self.llm.config, len(prefetch), shape_of),
            pg_collection=topo.groups,
        )

    def _set_training(self, training: bool) -> None:
        for module in self.modules.values():
            for chunk in module.chunks:
                chunk.train(training)

    def _sums(self, parts: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
        """(sum, count) of each metric over all microbatches of all ranks.

        Communicates: the metrics' names and sums. Syncs: reads the sums.
        """
        names: list[Any] = [parts[0]["names"] if parts else []]
        if self.topo.pp_size > 1 or len(self.topo.llm.ranks) < self.topo.world_size:
            dist.broadcast_object_list(names, self.topo.loss_rank, group=self.topo.world)
        total = torch.zeros(len(names[0]), 2, dtype=torch.float64, device=self.topo.device)
        for part in parts:
            total += part["sums"]
        sums = sum_over_ranks(total, self.topo).tolist()
        return {name: (value, count) for name, (value, count) in zip(names[0], sums, strict=True)}


def _row_values(micro: Microbatch, scored: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(place of each row of a microbatch in its shard [M] on the host; its log-prob and entropy
    [M, 2] float32)."""
    return micro.at, torch.stack(scored, -1).detach().float()


def stream_of(device: torch.device) -> int:
    """Number of the stream that is current in this thread; 0 on a CPU, which has none."""
    if not on_gpu(device):
        return 0
    return torch.get_device_module(device).current_stream(device).stream_id


def need_stream(call: str, built: int, now: int) -> None:
    """Raise RuntimeError if another stream is current than when the model was built.

    vLLM 0.32 makes a stream of its process and leaves it current in the thread that builds the
    engine (`vllm/utils/torch_utils.py`, `current_stream`). So the engine is built first, and the
    model, its buffers and all steps are on that stream. A step on another one would read tensors
    while they are written: nothing orders work on two streams.

    Args:
        call: for the message.
        built: `stream_of` when the model was built.
        now: `stream_of` the call.
    """
    if now != built:
        raise RuntimeError(
            f"{call}: CUDA stream {now:#x} is current, expected {built:#x}, on which the model was "
            "built. Build the rollout engine, which changes the stream, before the model, and call "
            "this in the thread that built both"
        )
