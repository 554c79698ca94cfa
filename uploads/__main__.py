"""`python -m uploads status|resume|verify|gc SPOOL`."""

import sys

from .commands import main

if __name__ == "__main__":
    sys.exit(main())
