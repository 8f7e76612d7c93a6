"""Adapters between this package and megatron-core, one file each."""

from pyrl_ext.parallel.groups import import_megatron

import_megatron()
