"""Every command escapes control characters in text that others wrote."""

import json
import logging
import re

import pytest

from destinations import cli
from destinations.runs.commands.screen import Screen
from tests.test_destinations.runs.foreign_runs import NOW, Terminal, command, copy_run, write_full_run

# Clears the screen, sets the title, copies to the clipboard, 8-bit CSI, carriage return, right to left, a
# forged line.
EVIL = "\x1b[2J\x1b]0;t\x07\x1b]52;c;eA==\x07\x9b31m\rx\u202e\u2066\nrun  forged\x1b[31m"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# The commands' own colours.
OURS = re.compile("\x1b\\[(?:0|1|2|3[1-6])m")


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """Two runs with escape sequences in every text of a run."""
    folder = write_full_run(tmp_path_factory.mktemp("evil") / "full")
    sidecar = json.loads((folder / "sidecar.json").read_text())
    sidecar |= {"run_id": f"id{EVIL}", "tags": [EVIL], "notes": EVIL, "display_name": EVIL, "status": EVIL}
    sidecar |= {"hparams": {EVIL: EVIL}, "summary": {EVIL: 1.0}, "checkpoint_path": EVIL}
    sidecar |= {
        "overhead": {"p50_us": EVIL, "p99_us": EVIL, "last_error": EVIL, "errors": EVIL, "dropped": EVIL}
    }
    (folder / "sidecar.json").write_text(json.dumps(sidecar))
    (folder / "summary.json").write_text(
        json.dumps({"metrics": {EVIL: {"last": 1.0, "min": 0.5, "max": 1, "count": 1}}})
    )
    (folder / "environment.json").write_text(json.dumps({"argv": [EVIL], EVIL: EVIL, "git": {EVIL: EVIL}}))
    (folder / "sessions.jsonl").write_text(json.dumps({"exception": EVIL}) + "\n")
    (folder / "metrics.csv").write_text(f'step,epoch,time,"{EVIL}"\n1,0,1.0,2.0\n')
    (folder / "texts.jsonl").write_text(json.dumps({"name": EVIL, "text": EVIL}) + "\n")
    (folder / "edits.json").write_text("[]")
    return folder


@pytest.fixture
def root(evil, tmp_path, monkeypatch):
    """Copies of the runs, one below a folder with escape sequences in its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    copy_run(evil, tmp_path / f"runs/{EVIL}")
    copy_run(evil, tmp_path / "runs/plain")
    sidecar = json.loads((tmp_path / "runs/plain/sidecar.json").read_text())
    (tmp_path / "runs/plain/sidecar.json").write_text(json.dumps({**sidecar, "run_id": "other"}))
    return tmp_path / "runs"


COMMANDS = [
    ["ls"],
    ["ls", "-c", "run_id,name,status,tags,notes,path,problem,checkpoint_path,created_at"],
    ["ls", "--where", f'hparams.x == "{EVIL}"'],
    ["ls", "--sort", EVIL],
    ["best", EVIL, "--min"],
    ["best", "nothing", "--min"],
    ["show", "plain/"],
    ["show", "runs/plain"],
    ["show", EVIL],
    ["diff", "runs/plain", f"runs/{EVIL}"],
    ["tail", "runs/plain", "--no-follow"],
    ["tail", "runs/plain", "--no-follow", "--metric", "nothing"],
    ["note", "runs/plain"],
    ["tag", "runs/plain"],
    ["plot", EVIL, "runs/plain", "-o", "x.png"],
    ["plot", EVIL],
    ["plot", "*", "runs/plain", EVIL],
    ["rm", "runs/plain"],
    ["rm", EVIL],
    ["plot", "nothing", "runs/plain", "-o", "x.png"],
    ["export"],
    ["export", "--metrics"],
    ["scan"],
    ["scan", "--full"],
    ["gc", "--older-than", "0s"],
    ["wait", "alive", "runs/plain", "--timeout", "0"],
    ["send", "runs/plain", "--to", f"nothing:{EVIL}"],
    ["send", "runs/plain", "--to", "run:sent"],
]


@pytest.mark.parametrize(
    "arguments", COMMANDS, ids=lambda one: " ".join(one).encode("unicode_escape").decode()[:40]
)
def test_no_command_shows_an_escape_of_others(root, arguments):
    """Results and messages contain nothing that moves the cursor or begins a line of its own."""
    _, output, errors = command(*arguments, "--root", root, terminal=True, now=NOW)

    assert output or errors
    assert RAW.search(OURS.sub("", output)) is None
    assert RAW.search(errors) is None
    assert "\x1b[31m" not in OURS.sub(lambda found: "" if found[0] != "\x1b[31m" else found[0], output)
    # Notes and cells of a CSV may have several lines.
    shown = errors if arguments[0] in {"note", "export"} else f"{output}\n{errors}"
    assert not any(line.startswith("run  forged") for line in shown.splitlines())


@pytest.mark.parametrize(
    "arguments", COMMANDS, ids=lambda one: " ".join(one).encode("unicode_escape").decode()[:40]
)
def test_json_stays_json(root, arguments):
    """JSON's own escapes keep the text readable by programs."""
    code, output, errors = command(*arguments, "--json", "--root", root, terminal=True, now=NOW)

    assert RAW.search(output) is None
    assert RAW.search(errors) is None
    if code == 0 and arguments[0] not in {"export", "tail"}:
        json.loads(output)


def test_the_text_comes_back_from_json(root):
    """Parsing JSON restores the original text."""
    _, output, _ = command("ls", "--json", "--root", root)

    assert {run["notes"] for run in json.loads(output)} == {EVIL}


def test_a_colour_is_ours_alone():
    """Text that looks like a colour code, or is one, colours nothing."""
    stream = Terminal()
    screen = Screen(stream, None, has_colors=True)

    screen.line(f"{screen.styled('a', 'red')} \x1b[31mb <0123456789abcdef:31;c")

    assert stream.getvalue() == "\x1b[31ma\x1b[0m \\x1b[31mb <0123456789abcdef:31;c\n"


def test_log_records_of_a_command_are_escaped(root, monkeypatch, tmp_path):
    """A warning of the package is printed like any other message."""
    place = tmp_path / f"cache{EVIL}"
    place.mkdir()
    (place / "training-destinations").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))

    _, _, errors = command("ls", "--root", root)

    assert "cannot be used" in errors
    assert RAW.search(errors) is None
    assert logging.getLogger("destinations").handlers == []


@pytest.mark.parametrize(
    "arguments", [[EVIL], ["runs", EVIL], ["runs", "ls", f"--{EVIL}"], ["runs", "best", EVIL]]
)
def test_mistyped_arguments_are_shown_escaped(arguments, capsys):
    """A command line may come from an untrusted file; an argument with a space may be the name of a root."""
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code

    assert code

    assert RAW.search(capsys.readouterr().err) is None
