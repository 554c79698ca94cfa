"""What is logged is what our packages log."""

from tests.our_log import caplog

__all__ = ["caplog"]
