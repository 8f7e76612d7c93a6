"""Bad arguments for every operator, with the error that each must raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrl_ext import ops
from pyrl_ext.ops import Inverse, invert_rows
from pyrl_ext.ops.causal_conv1d import grad_op as conv_grad
from pyrl_ext.ops.digest import digests
from pyrl_ext.ops.expert_rows import expert_rows_grad
from pyrl_ext.ops.gated_delta_rule import grad_op as delta_grad
from pyrl_ext.ops.latent_keys import latent_keys_grad
from pyrl_ext.ops.replay_probs import grad_op
from pyrl_ext.ops.rms_norm import rms_norm_grad
from pyrl_ext.ops.squared_relu import squared_relu_grad
from pyrl_ext.ops.ssd_scan import grad_op as ssd_grad
from pyrl_ext.ops.swiglu import swiglu_grad

NONE = torch.zeros(0, dtype=torch.int64)
ZERO = torch.zeros(1, dtype=torch.int64)


class Bad(NamedTuple):
    """A call that fails.

    Args:
        op: of `pyrl_ext.ops`, by name.
        call: makes it.
        error: the class.
        message: what follows ``<op>: ``, or a part of it.
    """

    op: str
    call: Callable[[], Any]
    error: type[Exception]
    message: str


def of(op: str, run: Callable[..., Any] | None = None) -> Callable[..., Bad]:
    """Makes bad calls of an operator: of the error's class, its message, and the arguments.

    ``run``: that of an operator which `pyrl_ext.ops` does not export.
    """
    called = run or getattr(ops, op)

    def bad(error: type[Exception], message: str, *args: Any, **named: Any) -> Bad:
        return Bad(op, partial(called, *args, **named), error, message)

    return bad


def _gather_rows() -> list[Bad]:
    bad = of("gather_rows")
    invert = of("invert_rows")
    src = torch.zeros(3, 2)
    fill = torch.zeros(2)
    two = torch.tensor([0, 1])
    row = "expected -1 (fill) or a row of src in [0, 3)"
    floats = Inverse(torch.zeros(4), torch.zeros(2))
    sizes = "starts [0], order [0], expected [3 + 1] and [2]"
    return [
        bad(ValueError, "fill [3]", src, ZERO, torch.zeros(3)),
        bad(TypeError, "torch.int32", src, ZERO.int(), fill),
        bad(TypeError, "fill is torch.float16, expected torch.float32 for", src, ZERO, fill.half()),
        bad(ValueError, "src is on meta, rows on cpu, fill on cpu", src.to("meta"), ZERO, fill),
        bad(ValueError, sizes, src, two, fill, Inverse(NONE, NONE)),
        bad(TypeError, "torch.float32, torch.float32, expected", src, two, fill, floats),
        bad(IndexError, f"rows[1] is 7, {row}", src, torch.tensor([0, 7, 7]), fill),
        bad(IndexError, f"rows[1] is -2, {row}", src, torch.tensor([0, -2, -2]), fill),
        invert(IndexError, f"rows[1] is 3, {row}", torch.tensor([0, 3, 4]), 3),
    ]


def _digests() -> list[Bad]:
    bad = of("digests", digests)
    one = torch.zeros(3)
    return [
        bad(ValueError, "0 tensors, expected at least one", []),
        bad(TypeError, "tensors[1] is 1.5, expected a tensor", [one, 1.5]),
        bad(ValueError, "tensors[1] is on meta, tensors[0] on cpu", [one, one.to("meta")]),
        bad(TypeError, "tensors[1] is torch.complex64, expected a real", [one, one + 0j]),
    ]


def _gather_fields() -> list[Bad]:
    bad = of("gather_fields")
    field = torch.zeros(3)
    no_bool = "a fill is 2.0, expected a number that torch.bool"
    fields = "0 fields, 0 fills, expected one fill a field, and a field"
    row = "rows[1] is 3, expected -1 (fill) or a row of src in [0, 3)"
    return [
        bad(ValueError, fields, [], ZERO, []),
        bad(ValueError, "1 fields, 2 fills", [field], ZERO, [0, 1]),
        bad(TypeError, "rows is torch.int32 [1]", [field], ZERO.int(), [0]),
        bad(ValueError, "fields[1] is [2], fields[0] [3]", [field, field[:2]], ZERO, [0, 0]),
        bad(TypeError, "torch.complex64, expected a real", [field + 0j], ZERO, [0]),
        bad(ValueError, "Use gather_rows", [torch.zeros(3, requires_grad=True)], ZERO, [0]),
        bad(ValueError, "fields[0] is on meta, rows on cpu", [field.to("meta")], ZERO, [0]),
        bad(ValueError, "a fill is 0.5, expected a number that torch.int64", [ZERO], ZERO, [0.5]),
        bad(ValueError, no_bool, [ZERO.bool()], ZERO, [2]),
        bad(ValueError, "a fill is -1.0", [ZERO.to(torch.uint8)], ZERO, [-1]),
        bad(ValueError, "a fill is nan", [ZERO], ZERO, [float("nan")]),
        bad(ValueError, "a fill is 9007199254740992.0", [ZERO], ZERO, [2**53]),
        bad(IndexError, row, [field], torch.tensor([0, 3]), [0]),
    ]


def _gather_routes() -> list[Bad]:
    good = {
        "routes": torch.zeros(50, 5, 4, dtype=torch.uint8),
        "rows": torch.zeros(9, dtype=torch.int64),
        "layers": (0,),
        "num_experts": 64,
    }
    bad = partial(of("gather_routes"), **good)
    far = torch.zeros(9, dtype=torch.int64).index_fill(0, torch.tensor([5]), 50)
    wide = torch.zeros(50, 5, 4).long()
    meta = torch.zeros(50, 5, 4, dtype=torch.uint8, device="meta")
    token = "rows[5] is 50, expected -1 (padding) or a token of routes in [0, 50)"
    return [
        bad(ValueError, "num_experts is 3, expected 4", num_experts=3),
        bad(ValueError, "num_experts is 300, expected 4 (the experts of a token", num_experts=300),
        bad(TypeError, "routes is torch.int64, expected one of", routes=wide),
        bad(TypeError, "layers is torch.int64 [1, 1]", layers=torch.tensor([[0]])),
        bad(TypeError, "rows is torch.int32, expected torch.int64", rows=far.int()),
        bad(ValueError, "rows [3, 3], expected [T, L, K], [M]", rows=far.view(3, 3)),
        bad(ValueError, "routes is on meta, rows on cpu, expected one device", routes=meta),
        bad(IndexError, token, rows=far),
        bad(IndexError, "layers[1] is 5, expected a slot of routes in [0, 5)", layers=[0, 5]),
    ]


def _expand_runs() -> list[Bad]:
    bad = of("expand_runs")

    def runs(message: str, *lengths: int) -> Bad:
        zeros = torch.zeros(len(lengths), dtype=torch.int64)
        return bad(ValueError, message, zeros, torch.tensor(lengths), 10)

    two = torch.zeros(2, dtype=torch.int64)
    three = torch.zeros(3, dtype=torch.int64)
    most = 2**63 - 1
    return [
        bad(ValueError, "starts [2], lengths [3], expected [R], [R]", two, three, 1),
        bad(ValueError, "expected [R]", two[None], two[None], 1),
        bad(TypeError, "starts is torch.int32", two.int(), two, 1),
        bad(ValueError, "size is -1", two, two, -1),
        runs("lengths[1] is -1, expected one in [0, 7], what is left of size 10", 3, -1),
        runs("lengths[2] is 3, expected one in [0, 2], what is left of size 10", 3, 5, 3, -1),
        runs(f"lengths[0] is {most}, expected one in [0, 10]", most, 2),
        runs(f"lengths[1] is {most}, expected one in [0, 6]", 4, most),
    ]


def _sum_rows() -> list[Bad]:
    bad = of("sum_rows")
    rows = torch.tensor([0, 0])
    one = invert_rows(rows, 1)
    short = Inverse(rows, rows[:1])

    def other(message: str, starts: Sequence[int], order: Sequence[int]) -> Bad:
        inverse = Inverse(torch.tensor(starts), torch.tensor(order))
        return bad(IndexError, message, torch.zeros(2, 3), rows, inverse)

    given = (
        "inverse.starts[1 : 3] is [0, 2] with entries [0, 2], expected rows of src in [0, 2), as "
        "invert_rows(rows, N) gives"
    )
    return [
        bad(ValueError, "src [3], rows [2], expected [M, ...], [M]", torch.zeros(3), rows, one),
        bad(TypeError, "src is torch.int64, expected one of", rows, rows, one),
        bad(TypeError, "rows is torch.int32", torch.zeros(2), rows.int(), one),
        bad(ValueError, "order [1], expected [N + 1] and [2]", torch.zeros(2), rows, short),
        bad(ValueError, "src is on meta", torch.zeros(2, device="meta"), rows, one),
        other(given, [0, 0, 2], [0, 2]),
        *(other("inverse.starts", starts, [0, 1]) for starts in ([0, 3, 2], [-1, 0, 2], [0, 2, 1])),
    ]


def _rotary() -> list[Bad]:
    bad = of("rotary")
    heads = torch.zeros(3, 2, 8)
    turns = torch.zeros(3, 4)
    meta: Any = heads.to("meta")
    floats = "expected torch.float32 for query"
    return [
        bad(ValueError, "query [3, 8], key", heads[:, 0], heads, turns),
        bad(ValueError, "turns [3, 3], expected", heads, heads, turns[:, :3]),
        bad(ValueError, "key [2, 2, 8], turns [3, 4], expected [T,", heads, heads[:2], turns),
        bad(ValueError, "expected R up to the width of heads", heads, heads[..., :2], turns),
        bad(TypeError, f"key is torch.float16, {floats}", heads, heads.half(), turns),
        bad(TypeError, f"turns is torch.bfloat16, {floats}", heads, heads, turns.bfloat16()),
        bad(ValueError, "key on meta, turns on cpu, expected one device", heads, meta, turns),
        bad(ValueError, "result 'thirds', expected", heads, heads, turns, result="thirds"),
    ]


def _latent_keys() -> list[Bad]:
    bad = of("latent_keys")
    both = torch.zeros(3, 2, 8)
    shared = torch.zeros(3, 4)
    key = torch.zeros(3, 2, 6)
    grad = of("latent_keys_grad", latent_keys_grad)
    wrong = "value [2, 2, 8], expected [T, heads, plain + R]"
    return [
        bad(ValueError, "both [3, 8], shared [3, 4], expected", both[:, 0], shared, 4),
        bad(ValueError, "shared [2, 4], expected", both, shared[:2], 4),
        bad(ValueError, "plain is 9, expected 0 to 8", both, shared, 9),
        bad(TypeError, "shared is torch.float16, expected torch.float32", both, shared.half(), 4),
        bad(ValueError, "shared on meta, expected one device", both, shared.to("meta"), 4),
        grad(ValueError, wrong, key, both[:2], 2),
    ]


def _expert_rows() -> list[Bad]:
    bad = of("expert_rows")
    chosen = torch.arange(8).expand(3, 8) < 2
    probs = torch.zeros(3, 8)
    more = chosen.logical_or(torch.arange(24).view(3, 8) == 13)
    grad = of("expert_rows_grad", expert_rows_grad)
    wrong = "grad [5], order [1], places [1], expected [T * K], [T * K], [T * K]"
    return [
        bad(ValueError, "routing_map [3, 8], probs [2, 8], expected [T, E]", chosen, probs[:2], 2),
        bad(ValueError, "top_k is 9, expected 1 to the 8 experts", chosen, probs, 9),
        bad(ValueError, "top_k is 0, expected 1 to the 8 experts", chosen, probs, 0),
        bad(TypeError, "routing_map is torch.uint8, expected torch.bool", chosen.byte(), probs, 2),
        bad(TypeError, "probs is torch.int64, expected one of [", chosen, probs.long(), 2),
        bad(ValueError, "routing_map is on cpu, probs on meta", chosen, probs.to("meta"), 2),
        bad(ValueError, "routing_map[1] has 3 experts, expected top_k 2", more, probs, 2),
        bad(ValueError, "routing_map[0] has 2 experts, expected top_k 3", chosen, probs, 3),
        grad(ValueError, wrong, torch.zeros(5), ZERO, ZERO, 1, 1),
    ]


def _rms_norm() -> list[Bad]:
    bad = of("rms_norm")
    x = torch.zeros(3, 4)
    weight = torch.zeros(4)
    grad = of("rms_norm_grad", rms_norm_grad)
    wrong = "grad [2, 4], x [3, 4], expected [..., W], [..., W]"
    halves = "x is torch.float16, expected one of [torch.float32"
    mixed = "weight is torch.bfloat16, expected torch.float32 for x"
    return [
        grad(ValueError, wrong, x[:2], x, weight, x[:, 0], None),
        bad(ValueError, "x [3, 4], weight [3], expected [..., W], [W]", x, x[:, 0], 1e-6),
        bad(ValueError, "x [], weight [4], expected [..., W], [W]", x[0, 0], weight, 1e-6),
        bad(ValueError, "x [3, 0], weight [0], expected W at least 1", x[:, :0], weight[:0], 1e-6),
        bad(TypeError, halves, x.half(), weight.half(), 1e-6),
        bad(TypeError, mixed, x, weight.bfloat16(), 1e-6),
        bad(ValueError, "x is on cpu, weight on meta", x, weight.to("meta"), 1e-6),
        bad(ValueError, "eps is 0.0, expected a number above 0", x, weight, 0.0),
    ]


def _swiglu() -> list[Bad]:
    bad = of("swiglu")
    rows = torch.zeros(3, 8)
    meta = torch.zeros(3, device="meta")
    grad = of("swiglu_grad", swiglu_grad)
    wide = "grad [3, 8], gate_up [3, 8], expected [N, W], [N, 2 W]"
    floats = "expected torch.float32 for gate_up of torch.float32"
    return [
        bad(ValueError, "gate_up [3, 7], expected [N, 2 W]", rows[:, 1:]),
        bad(ValueError, "gate_up [3], expected [N, 2 W]", meta),
        bad(TypeError, "gate_up is torch.int64, expected one of", rows.long()),
        bad(ValueError, "gate_up [3, 8], weight [2], expected [N, 2 W], [N]", rows, rows[:2, 0]),
        bad(TypeError, f"weight is torch.bfloat16, {floats}", rows, rows[:, 0].bfloat16()),
        bad(ValueError, "gate_up is on cpu, weight on meta, expected one device", rows, meta),
        grad(ValueError, wide, rows, rows, None),
    ]


def _squared_relu() -> list[Bad]:
    bad = of("squared_relu")
    rows = torch.zeros(3, 8)
    meta = torch.zeros(3, device="meta")
    grad = of("squared_relu_grad", squared_relu_grad)
    wrong = "grad [2, 8], x [3, 8], weight [3], expected [N, W], [N, W], [N]"
    return [
        bad(ValueError, "x [3], weight [3], expected [N, W], [N]", meta, meta),
        bad(TypeError, "x is torch.int64, expected one of", rows.long(), rows[:, 0]),
        bad(ValueError, "x [3, 8], weight [2], expected [N, W], [N]", rows, rows[:2, 0]),
        bad(ValueError, "x is on cpu, weight on meta, expected one device", rows, meta),
        grad(ValueError, wrong, rows[:2], rows, rows[:, 0]),
    ]


def _replay_probs() -> list[Bad]:
    good = {"scores": torch.zeros(3, 8), "ids": torch.zeros(3, 2).long()}
    bad = partial(of("replay_probs"), **good)

    def expert(entry: int) -> list[Bad]:
        scores = torch.zeros(9000, 8)
        ids = torch.zeros(9000, 2).long()
        ids[8001, 1] = ids[8500, 0] = entry
        message = f"ids[8001, 1] is {entry}, expected an expert in [0, 8)"
        grad: Bad = of("replay_probs_grad", grad_op)(
            IndexError, message, scores, scores, ids, "sum", 1
        )
        return [bad(IndexError, message, scores=scores, ids=ids), grad]

    many = torch.zeros(3, 9).long()
    shapes = "scores [3, 8], ids [4, 2], expected [M, E], [M, K]"
    norms = "norm is 'max', expected one of ['none', 'sum', 'softmax']"
    return [
        bad(ValueError, shapes, ids=torch.zeros(4, 2).long()),
        bad(ValueError, "9 ids a token, expected at most the 8 experts", ids=many),
        bad(TypeError, "ids is torch.float32, expected one of [torch.uint8", ids=torch.zeros(3, 2)),
        bad(TypeError, "scores is torch.int64, expected one of", scores=torch.zeros(3, 8).long()),
        bad(TypeError, "out_dtype is torch.int32, expected one of", out_dtype=torch.int32),
        bad(ValueError, norms, norm="max"),
        bad(ValueError, "scores is on meta, ids on cpu", scores=torch.zeros(3, 8, device="meta")),
        *expert(8),
        *expert(-1),
    ]


def _token_logprob() -> list[Bad]:
    logits = torch.zeros(9, 10)
    targets = torch.zeros(9).long()
    scale = torch.ones(9)
    rows = [torch.zeros(9)] * 5

    stats = partial(of("token_logprob_stats"), ValueError)
    combine = partial(of("token_logprob_combine"), ValueError)
    grad = partial(of("token_logprob_grad"), ValueError)
    over = partial(of("token_logprob_grad_"), ValueError)
    mask = torch.ones(9, 9, dtype=torch.bool)
    turned = logits.t().contiguous().t()
    double = [x.double() for x in (logits, scale, *rows)]
    doubles = "scale is torch.float64, expected torch.float32 for logits"
    wide = "width is 11, expected one in [0, 10]"
    devices = "logits is on cpu, targets on meta, scale on cpu, expected one device"
    kept = "keep_mask [9, 9], expected logits [T, V_local], targets [T], scale [T], keep_mask ["
    shapes = "stats [1, 4, 10], targets [9], scale [9], expected [R, 4, T], [T], [T]"
    halves = "stats is torch.float16, expected one of [torch.float32, torch.float64]"
    narrow = "dtype is torch.bfloat16 for torch.float64 logits, expected that of"
    return [
        stats(wide, logits, targets, scale, 0, 11),
        stats(doubles, logits, targets, scale.double(), 0, 10),
        stats("logits is torch.int64", targets[:, None], targets, scale, 0, 1),
        stats(devices, logits, targets.to("meta"), scale, 0, 10),
        stats(kept, logits, targets, scale, 0, 10, mask),
        of("token_logprob_rows")(ValueError, wide, logits, targets, scale, 11),
        combine(shapes, logits[None, :4], targets, scale, 10),
        combine(halves, torch.zeros(2, 4, 9).half(), targets, scale.half(), 10),
        grad(narrow, double[0], targets, double[1], 0, 10, *double[2:], dtype=torch.bfloat16),
        grad(wide, logits, targets, scale, 0, 11, *rows),
        over("expected contiguous ones", turned, targets, scale, 0, 10, *rows),
    ]


def _ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _sequences() -> list[Bad]:
    """Boundaries, for all operators along sequences."""
    x = torch.zeros(3, 2)
    steps = torch.zeros(3, 2)
    heads = torch.zeros(3, 2, 4)
    conv = x, torch.zeros(2, 4), None
    ssd = heads, steps, torch.zeros(2), heads, heads, torch.zeros(2)
    delta = heads, heads, heads, steps, steps
    runs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "causal_conv1d": (ops.causal_conv1d, conv),
        "ssd_scan": (ops.ssd_scan, (*ssd, ssd[5])),
        "gated_delta_rule": (ops.gated_delta_rule, delta),
        "causal_conv1d_grad": (conv_grad, (x, *conv)),
        "ssd_scan_grad": (ssd_grad, (heads, *ssd)),
        "gated_delta_rule_grad": (delta_grad, (heads, *delta)),
    }
    rule = "expected numbers that ascend from 0 to at most the 3 rows"
    wrong: list[tuple[type[Exception], str, Tensor]] = [
        (ValueError, f"cu_seqlens[2] is 1, {rule}", _ends(0, 2, 1, 3)),
        (ValueError, f"cu_seqlens[1] is 4, {rule}", _ends(0, 4)),
        (ValueError, f"cu_seqlens[0] is 1, {rule}", _ends(1, 3)),
        (ValueError, f"cu_seqlens[0] is -1, {rule}", _ends(-1, 3)),
    ]
    shapes: list[tuple[type[Exception], str, Tensor]] = [
        (ValueError, "cu_seqlens is [0], expected [S + 1]", _ends()),
        (TypeError, "cu_seqlens is torch.int64, expected torch.int32", ZERO),
        (ValueError, "cu_seqlens is on meta, the rows on cpu", _ends(0).to("meta")),
    ]
    return [
        of(name, run)(error, message, *args, ends)
        for name, (run, args) in runs.items()
        for error, message, ends in wrong + ([] if name.endswith("_grad") else shapes)
    ]


def _causal_conv1d() -> list[Bad]:
    x = torch.zeros(3, 2)
    weight = torch.zeros(2, 4)
    meta = torch.zeros(2, device="meta")

    bad = partial(of("causal_conv1d"), cu_seqlens=_ends(0))
    tall = torch.zeros(3, 4)
    wide = torch.zeros(2, 5)
    types = "weight is torch.bfloat16, expected torch.float32 for x"
    return [
        bad(ValueError, "x [3, 2], weight [3, 4], expected [T, D], [D, W]", x, tall, None),
        bad(ValueError, "weight is [2, 5], expected one of [2, 3, 4] weights", x, wide, None),
        bad(ValueError, "bias [3], expected [T, D], [D, W], [D]", x, weight, x[:, 0]),
        bad(TypeError, types, x, weight.bfloat16(), None),
        bad(ValueError, "x is on cpu, weight on cpu, bias on meta, expected", x, weight, meta),
    ]


def _ssd_scan() -> list[Bad]:
    x = torch.zeros(3, 4, 2)
    steps = torch.zeros(3, 4)
    head = torch.zeros(4)
    good = {"x": x, "dt": steps, "A": head, "B": x[:, :2], "C": x[:, :2], "D": head}
    bad = partial(of("ssd_scan"), **good, dt_bias=head, cu_seqlens=_ends(0))
    three = torch.zeros(3, 3, 2)
    return [
        bad(ValueError, "dt [3, 3], A [4]", dt=torch.zeros(3, 3)),
        bad(ValueError, "expected x [T, H, P], dt [T, H], A [H], B [T, G, N], C [T, G", C=three),
        bad(ValueError, "4 heads, 3 groups, expected as many heads in each", B=three, C=three),
        bad(TypeError, "A is torch.bfloat16, expected torch.float32 for x", A=head.bfloat16()),
        bad(ValueError, "D on meta, dt_bias on cpu, expected one device", D=head.to("meta")),
    ]


def _gated_delta_rule() -> list[Bad]:
    heads = torch.zeros(3, 4, 2)
    gate = torch.zeros(3, 4)
    good = {"q": heads, "k": heads, "v": heads, "g": gate, "beta": gate}
    bad = partial(of("gated_delta_rule"), **good, cu_seqlens=_ends(0))
    return [
        bad(ValueError, "expected q [T, H, K], k [T, H, K], v [T, H, V]", k=torch.zeros(3, 2, 2)),
        bad(ValueError, "g [3, 4], beta [3], expected", beta=torch.zeros(3)),
        bad(TypeError, "g is torch.bfloat16, expected torch.float32 for q", g=gate.bfloat16()),
        bad(ValueError, "v on meta, g on cpu, beta on cpu, expected one", v=heads.to("meta")),
    ]


def bad_calls() -> list[Bad]:
    makers = (
        _gather_rows,
        _digests,
        _gather_fields,
        _gather_routes,
        _expand_runs,
        _sum_rows,
        _rotary,
        _latent_keys,
        _expert_rows,
        _rms_norm,
        _swiglu,
        _squared_relu,
        _replay_probs,
        _token_logprob,
        _sequences,
        _causal_conv1d,
        _ssd_scan,
        _gated_delta_rule,
    )
    return [bad for make in makers for bad in make()]
