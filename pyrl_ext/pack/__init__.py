"""Samples to the rows of a rank: layout, schedule, batch, microbatch."""

from typing import TYPE_CHECKING

from pyrl_ext.lazy import exported

if TYPE_CHECKING:
    from pyrl_ext.pack.layout import TokenLayout
    from pyrl_ext.pack.thd import packed_seq_params
    from pyrl_ext.pack.unpack import unpack_rows

__all__ = ["TokenLayout", "packed_seq_params", "unpack_rows"]

__getattr__ = exported(
    __name__,
    {"TokenLayout": "layout", "packed_seq_params": "thd", "unpack_rows": "unpack"},
)
