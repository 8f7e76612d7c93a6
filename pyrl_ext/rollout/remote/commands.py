"""The command of each remote engine: its arguments, and the environment that it needs."""

from __future__ import annotations

import json
import shlex
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyrl_ext.plan import Plan
from pyrl_ext.rollout.remote import auth
from pyrl_ext.rollout.remote.canary import LONG, NEW
from pyrl_ext.rollout.remote.tls import certificate_of, trust_of
from pyrl_ext.rollout.vllm import cpu
from pyrl_ext.rollout.vllm.drafts import drafting
from pyrl_ext.rollout.vllm.quantization import quantizing
from pyrl_ext.rollout.vllm.start import unwritten

PARENT = "PYRL_PARENT"  # the process with which an engine ends
CPU_CACHE = 1 << 28  # of vLLM's build for CPUs [bytes]


@dataclass(frozen=True, slots=True)
class Command:
    """Command that starts an engine.

    Args:
        address: that the trainer calls
        arguments: of the process
        environment: in addition to that of the process that starts it
        tls: of connections to the engine; None: they are not encrypted
    """

    address: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        """Shell-quoted."""
        named = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join(["env", *named, shlex.join(self.arguments)])


def max_tokens(plan: Plan) -> int:
    """Longest context and response together: of a sample, or of the canary."""
    places = int(plan.hf.get("max_position_embeddings") or 2**20)
    return max(plan.longest + 1, min(LONG + NEW, places))


def commands_of(plan: Plan, overrides: Sequence[str], host: str | None) -> list[Command]:
    """The engines of one host.

    Args:
        overrides: of the config, for engines that read it
        host: as addresses name it; None: every host that is this machine

    Raises: ValueError for a host without engines, an open address without keys, or files of TLS
        that cannot be read.
    """
    names = [urlsplit(address).hostname or "" for address in plan.addresses]
    if not names:
        raise ValueError(
            "serve: no rollout.servers and no rollout.launch.hosts, expected one of them. "
            "Set rollout.servers=[http://localhost:8000], for the trainer too"
        )
    chosen = [n for n, name in enumerate(names) if name == host or (not host and is_here(name))]
    if not chosen:
        raise ValueError(
            f"serve: no engine on {host or 'this machine'}, expected one of "
            f"{', '.join(dict.fromkeys(names))}. Name it with --host"
        )
    auth.server_keys(keys_folder(plan), names[chosen[0]])
    certificate_of(plan)
    tls = trust_of(plan)
    make = _vllm if plan.rollout.engine == "vllm" else _embedded
    commands: list[Command] = []
    for place, number in enumerate(chosen):
        address = plan.addresses[number]
        tp = plan.rollout.tp
        arguments, environment = make(plan, overrides, address)
        if plan.device == "cuda":
            gpus = range(place * tp, place * tp + tp)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        commands.append(Command(address, tuple(arguments), environment, tls))
    return commands


def keys_folder(plan: Plan) -> str | None:
    """The folder of keys, as an absolute path."""
    return plan.resolve(plan.rollout.keys) if plan.rollout.keys else None


def is_here(name: str) -> bool:
    """True if the name is an address of this machine."""
    try:
        with socket.create_server((name, 0)):
            return True
    except OSError:
        return False


def _embedded(
    plan: Plan, overrides: Sequence[str], address: str
) -> tuple[list[str], dict[str, str]]:
    place = urlsplit(address)
    where = ["--host", str(place.hostname), "--port", str(place.port)]
    module = "pyrl_ext.rollout.remote.embedded"
    return [sys.executable, "-m", module, plan.source, *overrides, *where], {}


def _vllm(plan: Plan, overrides: Sequence[str], address: str) -> tuple[list[str], dict[str, str]]:
    place = urlsplit(address)
    on_cpu = cpu.installed()
    rollout = plan.rollout
    tokenizer = plan.tokenizer_path if rollout.stop else None
    options: dict[str, Any] = {
        "model": str(Path(plan.config_path).parent),
        "served_model_name": "policy",
        "host": place.hostname,
        "port": place.port,
        "load_format": "dummy",
        "dtype": plan.rollout_dtype,
        "tensor_parallel_size": rollout.tp,
        "max_model_len": max_tokens(plan),
        "max_num_seqs": plan.max_num_seqs,
        "enable_prefix_caching": True,
        "enable_return_routed_experts": bool(plan.router_layers),
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
        "weight_transfer_config": {"backend": "pyrl"},
        "worker_extension_cls": "pyrl_ext.rollout.remote.vllm_worker.ServedWorker",
        "middleware": "pyrl_ext.rollout.remote.auth.Auth",
        **drafting(plan.draft_layers),
        **quantizing(rollout.quantization),
        **({"hf_overrides": more} if (more := unwritten(dict(plan.hf))) else {}),
        **({"tokenizer": tokenizer} if tokenizer else {"skip_tokenizer_init": True}),
    }
    if rollout.tls is not None:
        options["ssl_certfile"] = plan.resolve(rollout.tls.cert)
        options["ssl_keyfile"] = plan.resolve(rollout.tls.key)
    environment = {
        "PYRL_SERVED": "1",
        auth.KEYS_VARIABLE: keys_folder(plan) or "",
        auth.ADDRESS_VARIABLE: address,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if on_cpu:
        options |= cpu.arguments(CPU_CACHE)
        environment |= {"VLLM_MLA_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        if plan.router_layers:  # vLLM's own routes: its second runner, with interpreted kernels
            environment |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    else:
        options["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    # not `vllm serve`: with the distribution vllm-cpu that looks for the version of "vllm"
    start = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    return start + _flags(options | rollout.engine_options), environment


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's engine as its command line takes them."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append("--no-" + flag[2:])
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return flags
