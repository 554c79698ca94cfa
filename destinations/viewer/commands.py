"""The command `destinations view`. It imports the server only when it runs."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from destinations.commands.parser import Parser

__all__ = ["add_options", "page_to"]

_MAX_NOTES = 20
_MIN_TOKEN = 16
_MAX_SECRET = 1024
_MAX_PORT = 65535


def add_options(parser: Parser) -> None:
    """Adds the options of the command; `run` of the parsed namespace returns the exit code."""
    text = "folder of runs, or s3://bucket/prefix (default: $DESTINATIONS_ROOT, else ./runs)"
    parser.take("root", "ROOT", text, nargs="*")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    parser.take("--port", "N", "port (default: 8377, or a free one if that is taken)", type=_port)
    text = "name that browsers use for this server, such as a proxy's; repeatable"
    parser.take("--allow-host", "NAME", text, action="append", default=[])
    parser.take("--base-url", "URL", "address of this page behind a proxy, such as https://example.org/runs/")
    text = "read the token of the address from FILE, so that it stays the same; a missing FILE is written"
    parser.take("--token-file", "FILE", text)
    text = "post to the URL in FILE, such as a Slack webhook, when a run stops beating"
    parser.take("--webhook-file", "FILE", text)
    parser.take("--read-only", None, "refuse edits of tags, notes and names")
    parser.take("--open", None, "open the page in a browser")
    parser.take("--export", "SITE", "write the page as static files to this folder, and exit")
    parser.take("--view", "NAME", "begin with this saved view; with --export: its runs")
    parser.take("--where", "FILTER", "with --export: only runs that match", default="")
    parser.take("--limit", "N", "with --export: at most N runs (default: 100)", type=int, default=100)
    text = "with --export: at most N MiB of media (default: 200)"
    parser.take("--media-mib", "N", text, type=int, default=200)
    parser.take("--overwrite", None, "with --export: replace an existing site")
    text = "with --export: also write hosts, users, command lines and the folders of paths"
    parser.take("--with-origin", None, text)
    parser.set_defaults(run=_run)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to {_MAX_PORT}, got {text!r}.")
    return int(text)


def _run(options: argparse.Namespace, session: Any = None) -> int:
    """Runs the command, with the messages and exit codes of `destinations runs`."""
    from destinations.runs.commands.running import run_command

    return run_command(view, options, session)


def view(options: argparse.Namespace, session: Any) -> int:
    """Serves the page until Ctrl-C, or exports it."""
    from destinations.runs.commands.running import EXIT_OK, roots_of, view_of
    from destinations.runs.views import RunView
    from destinations.viewer import Viewer
    from uploads import exit_on_sigterm

    options.root = options.root or None
    roots = roots_of(options, session)
    with contextlib.ExitStack() as opened:
        runs, source = _opened(roots, session, opened)
        view = {} if options.view is None else view_of(options.view, runs)
        if view:
            options.where = RunView.parse(view).filter(options.where) or ""
        if options.export is not None:
            return _export(runs, source, view, options, session)
        if options.open:
            # Otherwise the file with the token would stay behind.
            exit_on_sigterm()
        viewer = opened.enter_context(
            Viewer(
                runs,
                host=options.host,
                port=options.port,
                token=None if options.token_file is None else _token_of(Path(options.token_file)),
                webhook=None if options.webhook_file is None else _secret_of(options.webhook_file),
                allowed_hosts=options.allow_host,
                source=source,
                read_only=options.read_only,
                base_url=options.base_url,
                clock=session.clock,
            )
        )
        count = runs.report.runs
        session.screen.line(f"{count} {'run' if count == 1 else 'runs'} in {', '.join(map(str, roots))}")
        url = viewer.url if options.view is None else viewer.url + _query_of(options.view, view, runs)
        session.screen.line(url)
        session.screen.flush()
        if not viewer.is_local:
            session.note(
                f"warning: anyone who has this address and can reach {viewer.address} can read these runs"
                f"{'' if options.read_only else ' and edit their tags and notes'}. "
                "The connection is not encrypted. Leave out --host to serve this machine only."
            )
        if options.open:
            import webbrowser

            webbrowser.open(opened.enter_context(page_to(url)).as_uri())
        viewer.wait()
    return EXIT_OK


def _query_of(name: str, view: dict[str, Any], runs: Any, left_out: tuple[str, ...] = ()) -> str:
    """Returns the fragment of the page's address that shows a saved view."""
    from .catalog import with_page_ids

    fields = {field: value for field, value in view.items() if field not in left_out}
    return "#/runs?" + urlencode({**with_page_ids({name: fields}, runs)[name], "view": name}, doseq=True)


