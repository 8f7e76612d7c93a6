"""Adapters between this package and megatron-core, one file each."""
