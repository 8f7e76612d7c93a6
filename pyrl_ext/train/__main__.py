"""``python -m pyrl_ext.train``."""

import sys

from pyrl_ext.train import main

if __name__ == "__main__":
    sys.exit(main())
