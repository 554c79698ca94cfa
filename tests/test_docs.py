"""The docs match the code: lists are compared with it, and code blocks run."""

import doctest
import functools
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import destinations.runs
import events
import uploads
from events import Event, callbacks
from tests.page_blocks import blocks_of, run_page
from tests.servers import s3_servers

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The most blocks that may be left out, see `test_blocks_that_do_not_run_give_a_reason_and_stay_few`.
NOT_RUN = 22
# Pages whose blocks use packages that warn.
OTHERS_WARN = {"docs/adapters.md", "docs/trackers.md", "docs/how-to/wandb-offline.md"}
# Keeps other packages from reporting to their makers.
QUIET = {
    "DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_MODE": "offline",
}
# A progress bar shows seconds per batch if a batch took more than a second.
_SPEED = re.compile(r"\[\d\d:\d\d<[\d:?]+, +[\d.?]+ ?(batch/s|s/batch)")


def page_name(path):
    """Returns the path of a page, relative to the root of the project."""
    return path.relative_to(ROOT).as_posix()


def test_the_page_and_the_enum_draw_the_same_loop():
    """docs/events.md and the docstring of Event show the same loop."""
    drawing = re.search(r"```\n(.*?)\n```", inspect.cleandoc(Event.__doc__), re.DOTALL)[1]

    assert drawing.strip() in (ROOT / "docs/events.md").read_text(encoding="utf-8")


def test_links_between_pages_lead_to_files():
    """Each relative link names an existing file."""
    links = [
        (path, link)
        for path in PAGES
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    ]

    assert [(page_name(path), link) for path, link in links if not (path.parent / link).exists()] == []


def test_every_make_command_in_a_page_exists():
    """`make x` in a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)

    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= targets


@pytest.fixture(scope="module")
def s3():
    """An S3 server, for pages that name a bucket."""
    with s3_servers.moto() as server:
        yield server


def runs_blocks(path):
    """Returns whether a page has a block that runs."""
    return any(block.reason is None for block in blocks_of(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", [path for path in PAGES if runs_blocks(path)], ids=page_name)
def test_every_block_of_a_page_runs(path, tmp_path, request, torch_server, torch_python):
    """A page is a script: its blocks run in order in an empty folder, and print what the page shows."""
    text = path.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    folders = [
        torch_python.parent,
        sysconfig.get_path("scripts"),
        *os.defpath.split(os.pathsep)[1:],
        "/usr/bin",
    ]
    environment = {
        "HOME": str(tmp_path / "home"),
        "PATH": os.pathsep.join(map(str, folders)),
        "PYTHONPATH": str(ROOT),
        **QUIET,
    }
    if "s3://" in text:
        server = request.getfixturevalue("s3")
        # Otherwise a page would continue a run of the same name from another page.
        server.empty()
        environment |= {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            **s3_servers.ENVIRONMENT,
        }
    (tmp_path / "work").mkdir()
    warning_filter = None if page_name(path) in OTHERS_WARN else "error"
    start = functools.partial(torch_server.run, warning_filter=warning_filter)

    code, printed = run_page(path, tmp_path / "work", environment, start)

    assert code == 0, "".join(printed)[-8000:]
    for block, output in zip(blocks, printed[:-1], strict=True):
        if block.printed is not None:
            want, got = (_SPEED.sub("[", text) for text in (block.printed, output))
            assert doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS), (
                f"{path.name}:{block.line} shows\n{want}\nbut prints\n{got}"
            )


def test_blocks_that_do_not_run_give_a_reason_and_stay_few():
    """`NOT_RUN` is their number: lower it when one of them runs."""
    rows = [
        f"| {page_name(path)}:{block.line} | {block.reason} |"
        for path in PAGES
        for block in blocks_of(path.read_text(encoding="utf-8"))
        if block.reason is not None
    ]

    assert len(rows) <= NOT_RUN, "\n".join(["| block | why it is not run |", "|---|---|", *rows])


def test_no_block_escapes_the_runner():
    """Each fence of Python or shell is found, whatever is around it."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")

        fences = re.findall(r"^ *```(?:python|py|sh|bash|shell)\b", text, re.MULTILINE)

        assert len(fences) == sum(not block.hidden for block in blocks_of(text)), path


