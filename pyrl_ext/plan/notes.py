"""Notes on plans that hold, and the parts that the trainer cannot run yet."""

from __future__ import annotations

import math

from pyrl_ext.plan.forecast.fits import seems_to_fit
from pyrl_ext.plan.model.lora import adapter_faults
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules.log import wandb_problems
from pyrl_ext.plan.rules.optimizer import muon_problems
from pyrl_ext.plan.rules.state_packages import state_problems
from pyrl_ext.plan.rules.te import te_problems


def notes(plan: Plan) -> tuple[str, ...]:
    """Facts of `plan` that a reader may not expect."""
    model = plan.model
    sizes = plan.sizes
    found = list(sizes.notes())
    if sizes.num_nextn_predict_layers and not model.mtp:
        found.append(
            f"model.mtp is off: the {sizes.num_nextn_predict_layers} multi-token-prediction layers "
            "of the checkpoint are neither loaded nor trained"
        )
    if model.backend == "te":
        found.append(
            "model.backend te has run on no GPU so far: its wiring is tested with torch formulas "
            "in place of its kernels" + (", and of its quantizers" if model.fp8 else "")
        )
    if model.freeze:
        found.append(
            "model.freeze: estimated times, MFU and activations are as if all weights were trained"
        )
    found += _placement(plan)
    found += _start(plan)
    found += _objective(plan)
    found += _rollouts(plan)
    found += _adapters(plan)
    found += _images(plan)
    found += _held_out(plan)
    if (tight := seems_to_fit(plan)) is not None:
        found.append(f"hardware.gpu: {tight}")
    return tuple(found)


def _start(plan: Plan) -> list[str]:
    """Where the weights and the tokenizer come from."""
    model = plan.model
    found = list[str]()
    if plan.init_from is not None:
        also = " and optimizer state" if plan.init_optimizer else ""
        found.append(f"init_from {plan.init_from}: a new run starts from the weights{also} there")
    elif model.weights is None:
        found.append("model.weights is null: training starts from random weights")
    for key, name in (("tokenizer", model.tokenizer), ("weights", model.weights)):
        if name is not None and plan.is_hub_id(name):
            found.append(
                f"model.{key}: {name} is not a folder next to the YAML, so it is a hub id, "
                "and fetched when a run starts"
            )
    return found


def _objective(plan: Plan) -> list[str]:
    """What old log-probs and the KL compare."""
    found = list[str]()
    if plan.replay.source == "engine" and plan.replay.old != plan.replay.train:
        found.append(
            "replay.old and replay.train differ: the first update's ratio compares different routes"
        )
    objective = plan.objective
    if objective.kl_coef and (objective.kl, objective.kl_gradient) == ("k3", "direct"):
        found.append(
            "objective.kl_gradient is direct: the gradient of k3 itself descends the forward KL; "
            "reverse, the default, descends the KL that k3 estimates"
        )
    if objective.kl_coef and plan.init_from is not None and plan.lora is None:
        start = "model.weights" if plan.model.weights else "random weights (model.weights is null)"
        until = f" until step {objective.reference_refresh}" if objective.reference_refresh else ""
        found.append(
            f"objective.kl_coef with init_from: the KL is to {start}{until}, not to the weights "
            "that training starts from"
        )
    return found


def _rollouts(plan: Plan) -> list[str]:
    """Prompts and tokens that estimates leave out."""
    found = list[str]()
    if plan.rollout.oversample > 1:
        found.append(
            f"rollout.oversample {plan.rollout.oversample:g}: a step asks for {plan.prompts_asked} "
            f"prompts and trains on the {plan.batching.prompts} that are answered first, so on "
            "fewer long answers than the policy gives; estimated times are without it"
        )
    if plan.objective.dynamic_sampling:
        found.append(
            f"objective.dynamic_sampling {plan.objective.dynamic_sampling}: groups with equal "
            "rewards are generated and not trained on; estimated times are without them"
        )
    if plan.trains_on_sampling_mask and not plan.rollout.top_k:
        found.append(
            f"rollout.top_p {plan.rollout.top_p:g} without a top_k: the sets that are kept, 4 "
            "bytes a token, may be as large as the vocabulary; estimated bytes are without them"
        )
    return found


def _held_out(plan: Plan) -> list[str]:
    """Prompts that are held out of a file that is trained on."""
    found = list[str]()
    for name, keys in plan.prompt_keys.items():
        if keys.prompts and keys.eval_prompts is None and keys.eval_split is None:
            found.append(
                f"data.{name}eval_prompts is null: every eighth of data.{name}prompts is held out "
                "instead"
            )
    return found


