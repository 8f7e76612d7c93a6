import triton
import triton.language as tl

LOG2E = tl.constexpr(1.44269504)
LN2 = tl.constexpr(0.693147181)
VANISHES = tl.constexpr(-200.0)  # 2^z is 0 from here on; takes the place of -inf in products


# Rows are read one by one, so that nothing is gained by a variant for aligned ones
_ROW = ["targets", "scale", "max", "log_sum", "entropy", "grad_logprob", "grad_entropy"]


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=_ROW[:2])
def token_logprob_stats_kernel(
    logits,  # [T, columns] read
    targets,  # [T] int64
    scale,  # [T] float32
    keep,  # [T, columns] uint8, not read unless MASKED
    out,  # [4, T] float32, written
    T,
    columns,
    first,
    width,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = t * columns
    own = tl.load(scale + t)
    rate = own * LOG2E
    lane = tl.arange(0, BLOCK)
    top = -float("inf")
    base = 0.0
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        c = start + lane
        inside = c < width
        if MASKED:
            inside = inside & (tl.load(keep + row + c, inside, other=0) != 0)
        x = tl.load(logits + row + c, inside, other=-float("inf")).to(tl.float32)
        rise = tl.maximum(top, tl.max(x, 0))
        base_new = tl.where(rise == -float("inf"), 0.0, rise)  # -inf - -inf is not a number
        shift = tl.where(rise == top, 0.0, (base - base_new) * rate)
        shift = tl.where(top == -float("inf"), 0.0, tl.maximum(shift, VANISHES))
        factor = tl.exp2(shift)
        z = (x - base_new) * rate
        e = tl.exp2(z)
        weighted = factor * (weighted + shift * total) + e * tl.maximum(z, VANISHES)
        total = factor * total + e
        top, base = rise, base_new
    target = tl.load(targets + t) - first
    mine = (target >= 0) & (target < width)
    kept = mine
    if MASKED:
        kept = mine & (tl.load(keep + row + target, mine, other=0) != 0)
    value = tl.load(logits + row + target, kept, other=-float("inf")).to(tl.float32)
    weight = tl.sum(weighted, 0)
    tl.store(out + t, top)
    tl.store(out + T + t, tl.where(weight == weight, tl.sum(total, 0), weight))  # NaN shows
    tl.store(out + 2 * T + t, weight * LN2)
    tl.store(out + 3 * T + t, tl.where(mine, value, 0.0))


@triton.jit(do_not_specialize_on_alignment=_ROW)
def token_logprob_grad_kernel(
    logits,  # [T, columns] read
    targets,  # [T] int64
    scale,  # [T] float32, as the next five
    max,
    log_sum,
    entropy,
    grad_logprob,
    grad_entropy,
    keep,  # [T, columns] uint8, not read unless MASKED
    out,  # [T, columns] written, may be the logits
    columns,
    first,
    width,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = t * columns
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(scale + t)
    top = tl.load(max + t)
    gl = tl.load(grad_logprob + t)
    ge = tl.load(grad_entropy + t)
    dead = (top == -float("inf")) | ((gl == 0) & (ge == 0))
    inside = (c < width) & (dead == 0)
    if MASKED:
        inside = inside & (tl.load(keep + row + c, inside, other=0) != 0)
    x = tl.load(logits + row + c, inside, other=-float("inf")).to(tl.float32)
    z = (x - top) * (own * LOG2E) - tl.load(log_sum + t) * LOG2E
    constant = -own * (gl + ge * tl.load(entropy + t))
    g = tl.exp2(z) * (tl.maximum(z, VANISHES) * (-own * ge * LN2) + constant)
    g += tl.where(c == tl.load(targets + t) - first, own * gl, 0.0)
    g = tl.where(inside, g, 0.0)
    tl.store(out + row + c, g.to(out.dtype.element_ty), c < columns)


_STATS = dict(targets="*i64", scale="*fp32", keep="*u8", out="*fp32", T="i32")
_ROWS = dict.fromkeys(("max", "log_sum", "entropy", "grad_logprob", "grad_entropy"), "*fp32")
_SIZES = dict(columns="i32", first="i32", width="i32", MASKED="constexpr", BLOCK="constexpr")

BUILDS: dict[str, tuple[triton.JITFunction, dict[str, str], dict[str, object]]] = {
    f"{name} {dtype}{' masked' if masked else ''}": (
        kernel,
        {"logits": f"*{dtype}", **signature(dtype)},
        dict(MASKED=masked, BLOCK=4096),
    )
    for name, kernel, signature in (
        ("stats", token_logprob_stats_kernel, lambda dtype: {**_STATS, **_SIZES}),
        (
            "grad",
            token_logprob_grad_kernel,
            lambda dtype: dict(
                targets="*i64", scale="*fp32", **_ROWS, keep="*u8", out=f"*{dtype}", **_SIZES
            ),
        ),
    )
    for dtype in ("bf16", "fp32")
    for masked in (False, True)
}
