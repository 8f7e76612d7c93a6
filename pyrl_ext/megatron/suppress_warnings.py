"""Suppress the warnings that megatron-core prints at every build."""

from __future__ import annotations

import logging
import warnings
from typing import Any


class quiet:
    """Inside, megatron's warnings are off: GPTModel deprecated, no TransformerEngine, no Apex."""

    def __enter__(self) -> None:
        self.caught = warnings.catch_warnings()
        self.caught.__enter__()
        warnings.simplefilter("ignore")
        self.before = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *_: Any) -> None:
        logging.disable(self.before)
        self.caught.__exit__(None, None, None)
