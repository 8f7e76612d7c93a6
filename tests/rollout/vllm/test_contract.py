"""The installed vLLM has the names, parameters and fields that the engine uses, read from the code
of both. Needs vLLM (`make .venv/.vllm`); `make test-vllm` runs it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make .venv/.vllm", allow_module_level=True)

from pyrl_ext.plan.schema.lora import Lora
from pyrl_ext.rollout.vllm import cpu, engine
from pyrl_ext.rollout.vllm.worker import WorkerExtension
from tests.helpers.vllm_pair import CONFIGS

pytestmark = pytest.mark.vllm

PACKAGE = Path(engine.__file__).parents[1]
FILES = [
    *sorted((PACKAGE / "vllm").glob("*.py")),
    *sorted((PACKAGE / "servers").glob("vllm_*.py")),
]


class Made(NamedTuple):
    """A call in our code."""

    name: str
    node: ast.Call

    def fits(self, signature: inspect.Signature) -> None:
        """Raises: TypeError if the signature does not take these arguments."""
        positional = [each for each in self.node.args if not isinstance(each, ast.Starred)]
        named = {each.arg: None for each in self.node.keywords if each.arg is not None}
        whole = len(positional) == len(self.node.args) and len(named) == len(self.node.keywords)
        bind = signature.bind if whole else signature.bind_partial
        try:
            bind(*[None] * len(positional), **named)
        except TypeError as error:
            raise TypeError(f"{ast.unparse(self.node)}: {error}") from error


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def calls_of_engine() -> list[Made]:
    """Calls of methods of vLLM's engine."""
    found = list[Made]()
    for file, owner in (("engine.py", "self._engine"), ("requests.py", "self.engine")):
        for node in ast.walk(tree_of(PACKAGE / "vllm" / file)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) == owner:
                found.append(Made(node.func.attr, node))
    return found


def imports(file: Path) -> Iterator[tuple[str, str, str]]:
    """(module of vLLM, name in it, our name of it)."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for each in node.names:
                yield node.module or "", each.name, each.asname or each.name


def imported(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    if hasattr(found, name):
        return getattr(found, name)
    return importlib.import_module(f"{module}.{name}")


def test_engine_has_the_methods_that_we_call_with_our_arguments():
    from vllm import LLMEngine

    made = calls_of_engine()
    expected = {"add_request", "step", "sleep", "wake_up", "collective_rpc", "reset_prefix_cache"}
    assert {call.name for call in made} >= expected
    for call in made:
        call.fits(signature_of_method(getattr(LLMEngine, call.name)))


def signature_of_method(method: Any) -> inspect.Signature:
    """Without its first parameter, the object."""
    signature = inspect.signature(method)
    return signature.replace(parameters=[*signature.parameters.values()][1:])


def test_workers_have_the_methods_that_we_call_by_name():
    names = {
        ast.literal_eval(call.node.args[0])
        for call in calls_of_engine()
        if call.name == "collective_rpc"
    }
    assert len(names) > 5
    assert [name for name in names if not callable(getattr(WorkerExtension, name, None))] == []


def test_vllm_has_every_name_that_we_import_and_takes_our_arguments():
    checked = set[str]()
    for file in FILES:
        ours = {mine: imported(module, name) for module, name, mine in imports(file)}
        for node in ast.walk(tree_of(file)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if callable(target := ours.get(node.func.id)):
                Made(node.func.id, node).fits(inspect.signature(target))
                checked.add(node.func.id)
    assert checked >= {"EngineArgs", "SamplingParams", "LoRARequest", "LoRAModel", "mm_input"}


class Captured(Exception):
    """Instead of a start of vLLM, with the arguments of one."""


def start_arguments(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> dict[str, Any]:
    """The arguments of an engine that uses all that ours can."""

    def capture(_interpreted: bool, **arguments: Any) -> None:
        raise Captured(arguments)

    monkeypatch.setattr(engine, "start", capture)
    monkeypatch.setattr(cpu, "installed", lambda: on_cpu)
    with pytest.raises(Captured) as caught:
        engine.VLLMEngine(
            CONFIGS / "tiny",
            num_experts=8,
            layer_ids=(1, 2, 3),
            max_tokens=64,
            tokenizer=CONFIGS / "tiny",
            sampling_mask=True,
            sleeps=True,
            scale=lambda patches: patches,
            lora=Lora(rank=8, alpha=16, experts="none"),
        )
    return caught.value.args[0]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_EngineArgs_has_the_fields_that_we_set(monkeypatch: pytest.MonkeyPatch, on_cpu: bool):
    from vllm import EngineArgs

    given = start_arguments(monkeypatch, on_cpu)
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert len(given) > 15 and ("enable_sleep_mode" in given) == (not on_cpu)
    wanted = {*given, "distributed_executor_backend", "worker_extension_cls", "logprobs_mode"}
    assert wanted - known == set()


def test_workers_sleep_wake_and_load_as_we_ask():
    from vllm.v1.worker.gpu_worker import Worker

    signature_of_method(Worker.sleep).bind(level=2)
    signature_of_method(Worker.wake_up).bind(["weights"])
    signature_of_method(Worker.reload_weights).bind(weights_iterator=())


def test_outputs_have_the_fields_that_we_read():
    from vllm import CompletionOutput, RequestOutput

    fields = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {"token_ids", "logprobs", "finish_reason", "routed_experts"} <= fields
    assert {"request_id", "outputs", "finished"} <= {*inspect.signature(RequestOutput).parameters}


def test_routes_come_from_the_first_rank_and_a_scheduler_needs_no_connector():
    """The premises of `ask_first_rank_for_routes`."""
    from vllm.config import AuxOutputConfig, ParallelConfig
    from vllm.config.parallel import DistributedExecutorBackend
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.v1.core.sched.scheduler import Scheduler

    taken = inspect.signature(AuxOutputSchedulerConnector.take_output).parameters
    assert [*taken] == ["self", "request", "output"]
    assert "is_first_rank" in inspect.getsource(AuxOutputWorkerConnector.__init__)
    assert AuxOutputConfig(enable_return_routed_experts=True).enabled
    assert "distributed_executor_backend" in inspect.signature(ParallelConfig).parameters
    assert "external_launcher" in get_args(DistributedExecutorBackend)
    connector = "self.aux_output_connector"
    scheduler = ast.parse(textwrap.dedent(inspect.getsource(Scheduler)))
    guarded = set[int]()
    used = set[int]()
    for node in ast.walk(scheduler):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == connector:
            used.add(node.lineno)
        if isinstance(node, ast.If) and f"{connector} is not None" in ast.unparse(node.test):
            guarded.update(range(node.lineno, (node.end_lineno or 0) + 1))
    assert used and used <= guarded


def test_parallel_state_makes_groups_by_the_names_that_world_of_replaces():
    from vllm.distributed import parallel_state

    source = inspect.getsource(parallel_state)
    assert "torch.distributed.new_group(" in source
    assert "torch.distributed.get_world_size()" in source
    assert not hasattr(parallel_state, "new_group")
    assert not hasattr(parallel_state, "get_world_size")


def test_adapters_have_a_rank_that_vllm_knows():
    from vllm.config.lora import MaxLoRARanks

    assert 8 in get_args(MaxLoRARanks)
