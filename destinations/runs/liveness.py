"""Whether a run lives: one threshold, and one table of statuses."""

from destinations.run_directory.layout import TERMINAL_STATUSES

__all__ = ["HEARTBEAT_SECONDS", "is_alive", "is_terminal"]

# The writer of a run directory touches the heartbeat every second, and its lock counts as stale after the same three minutes;
# stable-pretraining's own scanner has this threshold too.
HEARTBEAT_SECONDS = 180.0

# What else the writers of other formats call an end. Lightning's "finished" is stored by stable-pretraining as it comes.
_TERMINAL = TERMINAL_STATUSES | {"finished", "orphaned", "killed"}


def is_terminal(status: str) -> bool:
    """Says whether a run of this status has ended, and says so itself."""
    return status in _TERMINAL


def is_alive(status: str, heartbeat_at: float | None, now: float) -> bool:
    """Says whether a run is being written: it has not ended, and its heartbeat is fresh.

    Args:
        status: of the run.
        heartbeat_at: when the heartbeat was last touched; a clock that goes ahead of ours counts as fresh.
        now: seconds since 1970.
    """
    return not is_terminal(status) and heartbeat_at is not None and heartbeat_at >= now - HEARTBEAT_SECONDS
