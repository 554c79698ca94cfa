"""What TextFile writes, and what it doesn't touch."""

import collections
import errno
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from destinations import LoggerDestination, TextFile
from destinations.testing import DryRun, RecordingDestination
from destinations.text.text_file import LineWriter, open_new


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    """Each test has its own working directory."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def folder(tmp_path):
    """Returns the working directory."""
    return tmp_path / "work"


def listing(folder):
    """Returns every file below a folder with its text."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def a_clock():
    """Returns a clock that advances a second per call."""
    return map(float, itertools.count(1000)).__next__


def log_one_of_each(run):
    """Logs a record of each kind."""
    log = run.logger
    log.log_hyperparameters({"lr": 1e-5, "model": {"depth": 3, "name": "a\nb"}, "empty": {}, "betas": [0.9]})
    log.log_metrics({"loss/train": 0.1 + 0.2, "n": 3}, step=3)
    log.log_table(["a", "b"], [[1, "x|y"], [float("nan"), np.zeros((2, 3))]], "wrong", 4)
    log.log_text("one\ntwo", "note", 5)
    masks = {"truth": np.zeros((2, 8, 9), "int64")}
    log.log_images(np.zeros((2, 3, 8, 9), "uint8"), step=6, masks=masks, mask_class_labels={1: "cat"})
    log.log_images([Image.new("L", (9, 8))], "pictures", step=6)
    log.log_audio(np.zeros(80, "float32"), 8000, step=7)
    log.log_video(np.zeros((2, 3, 8, 8), "uint8"), 10, step=8)
    log.log_histogram(np.zeros(5), step=9)
    log.log_point_cloud(np.zeros((4, 3)), step=10)
    log.log_traces({"grad": {"norm": 0.5}, "array": np.zeros(2)})


def test_lines_for_people(folder):
    """Each record has its lines, starting with kind and batch; numbers are written in full."""
    run = DryRun(TextFile(), run_name="mine")
    run.init()

    log_one_of_each(run)
    run.close()

    array = "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]"
    assert listing(folder) == {
        "mine/log-rank0.txt": "[hyperparameter]: lr: 1e-05\n"
        "[hyperparameter]: model.depth: 3\n"
        "[hyperparameter]: model.name: a\\nb\n"
        "[hyperparameter]: empty: {}\n"
        "[hyperparameter]: betas: [0.9]\n"
        "[metric][batch=3]: loss/train: 0.30000000000000004\n"
        "[metric][batch=3]: n: 3\n"
        f'[table][batch=4]: wrong: {{"columns": ["a", "b"], "rows": [[1, "x|y"], ["NaN", {array}]]}}\n'
        "[text][batch=5]: note: one\n"
        "[text][batch=5]: note: two\n"
        '[images][batch=6]: Images: {"images": {"dtype": "uint8", "shape": [2, 3, 8, 9]}, "channels_last": false, '
        '"masks": {"truth": {"dtype": "int64", "shape": [2, 8, 9]}}, "mask_class_labels": {"1": "cat"}}\n'
        '[images][batch=6]: pictures: {"images": ["L image 9x8"], "channels_last": false}\n'
        '[audio][batch=7]: Audio: {"audio": {"dtype": "float32", "shape": [80]}, "sample_rate": 8000}\n'
        '[video][batch=8]: Video: {"video": {"dtype": "uint8", "shape": [2, 3, 8, 8]}, "fps": 10}\n'
        '[histogram][batch=9]: Histogram: {"values": {"dtype": "float64", "shape": [5]}, "bins": 64}\n'
        '[point_cloud][batch=10]: Points: {"points": {"dtype": "float64", "shape": [4, 3]}}\n'
        '[trace]: grad: {"norm": 0.5}\n'
        '[trace]: array: {"dtype": "float64", "shape": [2]}\n'
    }