def _token_of(path: Path) -> str:
    """Returns the token in a private file; writes one if the file is missing."""
    from destinations.runs.commands.running import UsageError

    from .security import new_token

    with contextlib.suppress(FileExistsError), open(path, "x", opener=_private) as file:
        file.write(f"{new_token()}\n")
    token = _secret_of(path)
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(f"--token-file: {path} must have one line of at least {_MIN_TOKEN} characters.")
    return token


def _secret_of(path: str | Path) -> str:
    """Returns the text of a file that only this user can read."""
    from destinations.runs.commands.running import UsageError

    with Path(path).open() as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise UsageError(f"others can read {path}, which has a secret. Run `chmod 600 {path}`.")
        return file.read(_MAX_SECRET).strip()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def page_to(url: str) -> Iterator[Path]:
    """Gives a file that leads a browser to an address, because other users see the arguments of programs."""
    import html
    import tempfile

    # The folder belongs to this user alone.
    with tempfile.TemporaryDirectory(prefix="destinations-") as folder:
        page = Path(folder, "open.html")
        page.touch(mode=0o600)
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">\n')
        yield page


def _opened(roots: list[str], session: Any, opened: contextlib.ExitStack) -> tuple[Any, str]:
    """Returns the runs below the roots, and their URI if they are copies; `opened` closes them."""
    from destinations.runs import open_runs
    from destinations.runs.commands.running import UsageError
    from uploads import redact_text

    if sum("://" in root for root in roots) and len(roots) > 1:
        raise UsageError(f"one URI must be given by itself, got {', '.join(roots)}.")
    runs = opened.enter_context(open_runs(*roots, clock=session.clock))
    if not runs.copies:
        return runs, ""
    for copy in runs.copies:
        unreadable = [f"{name}: {reason}" for name, reason in copy.unreadable.items()]
        _note_left_out([*filter(None, [copy.unlisted]), *unreadable], session)
    return runs, redact_text(roots[0].partition("?")[0])


def _note_left_out(left_out: list[str], session: Any) -> None:
    for left in left_out[:_MAX_NOTES]:
        session.note(f"left out: {left}")
    if len(left_out) > _MAX_NOTES:
        session.note(f"and {len(left_out) - _MAX_NOTES} more")


def _export(runs: Any, source: str, view: dict[str, Any], options: argparse.Namespace, session: Any) -> int:
    from destinations.runs.commands.running import EXIT_OK, UsageError
    from destinations.runs.commands.screen import bytes_text

    from .catalog import Catalog
    from .site import export_site

    for name, value in (("--limit", options.limit), ("--media-mib", options.media_mib)):
        if value < 0:
            raise UsageError(f"{name} must be 0 or more, got {value}.")
    report = export_site(
        Catalog(runs, source=source, clock=session.clock),
        Path(options.export).absolute(),
        where=options.where,
        # The site has only the runs that match.
        view="" if options.view is None else _query_of(options.view, view, runs, ("where", "archived")),
        limit=options.limit,
        media_bytes=options.media_mib << 20,
        overwrite=options.overwrite,
        with_origin=options.with_origin,
    )
    media = f"{report.media_files} files of media, {bytes_text(report.media_bytes)}"
    session.screen.line(f"{report.runs} {'run' if report.runs == 1 else 'runs'}, {media}")
    _note_left_out(report.left_out, session)
    session.screen.line(str(Path(options.export) / "index.html"))
    return EXIT_OK
