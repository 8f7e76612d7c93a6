"""What must hold between fields: one named function a rule, grouped by topic.

A rule returns None, or its message: `<what, with value>, expected <rule>[; <consequence>][. <what
to do>]`. Ranges of a single field are in the schema. A rule that reads a field which is itself
wrong raises `Unchecked` by that read, and is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyrl_ext.plan.compiled import Plan
from pyrl_ext.plan.schema import Unchecked
from pyrl_ext.plan.stages import (
    a_split_that_fits,
    chunks_problem,
    counts_problem,
    is_split_by,
    layout_problem,
    split_keys,
)

Rule = Callable[[Plan], str | Iterable[str] | None]

RULES: list[tuple[str, Rule]] = []


def rule(key: str) -> Callable[[Rule], Rule]:
    """Register a rule; its problem is reported at the line of `key`."""

    def register(function: Rule) -> Rule:
        RULES.append((key, function))
        return function

    return register


def check(plan: Plan) -> Iterator[tuple[str, str]]:
    """(key, message) of every rule that `plan` breaks, as far as its fields are right."""
    for key, function in RULES:
        try:
            found = function(plan) or ()
        except Unchecked:
            continue
        for message in [found] if isinstance(found, str) else found:
            yield key, message


def relative(path: str) -> str:
    """`path` as seen from the working directory, where it lies below it."""
    shown = os.path.relpath(path)
    return path if shown.startswith("..") else shown


def _divisors(*numbers: int) -> str:
    """The common divisors as a phrase to choose from."""
    common = [n for n in range(1, min(numbers) + 1) if all(number % n == 0 for number in numbers)]
    if len(common) == 1:
        return "1"
    return f"{', '.join(map(str, common[:-1]))} or {common[-1]}"


def _in_config(plan: Plan) -> str:
    return f"({relative(plan.config_path)})"


# Tensor parallelism ----------------------------------------------------------------------------


@rule("parallel.tp")
def heads_split_over_tp(plan: Plan) -> str | None:
    heads, tp = plan.shape.num_attention_heads, plan.parallel.tp
    if heads % tp:
        return (
            f"{tp} does not divide num_attention_heads {heads} {_in_config(plan)}, expected a "
            f"divisor; attention heads are split over tensor-parallel ranks. Use {_divisors(heads)}"
        )


@rule("parallel.tp")
def widths_split_over_tp(plan: Plan) -> str | None:
    shape, tp = plan.shape, plan.parallel.tp
    widths = shape.tp_widths
    if odd := [f"{name} {width}" for name, width in widths.items() if width % tp]:
        usable = _divisors(shape.num_attention_heads, *filter(None, widths.values()))
        return (
            f"{tp} does not divide {', '.join(odd)} {_in_config(plan)}, expected a divisor of "
            f"each; these widths are split over tensor-parallel ranks. Use {usable}"
        )


@rule("parallel.tp")
def query_groups_split_over_tp(plan: Plan) -> str | None:
    groups, tp = plan.shape.query_groups, plan.parallel.tp
    if groups and groups % tp and tp % groups:
        return (
            f"{tp} neither divides num_key_value_heads {groups} nor is a multiple of it "
            f"{_in_config(plan)}, expected one of both; a key/value head is whole on a rank"
        )


# Experts ---------------------------------------------------------------------------------------


@rule("parallel.ep")
def experts_split_over_ep(plan: Plan) -> str | None:
    experts, ep = plan.shape.num_experts, plan.parallel.ep
    if experts % ep:
        return (
            f"{ep} does not divide {plan.shape.key('num_experts')} {experts} {_in_config(plan)}, "
            "expected a divisor; every rank holds the same number of experts. Use "
            f"{_divisors(experts)}"
        )


@rule("parallel.etp")
def expert_width_splits_over_etp(plan: Plan) -> str | None:
    width, etp = plan.shape.moe_intermediate_size, plan.parallel.etp_size
    if width % etp:
        return (
            f"{etp} does not divide moe_intermediate_size {width} {_in_config(plan)}, expected a "
            f"divisor; an expert's width is split over etp ranks (null: tp). Use {_divisors(width)}"
        )


@rule("parallel.ep")
def experts_fit_the_world(plan: Plan) -> str | None:
    parallel = plan.parallel
    stage, span = parallel.world_size // parallel.pp, parallel.ep * parallel.etp_size
    if stage % span:
        return (
            f"ep {parallel.ep} * etp {parallel.etp_size} = {span} does not divide the {stage} "
            f"ranks of a pipeline stage (dp {parallel.dp} * tp {parallel.tp} * cp {parallel.cp}), "
            "expected a divisor; experts are spread over the ranks of one stage. Lower ep, or "
            "raise dp"
        )


@rule("model.config")
def sizes_do_not_contradict(plan: Plan) -> Iterable[str]:
    return [f"{relative(plan.config_path)}: {each}" for each in plan.shape.contradictions()]


@rule("model.router_bias_update_rate")
def routers_have_a_bias(plan: Plan) -> str | None:
    rate = plan.model.router_bias_update_rate
    if rate and not plan.shape.has_router_bias:
        return f"{rate:g}, expected 0; routers of {plan.model.family} have no bias to move"


@rule("model.mtp")
def mtp_layers_exist(plan: Plan) -> str | None:
    if plan.model.mtp and not plan.shape.num_nextn_predict_layers:
        return f"on, expected num_nextn_predict_layers above 0 {_in_config(plan)}. Use mtp: off"


# Pipeline --------------------------------------------------------------------------------------


@rule("parallel.pp")
def a_split_needs_stages(plan: Plan) -> str | None:
    if plan.parallel.pp == 1 and (keys := ", ".join(split_keys(plan.parallel))):
        return f"1 with {keys}, expected pp above 1; there is nothing to split. Remove {keys}"


@rule("parallel.vpp")
def chunks_need_stages(plan: Plan) -> str | None:
    if plan.parallel.vpp and plan.parallel.pp == 1:
        vpp = plan.parallel.vpp
        return f"{vpp} with pp 1, expected pp above 1; there is nothing to interleave. Use null"


@rule("parallel")
def one_way_to_split(plan: Plan) -> str | None:
    keys = split_keys(plan.parallel)
    if len({*keys.values()}) > 1:
        return (
            f"{', '.join(keys)} together, expected a layout, or layers of the first and last "
            "stage, or what to account for; megatron-core splits in one of these ways"
        )


@rule("parallel.pp")
def layers_split_over_stages(plan: Plan) -> str | None:
    parallel, layers = plan.parallel, plan.shape.num_hidden_layers
    pp, vpp = parallel.pp, parallel.vpp_size
    counted = [key.split("_")[2] for key in split_keys(parallel)]
    slots = layers + len(counted)
    if is_split_by(parallel, "even") and slots % (pp * vpp):
        chunks = f"pp {pp} * vpp {vpp} = {pp * vpp}" if vpp > 1 else f"{pp}"
        total = f" + {' + '.join(counted)} = {slots}" if counted else ""
        other = "" if counted else f", or {a_split_that_fits(parallel, layers)}"
        return (
            f"{chunks} does not divide num_hidden_layers {layers}{total} {_in_config(plan)}, "
            "expected a divisor; every stage holds the same number of layers. Use "
            f"{_divisors(slots)}{other}"
        )


@rule("parallel.pp")
def stage_counts_leave_equal_stages(plan: Plan) -> str | None:
    if is_split_by(plan.parallel, "counts"):
        return counts_problem(plan.parallel, plan.shape.num_hidden_layers)


@rule("parallel.vpp")
def stage_counts_split_over_chunks(plan: Plan) -> str | None:
    if is_split_by(plan.parallel, "counts"):
        return chunks_problem(plan.parallel)


@rule("parallel.pipeline_model_parallel_layout")
def layout_places_the_model(plan: Plan) -> str | None:
    if is_split_by(plan.parallel, "layout"):
        return layout_problem(plan.parallel, plan.shape.num_hidden_layers, plan.num_mtp_layers)


# Batch -----------------------------------------------------------------------------------------


@rule("batching.minibatches")
def whole_groups_in_a_minibatch(plan: Plan) -> str | None:
    batching = plan.batching
    if batching.prompts % batching.minibatches:
        return (
            f"{batching.minibatches} does not divide prompts {batching.prompts}, expected a "
            f"divisor; a minibatch holds whole groups. Use {_divisors(batching.prompts)}"
        )


@rule("batching.minibatches")
def a_sample_for_every_replica(plan: Plan) -> str | None:
    samples, dp = plan.samples_per_minibatch, plan.parallel.dp
    if samples < dp:
        return (
            f"{samples} samples a minibatch ({plan.samples} samples / "
            f"{plan.batching.minibatches}), expected at least dp {dp}; a replica would have "
            "nothing to do. Raise batching.prompts"
        )


@rule("batching.samples_per_prompt")
def groups_have_a_spread(plan: Plan) -> str | None:
    if plan.objective.advantage == "grpo" and plan.batching.samples_per_prompt == 1:
        return (
            "1, expected at least 2 with objective.advantage grpo; an advantage is the distance "
            "from the group's mean, which is always 0 for a group of one"
        )


@rule("batching.tokens_per_microbatch")
def longest_sample_fits(plan: Plan) -> str | None:
    budget, rows = plan.batching.tokens_per_microbatch, plan.max_rows
    if budget < rows:
        return (
            f"{budget}, expected at least {rows}; the longest sample has data.max_prompt_tokens "
            f"{plan.data.max_prompt_tokens} + rollout.max_new_tokens {plan.rollout.max_new_tokens} "
            f"- 1 rows, padded to a multiple of {plan.row_alignment}"
        )


@rule("rollout.max_new_tokens")
def positions_suffice(plan: Plan) -> str | None:
    tokens = plan.data.max_prompt_tokens + plan.rollout.max_new_tokens
    if tokens > plan.shape.max_position_embeddings:
        return (
            f"{plan.rollout.max_new_tokens} + data.max_prompt_tokens {plan.data.max_prompt_tokens} "
            f"= {tokens} tokens, expected at most max_position_embeddings "
            f"{plan.shape.max_position_embeddings} {_in_config(plan)}"
        )


@rule("logprob.cache_bytes")
def a_cache_is_used(plan: Plan) -> str | None:
    logprob = plan.logprob
    if logprob.head == "logits" and logprob.cache_bytes:
        return (
            f"{logprob.cache_bytes} with head logits, expected 0; all logits are kept, and nothing "
            "is cached"
        )
    if logprob.loss_in_chunk and logprob.cache_bytes and not plan.num_mtp_layers:
        return (
            f"{logprob.cache_bytes} with loss_in_chunk, expected 0; no backward pass would read it"
        )


@rule("logprob.loss_in_chunk")
def a_loss_in_chunks_is_token_wise(plan: Plan) -> str | None:
    if plan.logprob.loss_in_chunk and plan.logprob.head == "logits":
        return "true with head logits, expected false; it has no chunks. Use head: fused"
    if plan.logprob.loss_in_chunk and ":" in plan.objective.loss:
        return (
            f"true with objective.loss {plan.objective.loss}, expected a built-in loss; it would "
            "see some tokens at a time, and may need all of a microbatch"
        )


# Rollout and replay ----------------------------------------------------------------------------


@rule("rollout.logprobs")
def logprobs_of_what_was_sampled(plan: Plan) -> str | None:
    if plan.rollout.logprobs != "processed":
        return (
            f"{plan.rollout.logprobs}, expected processed; the trainer compares with the "
            "distribution that tokens were drawn from, after temperature"
        )


@rule("rollout.accept_truncated_sampling")
def truncation_is_accepted(plan: Plan) -> str | None:
    rollout = plan.rollout
    if (rollout.top_p < 1 or rollout.top_k > 0) and not rollout.accept_truncated_sampling:
        return (
            f"false with top_p {rollout.top_p:g} and top_k {rollout.top_k}, expected top_p 1 and "
            "top_k 0; the trainer scores the full distribution, so every ratio would be off. Set "
            "it true to train on truncated samples anyway"
        )


@rule("rollout.path")
def recorded_samples_exist(plan: Plan) -> str | None:
    engine, path = plan.rollout.engine, plan.recorded_path
    if engine == "recorded" and path is None:
        return "null with engine recorded, expected the recorded samples"
    if engine != "recorded" and path is not None:
        return f"{plan.rollout.path!r} with engine {engine}, expected null; it would not be read"
    if path is not None and not os.path.exists(path):
        return f"{relative(path)} does not exist, expected the recorded samples"


@rule("replay")
def replay_needs_routers(plan: Plan) -> str | None:
    if plan.replay.enabled and not plan.router_layers:
        return f"on, expected a model with routers {_in_config(plan)}. Use replay: off"


@rule("model.backend")
def te_needs_a_gpu(plan: Plan) -> str | None:
    if plan.model.backend == "te" and plan.device == "cpu":
        return "te with device cpu, expected device cuda; its kernels run on GPUs only. Use local"


# Files, data and schedule ------------------------------------------------------------------------


@rule("model.tokenizer")
def tokenizer_exists(plan: Plan) -> str | None:
    return _folder_or_hub_id(plan, plan.model.tokenizer, "tokenizer.json")


@rule("model.weights")
def weights_exist(plan: Plan) -> str | None:
    return _folder_or_hub_id(plan, plan.model.weights, "*.safetensors")


def _folder_or_hub_id(plan: Plan, name: str | None, content: str) -> str | None:
    if name is None or plan.is_hub_id(name):
        return None
    folder = plan.resolve(name)
    is_folder = os.path.isdir(folder)
    if not is_folder or not any(Path(folder).glob(content)):
        missing = f"holds no {content}" if is_folder else "is no folder"
        return f"{relative(folder)} {missing}, expected a folder with {content} or a hub id"


@rule("model.tokenizer")
def text_needs_a_tokenizer(plan: Plan) -> str | None:
    if plan.model.tokenizer is None and plan.rollout.engine != "recorded":
        return "null, expected a tokenizer; prompts of data.task and data.prompts are text"


@rule("data")
def one_source_of_prompts(plan: Plan) -> str | None:
    if (plan.data.task is None) == (plan.data.prompts is None):
        both = "both task and prompts" if plan.data.task else "neither task nor prompts"
        return f"{both}, expected exactly one of data.task and data.prompts"


@rule("data.reward")
def prompts_need_a_reward(plan: Plan) -> str | None:
    data = plan.data
    if data.task is None and data.prompts is not None and data.reward is None:
        return (
            "null with data.prompts, expected module:function; only built-in tasks bring a reward"
        )


@rule("data.task")
def a_task_is_complete(plan: Plan) -> str | None:
    data = plan.data
    extra = [name for name in ("reward", "eval_prompts") if getattr(data, name) is not None]
    if data.task is not None and data.prompts is None and extra:
        return f"{data.task} with data.{extra[0]}, expected null; the task brings its own"
    if data.task is None and data.task_options:
        return "null with data.task_options, expected a task; the options would not be read"


@rule("data.prompts")
def prompts_exist(plan: Plan) -> str | None:
    return _data_file(plan, plan.data.prompts)


@rule("data.eval_prompts")
def eval_prompts_exist(plan: Plan) -> str | None:
    return _data_file(plan, plan.data.eval_prompts)


def _data_file(plan: Plan, name: str | None) -> str | None:
    if name is None:
        return None
    path = plan.resolve(name)
    if not path.endswith((".jsonl", ".parquet")):
        return f"{name!r}, expected a .jsonl or .parquet file"
    if not os.path.isfile(path):
        return f"{relative(path)} does not exist, expected a file; relative to the YAML file"


@rule("evaluate.prompts")
def evaluation_has_prompts(plan: Plan) -> str | None:
    if plan.evaluate.every > 0 and plan.evaluate.prompts == 0:
        every = plan.evaluate.every
        return f"0 with evaluate.every {every}, expected at least 1. Use every: 0 for never"


@rule("optimizer.warmup_steps")
def warmup_ends(plan: Plan) -> str | None:
    updates = plan.steps * plan.batching.minibatches
    if plan.optimizer.warmup_steps > updates:
        return (
            f"{plan.optimizer.warmup_steps}, expected at most {updates}, the optimizer steps of "
            f"the run (steps {plan.steps} * minibatches {plan.batching.minibatches}); lr would not "
            "be reached"
        )
