"""Sums up ledgers over sessions and ranks, and writes them as a trace."""

import gzip
import json

import pytest

from destinations.cli import main
from destinations.runs.content.ledger import read_time, write_trace

PRODUCTIVE = ("batch", "forward")
HEADER = "session,begin,end,step,start,restore,data,batch,forward,backward,waiting"


@pytest.fixture
def folder(tmp_path):
    """A folder with a file, which makes it a run folder."""
    (tmp_path / "run/time").mkdir(parents=True)
    (tmp_path / "run/metrics.csv").write_text("step,epoch,time,loss\n1,0,1.0,2.0\n")
    return tmp_path / "run/time"


def write(folder, *lines, rank=0, header=HEADER):
    """Writes a rank's file."""
    (folder / f"rank-{rank}.csv").write_text("\n".join((header, *lines, "")))


def test_sessions_add_up(folder):
    """A killed session costs the time until training reaches the same step again."""
    write(
        folder,
        "100,100,104,0,3,,1,,,,",
        "100,104,110,60,,,1,1,4,,",
        "120.5,120.5,123,40,1,1.5,,,,,",
        "120.5,123,131,80,,,,,8,,",
    )
    sessions = [
        {"start": 102.0, "status": "killed", "resume_step": None},
        {"start": 121.0, "status": "completed", "resume_step": 40},
    ]

    report = read_time(folder, sessions, PRODUCTIVE)

    assert report.seconds == {
        "gone": 10.5,
        "forward": 4 + 4,
        "start": 4,
        "repeated": 4,
        "data": 2,
        "restore": 1.5,
        "batch": 1,
    }
    assert report.wall == 31
    assert report.goodput == 9 / 31
    (fault,) = report.faults
    assert (fault.status, fault.step, fault.cost) == ("killed", 60, 10.5 + 1 + 1.5 + 4)
    assert [one.status for one in report.sessions] == ["killed", "completed"]
    assert report.slow_rank is None


def test_a_pause_after_a_completed_session_does_not_count(folder):
    """The user chose to pause."""
    write(folder, "100,100,110,9,,,,10,,,", "200,200,210,19,,,,10,,,")

    report = read_time(folder, [{"start": 100.0, "status": "completed", "resume_step": None}], PRODUCTIVE)

    assert (report.wall, report.faults, report.goodput) == (20, (), 1.0)


def test_the_rank_that_others_wait_for_is_named(folder):
    """The others wait for it in collectives and in the backward pass, so it spent more time elsewhere."""
    write(folder, "100,100,120,9,1,,1,,6,6,6")
    write(folder, "100,100,120,9,1,,9,,6,2,2", rank=1)
    write(folder, "100,100,120,9,1,,1.5,,6,6,5.5", rank=2)

    assert read_time(folder, [], PRODUCTIVE).slow_rank == (1, "data", 9 - 1.25)


TRAINER = "session,begin,end,step,start,forward,backward,waiting,data"


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        # It waited for the others to join, long before.
        (["100,90,100,0,2,,,5,", "100,100,120,9,,6,8,1,1"], ("backward", 5.0)),
        (["100,90,100,0,7,,,,", "100,100,120,9,,6,3,6,1"], ("start", 5.0)),
    ],
)
def test_a_slow_backward_pass_and_a_late_start_are_named(folder, slow, expected):
    """The others waited as long; the trainer subtracts that from the backward pass."""
    usual = ["100,90,100,0,2,,,5,", "100,100,120,9,,6,3,6,1"]
    for rank in range(3):
        write(folder, *(slow if rank == 2 else usual), rank=rank, header=TRAINER)

    assert read_time(folder, [], PRODUCTIVE).slow_rank == (2, *expected)


SLOW = "session,begin,end,step,clock,data,forward,backward,waiting"


def write_slow(folder, rank, *lines):
    """Writes the slow steps of a rank."""
    write(folder, "100,100,120,9,1,,1,,6,6,6", rank=rank)
    (folder / f"slow-{rank}.csv").write_text("\n".join((SLOW, *lines, "")))


def test_the_rank_that_delayed_others_is_named(folder):
    """Its bucket and span at that time are named; a step that no other rank found slow isn't."""
    write_slow(folder, 0, "100,101,102,7,,,.1,.9,", "100,110,112,70,,,.1,1.8,")
    write_slow(folder, 1, "100,101,102,7,,.8,.1,.1,", "100,110,112,70,,1.8,.1,.1,", "100,115,116,90,,1,,,")
    (folder / "spans-1.csv").write_text(
        "begin,microseconds,name,track\n101,700000,tokenize,spans\n101,20,wait,spans\n103,9,later,spans\n"
    )

    report = read_time(folder, [], PRODUCTIVE)

    assert [(one.step, one.rank, one.bucket, one.spans) for one in report.slow_steps] == [
        (7, 1, "data", ("tokenize", "wait")),
        (70, 1, "data", ()),
    ]
    assert report.slow_steps_text == (
        "rank 1 made the others wait 2.6 s at steps 7, 70, for data, in 'tokenize'"
    )
    assert report.to_json()["slow_steps"][0]["step"] == 7


