"""``python -m pyrl_ext.tools.prebuild``."""

import sys

from pyrl_ext.tools.prebuild import main

if __name__ == "__main__":
    sys.exit(main())
