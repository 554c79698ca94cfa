"""Regular expressions of filters, in bounded time.

`re` tries all ways in which a text may match, and keeps the interpreter from all other threads meanwhile:
`(a+)+$` takes minutes for thirty letters. A pattern that has only one way is matched here; all others in a
process that is ended when it takes too long. That costs some 50 ms, and a second for 100,000 runs.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from destinations.runs.budget import seconds_left, spend
from destinations.runs.errors import BudgetError

__all__ = ["matching"]

_MAX_SECONDS = 2.0
_LOOK_SECONDS = 0.1
# Neither repeats nor choices: a text matches from each of its places in one way or not at all.
_HAS_ONE_WAY = re.compile(r"(?:\(\?i\))?(?:\\.|[^\\*+?{|(])*", re.DOTALL)
_PROGRAM = """\
import json, re, sys
pattern, texts = json.load(sys.stdin)
search = re.compile(pattern).search
json.dump([place for place, text in enumerate(texts) if search(text)], sys.stdout)
"""


def matching(pattern: str, texts: Sequence[str]) -> list[int]:
    """Returns the places of the texts in which a valid regular expression matches somewhere.

    Raises:
        BudgetError: it takes longer than two seconds, or nobody waits for it any more.
    """
    if _HAS_ONE_WAY.fullmatch(pattern):
        search = re.compile(pattern).search
        return [place for place, text in enumerate(texts) if search(text)]
    deadline = time.monotonic() + max(_LOOK_SECONDS, min(_MAX_SECONDS, seconds_left()))
    sent: bytes | None = json.dumps([pattern, texts]).encode()
    with subprocess.Popen(  # noqa: S603  # a fixed program
        [sys.executable, "-I", "-S", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    found, _ = process.communicate(sent, _LOOK_SECONDS)
                    return list(json.loads(found))
                sent = None
                if time.monotonic() >= deadline:
                    break
                spend()  # The client may be gone.
        finally:
            process.kill()
    raise BudgetError(
        f"the regular expression {pattern!r:.200} takes too long. "
        "Leave out repeats within repeats, such as (a+)+."
    )
