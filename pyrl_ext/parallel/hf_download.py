"""Hub ids of a plan -> folders: one rank of each node downloads, while the others wait."""

from __future__ import annotations

import json
import uuid

from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

from pyrl_ext.parallel.collective_errors import gather_objects
from pyrl_ext.parallel.launch import launched
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.parallel.waiting import NotYet, announced, say_nothing, say_on_stderr, wait_for
from pyrl_ext.plan import Plan
from pyrl_ext.plan.language.hf_hub import reason

TOKENIZER_FILES = (
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "generation_config.json",
    "*processor_config.json",
)
WEIGHT_FILES = ("*.safetensors", "*.json")
FILES = {
    "model.tokenizer": ("config.json", *TOKENIZER_FILES),
    "model.weights": WEIGHT_FILES,
    "teacher.model": ("config.json", *TOKENIZER_FILES),
}
"""Key -> files that are fetched for it; for a teacher on the trainer's ranks those of both."""


def fetch(plan: Plan, topo: Topology) -> Plan:
    """``plan`` with the folders of its hub ids, in the hub's cache (HF_HUB_CACHE) of each node.

    Local rank 0 of each node downloads; the others wait without a time limit.

    Communicates: a gather over the world, then by the store.
    Raises: OSError on every rank, with the reason, when a node could not fetch something.
    """
    model = plan.model
    named = {"model.tokenizer": model.tokenizer, "model.weights": model.weights}
    if plan.teacher.servers:
        named["teacher.model"] = plan.teacher.model
    else:
        named |= {f"teacher {name}": name for name in plan.teachers.values()}
    wanted = {key: name for key, name in named.items() if name and plan.is_hub_id(name)}
    if not wanted:
        return plan
    first = topo.rank - launched("LOCAL_RANK", 0)
    nodes = gather_objects((first, uuid.uuid4().hex), topo.world)
    keys = {rank: f"hub/{nodes[0][1]}/{rank}" for rank, _ in nodes}
    store = _get_default_store()
    if topo.rank == first:
        answer = _download(wanted, shown=topo.is_main and plan.log.progress)
        store.set(keys[first], json.dumps(answer))

    def look() -> None:
        if not store.check([*keys.values()]):
            raise NotYet("at least one is not done")

    # not in a collective, which gives up after the process group's timeout
    where = f"local rank 0 of each of {len(keys)} nodes, which download from the hub"
    wait_for(where, look, say=say_on_stderr if topo.rank == first else say_nothing)
    answers = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
    failed = [f"rank {rank}: {a['problem']}" for rank, a in answers.items() if "problem" in a]
    if failed:
        raise OSError("\n".join(failed))
    return plan.model_copy(update={"fetched": answers[first]})


def _download(wanted: dict[str, str], shown: bool) -> dict[str, str]:
    """Hub id -> folder, or {"problem": reason}."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not shown:
        disable_progress_bars()
    folders = {}
    for name in dict.fromkeys(wanted.values()):
        keys = [key for key in wanted if wanted[key] == name]
        both = (*WEIGHT_FILES, *TOKENIZER_FILES)
        patterns = [pattern for key in keys for pattern in FILES.get(key, both)]
        advice = "HF_HUB_OFFLINE=1 reads the hub's cache alone"
        try:
            with announced(f"{name} from {constants.ENDPOINT}", None, advice, signals_kill=True):
                folders[name] = snapshot_download(
                    name, allow_patterns=patterns, ignore_patterns="*/*"
                )
        except Exception as error:  # also what its network library raises
            return {"problem": f"{' and '.join(keys)}: {name}: {reason(error)}"}
    return folders
