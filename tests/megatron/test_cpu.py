"""Runs on a CPU keep freed memory."""

import platform
import resource

import pytest
import torch

from pyrl_ext.megatron import cpu


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_install_lets_malloc_keep_the_memory_of_freed_tensors():
    """Else each of 64 MiB comes with 16,384 page faults; the heap grows for the first two."""
    cpu.install()
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(1 << 24)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[-1] < 1000, faults