def test_a_process_that_overlaps_an_earlier_one_does_not_restart_it(folder):
    """It may be a standby process or a notebook: sessions are ordered by their start."""
    write(
        folder,
        "130,90,130,0,40,,,,,,",
        "130,130,140,9,,,,10,,,",
        "100,95,100,0,5,,,,,,",
        "100,100,110,9,,,,10,,,",
    )
    sessions = [
        {"start": 100.1, "status": "killed", "resume_step": None},
        {"start": 130.1, "status": "completed", "resume_step": None},
    ]

    report = read_time(folder, sessions, PRODUCTIVE)

    assert report.seconds == {"gone": 20, "repeated": 10, "batch": 10, "start": 5}
    assert [(one.begin, one.status) for one in report.sessions] == [(95, "killed"), (130, "completed")]


@pytest.mark.parametrize(
    "line",
    ["torn,by", "100,110,105,9,,,,1,,,", "100,nan,120,9,,,,1,,,", "100,110,111,x,,,,1,,,", "\x00", '"open'],
)
def test_damaged_lines_are_left_out(folder, line):
    """All other lines count."""
    write(folder, "100,100,110,9,,,,10,,,", line)

    assert read_time(folder, [{"start": "no", "status": 3}], PRODUCTIVE).seconds == {"batch": 10}


def test_a_run_without_times(tmp_path):
    """The folder is missing, or has other files."""
    assert read_time(tmp_path / "time", [], PRODUCTIVE) is None
    (tmp_path / "rank-0.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "rank-1.csv").mkdir()
    assert read_time(tmp_path, [], PRODUCTIVE) is None


def test_a_trace_has_the_spans_of_all_ranks(folder, tmp_path):
    """Times are in microseconds; each rank has a process, and the user's spans have a thread."""
    for rank in (0, 1):
        (folder / f"spans-{rank}.csv").write_text(
            'begin,microseconds,name,track\n100.5,250,forward,time\n101,10,"a, b",spans\ntorn,'
        )
    with (tmp_path / "trace.json").open("w") as file:
        count = write_trace(folder, file, name="mine", uploads={"model.pt": 102.0})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    assert count == len(events)
    spans = [
        (one["pid"], one["tid"], one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"
    ]
    assert spans == [
        (0, 0, "forward", 100_500_000, 250),
        (0, 1, "a, b", 101_000_000, 10),
        (1, 0, "forward", 100_500_000, 250),
        (1, 1, "a, b", 101_000_000, 10),
    ]
    assert [(one["name"], one["ts"]) for one in events if one["ph"] == "i"] == [("model.pt", 102_000_000)]


def test_uploads_and_profiles_are_in_a_trace(folder, tmp_path):
    """Uploads last from start to end and may overlap; a profile has its own process."""
    (folder / "spans-0.csv").write_text(
        "begin,microseconds,name,track\n101,5000000,a.pt,uploads\n102,1000000,b.pt,uploads\n103,,read,spans\n"
    )
    profile = tmp_path / "p.json.gz"
    document = {
        "baseTimeNanoseconds": 10**11,
        "traceEvents": [{"ph": "X", "name": "mm", "pid": 7, "tid": 7, "ts": 5, "dur": 1}, 3],
    }
    profile.write_bytes(gzip.compress(json.dumps(document).encode()))
    damaged = tmp_path / "damaged.json.gz"
    damaged.write_bytes(b"none")
    with (tmp_path / "trace.json").open("w") as file:
        write_trace(folder, file, name="mine", uploads={}, profiles=[damaged, profile])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    uploads = [(one["ph"], one["name"], one["ts"], one["id"]) for one in events if one.get("cat") == "upload"]
    assert uploads == [
        ("b", "a.pt", 101e6, "0.0"),
        ("e", "a.pt", 106e6, "0.0"),
        ("b", "b.pt", 102e6, "0.1"),
        ("e", "b.pt", 103e6, "0.1"),
    ]
    (kernel,) = [one for one in events if one["name"] == "mm"]
    assert (kernel["ts"], kernel["pid"]) == (10**8 + 5, 1_001_000)


def test_commands_show_times_and_write_traces(folder, tmp_path, capsys):
    """`time`, its JSON, `show` and `trace` have them; `trace` doesn't overwrite a file by default."""
    write(folder, "100,100,110,9,1,,2,,7,,", "150,150,160,9,1,,2,,7,,")
    (folder / "spans-0.csv").write_text("begin,microseconds,name,track\n100.5,250,forward,time\n")
    where = ["--root", str(tmp_path)]
    trace = ["runs", "trace", "run", "-o", str(tmp_path / "t.json"), *where]

    assert main(["runs", "time", "run", *where]) == 0
    shown = capsys.readouterr().out
    assert "goodput 23.3% of 1m00s, 1 fault\n" in shown
    assert main(["runs", "time", "run", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["faults"][0]["gone"] == 40
    assert main(["runs", "show", "run", *where]) == 0
    assert "goodput 23.3%" in capsys.readouterr().out
    assert main(trace) == 0
    assert main(trace) == 1
    assert main([*trace, "--overwrite"]) == 0
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 3
