"""`python -m stepwell`, and so `torchrun ... -m stepwell`."""

import sys

from stepwell.cli import main

if __name__ == "__main__":
    sys.exit(main())
