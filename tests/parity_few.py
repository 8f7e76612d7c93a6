"""The layouts that CI compares with one process, in one process that imports all once.

python -m tests.parity_few
"""

import sys

from tests import parity, parity_modules, parity_objectives


def main() -> int:
    bad = [
        parity.main(["--pairs"]),
        parity_modules.main(["--few"]),
        parity_objectives.main(["--few"]),
    ]
    return int(any(bad))


if __name__ == "__main__":
    sys.exit(main())
