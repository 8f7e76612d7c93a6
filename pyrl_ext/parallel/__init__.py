"""The machine: ranks and groups, heartbeats, host and device memory, clocks, downloads."""
