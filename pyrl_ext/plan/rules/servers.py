"""Remote engines, and training while they generate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from pyrl_ext.plan.forecast.engine_memory import engine_memory
from pyrl_ext.plan.language.errors import show
from pyrl_ext.plan.model.units import size
from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, changed, rule

LOOPBACK = re.compile(r"https?://(localhost|127\.\d+\.\d+\.\d+):\d+")
# Keys that only remote engines read; keys that need rollout.ahead of at least 1.
REMOTE_ONLY = (
    "min_servers",
    "senders",
    "delta_sync",
    "keys",
    "tls",
    "request_timeout",
    "publish_timeout",
    "pause",
)
AHEAD = ("second_span_routes", "stale_groups", "overlap_publish")
# Keys of engines that the trainer starts on its own hosts -> the value expected otherwise
LOCAL_ONLY = {"gpus": "null", "sleep": "it left out", "offload_trainer": "none"}


@rule("rollout")
def remote_engines_share_nothing_with_the_trainer(plan: Plan) -> Found:
    rollout = plan.rollout
    if not plan.remote_engines:
        return
    if rollout.servers and rollout.launch.hosts:
        yield (
            "servers",
            f"{show(rollout.servers)} with rollout.launch, expected only one of them; "
            "addresses of running servers, or hosts on which serve starts them",
        )
    if rollout.engine not in ("hf", "vllm"):
        why = "recorded samples need no engine"
        yield "engine", f"{rollout.engine} with remote engines, expected hf or vllm; {why}"
    for name, rule_ in LOCAL_ONLY.items():
        asked = rollout.sleep and "sleep" in rollout.model_fields_set
        if asked if name == "sleep" else changed(rollout, name):
            yield (
                name,
                f"{show(getattr(rollout, name))} with remote engines, expected {rule_}; they share "
                "no GPU with the trainer, and take weights over the network",
            )
    if rollout.transport not in ("auto", "broadcast"):
        yield (
            "transport",
            f"{rollout.transport} with remote engines, expected auto (TCP) or broadcast; they "
            "share no memory with the trainer",
        )


@rule("rollout")
def remote_engines_read_what_is_set(plan: Plan) -> Found:
    rollout = plan.rollout
    why = "only remote engines (rollout.servers, rollout.launch) read it"
    unread = () if plan.remote_engines else REMOTE_ONLY
    if not plan.remote_engines and rollout.engine != "recorded":
        unread = (*unread, "ahead")
    for name in filter(lambda name: changed(rollout, name), unread):
        yield name, f"{show(getattr(rollout, name))}, expected it left out; {why}"
    for name in ("gpus", "port") if not rollout.launch.hosts else ():
        if changed(rollout.launch, name):
            yield (
                f"launch.{name}",
                f"{getattr(rollout.launch, name)} without rollout.launch.hosts, expected the hosts "
                "too; no engine is started without them. Set rollout.launch.hosts=[127.0.0.1] for "
                "engines on this machine",
            )
    for name in AHEAD if not rollout.ahead else ():
        if changed(rollout, name):
            value = show(getattr(rollout, name))
            why = "it needs rollout.ahead of at least 1"
            yield name, f"{value} with rollout.ahead 0, expected it left out; {why}"


@rule("rollout.ahead")
def steps_ahead_know_their_prompts(plan: Plan) -> Found:
    if plan.rollout.ahead and plan.objective.dynamic_sampling:
        return (
            f"{plan.rollout.ahead} with objective.dynamic_sampling "
            f"{plan.objective.dynamic_sampling}, expected only one of them; the prompts that "
            "replace groups of equal rewards are only known when the step is trained"
        )


@rule("rollout")
def remote_engines_return_what_is_trained_on(plan: Plan) -> Found:
    if not plan.remote_engines:
        return
    if plan.modules:
        yield (
            "servers" if plan.rollout.servers else "launch",
            "remote engines with modules, expected a text-only model; requests carry tokens, no "
            "images. Use colocated engines",
        )
    if plan.trains_on_sampling_mask:
        yield (
            "top_p" if plan.rollout.top_p < 1 else "top_k",
            "trained on the tokens that it keeps, with remote engines, expected "
            "rollout.accept_truncated_sampling, top_p 1 and top_k 0, or colocated "
            "engines; servers do not return these tokens",
        )


@rule("rollout")
def remote_engines_have_addresses(plan: Plan) -> Found:
    key = "servers" if plan.rollout.servers else "launch"
    for problem in address_problems(plan.addresses, "engine"):
        yield key, problem
    secure = plan.rollout.tls is not None
    wrong = [each for each in plan.rollout.servers if each.startswith("https:") != secure]
    if wrong and secure:
        yield (
            "servers",
            f"{wrong[0]} with rollout.tls, expected https://host:port; engines speak HTTPS then",
        )
    elif wrong:
        yield (
            "servers",
            f"{wrong[0]} without rollout.tls, expected http://host:port, or rollout.tls with the "
            "files for TLS; without them engines speak HTTP, and weights are not encrypted",
        )
    others = [each for each in plan.addresses if not LOOPBACK.fullmatch(each)]
    if others and plan.rollout.keys is None:
        yield (
            "keys",
            f"null with an engine at {others[0]}, expected a folder with the files generate and "
            "control; anyone who reaches that address could change its weights",
        )


def address_problems(addresses: Sequence[str], what: str) -> Iterator[str]:
    """Find addresses that are given twice and ports out of range; `what` names a server."""
    twice = [each for each, times in Counter(addresses).items() if times > 1]
    if twice:
        yield f"{twice[0]} twice, expected an address for each {what}"
    port = max((int(each.rpartition(":")[2]) for each in addresses), default=0)
    if port > 65535:
        yield f"port {port}, expected at most 65535"


@rule("rollout.min_servers")
def enough_engines_are_there_to_begin_with(plan: Plan) -> Found:
    least = plan.rollout.min_servers
    there = len(plan.addresses)
    if plan.remote_engines and least > there:
        return f"{least}, expected at most {there}, the number of engines; the run could not start"


@rule("rollout.senders")
def each_sender_is_another_rank(plan: Plan) -> Found:
    asked = plan.rollout.senders
    ranks = plan.parallel.world_size
    if plan.remote_engines and asked > ranks:
        return f"{asked}, expected at most {ranks}, the number of ranks; each sends a part"


@rule("rollout")
def one_rank_broadcasts_to_remote_engines(plan: Plan) -> Found:
    rollout = plan.rollout
    if not plan.remote_engines or rollout.transport != "broadcast":
        return
    if rollout.tls is not None:
        yield (
            "transport",
            "broadcast with rollout.tls, expected auto; gloo and NCCL send weights unencrypted",
        )
    if rollout.senders > 1:
        yield (
            "senders",
            f"{rollout.senders} with rollout.transport broadcast, expected 1; groups of several "
            "ranks that send to the same engines could deadlock",
        )


@rule("rollout.delta_sync")
def adapters_are_sent_whole(plan: Plan) -> Found:
    if plan.rollout.delta_sync and plan.lora_publish == "adapter":
        return (
            "true with adapters in the engine, expected false; nothing but the adapters is sent, "
            "and they change everywhere. Use lora.publish: merge to send merged weights"
        )


@rule("rollout.tp")
def an_engine_holds_the_model_and_a_sample(plan: Plan) -> Found:
    memory = engine_memory(plan)
    if memory is None or memory.least <= memory.taken:
        return None
    return (
        f"{plan.rollout.tp} needs {size(memory.least)} on each GPU of an engine, weights "
        f"{size(memory.weights)} + a KV cache for {memory.sample:,} tokens, expected at most "
        f"{size(memory.taken)}, rollout.gpu_memory_utilization "
        f"{plan.rollout.gpu_memory_utilization:g} of {size(memory.limit)}; vLLM would not start. "
        "Raise either one"
    )
