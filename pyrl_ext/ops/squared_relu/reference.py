import torch.nn.functional as F
from torch import Tensor

from pyrl_ext.ops.dtypes import accum_dtype


def squared_relu(x: Tensor, weight: Tensor) -> Tensor:
    positive = F.relu(x.to(accum_dtype(x.dtype)))
    return (positive.square() * weight[:, None]).to(x.dtype)


def squared_relu_grad(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = accum_dtype(x.dtype)
    grad = grad.to(wide)
    positive = F.relu(x.to(wide))
    of_x = 2 * grad * positive * weight[:, None]
    return of_x.to(x.dtype), (grad * positive.square()).sum(-1)
