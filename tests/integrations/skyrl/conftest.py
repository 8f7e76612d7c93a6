"""These tests run where SkyRL is installed: ``make test-skyrl``."""

from importlib.util import find_spec

SPEC = find_spec("skyrl")  # without an origin: a folder of that name
collect_ignore_glob = [] if SPEC and SPEC.origin else ["test_*.py"]
