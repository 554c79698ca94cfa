"""Where a spool is when nobody says: a place that a second start of the same training finds again."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["default_spools"]


def default_spools(store_uri: str) -> Iterator[Path]:
    """Spools for this store, numbered from 0, without end. A queue takes the first that no live queue has: what an earlier process left there is uploaded along.

    Under `$UPLOADS_HOME`, else `$XDG_STATE_HOME/uploads`, else `~/.local/state/uploads`.
    """
    home = os.environ.get("UPLOADS_HOME")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    root = Path(home or f"{state}/uploads").expanduser()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", store_uri.partition("?")[0]).strip("-")[:60]
    digest = hashlib.sha256(store_uri.encode()).hexdigest()[:8]
    for number in itertools.count():
        yield root / f"{readable}-{digest}" / str(number)