def test_json_lines(folder):
    """With format="jsonl" each record is one line of strict JSON."""
    run = DryRun(TextFile("log.jsonl", format="jsonl", clock=a_clock()))
    run.init()

    log_one_of_each(run)
    run.close()

    lines = listing(folder)["log.jsonl"].splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    config = {"lr": 1e-5, "model": {"depth": 3, "name": "a\nb"}, "empty": {}, "betas": [0.9]}
    masks = {"truth": {"dtype": "int64", "shape": [2, 8, 9]}}
    pixels, labels = {"dtype": "uint8", "shape": [2, 3, 8, 9]}, {"mask_class_labels": {"1": "cat"}}
    traces = {"grad": {"norm": 0.5}, "array": {"dtype": "float64", "shape": [2]}}
    assert [one.pop("time") for one in found] == [1000.0 + number for number in range(11)]
    assert [(one.pop("kind"), one.pop("step", None), one.pop("name", None), one) for one in found] == [
        ("hyperparameters", None, None, {"hyperparameters": config}),
        ("metrics", 3, None, {"metrics": {"loss/train": 0.1 + 0.2, "n": 3}}),
        ("table", 4, "wrong", {"columns": ["a", "b"], "rows": [[1, "x|y"], ["NaN", [[0.0] * 3] * 2]]}),
        ("text", 5, "note", {"text": "one\ntwo"}),
        ("images", 6, "Images", {"images": pixels, "channels_last": False, "masks": masks, **labels}),
        ("images", 6, "pictures", {"images": ["L image 9x8"], "channels_last": False}),
        ("audio", 7, "Audio", {"audio": {"dtype": "float32", "shape": [80]}, "sample_rate": 8000}),
        ("video", 8, "Video", {"video": {"dtype": "uint8", "shape": [2, 3, 8, 8]}, "fps": 10}),
        ("histogram", 9, "Histogram", {"values": {"dtype": "float64", "shape": [5]}, "bins": 64}),
        ("point_cloud", 10, "Points", {"points": {"dtype": "float64", "shape": [4, 3]}}),
        ("traces", None, None, {"traces": traces}),
    ]


def test_names_cannot_forge_lines(folder):
    """A name with line ends stays on its line in both formats, whatever a reader splits at."""
    name = "a\n[metric][batch=9]: b\r\x85\u2028\x1b[2J"
    run = DryRun(TextFile("log.txt"), TextFile("log.jsonl", format="jsonl", clock=a_clock()))
    run.init()

    run.logger.log_metrics({name: 1.0}, 0)
    run.close()

    files = listing(folder)
    assert files["log.txt"] == "[metric][batch=0]: a\\n[metric][batch=9]: b\\r\\x85\\u2028\\x1b[2J: 1.0\n"
    assert len(files["log.jsonl"].splitlines()) == 1
    assert json.loads(files["log.jsonl"])["metrics"] == {name: 1.0}


def test_traces_can_be_left_out(folder):
    """With log_traces=False the file has none."""
    run = DryRun(TextFile("log.txt", log_traces=False))
    run.init()

    run.logger.log_traces({"grad": 0.5})
    run.close()

    assert listing(folder) == {"log.txt": ""}


def test_records_before_init_are_written(folder):
    """They're at the beginning of the file."""
    file = TextFile("log.txt")
    run = DryRun(file)
    run.logger.log_metrics({"early": 1.0}, 0)

    run.init()
    run.logger.log_metrics({"late": 2.0}, 0)
    run.close()

    assert listing(folder) == {"log.txt": "[metric][batch=0]: early: 1.0\n[metric][batch=0]: late: 2.0\n"}


# Existing files.


def test_a_new_run_refuses_an_existing_file(folder):
    """By default an existing file raises FileExistsError and stays unchanged."""
    (folder / "log.txt").write_text("precious")
    run = DryRun(TextFile("log.txt"))

    with pytest.raises(FileExistsError, match=r"^text file .*log\.txt. already exists"):
        run.init()
    run.logger.log_metrics({"loss": 1.0}, 0)
    run.close()

    assert listing(folder) == {"log.txt": "precious"}


def test_a_refused_file_does_not_stop_training(folder):
    """Outside of tests the logger counts the error, and training continues."""
    (folder / "log.txt").write_text("precious")
    recording = RecordingDestination()
    run = DryRun(TextFile("log.txt"), recording, raise_errors=False)

    run.init()
    run.fit()
    run.close()

    assert run.logger.faults.counts == {("TextFile", "after_load", "FileExistsError"): 1}
    assert len(recording.metrics) == 6
    assert listing(folder) == {"log.txt": "precious"}


