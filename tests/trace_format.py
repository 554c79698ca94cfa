"""Checks a trace against Chrome's Trace Event Format, as Perfetto reads it.

Perfetto's own library needs a binary from the network. The rules come from the document that `write_trace`
names: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
from collections import defaultdict

__all__ = ["checked_trace"]

# The keys of an event besides "ph", by its phase.
FIELDS = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "b": {"name", "cat", "id", "ts", "pid"},
    "e": {"name", "cat", "id", "ts", "pid"},
    "i": {"name", "ts", "pid", "tid"},
    "M": {"name", "pid", "args"},
}
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}


def checked_trace(path, *, is_ours=True):
    """Returns the events of a trace; fails if Perfetto would drop or misread one.

    Args:
        path: the file.
        is_ours: whether all events are ours; events of a profile have phases and nesting of their own.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["displayTimeUnit"] in {"ms", "ns"}
    events = document["traceEvents"]
    spans, opened = defaultdict(list), {}
    for one in events:
        phase = one["ph"]
        if phase not in FIELDS and not is_ours:
            continue
        assert FIELDS[phase] <= one.keys(), one
        assert isinstance(one["name"], str), one
        assert isinstance(one["pid"], int), one
        if phase == "M":
            assert one["name"] in METADATA or not is_ours, one
            assert isinstance(one["args"], dict), one
            continue
        assert one["ts"] >= 0, one
        if phase == "X":
            assert one["dur"] >= 0, one
            spans[one["pid"], one["tid"]].append(one)
        elif phase == "b":
            assert opened.setdefault((one["cat"], one["id"]), one) is one
        elif phase == "e":
            assert opened.pop((one["cat"], one["id"]))["ts"] <= one["ts"]
        elif phase == "i":
            assert one.get("s", "t") in {"g", "p", "t"}
    assert not opened
    for of_thread in spans.values() if is_ours else ():
        _check_nesting(of_thread)
    return events


def _check_nesting(spans):
    """Fails if two spans of a thread overlap without nesting, by more than a microsecond of rounding."""
    ends = []
    for one in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        end = one["ts"] + one["dur"]
        while ends and ends[-1] <= one["ts"] + 1:
            ends.pop()
        assert not ends or end <= ends[-1] + 2, one
        ends.append(end)
