"""Which experts each router of a live policy uses, against the samples: an oracle by plain loops.

The probe knows a forward pass's microbatch by its tokens and a recomputation by the bits of the
router's input, so that it shares no bookkeeping with the replay it checks.
"""

import math
from collections import defaultdict

import torch
from torch import Tensor

from pyrl_ext.pack.batch import Batch


def local_rows(batch: Batch, ids, place, tile: int = 1) -> list[int]:
    """Row of the batch in each row of this context-parallel rank, -1 = padding; one by one."""
    cp = place.cp_size
    tp = place.tp_size
    unit = math.lcm(tp if cp == 1 else 2 * cp * tp, tile * tp * cp)
    rows: list[int] = []
    for i in ids:
        first = sum(batch.seqlens[:i])
        length = batch.seqlens[i]
        padded = -(-length // unit) * unit
        whole = [first + t if t < length else -1 for t in range(padded)]
        if cp == 1:
            rows += whole
        else:
            size = padded // (2 * cp)
            for chunk in (place.cp_rank, 2 * cp - 1 - place.cp_rank):
                rows += whole[chunk * size : (chunk + 1) * size]
    return rows


class Probe:
    """Hooks every router of ``policy``; `expect` says which batch comes, `finish` that it came.

    ``checked`` counts the (row, layer) pairs whose experts were compared.
    """

    def __init__(self, policy):
        from megatron.core.transformer.moe.router import TopKRouter

        self.topo = policy.topo
        self.sizes = policy.plan.sizes
        self.tile = policy.plan.tile_rows
        full = policy.plan.model.recompute == "full"
        self.recompute = full or "moe" in policy.plan.recomputed_modules
        self.checked = 0
        self.microbatch: int | None = None
        for chunk in policy.llm.chunks:
            chunk.register_forward_pre_hook(self._note_tokens, with_kwargs=False)
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._check)

    def expect(self, batch: Batch, schedule, training: bool, replay: bool = True) -> None:
        """The pass that comes is over ``batch``, cut by ``schedule``."""
        self.batch = batch
        self.training = training
        self.replay = replay
        groups = (schedule.group_of(m, self.topo.grid_rank) for m in range(len(schedule)))
        self.rows = [
            local_rows(batch, group.samples, self.topo.place(group.cp_size), self.tile)
            for group in groups
        ]
        tokens = [tuple(int(batch.tokens[r]) if r >= 0 else 0 for r in rows) for rows in self.rows]
        assert len(set(filter(any, tokens))) == len([*filter(any, tokens)]), (
            "equal tokens are no oracle"
        )
        self.by_tokens = {t: i for i, t in enumerate(tokens)}
        self.by_input: dict[tuple[int, bytes], int] = {}
        self.seen: defaultdict[tuple[int, int], int] = defaultdict(int)  # (layer, microbatch)

    def finish(self, layers) -> None:
        """Every microbatch passed every router of ``layers`` once, or twice where recomputed."""
        times = 2 if self.training and self.recompute else 1
        for layer in layers:
            for i, rows in enumerate(self.rows):
                if any(r >= 0 for r in rows):
                    assert self.seen[layer, i] == times, (layer, i, self.seen[layer, i])

    def _note_tokens(self, _module, args) -> None:
        tokens = tuple(args[0].flatten().tolist())
        self.microbatch = self.by_tokens.get(tokens)
        assert self.microbatch is not None or not any(tokens), "tokens of no microbatch"

    def _check(self, router, args, output) -> None:
        layer = router.layer_number - 1
        if router.is_mtp_layer:
            layer += self.sizes.num_hidden_layers
        used: Tensor = output[1]
        assert (used.sum(-1) == router.topk).all(), (
            f"layer {layer}: not {router.topk} experts a row"
        )
        if layer in self.batch.layer_ids and self.replay:
            self._compare(layer, self._which(layer, args[0]), used)
        elif router.is_mtp_layer or not self.replay:
            self._is_native(layer, router, args[0], used)

    def _which(self, layer: int, hidden: Tensor) -> int | None:
        key = layer, hidden.detach().float().numpy().tobytes()
        if self.training and self.recompute and torch.is_grad_enabled() and key in self.by_input:
            return self.by_input[key]  # a recomputation, of whichever microbatch had this input
        if self.microbatch is not None:
            self.by_input[key] = self.microbatch
        return self.microbatch

    def _compare(self, layer: int, microbatch: int | None, used: Tensor) -> None:
        if microbatch is None:  # padding alone
            return
        self.seen[layer, microbatch] += 1
        rows = self.rows[microbatch]
        part = len(rows) // self.topo.tp_size
        mine = rows[self.topo.tp_rank * part : (self.topo.tp_rank + 1) * part]
        assert len(mine) == len(used), (layer, len(mine), len(used))
        slot = self.batch.layer_ids.index(layer)
        assert self.batch.routes is not None
        for m, row in enumerate(mine):
            if row >= 0 and self.batch.route_mask[row]:
                want = sorted(self.batch.routes[row, slot].tolist())
                assert used[m].nonzero().flatten().tolist() == want, (layer, microbatch, m, row)
                self.checked += 1

    def _is_native(self, layer: int, router, hidden: Tensor, used: Tensor) -> None:
        """A router without routes chooses for itself."""
        rows = self.rows[self.microbatch] if self.microbatch is not None else []
        if self.microbatch is not None:
            self.seen[layer, self.microbatch] += 1
        part = len(rows) // self.topo.tp_size
        mine = rows[self.topo.tp_rank * part : (self.topo.tp_rank + 1) * part]
        real = torch.tensor([row >= 0 for row in mine], dtype=torch.bool)
        with torch.no_grad():
            scores = router.gating(hidden).flatten(0, -2)
            if router.expert_bias is not None:
                scores = scores.sigmoid() + router.expert_bias
            want = torch.zeros_like(used).scatter(1, scores.topk(router.topk).indices, True)
        # under recomputation the newest microbatch may be another one, of another length
        if len(real) == len(used) and not self.recompute:
            assert torch.equal(used[real], want[real])
            self.checked += int(real.sum())
