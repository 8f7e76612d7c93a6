import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])  # a bound
def sum_rows_kernel(
    src,  # [M, C] read, rows `stride` apart
    stride,
    starts,  # [N + 1] int64
    order,  # [M] int64
    out,  # [N, C] written
    N,
    C,
    TALL: tl.constexpr,  # rows of a tile
    WIDE: tl.constexpr,  # columns of a tile
    ACC: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    begin = tl.load(starts + n, n < N, other=0)
    count = tl.load(starts + n + 1, n < N, other=0) - begin
    inside = (n < N)[:, None] & (c < C)[None, :]
    total = tl.zeros((TALL, WIDE), ACC)
    for j in range(tl.max(count, 0)):
        m = tl.load(order + begin + j, j < count, other=0)
        more = inside & (j < count)[:, None]
        term = tl.load(src + m[:, None] * stride + c[None, :], more, other=0)
        total += term.to(ACC)
    tl.store(out + n[:, None] * C + c[None, :], total.to(out.dtype.element_ty), inside)


def _build(dtype: str, acc: tl.dtype, tall: int, wide: int):
    signature = {"src": f"*{dtype}", "stride": "i64", "starts": "*i64", "order": "*i64"}
    signature |= {"out": f"*{dtype}", "N": "i64", "C": "i32"}
    constexprs = {"TALL": tall, "WIDE": wide, "ACC": acc}
    return sum_rows_kernel, {**signature, **dict.fromkeys(constexprs, "constexpr")}, constexprs


BUILDS = {
    "sum_rows hidden bf16": _build("bf16", tl.float32, 2, 1024),
    "sum_rows hidden fp32": _build("fp32", tl.float32, 2, 1024),
    "sum_rows scalars fp32": _build("fp32", tl.float32, 256, 1),
    "sum_rows hidden fp64": _build("fp64", tl.float64, 2, 1024),
}
