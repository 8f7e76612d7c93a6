"""The packages whose kernels serve layers with states on a GPU: found by their names, never
imported, and what they demand."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

from pyrl_ext.plan.plan import Plan
from pyrl_ext.plan.rules._rule import Found, in_config, rule


class Package(NamedTuple):
    """A package by what is imported, what pip calls it, and the version that was read."""

    module: str
    name: str
    version: str


CONV = Package("causal_conv1d", "causal-conv1d", "1.7.0")
PACKAGES = {
    "gated_delta_net": (CONV, Package("fla", "fla-core", "0.6.0")),
    "mamba": (CONV, Package("mamba_ssm", "mamba-ssm", "2.3.2.post1")),
}
# a row's channels in whole 16 bytes; fla's keys
TILE = 8
WIDEST = 256


def install(mixer: str) -> str:
    """The command that gets the packages of a mixer, compiled for the torch that is here."""
    names = " ".join(f"{each.name}=={each.version}" for each in PACKAGES[mixer])
    return f"CUDA_HOME=/usr/local/cuda pip install --no-build-isolation {names}"


def package_problems(mixer: str) -> list[str]:
    """The packages of a mixer that are missing or of another version."""
    return [problem for each in PACKAGES[mixer] if (problem := _problem(each))]


def _problem(package: Package) -> str | None:
    if find_spec(package.module) is None:
        return f"{package.module} is not installed, expected {package.name} {package.version}"
    try:
        found = version(package.name)
    except PackageNotFoundError:
        return f"{package.module} is installed without {package.name}, expected that package of pip"
    series = package.version.split(".")[:2]
    if found.split(".")[:2] != series:
        return f"{package.name} {found}, expected {'.'.join(series)}"
    return None


def _served(plan: Plan) -> str | None:
    """The mixer whose operators the packages serve."""
    mixer = plan.sizes.state_mixer
    on_gpu = plan.device == "cuda" and plan.model.dtype == "bfloat16"
    return mixer.name if mixer is not None and on_gpu else None


def state_problems(plan: Plan) -> list[str]:
    """Why the layers of `plan` that carry a state lack kernels here."""
    if (mixer := _served(plan)) is None:
        return []
    found = package_problems(mixer)
    where = f"kernels.backend: {plan.kernels.backend} with {mixer} layers on device cuda"
    return [f"{where}, {each}. Run: {install(mixer)}" for each in found]


@rule("kernels.backend")
def operators_with_states_are_of_packages(plan: Plan) -> Found:
    mixer = plan.sizes.state_mixer
    backend = plan.kernels.backend
    if mixer is not None and plan.device == "cuda" and backend != "auto":
        names = ", ".join(each.module for each in PACKAGES[mixer.name])
        return (
            f"{backend} with {mixer.name} layers, expected auto; their operators are those of "
            f"{names}, or torch's"
        )


@rule("device")
def packages_have_kernels_for_the_widths(plan: Plan) -> Found:
    mixer = plan.sizes.state_mixer
    if mixer is None or (name := _served(plan)) is None:
        return None
    odd = [f"{key} {n}" for key, n in mixer.widths.items() if n % TILE or n > WIDEST]
    if odd:
        names = " and ".join(each.module for each in PACKAGES[name])
        return (
            f"cuda with {', '.join(odd)} {in_config(plan)}, expected multiples of {TILE}, at most "
            f"{WIDEST}; {names} have no kernels for others"
        )