def test_the_site_builds_strictly_loads_nothing_from_elsewhere_and_has_every_public_name(tmp_path):
    """`make docs` builds without a warning, pages need no network, and the reference has each public name."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stderr == ""

    pages = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html"))
    styles = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.css"))
    loaded = re.findall(r'src="((?:https?:)?//[^"]+)"|<link[^>]+href="((?:https?:)?//[^"]+)"', pages)
    assert loaded == []
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\s]+", styles) == []
    packages = [events, events.callbacks, events.monitor, destinations, destinations.runs, uploads]
    names = [
        f"{package.__name__}.{name}"
        for package in packages
        for name in package.__all__
        if not inspect.ismodule(getattr(package, name))  # which have pages of their own
    ]
    assert [name for name in names if f'id="{name}"' not in pages] == []
    own = {
        "run": ("events.Run.batch_end", "events.Run.log_images"),
        "run-directory": ("destinations.RunDirectory.run_dir",),
        "saved-run": (
            "destinations.runs.RecordedRun.series",
            "destinations.runs.RecordedRun.images",
        ),
    }
    for page, found in own.items():
        text = (tmp_path / "site" / "reference" / f"{page}.html").read_text(encoding="utf-8")
        assert [name for name in found if f'id="{name}"' not in text] == []


def test_terminal_output_fits_its_page():
    """Lines don't wrap: a window of 1440 pixels shows 120 columns."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    blocks = re.findall(r"^```(?:text|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    assert [line for block in blocks for line in block.splitlines() if len(line) > 120] == []


def site_hooks():
    """Returns the module of hooks that builds pages from the code."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def test_every_command_is_in_its_reference():
    """The page of commands has the help of each parser."""
    text = site_hooks().command_line()

    for command in ("runs ls", "runs send", "uploads resume", "view", "doctor"):
        assert f"## destinations {command}\n" in text
        assert f"usage: destinations {command}" in text


def test_every_extra_that_a_page_installs_exists():
    """`pip install "training-destinations[x]"` names extras of pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]

    named = {
        name
        for path in PAGES
        for group in re.findall(r"training-destinations\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for name in group.split(",")
    }

    assert named - set(extras) == set()


def test_every_callback_is_in_its_page():
    """docs/callbacks.md names each of `events.callbacks`."""
    text = (ROOT / "docs/callbacks.md").read_text(encoding="utf-8")

    assert [name for name in callbacks.__all__ if f"`{name}(" not in text] == []


def test_composers_arguments_are_refused_and_their_replacements_exist():
    """In each row, the argument on the left raises and the one on the right exists."""
    text = (ROOT / "docs/coming-from-composer.md").read_text(encoding="utf-8")
    table = text[text.index("## Arguments of Trainer") : text.index("## RemoteUploaderDownloader")]
    rows = re.findall(r"^\| `(Trainer|CheckpointSaver)\((.*?)\)`(?:, .*?)? \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == 13

    for name, theirs, here in rows:
        ours = inspect.signature(getattr(events, name)).parameters
        named = set(re.findall(r"`(\w+)=", here))
        assert named <= set(ours), (name, here)
        left = {one.partition("=")[0] for one in theirs.split(", ")} - named
        # These exist here too, with other values.
        assert left & set(ours) <= {"save_interval"}, (name, theirs)
        for argument in left - set(ours) if name == "Trainer" else ():
            with pytest.raises(TypeError, match=f"no argument '{argument}'"):
                events.Trainer(None, **{argument: True})


def test_fault_tests_has_a_line_for_each_test_that_causes_faults():
    """Each has its docstring."""
    lines = site_hooks().fault_tests().splitlines()

    assert sum(line.startswith("- *") for line in lines) > 300
    assert [line for line in lines if line.endswith("*: ")] == []


def test_the_page_on_upgrades_lists_the_versions_of_the_code():
    """Each format has a row with its version."""
    text = (ROOT / "docs/upgrades.md").read_text(encoding="utf-8")

    rows = [int(version) for version in re.findall(r"^\| [^|]+ \| (\d+) \|", text, re.MULTILINE)]

    places = [
        "destinations.run_directory.layout:FORMAT_VERSION",
        "destinations.run_directory.parquet:_VERSION",
        "destinations.runs.index.edits:_FORMAT_VERSION",
        "destinations.run_directory.pieces:_FORMAT",
        "events.trainer.checkpoint.contents:VERSION",
        "events.trainer.checkpoint.sharded:_VERSION",
        "uploads.spool.spool:_VERSION",
    ]
    assert rows == [pkgutil.resolve_name(place) for place in places]


def test_the_readme_lists_the_extras_of_the_package():
    """The table has each extra for users, and no other."""
    import tomllib

    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| extra | for |")[1].split("\n\n")[0]
    shown = set(re.findall(r"`([a-z]+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:])))

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shown == set(project["optional-dependencies"]) - {"dev", "docs"}
