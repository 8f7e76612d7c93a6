import triton
import triton.language as tl


@triton.jit
def gather_routes_kernel(
    routes,  # [T, L, K] read, rows row_stride elements apart
    rows,  # [M] int64, -1 or a row of routes
    slots,  # [l] int64
    out,  # [l, M, K] written
    row_stride,
    M,
    num_experts,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, PADDED_K)[None, :]
    layer = tl.program_id(1).to(tl.int64)
    inside = (m < M) & (j < K)
    row = tl.load(rows + m, m < M, other=-1)
    slot = tl.load(slots + layer)
    expert = tl.load(routes + row * row_stride + slot * K + j, inside & (row >= 0), other=0)
    fill = (m * K + j) % num_experts
    value = tl.where(row >= 0, expert.to(tl.int64), fill)
    tl.store(out + (layer * M + m) * K + j, value.to(out.dtype.element_ty), inside)
