"""``python -m pyrl_ext.tools.measure``."""

import sys

from pyrl_ext.tools.measure import main

if __name__ == "__main__":
    sys.exit(main())
