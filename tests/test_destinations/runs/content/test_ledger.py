"""What ledgers wrote is added up over sessions and ranks, and written as a trace."""

import json

import pytest

from destinations.cli import main
from destinations.runs.content.ledger import read_time, write_trace

PRODUCTIVE = ("batch", "forward")
HEADER = "session,begin,end,step,start,restore,data,batch,forward,backward,waiting"


@pytest.fixture
def folder(tmp_path):
    """The folder of a run with a file, so that it is one."""
    (tmp_path / "run/time").mkdir(parents=True)
    (tmp_path / "run/metrics.csv").write_text("step,epoch,time,loss\n1,0,1.0,2.0\n")
    return tmp_path / "run/time"


def write(folder, *lines, rank=0, header=HEADER):
    """Writes the file of a rank."""
    (folder / f"rank-{rank}.csv").write_text("\n".join((header, *lines, "")))


def test_sessions_add_up(folder):
    """A killed session costs what came until training was where it had been."""
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


def test_a_pause_after_a_completed_session_is_none_of_the_run(folder):
    """It was the user's choice."""
    write(folder, "100,100,110,9,,,,10,,,", "200,200,210,19,,,,10,,,")

    report = read_time(folder, [{"start": 100.0, "status": "completed", "resume_step": None}], PRODUCTIVE)

    assert (report.wall, report.faults, report.goodput) == (20, (), 1.0)


def test_the_rank_that_others_wait_for_is_named(folder):
    """By what it took longer for than they; they wait in collectives, and within the backward pass."""
    write(folder, "100,100,120,9,1,,1,,6,6,6")
    write(folder, "100,100,120,9,1,,9,,6,2,2", rank=1)
    write(folder, "100,100,120,9,1,,1.5,,6,6,5.5", rank=2)

    assert read_time(folder, [], PRODUCTIVE).slow_rank == (1, "data", 9 - 1.25)


def test_ranks_that_are_alike_are_not_named(folder):
    """A hundredth of the time is no difference."""
    write(folder, "100,100,120,9,1,,1,,6,6,6")
    write(folder, "100,100,120,9,1,,1.2,,6,6,5.8", rank=1)

    assert read_time(folder, [], PRODUCTIVE).slow_rank is None


@pytest.mark.parametrize(
    "line",
    ["torn,by", "100,110,105,9,,,,1,,,", "100,nan,120,9,,,,1,,,", "100,110,111,x,,,,1,,,", "\x00", '"open'],
)
def test_damaged_lines_are_left_out(folder, line):
    """The others count."""
    write(folder, "100,100,110,9,,,,10,,,", line)

    assert read_time(folder, [{"start": "no", "status": 3}], PRODUCTIVE).seconds == {"batch": 10}


def test_a_run_without_times(tmp_path):
    """A folder that is not there, and one with other files."""
    assert read_time(tmp_path / "time", [], PRODUCTIVE) is None
    (tmp_path / "rank-0.csv").write_bytes(b"\xff\xfe")
    (tmp_path / "rank-1.csv").mkdir()
    assert read_time(tmp_path, [], PRODUCTIVE) is None


def test_a_trace_has_the_spans_of_all_ranks(folder, tmp_path):
    """In microseconds; a process for each rank, and a thread for the spans of the user."""
    for rank in (0, 1):
        (folder / f"spans-{rank}.csv").write_text(
            'begin,microseconds,name,is_own\n100.5,250,forward,0\n101,10,"a, b",1\ntorn,'
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


def test_commands_show_times_and_write_traces(folder, tmp_path, capsys):
    """`time`, its JSON, `show`, and `trace`, which replaces nothing unasked."""
    write(folder, "100,100,110,9,1,,2,,7,,", "150,150,160,9,1,,2,,7,,")
    (folder / "spans-0.csv").write_text("begin,microseconds,name,is_own\n100.5,250,forward,0\n")
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
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 4
