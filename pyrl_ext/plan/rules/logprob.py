"""Log-probabilities: what the trainer scores must be what the engine drew from."""

from __future__ import annotations

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, rule


@rule("logprob.cache_bytes")
def a_cache_is_used(plan: Plan) -> Found:
    logprob = plan.logprob
    if logprob.head == "logits" and logprob.cache_bytes:
        return (
            f"{logprob.cache_bytes} with head logits, expected 0; all logits are kept, and nothing "
            "is cached"
        )
    if plan.loss_in_chunk and logprob.cache_bytes and not plan.num_mtp_layers:
        key = "loss_in_chunk" if logprob.loss_in_chunk else f"distill {plan.objective.distill}"
        return f"{logprob.cache_bytes} with {key}, expected 0; no backward pass would read it"


@rule("logprob.loss_in_chunk")
def a_loss_in_chunks_is_token_wise(plan: Plan) -> Found:
    if plan.logprob.loss_in_chunk and plan.logprob.head == "logits":
        return "true with head logits, expected false; it has no chunks. Use head: fused"
    objective = plan.objective
    if plan.logprob.loss_in_chunk and objective.needs_sequences and ":" not in objective.loss:
        return (
            f"true with objective.loss {objective.loss}, ratio {objective.ratio} and opsm "
            f"{objective.opsm}, expected false; a chunk sees some tokens at a time, these parts "
            "add up numbers of whole sequences"
        )
    if plan.logprob.loss_in_chunk and not objective.is_token_wise:
        return (
            f"true with objective.loss {objective.loss}, expected a token-wise loss; it sees some "
            "tokens at a time. If that is one, set objective.loss_is_token_wise: true"
        )


@rule("objective.loss")
def a_loss_of_split_sequences_is_token_wise(plan: Plan) -> Found:
    size = max(plan.parallel.cp, plan.parallel.dynamic_cp or 1)
    if size > 1 and ":" in plan.objective.loss and not plan.objective.is_token_wise:
        return (
            f"{plan.objective.loss} with context parallelism over {size} ranks, expected a "
            "token-wise loss; each rank sees a part of every sequence. If it is one, set "
            "objective.loss_is_token_wise: true; else set parallel.cp: 1"
        )


@rule("logprob.accept_rounded_logits")
def rounded_logits_are_accepted(plan: Plan) -> Found:
    rounded = plan.logprob.head == "logits" and plan.model.dtype == "bfloat16"
    if rounded and not plan.logprob.accept_rounded_logits:
        return (
            "false with logprob.head logits and model.dtype bfloat16, expected head fused, which "
            "keeps them in float32; rounding moves a log-prob by up to 3.4e-2, an importance ratio "
            "of 0.967 to 1.027 by itself. Use head: fused, or set it true to train with that"
        )


@rule("rollout.logprobs_mode")
def logprobs_of_what_was_sampled(plan: Plan) -> Found:
    if plan.rollout.logprobs_mode != "processed":
        return (
            f"{plan.rollout.logprobs_mode}, expected processed; the trainer compares with the "
            "distribution that tokens were drawn from, after temperature"
        )


@rule("rollout.accept_truncated_sampling")
def truncation_is_accepted(plan: Plan) -> Found:
    rollout = plan.rollout
    on_gpu = rollout.engine == "vllm" and plan.device == "cuda"
    if plan.trains_on_sampling_mask and on_gpu and not rollout.top_k:
        return (
            f"false with engine vllm, top_p {rollout.top_p:g} and top_k 0, expected a top_k, as "
            "vLLM returns kept sets of bounded size only; without them the trainer would score "
            "the full distribution, and every ratio would be off. Set rollout.top_k, or set it true"
        )
