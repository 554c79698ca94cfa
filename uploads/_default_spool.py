"""Where a spool is when nobody says: a place that a second start of the same training finds again."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from pathlib import Path

from .ownership import owner_of

__all__ = ["default_spool"]


def default_spool(store_uri: str) -> Path:
    """The first spool for this store that no live queue uses: what an earlier process left there is uploaded along.

    Under `$UPLOADS_HOME`, else `$XDG_STATE_HOME/uploads`, else `~/.local/state/uploads`.
    """
    home = os.environ.get("UPLOADS_HOME")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    root = Path(home or f"{state}/uploads").expanduser()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", store_uri.partition("?")[0]).strip("-")[:60]
    digest = hashlib.sha256(store_uri.encode()).hexdigest()[:8]
    candidates = (root / f"{readable}-{digest}" / str(number) for number in itertools.count())
    return next(path for path in candidates if owner_of(path / "queue.lock") is None)
