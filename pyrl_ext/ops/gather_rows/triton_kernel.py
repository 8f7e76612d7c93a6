"""Every tensor comes as integers of its element's width, so a kernel serves all dtypes."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])  # a bound
def gather_rows_kernel(
    srcs,  # each [N, WIDTHS] read, rows `strides` apart
    strides,
    rows,  # [M] int64, -1 or a row of the sources
    fills,  # FILL_ROWS: each [WIDTHS] read; else an element of each
    outs,  # each [M, WIDTHS] written
    firsts,  # of the programs, those that begin a field, and their number
    M,
    WIDTHS: tl.constexpr,
    TALL: tl.constexpr,  # rows of a tile
    WIDE: tl.constexpr,  # columns of a tile
    FILL_ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    for f in tl.static_range(len(WIDTHS)):  # type: ignore
        if program >= firsts[f] and program < firsts[f + 1]:
            across: tl.constexpr = (WIDTHS[f] + WIDE[f] - 1) // WIDE[f]
            tile = program - firsts[f]
            m = (tile // across).to(tl.int64) * TALL[f] + tl.arange(0, TALL[f])
            c = tile % across * WIDE[f] + tl.arange(0, WIDE[f])
            row = tl.load(rows + m, m < M, other=-1)[:, None]
            inside = (m < M)[:, None] & (c < WIDTHS[f])[None, :]
            value = tl.load(srcs[f] + row * strides[f] + c[None, :], inside & (row >= 0), other=0)
            if FILL_ROWS:
                padding = tl.load(fills[f] + c[None, :], inside & (row < 0), other=0)
            else:
                padding = tl.cast(fills[f], value.dtype)  # Triton makes a fill of 1 a constant
            tl.store(
                outs[f] + m[:, None] * WIDTHS[f] + c[None, :],
                tl.where(row >= 0, value, padding),
                inside,
            )
