"""`python -m uploads status|resume|retry|verify|gc SPOOL`."""

import sys

from .command_line import main

if __name__ == "__main__":
    sys.exit(main())
