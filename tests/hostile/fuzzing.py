"""What the fuzz tests share: the number of examples, their limits, and ways to damage a file.

`make test` always tries the same examples, and `make test-all` tries eight times as many. `FUZZ_EXAMPLES=10000`
tries that many per test, different ones each time; `make fuzz` repeats that for `FUZZ_MINUTES`.
"""

import contextlib
import copy
import json
import os
import signal
import tracemalloc

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.effort import times

__all__ = ["ODD", "changed", "changed_text", "damaged", "fuzz", "limit", "little_memory", "places"]

LIMIT_SECONDS = 240
MEMORY_BYTES = 64 << 20
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def fuzz(count):
    """Returns the settings of a test: `count` fixed examples, or the number asked for in the environment."""
    return settings(
        max_examples=EXAMPLES or times(-(-count // 8), count),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def limit():
    """Ends a test that hangs."""

    def stop(*_):
        raise KeyboardInterrupt  # Not an Exception, which a reader might suppress.

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS * (1 + EXAMPLES // 100))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def little_memory():
    """Asserts that at most 64 MiB are allocated at a time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES


# Ways to damage a file.

TOKENS = [
    *(
        b"",
        b"\0",
        b"\n",
        b"\r",
        b'"',
        b",",
        b"'",
        b"\\",
        b"\xff",
        b"\xed\xa0\x80",
        b"\x1b[2J",
        b"-",
        b"1e999",
    ),
    *(b"nan", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"a" * 200_000, b"\xff" * 8, b"\x7f\xff\xff\xff"),
    *(
        b"../" * 40,
        b"/etc/passwd",
        b"\\ud800",
        b"null",
        b"{}",
        b"- " * 3000,
        b"&a [*a]",
        b": ",
        b"!!python/x ",
    ),
]
ODD = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    st.sampled_from(
        [
            *(10**30, -(10**400), 1e308, "\ud800", "\0", "\x1b[2J", "../x", "/etc/passwd", "..", "a" * 300),
            *(
                "a/" * 3000,
                [],
                {},
                [[]],
                {"": None},
                [None] * 3,
                {"a": {"b": [1]}},
                ["a", 1, {}],
                "NaN",
                1 << 62,
            ),
        ]
    ),
)


@st.composite
def damaged(draw, content):
    """Replaces, removes, repeats or inserts some bytes."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from([0, 1, 2, 8, 100, len(content)])))
        piece = draw(st.sampled_from(TOKENS) | st.binary(max_size=12) | st.just(content[start:end] * 2))
        content = content[:start] + piece + content[end:]
    return content


def places(value, at=()):
    """Returns the paths of all values in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in places(item, (*at, key)))]


@st.composite
def changed(draw, document):
    """Returns a JSON document with up to three values replaced or removed."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(document)))
        value = copy.deepcopy(draw(ODD))  # It may be changed again.
        if not place:
            continue
        inner = document
        for key in place[:-1]:
            inner = inner[key]
        if draw(st.integers(0, 5)) == 0:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
    return document


def changed_text(content):
    """Returns JSON with odd values: a file of one object, or the first line of several."""
    lines = content.splitlines(keepends=True)
    try:
        document, rest = json.loads(content), b""
    except ValueError:
        document, rest = json.loads(lines[0]), b"".join(lines[1:])
    return changed(document).map(lambda one: json.dumps(one).encode() + b"\n" + rest)
