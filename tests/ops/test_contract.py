"""The contract of every operator: opcheck, full graphs, shapes without data, bad arguments, Triton.

That backends equal the reference, and the gradients, is in the file of each operator."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyrl_ext import ops
from pyrl_ext.ops import use_backend
from pyrl_ext.ops._op import Op
from tests.helpers.bad_arguments import Bad, bad_calls
from tests.helpers.contract_cases import CASES, every_op, results
from tests.helpers.deadline import DEADLINE
from tests.helpers.python_path import python_path

pytestmark = pytest.mark.multiprocess


@pytest.fixture(params=CASES)
def call(request: pytest.FixtureRequest) -> tuple[Op, tuple[Any, ...]]:
    name, args = CASES[request.param]
    copies = tree_map(lambda x: _copy(x) if isinstance(x, Tensor) else x, args)
    return every_op()[name], tuple(copies)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def test_Op_has_a_case_for_every_operator():
    assert {name for name, _ in CASES.values()} == every_op().keys()


def test_Op_passes_opcheck(call):
    op, args = call
    torch.library.opcheck(op.overload, args)


def test_Op_compiles_without_a_graph_break(call):
    op, args = call
    args = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, args)
    eager = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
    torch._dynamo.reset()  # one function compiled for every operator
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    out = compiled(*args)
    ours = [args[0]] if out is None else [out] if isinstance(out, Tensor) else list(out)
    for a, b in zip(ours, results(op, eager), strict=True):
        assert torch.equal(a, b)


def test_Op_gives_shapes_and_dtypes_of_meta_tensors(call):
    op, args = call
    args = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, args)
    host = {"layers"}  # arguments that stay on the host
    names = [argument.name for argument in op.overload._schema.arguments]
    meta = [
        tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, value)
        if name not in host
        else value
        for name, value in zip(names, args, strict=False)
    ]
    for a, b in zip(results(op, tuple(meta)), results(op, args), strict=True):
        assert a.is_meta and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# Bad arguments ----------------------------------------------------------------------------------

BAD = bad_calls()


def test_Op_has_bad_arguments_for_every_operator():
    assert {bad.op for bad in BAD} == every_op().keys()


REFUSALS = [
    pytest.param(bad, backend.name, id=f"{n} {bad.op}-{backend.name}")
    for n, bad in enumerate(BAD)
    for backend in every_op()[bad.op].backends
    if backend.name not in ("triton", "causal_conv1d", "fla", "mamba_ssm")
]


@pytest.mark.parametrize(("bad", "backend"), REFUSALS)
def test_Op_refuses_arguments_that_do_not_fit(bad: Bad, backend: str):
    with use_backend(backend), pytest.raises(Exception) as raised:
        bad.call()
    where, _, message = str(raised.value).partition(": ")
    assert type(raised.value) is bad.error
    assert where in (bad.op, bad.op.removesuffix("_grad")) and bad.message in message
    if bad.error is IndexError:  # the whole of it
        assert message.startswith(bad.message)


FUNCTIONS = {
    name: function
    for name, function in vars(ops).items()
    if inspect.isfunction(function) and name in {bad.op for bad in BAD}
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_refuse_what_is_no_tensor(name: str):
    function = FUNCTIONS[name]
    given = inspect.signature(function).parameters.values()
    required = [each for each in given if each.default is each.empty]
    with pytest.raises(TypeError, match=rf"^{name}: \w+ is 1\.5, expected a tensor$"):
        function(*(1.5 for _ in required))


def test_gather_rows_refuses_a_number_as_fill():
    fill: Any = -1.0
    with pytest.raises(TypeError, match=r"^gather_rows: fill is -1\.0, expected a tensor$"):
        ops.gather_rows(torch.zeros(3, 2), torch.tensor([0, -1]), fill)


# Triton, interpreted: one process for all, since importing torch and Triton takes longest ---------

# operators that a file of tests speaks for together
GRADS = ("replay_probs", "rms_norm", "swiglu", "latent_keys", "expert_rows")
FILES = {f"{name}_grad": name for name in GRADS} | {
    f"token_logprob_{name}": "token_logprob"
    for name in ("stats", "rows", "combine", "grad", "grad_")
}
FILES |= {"invert_rows": "gather_rows", "digests": "digest"}
INTERPRET = """
import importlib, json, sys, traceback
failures = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"tests.ops.test_{name}").triton_equals_reference()
    except BaseException:
        failures[name] = traceback.format_exc()
print(json.dumps(failures))
"""
TRITON = sorted(
    {
        FILES.get(name, name)
        for name, op in every_op().items()
        if "triton" in [backend.name for backend in op.backends]
    }
)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """The tracebacks of the files whose Triton kernels differ from the reference."""
    pytest.importorskip("triton")
    here = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": python_path(here)}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRET, *TRITON],
        env=env,
        check=True,
        timeout=DEADLINE,
        stdout=subprocess.PIPE,
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", TRITON)
def test_Op_by_triton_equals_the_reference_interpreted(interpreted: dict[str, str], name: str):
    assert name not in interpreted, interpreted[name]
