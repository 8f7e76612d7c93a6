"""These tests run where `tests.te.formulas` was loaded first: ``make test-te``."""

import sys

collect_ignore_glob = [] if "tests.te.formulas" in sys.modules else ["test_*.py"]
