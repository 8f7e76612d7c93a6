import triton
import triton.language as tl


@triton.jit
def gather_rows_kernel(
    src,  # [N, C] read
    rows,  # [M] int64, -1 or a row of src
    fill,  # [C] read
    out,  # [M, C] written
    C,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    value = tl.load(src + row * C + c, inside & (row >= 0), other=0)
    padding = tl.load(fill + c, inside & (row < 0), other=0)
    tl.store(out + i * C + c, tl.where(row >= 0, value, padding), inside)
