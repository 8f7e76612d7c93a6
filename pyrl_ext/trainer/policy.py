"""Policy: megatron model chunks and their optimizer, run over packed microbatches."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from pyrl_ext.dist.offload import OffloadedStorage
from pyrl_ext.dist.topology import Topology
from pyrl_ext.dist.upload import to_device
from pyrl_ext.loss.inputs import LossFn
from pyrl_ext.megatron import checkpoint
from pyrl_ext.megatron.ddp import buffers, gather_shards, release, unwrap, wrap_ddp
from pyrl_ext.megatron.head import score_tokens
from pyrl_ext.megatron.model import build_chunks
from pyrl_ext.megatron.optimizer import build_optimizer, set_lr, state_tensors, warmed_up
from pyrl_ext.models import family, hf_folder, weight_table
from pyrl_ext.ops import Inverse, invert_rows, sum_rows
from pyrl_ext.pack.batch import Batch
from pyrl_ext.pack.microbatch import Microbatch
from pyrl_ext.replay.router_hook import Replay
from pyrl_ext.trainer.prefetch import Feed
from pyrl_ext.trainer.zero_gradient import check_zero_gradient
from pyrl_ext.weights.gather import gather_buckets, plan_buckets

Schedule = Sequence[Sequence[Sequence[int]]]  # [dp rank][microbatch] -> sample ids


@dataclass(frozen=True)
class Scores:
    """A forward pass over a batch, alike on every rank.

    Args:
        logprobs:  [T] fp32, of each row's target.
        entropy:   [T] fp32, of each row's distribution [nats].
        agreement: layer id -> (sum of shares, equal sets, count) of routes the router agreed with.
    """

    logprobs: Tensor
    entropy: Tensor
    agreement: dict[int, tuple[float, float, float]] = field(default_factory=dict)


class Policy:
    """One model of this run on this rank. Build with `build`; ``step`` counts finished updates.

    Every method is a collective: all ranks call it with the same batch and schedule.
    """

    def __init__(self, plan: Any, topo: Topology, chunks: list, optimizer: Any, replay: Replay):
        self.plan, self.topo = plan, topo
        self.chunks, self.optimizer, self.replay = chunks, optimizer, replay
        self.family = family(plan.model.family)
        self.table = self.family.weights(plan.sizes, plan.num_mtp_layers)
        self.buckets = plan_buckets(plan, self.table)
        self.mtp_layers = plan.num_mtp_layers  # layers for multi-token prediction
        self.step = 0  # rollout steps finished
        self.updates = 0  # optimizer steps finished
        self._offloaded = {
            part: OffloadedStorage() for part in ("weights", "gradients", "optimizer")
        }

    @classmethod
    def build(
        cls, plan: Any, topo: Topology, trainable: bool = True, initial: bool = True
    ) -> Policy:
        """The plan's model with its initial weights; without ``trainable``, a frozen reference.

        Without ``initial`` the weights are undefined until `load`.
        """
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        if topo.device.type == "cpu":
            from pyrl_ext.megatron import cpu

            cpu.install()
        model_parallel_cuda_manual_seed(plan.seed)
        kind = family(plan.model.family)
        chunks = build_chunks(plan, topo, kind.config(plan.sizes), kind.rotary(plan.sizes))
        optimizer = None
        if trainable:
            chunks = wrap_ddp(plan, chunks, topo.groups)
        policy = cls(plan, topo, chunks, optimizer, Replay(chunks, topo.device))
        if trainable:
            weakref.finalize(policy, release, chunks)
        policy._check_stages()
        if initial:
            policy.load_initial_weights()
        if trainable:  # after the weights: mixed precision copies them to fp32 masters
            policy.optimizer = build_optimizer(plan, chunks, topo.groups)
            policy._config.grad_scale_func = policy.optimizer.scale_loss
        else:
            for chunk in chunks:
                chunk.requires_grad_(False)
        return policy

    def _check_stages(self) -> None:
        """The live routers are those that the plan's stage table gives this rank."""
        decoder, routers = self.plan.sizes.num_hidden_layers, self.plan.router_layers
        for chunk, stage in enumerate(self.plan.stages[self.topo.pp_rank]):
            planned = [i for i in stage.layers if i in routers]
            planned += range(decoder, decoder + stage.mtp)
            if (live := self.replay.layer_ids(chunk)) != tuple(planned):
                raise RuntimeError(
                    f"Policy.build: rank {self.topo.rank}, chunk {chunk} has routers in layers "
                    f"{live}, expected {planned}, the plan's; routes would go to other layers"
                )

    # weights -------------------------------------------------------------------------------------

    @property
    def _models(self) -> list[torch.nn.Module]:
        return [unwrap(chunk) for chunk in self.chunks]

    @property
    def _config(self) -> Any:
        return self._models[0].config

    def _live(self) -> dict[str, Tensor]:
        experts = self.plan.sizes.num_experts // self.topo.ep_size
        return weight_table.live(self._models, self.topo.groups.ep.rank(), experts)

    def load_initial_weights(self) -> None:
        """From ``model.weights``, a checkpoint folder, or drawn from the plan's seed."""
        live, plan, rows = self._live(), self.plan, self.table
        weight_table.check_claims(self.table, live)
        if plan.weights_path is None:
            read = weight_table.RandomWeights(self.table, plan.sizes.initializer_range, plan.seed)
        else:
            read = hf_folder.SafetensorsFolder(plan.weights_path)
            read.check(self.table, self.family.ignored(plan.sizes, self.mtp_layers))
            size = sum(t.nbytes for t in live.values())
            shown = self.topo.is_main and plan.log.progress
            rows = hf_folder.progress(rows, f"reading {plan.weights_path}", len(rows), size, shown)
        weight_table.load(rows, live, read, self.topo)

    def weights(self, only: Set[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every checkpoint tensor (HF name, value), whole on every rank; may alias live parameters.

        Args:
            only: names that are asked for; None: all.

        Communicates: see `publish.gather_buckets`.
        """
        self._need("weights")
        plan = self.plan
        buckets = self.buckets if only is None else plan_buckets(plan, self.table, only=only)
        return gather_buckets(buckets, self._live(), self.topo)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """What `accumulate` left: d(loss) / d(tensor), float32, as `weights` names and shapes them.

        What is not trained (the routers' selection bias) has zeros.

        Communicates: as `weights`; with the distributed optimizer also an all-gather of the shards.
        """
        if self.plan.optimizer.distributed:
            gather_shards(self.chunks)
        found = {
            name: getattr(tensor, "main_grad", torch.zeros_like(tensor, dtype=torch.float32))
            for name, tensor in self._live().items()
        }
        buckets = plan_buckets(self.plan, self.table, torch.float32)
        return gather_buckets(buckets, found, self.topo)

    # memory --------------------------------------------------------------------------------------

    def offload(self, part: Literal["weights", "gradients", "optimizer"]) -> int:
        """Free device memory for an engine until `onload`; a pass that needs the part raises.

        Args:
            part: parameters and buffers; gradients, whose contents are lost; or the optimizer's
                state with its fp32 copies of the weights.

        Returns: bytes freed on this rank.
        Syncs: once.
        """
        tensors = list(self._live().values())
        if part != "weights":
            shared = {t.untyped_storage().data_ptr() for t in tensors}
            tensors = [b.grad_data for b in buffers(self.chunks)]
            if part == "optimizer":  # in fp32 it steps the weights themselves
                tensors = state_tensors(self.optimizer)
                tensors = [t for t in tensors if t.untyped_storage().data_ptr() not in shared]
        return self._offloaded[part].offload(tensors, keep=part != "gradients")

    def onload(self) -> int:
        """Bring everything that was offloaded back onto the device.

        Returns: bytes allocated on this rank.
        """
        return sum(each.onload() for each in self._offloaded.values())

    def _need(self, *parts: str) -> None:
        if away := [part for part in parts if self._offloaded[part]]:
            raise RuntimeError(
                f"Policy: the {' and '.join(away)} of rank {self.topo.rank} are offloaded, "
                "expected them on the device; call onload first"
            )

    # passes --------------------------------------------------------------------------------------

    def scores(self, batch: Batch, schedule: Schedule, replay: bool = True) -> Scores:
        """Log-prob and entropy of every row of ``batch`` under the current weights.

        Communicates: two all-reduces of [T] fp32 over data and context ranks, a broadcast from the
        last stage. Syncs: reads the agreement counts.
        """
        self._need("weights")
        feed = self._feed(batch, schedule, replay)
        found: list[tuple[Microbatch, Tensor, Tensor]] = []

        def keep(micro: Microbatch, scored: tuple[Tensor, Tensor], _ahead: list) -> tuple:
            logprobs, entropy = scored
            found.append((micro, logprobs, entropy))
            return logprobs.sum(), _count(micro.inputs.loss_mask), {}

        with torch.no_grad(), self.replay.session(counting=replay), self._mode(training=False):
            self._run(feed, keep, forward_only=True)
            layers = self.plan.sizes.num_hidden_layers + self.mtp_layers
            agreement = self.replay.agreement(layers) if replay else {}
        stream = self._to_stream(found, len(batch.tokens))
        self._share(stream)
        logprobs, entropy = stream.T.contiguous().cpu()
        return Scores(logprobs, entropy, agreement)

    def _to_stream(self, found: list[tuple[Microbatch, Tensor, Tensor]], num_rows: int) -> Tensor:
        """[T, 2] log-prob and entropy of the rows that this rank has scored, zeros elsewhere."""
        device = self.topo.device
        if not found:  # not on the last pipeline stage
            return torch.zeros(num_rows, 2, device=device)
        rows = torch.cat([micro.rows for micro, *_ in found])
        inverse = invert_rows(rows, num_rows)
        there = Inverse(*(to_device(each, device) for each in inverse))
        values = torch.cat([torch.stack(each, -1).float() for _, *each in found])
        return sum_rows(values, to_device(rows, device), there)

    def update(self, minibatch: Batch, schedule: Schedule, loss: LossFn) -> dict[str, float]:
        """One optimizer step on ``minibatch``; token means are over the whole minibatch.

        Returns: loss, grad_norm, lr and the loss function's metrics.
        Raises: FloatingPointError when the loss (before the step) or the gradient is not finite, or
            the gradient is exactly 0 although tokens have an advantage (built-in loss).
        """
        metrics = self.accumulate(minibatch, schedule, loss)
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(
                f"Policy.update: the loss of update {self.updates} is {metrics['loss']}; "
                "the weights are as they were before it"
            )
        metrics |= self.step_optimizer()
        if metrics["grad_norm"] == 0 and self.plan.objective.loss == "grpo":
            check_zero_gradient(minibatch, metrics, f"update {self.updates - 1}")
        return metrics

    def step_optimizer(self) -> dict[str, float]:
        """Move the weights along what `accumulate` left.

        Returns: grad_norm (before clipping) and lr.
        Raises: FloatingPointError when the gradient is not finite.
        """
        self._need(*self._offloaded)
        lr = warmed_up(self.plan.optimizer.lr, self.plan.optimizer.warmup_steps, self.updates)
        set_lr(self.optimizer, lr)
        stepped, grad_norm, _ = self.optimizer.step()
        norm = float(grad_norm) if grad_norm is not None else float("nan")
        if not stepped or not math.isfinite(norm):
            raise FloatingPointError(
                f"Policy.update: the gradient norm of update {self.updates} is {norm}. Go on from "
                "the last checkpoint; a lower optimizer.lr or objective.tis_cap may help"
            )
        self.updates += 1
        return {"grad_norm": norm, "lr": lr}

    def accumulate(self, minibatch: Batch, schedule: Schedule, loss: LossFn) -> dict[str, float]:
        """The gradient of the mean token loss of ``minibatch``, reduced over ranks, in the buffers.

        Layers for multi-token prediction add ``mtp_coef`` times the mean, over depths, of their
        mean negative log-prob, each over the loss tokens that its depth can predict.

        Returns: loss and the loss function's metrics; ``mtp_loss`` with such layers [nats].
        """
        if not minibatch.num_loss_tokens:
            raise ValueError("Policy.update: the minibatch has no token under its loss mask")
        self._need("weights", "gradients")
        feed = self._feed(minibatch, schedule, self.plan.replay.train, depths=self.mtp_layers)
        names: list[str] = []
        in_chunk = loss if self.plan.logprob.loss_in_chunk else None

        def score(micro: Microbatch, scored: tuple, ahead: list[Tensor]) -> tuple:
            total, count, sums = scored if in_chunk else loss(scored[0], scored[1], micro.inputs)
            sums = {"loss": (total.detach(), count), **sums}
            if ahead:
                extra, sums["mtp_loss"] = self._mtp_loss(micro, ahead, minibatch)
                total = total + extra
            names[:] = sums
            table = torch.stack([torch.stack([s.double(), c.double()]) for s, c in sums.values()])
            return total, count.int(), {"sums": table}

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.replay.session(), self._mode(training=True):
            parts = self._run(feed, score, forward_only=False, in_chunk=in_chunk)
        return self._means(parts, names)

    def _mtp_loss(
        self, micro: Microbatch, ahead: list[Tensor], minibatch: Batch
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """(this microbatch's part of the loss, (negative log-probs, tokens) over all depths)."""
        extra, missed, tokens = ahead[0].new_zeros(3).unbind()
        for depth, (logprobs, part) in enumerate(zip(ahead, micro.ahead, strict=True), start=1):
            lost = -torch.where(part.loss_mask, logprobs, 0).sum()
            # megatron divides by the minibatch's loss tokens; fewer can be predicted from afar
            counted = max(1, minibatch.num_loss_tokens_ahead(depth))
            extra = extra + lost * (minibatch.num_loss_tokens / counted)
            missed, tokens = missed + lost.detach(), tokens + part.loss_mask.sum()
        return extra * (self.plan.objective.mtp_coef / len(ahead)), (missed, tokens)

    def _feed(self, batch: Batch, schedule: Schedule, replayed: bool, depths: int = 0) -> Feed:
        mine = schedule[self.topo.dp_rank]
        return Feed(batch, mine, self.plan, self.topo, self.replay, replayed, depths)

    def _run(
        self,
        feed: Feed,
        score: Callable[..., tuple],
        forward_only: bool,
        in_chunk: LossFn | None = None,
    ) -> list:
        """megatron's own schedule over ``feed``; ``score`` turns log-probs into a loss.

        A pass that trains scores loss tokens only; the log-probs of others may be NaN. With
        ``in_chunk`` this loss is taken where they are made, and ``score`` gets its results.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(iterator: Iterator, chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
            index, ready, routes = next(iterator)
            self.replay.force(index, routes)
            micro, packed = ready.micro, ready.packed
            tokens, positions = micro.tokens[None], packed.positions[None]
            every = forward_only or not self.plan.objective.is_token_wise
            batch = None if every else feed.batch
            head = partial(score_tokens, self.plan, self.topo.groups.tp, micro, batch, in_chunk)
            output = chunk(tokens, positions, None, packed_seq_params=packed, output_processor=head)
            feed.prepare_next()  # copied while a GPU computes what was launched above

            def of_output(output: Any) -> tuple:
                """On the last stage: what `score_tokens` made of each depth."""
                first, *others = output if isinstance(output, list) else [output]
                with record_function("pyrl: loss"):
                    return score(micro, first, [logprobs for logprobs, _ in others])

            return output, of_output

        iterators: list[Iterator] = [feed.of_chunk(i) for i in range(len(self.chunks))]
        single = len(self.chunks) == 1
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=len(feed),
            seq_length=0,  # ignored: variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        for chunk in self.chunks:
            chunk.train(training)
        yield

    def _share(self, values: Tensor) -> None:
        """Sum over data and context ranks (each row lives on one), then last stage to all."""
        if self.topo.is_last_stage:
            dist.all_reduce(values, group=self.topo.groups.dp_cp)
        if self.topo.pp_size > 1:
            dist.broadcast(values, self.topo.last_stage, group=self.topo.groups.pp)

    def _means(self, parts: list[dict], names: list[str]) -> dict[str, float]:
        """Sums and counts of all microbatches of all ranks -> means.

        Syncs: reads the result.
        """
        shared: list[Any] = [names]
        if self.topo.pp_size > 1:
            group = self.topo.groups.pp
            dist.broadcast_object_list(shared, self.topo.last_stage, group=group)
        total = torch.zeros(len(shared[0]), 2, dtype=torch.float64, device=self.topo.device)
        for part in parts:
            total += part["sums"]
        self._share(total)
        return {n: s / c if c else 0.0 for n, (s, c) in zip(shared[0], total.tolist(), strict=True)}

    # disk ----------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Model, optimizer and counters into ``folder``, whole or not at all; with
        ``checkpoint.hf`` the weights once more in its ``hf/``, as Hugging Face has them."""
        self._need(*self._offloaded)
        plan, topo = self.plan, self.topo
        counters = {"step": self.step, "updates": self.updates}

        def write_hf(writing: Path) -> None:
            hf_folder.write_hf(writing / "hf", self.weights(), plan, topo)

        also = [write_hf] if plan.checkpoint.hf else []
        checkpoint.save(folder, self._models, self.optimizer, counters, plan, topo, *also)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, under this or another layout."""
        self._need(*self._offloaded)
        counters = checkpoint.load(folder, self._models, self.optimizer, self.plan, self.topo)
        self.step, self.updates = counters["step"], counters["updates"]


def _count(mask: Tensor) -> Tensor:
    return mask.sum().int()
