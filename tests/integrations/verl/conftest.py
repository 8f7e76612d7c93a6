"""These tests run where verl is installed: ``make test-verl``."""

from importlib.util import find_spec

SPEC = find_spec("verl")  # without an origin: a folder of that name
collect_ignore_glob = [] if SPEC and SPEC.origin else ["test_*.py"]
