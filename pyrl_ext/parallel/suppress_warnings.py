"""Warnings of other packages that the user of a run cannot act on; all of them are named here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

# what it says, where that is enough to find it -> its category
HIDDEN: dict[str, type[Warning]] = {
    # the plan's backend decides, not which packages happen to be there
    "(Transformer Engine and )?Apex (are|is) not installed": UserWarning,
    ".*without the NVRx async checkpointing": UserWarning,
    "`torch.distributed.* is deprecated": FutureWarning,  # megatron-core calls it
    "The .grad attribute of a Tensor that is not a leaf": UserWarning,
}


def hide_warnings() -> None:
    """Hide the warnings of `HIDDEN`, and that torch finds nvcc but no GPU; for the whole process.

    megatron-core says most of them when it is imported, so this has to come before.
    """
    for message, category in HIDDEN.items():
        warnings.filterwarnings("ignore", message, category)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def hide_gpu_warnings() -> None:
    """Hide what megatron-core advises for GPUs, in a process that runs on the CPU."""
    warnings.filterwarnings("ignore", ".*CUDA_DEVICE_MAX_CONNECTIONS")


@contextmanager
def quiet() -> Generator[None]:
    """Inside, warnings are off: what megatron-core says at every build of a model or optimizer."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
