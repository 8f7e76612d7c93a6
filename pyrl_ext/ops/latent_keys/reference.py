import torch
from torch import Tensor


def latent_keys(both: Tensor, shared: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    common = shared[:, None].expand(-1, both.shape[1], -1)
    return torch.cat([both[..., :plain], common], -1), both[..., plain:].clone(
        memory_format=torch.contiguous_format
    )


def latent_keys_grad(key: Tensor, value: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(key.dtype, torch.float32)
    shared = key[..., plain:].sum(1, dtype=wide).to(key.dtype)
    return torch.cat([key[..., :plain], value], -1), shared
