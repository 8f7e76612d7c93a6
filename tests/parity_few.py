"""The layouts that CI compares with one process, in one process that imports all once.

python -m tests.parity_few

The ranks have to follow NCCL's rules (`tests/helpers/nccl_rules`).
"""

import os
import sys

from tests import parity, parity_modules, parity_objectives


def main() -> int:
    os.environ["PYRL_NCCL_RULES"] = "1"
    bad = [
        parity.main(["--pairs"]),
        parity_modules.main(["--few"]),
        parity_objectives.main(["--few"]),
    ]
    return int(any(bad))


if __name__ == "__main__":
    sys.exit(main())
