"""Problems of dynamic context parallelism for tests: lengths, grids and limits of every kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pyrl_ext.plan.forecast.cp_problem import CostModel, Exchange
from pyrl_ext.plan.model.alignment import alignment

COST = CostModel(
    token_seconds=1e-6,
    square_seconds=1e-10,
    launch_seconds=2e-5,
    exchanges=(Exchange(8, 1e-5, 1e-8), Exchange(512, 2e-5, 5e-8)),
)


@st.composite
def problems(draw: st.DrawFn, most_samples: int = 40) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `plan_dynamic_cp` that it accepts, sizes of any kind among them."""
    least = draw(st.sampled_from([1, 1, 1, 2, 3]))
    ranks = least * draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 24]))
    sizes = [s for s in (least * 2**i for i in range(8)) if s <= ranks]
    most = draw(st.sampled_from([*sizes, ranks, None]))
    tp, fp8 = draw(st.sampled_from([1, 2])), draw(st.booleans())
    limit = draw(st.integers(1, 12)) * alignment(tp, 2, True)
    top = limit * (ranks if most is None else most) // alignment(tp, most or ranks, fp8)
    top *= alignment(tp, most or ranks, fp8)
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    lengths = st.one_of(st.integers(1, top), st.integers(1, min(top, limit)))
    seqlens = draw(st.lists(lengths, min_size=1, max_size=most_samples))
    options = dict(min_cp_size=least, max_cp_size=most, tp_size=tp, fp8=fp8)
    return (seqlens, ranks, limit), dict(**options, pp_size=pp, vpp_size=vpp)
