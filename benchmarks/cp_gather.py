"""One attention layer of GLM-4.7-Flash on two context-parallel ranks: ``python -m
benchmarks.cp_gather [--rows N] [--rounds N]``.

Gathers latents and gathers keys and values of all heads, in turns, forward and backward; prints
bytes over the ranks' group and milliseconds of the slower rank. Written before measuring: 17.8
times fewer bytes; about as fast here, since on a CPU a rank projects 1,000 rows in as much time as
loopback takes for their keys and values.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pyrl_ext.pack.layout import TokenLayout
from pyrl_ext.parallel import topology
from pyrl_ext.plan import compile_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CONFIG

SMALLER = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "vocab_size": 128}
SMALLER |= {"num_nextn_predict_layers": 0, "intermediate_size": 128}
WAYS = {"latents": True, "keys and values": False}


class Sent(TorchDispatchMode):
    """Bytes that a rank of two sends in all-gathers and reduce-scatters."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "_base_" in func.__name__:
            self.total += max(x.nbytes for x in args if isinstance(x, torch.Tensor)) // 2
        return func(*args, **(kwargs or {}))


@contextmanager
def attention(config: Path) -> Iterator[tuple[Any, Any]]:
    """The attention of the first layer, and this rank's place."""
    from pyrl_ext.megatron.local_layers import LatentAttention
    from pyrl_ext.trainer.policy import Policy

    plan = compile_plan(CONFIG, [f"model.config={config}", "parallel.cp=2", "replay=off"])
    with topology.start(plan) as topo:
        policy = Policy.build(plan, topo, trainable=False)
        layers = [m for m in policy.llm.models[0].modules() if isinstance(m, LatentAttention)]
        yield layers[0].requires_grad_(True).train(), topo.place()


def measured(group: Any, config: Path, rows: int, rounds: int) -> dict[str, tuple[int, float]]:
    """Bytes that a rank sends, and median seconds of the slower rank, each way."""
    from pyrl_ext.megatron.packed_attention import PackedSequences

    os.environ["WORLD_SIZE"] = str(group.size())
    torch.use_deterministic_algorithms(False)
    with attention(config) as (layer, place):
        layout = TokenLayout((rows // 4,) * 4, cp_size=2)
        positions = torch.arange(layout.num_local) % (rows // 8)
        packed = PackedSequences(layout=layout, place=place, positions=positions, qkv_format="thd")
        hidden = torch.randn(layout.num_local, 1, layer.config.hidden_size)
        sent = dict[str, int]()
        seconds = {way: list[float]() for way in WAYS}
        for _ in range(rounds + 1):
            for way, layer.gathers_latents in WAYS.items():
                dist.barrier()
                start = time.perf_counter()
                with Sent() as counted:
                    out, _ = layer(hidden.requires_grad_(), None, packed_seq_params=packed)
                    out.sum().backward()
                took = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                seconds[way].append(float(took))
                sent[way] = counted.total
        return {way: (sent[way], statistics.median(seconds[way][1:])) for way in WAYS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="of both ranks, in 4 samples")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    whole = json.loads((CONFIG.parent / "glm47/config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(whole | SMALLER))
        found = run_ranks(measured, 2, config, options.rows, options.rounds, timeout=600)[0]
    print(
        f"{options.rows} rows on 2 gloo ranks, fp32, forward and backward, torch "
        f"{torch.__version__}, CPU, load {os.getloadavg()[0]:.1f}; median of {options.rounds}"
    )
    for way, (sent, took) in found.items():
        print(f"{way:16s} {sent / 1e6:8.2f} MB {took * 1e3:8.1f} ms")
    few, many = (found[way][0] for way in WAYS)
    print(f"{many / few:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
