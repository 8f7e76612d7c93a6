"""Tokens to the rows of their experts and back, by the operators of this package."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from pyrl_ext.ops import expert_rows, gather_rows, sum_rows


class RowDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron's dispatcher over all-to-all, with `gather_rows` and `sum_rows` for its permutation.

    megatron-core 0.19.2 sorts all entries of the routing map, E a token, to find the K that are
    set, and adds the outputs of a token's experts in the type of the model by ``scatter_add``, on
    a GPU with atomics. Here they are added in float32, in the order of the experts.

    A rank that holds all experts (ep = etp = 1) exchanges nothing. megatron-core nevertheless
    splits the rows by expert and concatenates them in the same order, and waits on a GPU in every
    layer for the counts that this takes; here neither happens.

    Syncs: as megatron's, where experts are spread over ranks and routers choose: the host needs the
    sizes to exchange. Where routes are replayed it has them already.
    """

    router: Any  # of the layer

    @property
    def _alone(self) -> bool:
        return self.ep_size == 1 and self.tp_size == 1

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[tokens * K, H] rows expert by expert, and [tokens * K] the weight of each."""
        self.hidden_shape = hidden_states.shape
        self.probs = probs  # megatron's combine_preprocess asks for its type
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        found = expert_rows(routing_map, probs, self.config.moe_router_topk)
        self._rows = found.rows
        self._inverse = found.inverse
        if self._alone:
            self.tokens_per_expert = found.counts
        else:
            counts = self.preprocess(routing_map)
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
                "before_permutation_1", counts
            )
        rows = gather_rows(tokens, self._rows, inverse=self._inverse)
        return rows, found.weights

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """megatron's, or from the rows that replay knows each rank to send to each expert: then
        nothing is gathered, and what the host needs is there.

        Returns: [E_local] rows that each of this rank's experts gets.
        """
        replay = self.router.router_replay
        if not (replay and replay.used) or (sent := replay.used.sent) is None:
            return super().preprocess(routing_map)
        mine = sent[self.tp_ep_group.rank()]
        experts = self.local_expert_indices
        here = sent[:, experts[0] : experts[-1] + 1].view(self.ep_size, self.tp_size, -1)
        self.input_splits = mine.view(self.ep_size, -1).sum(1).numpy()
        self.output_splits = here[:, self.tp_rank].sum(1).numpy()
        self.output_splits_tp = here.sum((0, 2)).numpy()
        self.num_global_tokens_per_local_expert = here.transpose(0, 1).flatten(0, 1)
        self.num_out_tokens = int(mine.sum())
        self.cuda_sync_point = "no_sync"
        return here.sum((0, 1))

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Any, Any]:
        """The rows that this rank's experts get, how many each gets, and the rows' weights."""
        if not self._alone:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        return global_input_tokens, self.tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The rows in the order in which they arrived."""
        return hidden_states if self._alone else super().combine_preprocess(hidden_states)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """The sum of each token's rows."""
        summed = sum_rows(permutated_local_input_tokens, self._rows, self._inverse)
        return summed.view(self.hidden_shape)


class RowMoELayer(MoELayer):
    """megatron's layer, which builds a dispatcher by name, with ours in its place.

    Raises: ValueError if the dispatcher is to compute the shared experts, which ours does not.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        if config.moe_shared_expert_overlap:
            raise ValueError(
                "RowMoELayer: moe_shared_expert_overlap is True, expected False; RowDispatcher "
                "does not compute shared experts, so that their output would be missing"
            )
        super().__init__(config, *args, **kwargs)
        self.token_dispatcher = RowDispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=config,
            pg_collection=kwargs["pg_collection"],
        )
        self.token_dispatcher.router = self.router
        if not self.token_dispatcher._alone:
            self.router.shares_rows = kwargs["pg_collection"].tp_ep
