"""Triton kernels that are compiled before the run, for a GPU that need not be at hand.

`build` makes the very calls that a training run of the plan makes, on tensors without data and with
a driver that launches nothing, into a folder that is a cache of Triton's. `use` makes a run load
from it. Triton compiles a kernel for each set of dtypes, constants and divisibilities by 16 of its
sizes, so each call is made with row counts of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from pyrl_ext.models import family
from pyrl_ext.plan import Plan, compile_plan
from pyrl_ext.plan.forecast.hardware import gpu_of
from pyrl_ext.samples import route_dtype

MANIFEST = "pyrl_kernels.json"
ROWS = (4096, 4095, 17, 1)  # Triton tells multiples of 16 and 1 from others, in what follows too

Launch = tuple[str, Callable[[int], object]]


class Offline(DriverBase):
    """A GPU that is not there: kernels are compiled for its ``target`` and not launched."""

    def __init__(self, target: int):
        self.target = GPUTarget("cuda", target, 32)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda *binary: (self, self, 0, 0, 1 << 20),
            unload_module=lambda module: None,
        )
        self.launcher_cls = lambda source, metadata: lambda *call: None

    @classmethod
    def is_active(cls) -> bool:  # type: ignore[override]
        return False

    def get_current_target(self) -> GPUTarget:  # type: ignore[override]
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("Offline: nothing is launched")

    get_active_torch_device = get_benchmarker = map_python_to_cpp_type  # type: ignore[assignment]


def build(plan: Plan, folder: Path, say: Callable[[str], object] = print) -> None:
    """Compile every Triton kernel variant of ``plan`` into ``folder``. A process can do so once:
    what Triton has compiled already it would not write again.

    Raises: ValueError when the plan names no GPU.
    """
    target = _target(plan)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # until all are there
    with _cache(folder), _driver(Offline(target)), compiled() as found:
        for name, launch in launches(plan):
            before, start = len(found), perf_counter()
            for rows in ROWS:
                launch(rows)
            new = sum(not hit for _, hit in found[before:])
            old = len(found) - before - new
            say(f"{name}: {new} variants compiled in {perf_counter() - start:.1f} s, {old} there")
    (folder / MANIFEST).write_text(json.dumps(_facts(plan, target), indent=2) + "\n")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    say(f"{len(found)} kernels for sm_{target} in {folder}, {size / 1e6:.1f} MB")


def use(plan: Plan, folder: Path) -> int:
    """Let this process load kernels from ``folder``; returns how many launches it was built for.

    Raises: ValueError with what differs, when it was built for other kernels, another Triton or
        another GPU.
    """
    file = folder / MANIFEST
    advice = f"Build it again: python -m pyrl_ext.plan {plan.source} --build {folder}"
    if not file.is_file():
        raise ValueError(
            f"kernels.prebuilt: {folder} holds no {MANIFEST}, expected what --build wrote. {advice}"
        )
    target = "{}{}".format(*torch.cuda.get_device_capability())
    built, wanted = json.loads(file.read_text()), _facts(plan, int(target))
    for name, value in wanted.items():
        if built.get(name) != value:
            raise ValueError(
                f"kernels.prebuilt: {folder} was built for {_difference(name, built, wanted)}; "
                f"kernels would be compiled during the run. {advice}"
            )
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    knobs.compilation.listener = _say_miss
    return len(wanted["launches"])


def _difference(name: str, built: dict[str, Any], wanted: dict[str, Any]) -> str:
    if name != "launches":
        return f"{name} {built.get(name)}, expected {wanted[name]}"
    missing = [each for each in wanted[name] if each not in built.get(name, ())]
    extra = [each for each in built.get(name, ()) if each not in wanted[name]]
    return f"another plan: it lacks {missing}, and has {extra} that this one does not launch"


def _say_miss(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        print(f"kernels: {src.name} was compiled during the run, not prebuilt", flush=True)


def _facts(plan: Plan, target: int) -> dict[str, Any]:
    names = [name for name, _ in launches(plan)]
    return {"triton": triton.__version__, "target": f"sm_{target}", "launches": names}


def _target(plan: Plan) -> int:
    gpu = gpu_of(plan)
    if gpu is None:
        raise ValueError(
            "hardware.gpu: null, expected the GPU to compile kernels for. For example "
            "hardware.gpu=H200"
        )
    return gpu.target


# What a run launches -----------------------------------------------------------------------------


def launches(plan: Plan) -> Iterator[Launch]:
    """(name, a call with so many rows) of every Triton kernel of every rank of ``plan``."""
    config = family(plan.model.family).config(plan.sizes)
    yield from _router_launches(plan, config)
    yield from _head_launches(plan)
    yield from _attention_launches(plan, config)
    yield "sum_rows float32 x 2", lambda rows: _sum_rows(rows, 2, torch.float32)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _router_launches(plan: Plan, config: dict[str, Any]) -> Iterator[Launch]:
    from pyrl_ext.ops.gather_routes import triton as routes
    from pyrl_ext.ops.replay_probs import triton as router

    sizes = plan.sizes
    if not plan.router_layers:
        return
    topk, experts = sizes.topk, sizes.num_experts
    ids = route_dtype(experts)
    spans = {1}  # padding where nothing is replayed
    for stage in plan.stages:
        held = [i for chunk in stage for i in chunk.layers if i in plan.router_layers]
        first = plan.router_layers.index(held[0]) if held else 0
        spans.add(plan.router_layers.index(held[-1]) - first + 1 if held else 1)
    for span in sorted(spans):

        def gather(rows: int, span: int = span) -> Tensor:
            source, at = _meta(rows, span, topk, dtype=ids), _meta(rows, dtype=torch.int64)
            layers = torch.zeros(1, dtype=torch.int64)
            return routes.gather_routes(source, at, layers, experts)

        yield f"gather_routes {ids} {span} x {topk} of {experts}".replace("torch.", ""), gather
    if not plan.replay.enabled or config.get("moe_router_score_function") != "sigmoid":
        return  # Triton leaves a softmax of the chosen to the others
    scale = config.get("moe_router_topk_scaling_factor") or 1.0

    def probs(rows: int) -> None:
        scores, chosen = _meta(rows, experts), _meta(rows, topk, dtype=ids)
        router.replay_probs(scores, chosen, "sum", scale, torch.float32)
        router.replay_probs_grad(scores, scores, chosen, "sum", scale)

    yield f"replay_probs {topk} of {experts} x {scale:g}", probs


def _head_launches(plan: Plan) -> Iterator[Launch]:
    from pyrl_ext.ops.token_logprob import triton as logprob

    tp, how, model = plan.parallel.tp, plan.logprob, getattr(torch, plan.model.dtype)
    columns = -(-plan.sizes.vocab_size // tp)
    dtypes = [torch.float32 if how.head == "fused" else model]
    if how.cache_bytes and model != torch.float32:
        dtypes.append(model)  # cached logits are read for the gradient
    for dtype in dtypes:
        for rank in range(tp):
            first = rank * columns
            width = min(plan.sizes.vocab_size - first, columns)

            def score(
                rows: int, dtype: torch.dtype = dtype, first: int = first, width: int = width
            ) -> None:
                logits, at = _meta(rows, columns, dtype=dtype), _meta(rows, dtype=torch.int64)
                each = [_meta(rows) for _ in range(6)]
                logprob.stats(logits, at, each[0], first, width)
                logprob.grad(logits, at, each[0], first, width, *each[1:])

            name = f"token_logprob {dtype} {width} of {columns} from {first}"
            yield name.replace("torch.", ""), score


def _attention_launches(plan: Plan, config: dict[str, Any]) -> Iterator[Launch]:
    """Keys and values in the order of attention, under context parallelism."""
    from pyrl_ext.ops.gather_rows import triton as rows_of

    if plan.parallel.cp == 1:
        return
    sizes, dtype = plan.sizes, getattr(torch, plan.model.dtype)
    heads = (sizes.query_groups or sizes.num_attention_heads) // plan.parallel.tp
    if config.get("multi_latent_attention"):
        widths = {config["qk_head_dim"] + config["qk_pos_emb_head_dim"], config["v_head_dim"]}
    else:
        widths = {config["kv_channels"]}
    for width in sorted(max(heads, 1) * width for width in widths):

        def gather(rows: int, width: int = width) -> None:
            source, at = _meta(rows, width, dtype=dtype), _meta(rows, dtype=torch.int64)
            rows_of.gather_rows(source, at, _meta(width, dtype=dtype))
            _sum_rows(rows, width, dtype)

        yield f"gather_rows, sum_rows {dtype} x {width}".replace("torch.", ""), gather


def _sum_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    from pyrl_ext.ops.sum_rows import triton as sums

    at = _meta(rows, dtype=torch.int64)
    return sums.sum_rows(
        _meta(rows, width, dtype=dtype), at, _meta(rows + 1, dtype=torch.int64), at
    )


# Triton's switches -------------------------------------------------------------------------------


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    before = knobs.cache.dir
    knobs.cache.dir = str(folder)
    try:
        yield
    finally:
        knobs.cache.dir = before


@contextmanager
def _driver(other: DriverBase) -> Iterator[None]:
    before = driver._active
    driver.set_active(other)
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def compiled() -> Iterator[list[tuple[str, bool]]]:
    """(kernel, whether it was in the cache) of every variant that Triton asks its cache for."""
    found: list[tuple[str, bool]] = []
    before = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        found.append((src.name, cache_hit))

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = before


def main() -> int:
    """What `python -m pyrl_ext.plan CONFIG --build FOLDER` runs."""
    parser = argparse.ArgumentParser(prog="python -m pyrl_ext.tools.prebuild", description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--into", required=True, type=Path, metavar="FOLDER")
    options = parser.parse_intermixed_args()
    try:
        build(compile_plan(options.config, options.overrides), options.into)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
