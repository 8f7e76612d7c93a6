"""These tests run where wandb is installed: ``PYTHONPATH=.venv/wandb``."""

from importlib.util import find_spec

SPEC = find_spec("wandb")  # without an origin: a folder of that name
collect_ignore_glob = [] if SPEC and SPEC.origin else ["test_*.py"]
