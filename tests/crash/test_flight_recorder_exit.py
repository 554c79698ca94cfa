"""`FlightRecorder` in processes that get SIGTERM, are stopped, fork, or wait in C."""

import json
import os
import signal
import time

import pytest

BEGIN = """
import ctypes, os, signal, sys, threading, time
from events import Run
from events.callbacks import FlightRecorder

libc = ctypes.CDLL(None)

def wait_in_c():
    # Locked twice, a mutex waits for ever, and no signal interrupts it: as a collective that lacks a rank.
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=announce, args=(threading.get_native_id(), ctypes.addressof(mutex)), daemon=True).start()
    libc.pthread_mutex_lock(mutex)

def announce(thread, address):
    # "ready" once the kernel has the thread waiting for the mutex: a signal before that is handled by Python.
    while True:
        with open(f"/proc/self/task/{thread}/syscall") as file:
            call = file.read().split()
        if len(call) > 1 and int(call[1], 16) == address:
            print("ready", flush=True)
            return
        time.sleep(0.01)

def begin(**options):
    run = Run(callbacks=FlightRecorder(folder=sys.argv[1], **options), run_name="mine")
    run.log_metrics({"loss": 1.0})
    run.batch_end()
    return run
"""


def read(folder):
    """Returns the file of rank 0."""
    return json.loads((folder / "rank-0.json").read_bytes())


def test_sigterm_writes_the_file_while_the_main_thread_waits_in_c(start, tmp_path):
    """SIGTERM also ends the process, which would otherwise wait until it is killed."""
    process = start(BEGIN + "run = begin()\nwait_in_c()", tmp_path)
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 128 + signal.SIGTERM
    found = read(tmp_path)
    assert found["reason"] == "sigterm"
    assert found["threads"][0]["frames"][-1]["function"] == "wait_in_c"


def test_sigterm_still_ends_a_process_without_a_handler(start, tmp_path):
    """The signal itself ends it, as it would have without the recorder."""
    process = start(
        BEGIN + "run = begin()\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)", tmp_path
    )
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == -signal.SIGTERM
    assert read(tmp_path)["reason"] == "sigterm"


def test_a_later_orderly_exit_still_works(start, tmp_path):
    """If `exit_on_sigterm` follows the recorder's handler, it calls that handler and then exits."""
    program = (
        BEGIN
        + """
from uploads import exit_on_sigterm
with begin() as run:
    exit_on_sigterm()
    try:
        print("ready", flush=True)
        while True: time.sleep(0.01)
    finally:
        print("finally", flush=True)
"""
    )
    process = start(program, tmp_path)
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 128 + signal.SIGTERM
    assert process.stdout.readline() == "finally\n"
    assert [one["reason"] for one in read(tmp_path)["reasons"]] == ["sigterm"]


def test_a_terminated_child_does_not_write_its_parents_file(start, tmp_path):
    """The signal ends the child, and the parent's file is not written."""
    program = (
        BEGIN
        + """
run = begin()
child = os.fork()
if not child:
    while True: time.sleep(0.01)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
run.close()
"""
    )
    process = start(program, tmp_path)

    assert process.stdout.readline() == f"{-signal.SIGTERM}\n"
    assert process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_stopped_process_is_not_reported_as_hanging(start, tmp_path):
    """Stopped for longer than `hang_seconds`, it continues without a report; a hang after that is reported."""
    program = (
        BEGIN
        + """
run = begin(hang_seconds=2)
print("ready", flush=True)
for line in sys.stdin:
    if line == "hang\\n":
        wait_in_c()
    run.batch_end()
    print("step", flush=True)
"""
    )
    process = start(program, tmp_path, stdin=-1)
    assert process.stdout.readline() == "ready\n"

    def send(line):
        process.stdin.write(line)
        process.stdin.flush()
        return process.stdout.readline()

    send("step\n")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)

    assert send("step\n") == "step\n"
    assert list(tmp_path.iterdir()) == []
    assert send("hang\n") == "ready\n"
    deadline = time.monotonic() + 50
    while not (tmp_path / "rank-0.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read(tmp_path)["reason"] == "hang"
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
