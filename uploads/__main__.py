"""`destinations uploads status|resume|retry|verify|gc SPOOL`, as `python -m uploads`."""

import sys

from .command_line import main

if __name__ == "__main__":
    sys.exit(main())
