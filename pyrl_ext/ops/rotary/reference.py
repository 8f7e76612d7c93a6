import torch
from torch import Tensor


def rotary(
    query: Tensor, key: Tensor, turns: Tensor, last: bool, source: str, result: str, back: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = turns[:, None].chunk(2, -1)

    def turned(heads: Tensor) -> Tensor:
        plain = heads.shape[-1] - turns.shape[1]
        first, second = heads.split([plain, turns.shape[1]][:: 1 if last else -1], -1)
        pairs = second if last else first
        a, b = _pairs(pairs, source).to(turns.dtype).unbind(-2 if source == "halves" else -1)
        s = -sin if back else sin
        both = torch.stack((a * cos - b * s, b * cos + a * s), -2 if result == "halves" else -1)
        out = both.flatten(-2).to(heads.dtype)
        return torch.cat((first, out) if last else (out, second), -1)

    return turned(query), turned(key)


def _pairs(x: Tensor, place: str) -> Tensor:
    return x.unflatten(-1, (2, -1) if place == "halves" else (-1, 2))
