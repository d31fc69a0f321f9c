"""`python -m memtraffic` is the command `memtraffic`."""

import sys

from memtraffic.cli import main

if __name__ == "__main__":
    sys.exit(main())