def test_close_refuses_if_no_event_came(folder):
    """A run that only logged counts as new."""
    (folder / "log.txt").write_text("precious")
    run = DryRun(TextFile("log.txt"), raise_errors=False)
    run.fire("init")
    run.logger.log_metrics({"loss": 1.0}, 0)

    run.close()

    assert run.logger.faults.counts == {("TextFile", "close", "FileExistsError"): 1}
    assert listing(folder) == {"log.txt": "precious"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_resumed_run_appends(folder, overwrite):
    """A run that continues from a checkpoint continues its file, whatever `overwrite` is.

    Records from before the load are in it.
    """
    (folder / "log.txt").write_text("[metric][batch=4]: loss: 1.0\n")
    run = DryRun(TextFile("log.txt", overwrite=overwrite))
    run.fire("init", "before_load")
    run.logger.log_hyperparameters({"lr": 0.1})
    run.state.timestamp = run.state.timestamp.copy(batch=5)

    run.fire("after_load")
    run.logger.log_metrics({"loss": 0.5})
    run.close()

    assert listing(folder) == {
        "log.txt": "[metric][batch=4]: loss: 1.0\n[hyperparameter]: lr: 0.1\n[metric][batch=5]: loss: 0.5\n"
    }


def test_append_continues_a_file_in_a_new_run(folder):
    """With append=True a new run continues an existing file."""
    (folder / "log.txt").write_text("old\n")
    run = DryRun(TextFile("log.txt", append=True))

    run.fire("init")
    run.logger.log_metrics({"loss": 0.5}, 0)
    run.close()

    assert listing(folder) == {"log.txt": "old\n[metric][batch=0]: loss: 0.5\n"}


def test_overwrite_replaces_the_file_for_new_readers_only(folder):
    """With overwrite=True the old content goes, but a reader with the file open still sees it."""
    (folder / "log.txt").write_text("old\n")
    run = DryRun(TextFile("log.txt", overwrite=True))

    with (folder / "log.txt").open() as reader:
        run.init()
        run.logger.log_metrics({"loss": 0.5}, 0)
        run.close()
        seen = reader.read()

    assert seen == "old\n"
    assert listing(folder) == {"log.txt": "[metric][batch=0]: loss: 0.5\n"}


def test_overwrite_does_not_replace_devices():
    """A path that isn't a regular file is written to, not replaced."""
    run = DryRun(TextFile("/dev/null", overwrite=True))

    run.init()
    run.logger.log_metrics({"loss": 0.5}, 0)
    run.close()

    assert not os.path.isfile("/dev/null")  # noqa: PTH113  # the question is what the path is now


@pytest.mark.parametrize(
    ("torn", "repaired"),
    [
        ("whole\n", "whole\n"),
        ("whole\n[metric][batch=3]: lo", "whole\n[metric][batch=3]: lo\n"),
        ("no end at all", "no end at all\n"),
        ("", ""),
    ],
)
def test_a_torn_last_line_gets_its_end(folder, torn, repaired):
    """A line that a killed process left half written ends before the next line begins."""
    (folder / "log.txt").write_text(torn)
    run = DryRun(TextFile("log.txt", append=True))

    run.init()
    run.logger.log_metrics({"loss": 0.5}, 0)
    run.close()

    assert listing(folder) == {"log.txt": repaired + "[metric][batch=0]: loss: 0.5\n"}


def test_a_torn_json_line_is_kept_as_text(folder):
    """Half a record doesn't break JSON readers, and isn't lost.

    A complete one without a newline stays.
    """
    (folder / "torn.jsonl").write_text('{"kind":"metrics"}\n{"kind":"metr')
    (folder / "whole.jsonl").write_text('{"kind":"metrics"}')
    run = DryRun(*(TextFile(f"{name}.jsonl", format="jsonl", append=True) for name in ("torn", "whole")))

    run.init()
    run.close()

    assert listing(folder) == {
        "torn.jsonl": '{"kind":"metrics"}\n{"kind": "torn", "torn": "{\\"kind\\":\\"metr"}\n',
        "whole.jsonl": '{"kind":"metrics"}\n',
    }


def test_a_torn_line_may_be_longer_than_a_block(folder):
    """The end of the last whole line is found at any distance, and bytes that aren't UTF-8 survive."""
    long = b"whole\n" + b"x" * 200_000 + b"\xff"
    (folder / "log.txt").write_bytes(long)
    run = DryRun(TextFile("log.txt", append=True))

    run.init()
    run.close()

    assert (folder / "log.txt").read_bytes() == long + b"\n"


# Ranks and paths.


@pytest.mark.parametrize(
    ("filename", "files"),
    [
        ("{run_name}/log-rank{rank}.txt", ["mine/log-rank0.txt", "mine/log-rank1.txt"]),
        ("{rank:03d}.txt", ["000.txt", "001.txt"]),
        ("local{local_rank}.txt", ["local0.txt", "local1.txt"]),
        ("node{node_rank}.txt", ["node0.txt"]),
        ("log.txt", ["log.txt"]),
    ],
)
def test_each_rank_writes_a_file_if_its_name_has_the_rank(folder, filename, files):
    """Without a rank in the name, only rank 0 writes."""
    for rank in (1, 0):
        run = DryRun(TextFile(filename), run_name="mine", rank=rank)
        run.init()
        run.logger.log_metrics({"rank": rank}, 0)
        run.close()

    assert list(listing(folder)) == files
    assert listing(folder)[files[0]] == "[metric][batch=0]: rank: 0\n"


# Capture.


def test_capture_copies_lines_of_both_streams(folder, capsys):
    """Prints still reach their stream, and the file line by line.

    Partial lines of the two don't mix.
    """
    run = DryRun(TextFile("log.txt", capture_stdout=True, capture_stderr=True))
    run.init()

    print("one\ntwo")
    print("out: ", end="")
    print("err: half, ", end="", file=sys.stderr)
    run.logger.log_metrics({"loss": 1.0}, 0)
    print("rest")
    print("whole", file=sys.stderr)
    print("no end", end="")
    run.close()
    print("after close")

    assert listing(folder)["log.txt"].splitlines() == [
        "[stdout]: one",
        "[stdout]: two",
        "[metric][batch=0]: loss: 1.0",
        "[stdout]: out: rest",
        "[stderr]: err: half, whole",
        "[stdout]: no end",
    ]
    assert capsys.readouterr() == ("one\ntwo\nout: rest\nno endafter close\n", "err: half, whole\n")


def test_a_progress_bar_is_captured_in_its_last_state(folder, capsys):
    """Carriage returns overwrite, as on a terminal.

    A Windows line end is one line end, also in two pieces.
    """
    run = DryRun(TextFile("log.txt", capture_stderr=True))
    run.init()

    for text in ("\r 0%", "\r50%", "\r100%\n", "dos\r\n", "in two\r", "\n", "\n"):
        sys.stderr.write(text)
    run.close()

    assert listing(folder)["log.txt"].splitlines() == [
        "[stderr]: 100%",
        "[stderr]: dos",
        "[stderr]: in two",
        "[stderr]: ",
    ]


def test_streams_are_restored_exactly(capsys):
    """After close the streams are the same objects as before."""
    before = sys.stdout, sys.stderr
    run = DryRun(TextFile("log.txt", capture_stdout=True, capture_stderr=True))
    run.init()
    assert sys.stdout is not before[0]

    run.close()

    assert sys.stdout is before[0]
    assert sys.stderr is before[1]


def test_a_wrapper_that_stays_on_top_keeps_working(capsys):
    """Another library's wrapper that isn't removed before close keeps writing; nothing more is captured."""

    class Shouting:
        def __init__(self, stream):
            self.stream = stream

        def write(self, text):
            return self.stream.write(text.upper())

    before = sys.stdout
    run = DryRun(TextFile("log.txt", capture_stdout=True))
    run.init()
    sys.stdout = Shouting(sys.stdout)
    print("a")

    run.close()
    print("b")
    sys.stdout = before

    with open("log.txt") as file:  # noqa: PTH123
        assert file.read() == "[stdout]: A\n"
    assert capsys.readouterr().out == "A\nB\n"


def test_other_attributes_come_from_the_wrapped_stream(capfd):
    """Encoding, fileno, isatty and flush are the wrapped stream's."""
    before = sys.stdout
    run = DryRun(TextFile("log.txt", capture_stdout=True))
    run.init()

    assert sys.stdout.encoding == before.encoding
    assert sys.stdout.fileno() == before.fileno()
    assert sys.stdout.isatty() is False
    sys.stdout.writelines(["a\n", "b\n"])
    run.close()

    with open("log.txt") as file:  # noqa: PTH123
        assert file.read() == "[stdout]: a\n[stdout]: b\n"


class PrintsWhenRendered:
    """A trace that prints when it's converted to text."""

    def __str__(self):
        print("printed while rendering")
        return "text"


def test_printing_while_logging_does_not_deadlock(folder, capsys):
    """A record that prints, and a thread that logs that the disk is full, only add lines."""
    run = DryRun(TextFile("log.txt", capture_stdout=True, capture_stderr=True))
    run.init()
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("destinations").addHandler(handler)

    try:
        run.logger.log_traces({"trace": PrintsWhenRendered()})
        with run.logger.destinations[0]._writer._lock:
            logging.getLogger("destinations").error("from the writer")
        run.close()
    finally:
        logging.getLogger("destinations").removeHandler(handler)

    assert listing(folder)["log.txt"].splitlines() == [
        "[stdout]: printed while rendering",
        "[trace]: trace: text",
        "[stderr]: from the writer",
    ]


def test_lines_of_many_threads_are_whole(folder, capsys):
    """Eight threads that print and log at once lose and mix nothing."""
    run = DryRun(TextFile("log.txt", capture_stdout=True))
    run.init()

    def work(number):
        for count in range(200):
            sys.stdout.write(f"thread {number} line {count}\n")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.close()

    lines = listing(folder)["log.txt"].splitlines()
    assert sorted(lines) == sorted(
        f"[stdout]: thread {n} line {count}" for n in range(8) for count in range(200)
    )


def test_the_exception_that_ended_the_run_is_written(folder):
    """The traceback is at the end, without its secrets."""
    run = DryRun(TextFile("log.txt"))
    run.init()

    try:
        int("password=hunter22")
    except ValueError as error:
        run.close(error)

    lines = listing(folder)["log.txt"].splitlines()
    assert lines[0] == "[exception]: Traceback (most recent call last):"
    assert (
        lines[-1] == "[exception]: ValueError: invalid literal for int() with base 10: 'password=[redacted]'"
    )


def test_an_uncaught_exception_is_the_last_captured_line(folder):
    """If a script dies without closing its run, the file has its traceback once, as printed."""
    code = """
from destinations import TextFile
from destinations.testing import DryRun
run = DryRun(TextFile("log.txt", capture_stdout=True, capture_stderr=True))
run.init()
print("about to fail")
raise RuntimeError("the end")
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    lines = listing(folder)["log.txt"].splitlines()
    assert finished.returncode == 1
    assert finished.stderr.endswith("RuntimeError: the end\n")
    assert lines[0] == "[stdout]: about to fail"
    assert lines[1] == "[stderr]: Traceback (most recent call last):"
    assert lines[-1] == "[stderr]: RuntimeError: the end"


# The writer.


def test_a_forked_child_writes_nothing(folder):
    """It neither rewrites queued lines nor writes what it prints or logs itself."""
    code = """
import os, sys
from destinations import TextFile
from destinations.testing import DryRun
run = DryRun(TextFile("log.txt", capture_stdout=True, flush_interval=600))
run.init()
run.logger.log_metrics({"before": 1.0}, 0)
sys.stdout.flush()
child = os.fork()
if not child:
    print("from the child", flush=True)
    run.logger.log_metrics({"child": 1.0}, 0)
    run.logger.flush()
    run.close()
    sys.exit(0)
status = os.waitpid(child, 0)[1]
run.logger.log_metrics({"after": 1.0}, 0)
run.close()
sys.exit(status)
"""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, check=False
    )

    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "from the child\n", "")
    assert listing(folder) == {"log.txt": "[metric][batch=0]: before: 1.0\n[metric][batch=0]: after: 1.0\n"}


def test_a_kill_loses_no_flushed_line(folder):
    """After flush the lines belong to the system, and survive SIGKILL."""
    code = """
import os, signal
from destinations import TextFile
from destinations.testing import DryRun
run = DryRun(TextFile("log.txt", flush_interval=600))
run.init()
for step in range(1000):
    run.logger.log_metrics({"loss": 0.5}, step)
run.logger.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished = subprocess.run([sys.executable, "-c", code], timeout=300, check=False)

    assert finished.returncode == -signal.SIGKILL
    assert listing(folder) == {
        "log.txt": "".join(f"[metric][batch={step}]: loss: 0.5\n" for step in range(1000))
    }


def test_the_thread_writes_after_flush_seconds(folder):
    """Queued lines reach the file without a call of flush."""
    queue, is_rendering = collections.deque(["a record"]), threading.Event()

    def render(record):
        is_rendering.set()
        return f"{record}\n"

    writer = LineWriter(open_new(folder / "log.txt"), queue, render, flush_seconds=0.01)

    assert is_rendering.wait(60)
    writer.flush()
    assert listing(folder) == {"log.txt": "a record\n"}
    writer.close()


def test_a_full_queue_drops_and_counts(folder):
    """While the disk hangs, calls return, dropped records are counted, and a line has their number."""
    file = TextFile("log.txt", max_pending_records=3, flush_interval=600)
    run = DryRun(file)
    run.init()

    with file._writer._lock:
        for step in range(5):
            run.logger.log_metrics({"loss": 0.5}, step)
    run.logger.flush()
    run.logger.log_metrics({"loss": 0.5}, 5)
    run.close()

    assert file.dropped_records == 2
    assert listing(folder)["log.txt"].splitlines() == [
        "[metric][batch=0]: loss: 0.5",
        "[metric][batch=1]: loss: 0.5",
        "[metric][batch=2]: loss: 0.5",
        "[note]: 2 records were dropped here: the queue of 3 was full.",
        "[metric][batch=5]: loss: 0.5",
    ]


def test_a_temporarily_full_disk_loses_nothing(folder, monkeypatch):
    """A write that fails half way continues where it stopped: no line is lost or repeated."""
    file = TextFile("log.txt", flush_interval=600)
    run = DryRun(file)
    run.init()
    real_write, fails = os.write, iter([5, None])

    def full_disk(descriptor, data):
        count = next(fails, len(data)) if descriptor == file._writer._descriptor else len(data)
        if count is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data[:count])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        run.logger.log_metrics({"loss": 0.5}, 0)
        with pytest.raises(OSError, match="No space left"):
            run.logger.flush()
    run.logger.log_metrics({"loss": 0.25}, 1)
    run.close()

    assert listing(folder) == {"log.txt": "[metric][batch=0]: loss: 0.5\n[metric][batch=1]: loss: 0.25\n"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")  # noqa: PTH110
def test_a_disk_that_stays_full_is_reported_at_close():
    """The error counts the unwritten lines, and training was never disturbed."""
    before = set(threading.enumerate())
    run = DryRun(TextFile("/dev/full"), raise_errors=False)
    run.init()
    run.fit()

    run.close()

    assert run.logger.faults.counts[("TextFile", "close", "OSError")] == 1
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "destinations-line-writer"]


