"""`read_dump`: the collectives that NCCL's watchdog noted before it ended a process.

torch writes them as a pickle, and any program on the machine may have planted another one. So only plain
containers, texts and numbers are unpickled, from a regular file of this user.
"""

import io
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["OF_COLLECTIVE", "dump_path", "fresh_dump", "read_dump"]

OF_COLLECTIVE = (
    "profiling_name",
    "collective_seq_id",
    "process_group",
    "input_sizes",
    "state",
    "retired",
    "time_created_ns",
)
"""The kept fields of a collective."""

_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108  # torch's
# torch's names for it, the newer one first.
_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_MAX_BYTES = 64 << 20
_MAX_DEPTH = 4
_MAX_ITEMS = 64
_MAX_TEXT = 200


_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
)


class _Plain(pickle._Unpickler):  # noqa: SLF001
    """Only knows the opcodes of builtin containers, texts and numbers, which import and call nothing.

    Uses the unpickler in Python, because the one in C knows all opcodes and allocates as much memory as a
    damaged file asks for.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]]  # noqa: SLF001
        for code in _PLAIN
    }


def dump_path(rank: int) -> Path:
    """Returns the path to which NCCL's watchdog writes for a rank."""
    start = next((os.environ[one] for one in _VARIABLES if os.environ.get(one)), _DEFAULT)
    return Path(f"{start}{rank}")


def fresh_dump(rank: int, since: float, clock: Callable[[], float] = time.time) -> Path | None:
    """Returns the dump of a rank, if this user has written one after a time.

    Args:
        rank: the rank.
        since: the time, in seconds since 1970.
        clock: returns the current time; a dump from the future is ignored.
    """
    path = dump_path(rank)
    try:
        status = path.lstat()
    except OSError:
        return None
    is_ours = status.st_uid == os.getuid() and status.st_size <= _MAX_BYTES
    return path if is_ours and path.is_file() and since <= status.st_mtime <= clock() + 1 else None


def read_dump(path: Path, most: int) -> list[dict[str, Any]]:
    """Returns the last collectives of a dump, oldest first; none if the file is not a dump.

    Args:
        path: the path of the dump.
        most: the maximum number.
    """
    from uploads.disk import open_regular

    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        found = _Plain(io.BytesIO(data)).load() if len(data) <= _MAX_BYTES else {}
        entries = found["entries"][-most:]
        return [{name: _plain(one.get(name)) for name in OF_COLLECTIVE} for one in entries]
    except Exception:  # noqa: BLE001  # a damaged pickle raises anything
        return []


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns a value as JSON has it, of a bounded size."""
    match value:
        case None | bool():
            return value
        case int():
            return value if value.bit_length() <= 64 else None  # noqa: PLR2004
        case list() | tuple() if depth < _MAX_DEPTH:
            return [_plain(one, depth + 1) for one in value[:_MAX_ITEMS]]
    return str(value)[:_MAX_TEXT] if isinstance(value, str | float) else None
