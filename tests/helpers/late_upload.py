"""Copies that arrive when they are waited for and no earlier, as on a busy GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrl_ext.parallel.upload import Upload


class LateUpload(Upload):
    """On a CPU: until `arrive` an uploaded tensor holds other bytes than it should."""

    def __init__(self, device: torch.device | str = "cpu"):
        super().__init__(torch.device(device))
        self._late: list[tuple[Tensor, Tensor]] = []

    def __call__(self, host: Tensor) -> Tensor:
        there = torch.empty_like(host)
        there.view(torch.uint8).fill_(1)
        self._late.append((there, host.clone()))
        return there

    def arrive(self) -> None:
        while self._late:
            there, sent = self._late.pop()
            there.copy_(sent)