def _adapters(plan: Plan) -> list[str]:
    """Differences between the adapters of trainer and engine."""
    found = []
    lora = plan.lora
    way = plan.lora_publish
    if lora is None or way is None:
        return found
    if plan.model.weights is None:
        found.append("lora: the base is frozen at random weights, since model.weights is null")
    if way == "merge" and lora.publish is None:
        faults = "; ".join(adapter_faults(plan, plan.sizes))
        found.append(f"lora.publish: merge, since an adapter would not be applied whole: {faults}")
    if way == "merge" and plan.rollout_dtype == "bfloat16":
        found.append(
            "lora.publish merge in bfloat16: steps below the rounding of a weight do not reach the "
            "engine. Where B had a standard deviation of 3e-4 it saw 51 to 69 % of the policy's "
            "move, of 3e-5 21 to 24 %; publish adapter has no such rounding"
        )
    if (way, plan.rollout.engine, plan.device) == ("adapter", "vllm", "cuda"):
        found.append("lora.publish adapter: vLLM has applied adapters on no GPU so far")
    if way == "adapter" and plan.engine_sleeps:
        found.append(
            "lora.publish adapter with rollout.sleep: an engine that sleeps keeps no weights, so "
            "every publish sends all of them; with sleep false it sends the factors alone"
        )
    scales = {lora.scale_of(expert) for expert in (False, bool(plan.router_layers))}
    if (way, plan.rollout.engine, plan.rollout_dtype) == ("adapter", "vllm", "bfloat16") and any(
        math.frexp(scale)[0] != 0.5 for scale in scales
    ):
        found.append(
            f"lora.alpha {lora.alpha:g}: alpha / rank is no power of two, so vLLM rounds B once "
            "more as it multiplies it"
        )
    return found


def _images(plan: Plan) -> list[str]:
    """Images that prompts have no room for."""
    found = []
    tower = plan.sizes.vision
    estimate = plan.estimate
    if tower is None or not plan.modules:
        return found
    rows = estimate.images * (estimate.image_patches // tower.merge**2)
    room = estimate.prompt_tokens or plan.data.max_prompt_tokens
    if plan.has_rollouts and rows > room:
        found.append(
            f"estimate: {rows:,.0f} rows of images in a sample are more than the {room:,} tokens "
            "of a prompt, which they are part of; estimated times are too short"
        )
    return found


def _placement(plan: Plan) -> list[str]:
    """Costs of a layout in addition to its ranks."""
    parallel = plan.parallel
    node = plan.hardware.gpus_per_node
    found = []
    columns = -(-plan.sizes.vocab_size // parallel.tp) * parallel.tp
    if columns > plan.sizes.vocab_size:
        found.append(
            f"parallel.tp {parallel.tp} does not divide vocab_size {plan.sizes.vocab_size}: "
            f"embedding and head are padded to {columns} columns, which no token has"
        )
    span = parallel.ep * parallel.etp_size
    if plan.device == "cuda" and span > node:
        found.append(
            f"ep {parallel.ep} * etp {parallel.etp_size} = {span} ranks are more than "
            f"hardware.gpus_per_node {node}: tokens cross the network on their way to experts"
        )
    if exchanged := plan.exchanged_elements:
        found.append(str(exchanged))
    return found


def unsupported(plan: Plan) -> tuple[str, ...]:
    """Parts of `plan` that the trainer refuses to start, each with its key."""
    found = [f"model.config: {reason}" for reason in plan.sizes.unsupported()]
    found += [*te_problems(plan), *wandb_problems(plan), *state_problems(plan)]
    found += muon_problems(plan)
    if plan.sizes.vision and not plan.modules:
        reads = f"{plan.model.family} reads images, which nothing would encode"
        found.append(f"modules: none, expected vision; {reads}")
    found += _engine(plan)
    return tuple(found)


def _engine(plan: Plan) -> list[str]:
    """Parts that vLLM supports and the trainer does not use yet."""
    rollout = plan.rollout
    found = []
    if rollout.engine != "vllm":
        return found
    ranks = plan.world_size
    node = plan.hardware.gpus_per_node
    if rollout.gpus is not None and ranks + rollout.gpus > node:
        found.append(
            f"rollout.gpus: {rollout.gpus} and {ranks} ranks of the trainer are more than the "
            f"{node} GPUs of a node; use rollout.launch"
        )
    return found
