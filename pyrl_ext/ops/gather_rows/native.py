import torch
from torch import Tensor

from pyrl_ext.ops._native import C, refuse_device, threads


def refuse(src: Tensor, rows: Tensor, fill: Tensor) -> str | None:
    return refuse_device(src, "gather_rows")


def gather_rows(src: Tensor, rows: Tensor, fill: Tensor) -> Tensor:
    src, rows, fill = src.contiguous(), rows.contiguous(), fill.contiguous()
    out = src.new_empty(rows.numel(), src.shape[1])
    src_, rows_, fill_, out_ = (t.data_ptr() for t in (src, rows, fill, out))
    num_out, row_bytes = rows.numel(), src.shape[1] * src.element_size()
    if src.is_cuda:
        with torch.cuda.device(src.device):
            stream = torch.cuda.current_stream().cuda_stream
            C.gather_rows_cuda(src_, rows_, fill_, out_, num_out, row_bytes, stream)
    else:
        C.gather_rows_cpu(src_, src.shape[0], rows_, fill_, out_, num_out, row_bytes, threads())
    return out