# Upload.


class CountsUploads(LoggerDestination):
    def __init__(self):
        self.uploads = []

    def can_upload_files(self):
        return True

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        self.uploads.append((remote_file_name, overwrite, file_path.read_text().count("\n")))


def test_the_file_is_uploaded_after_epochs_and_at_close():
    """With a remote name the whole file is uploaded once per epoch and at close, if it has grown.

    It is never uploaded per batch.
    """
    store = CountsUploads()
    run = DryRun(
        TextFile("log.txt", "{run_name}/logs/{rank}.txt"),
        store,
        run_name="mine",
        max_duration="2ep",
        batches_per_epoch=5,
    )
    run.init()

    run.fit()
    run.logger.log_metrics({"last": 1.0})
    run.close()

    assert store.uploads == [
        ("mine/logs/0.txt", True, 5),
        ("mine/logs/0.txt", True, 10),
        ("mine/logs/0.txt", True, 11),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "csv"}, 'format must be "text" or "jsonl"'),
        ({"flush_interval": 0}, "flush_interval must be a positive number of seconds"),
        ({"flush_interval": float("nan")}, "flush_interval must be a positive number of seconds"),
        ({"overwrite": True, "append": True}, "overwrite and append must not both be True"),
        ({"max_pending_records": 0}, "max_pending_records must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    """Invalid arguments raise at once."""
    with pytest.raises(ValueError, match=message):
        TextFile(**arguments)
