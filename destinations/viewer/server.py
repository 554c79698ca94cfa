"""`Viewer`: the server of the page, in a thread of this process."""

import asyncio
import html
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Self
from urllib.parse import urlsplit

import attrs
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from destinations.runs import RecordedRun, Runs, open_runs
from destinations.runs.budget import Limits

from .app import App
from .catalog import Catalog
from .changes import Changes
from .charts import ChartReader
from .security import IS_KNOWN, Guard, new_token
from .watch import HeartbeatWatch

__all__ = ["DEFAULT_PORT", "Viewer", "view_run"]

DEFAULT_PORT = 8377
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_BACKLOG = 2048
_MAX_STRANGERS = 256
# The address and the headers of a request.
_MAX_HEADER_BYTES = 32 << 10
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  # compared with what the user gave

_log = logging.getLogger("destinations")


def view_run(run: RecordedRun, *, port: int | None = None) -> "Viewer":
    """Serves the page of one run; see `RecordedRun.view`.

    ```python
    with open_runs("runs") as runs, view_run(runs["digits"]) as viewer:
        print(viewer.url)
    ```
    """
    runs = open_runs(run.path)
    try:
        return Viewer(runs, port=port, owns_runs=True).start()
    except BaseException:
        runs.close()
        raise


def _checked_token(token: str | None) -> str:
    """Returns the token, or a random one."""
    if token is not None and len(token) < 16:  # noqa: PLR2004  # characters
        raise ValueError(f"token must have at least 16 characters, got {len(token)}.")
    return new_token() if token is None else token


def _checked_base(url: str | None) -> str | None:
    """Returns the address with a final slash."""
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"base_url must be like https://example.org/runs/, got {url!r:.200}.")
    return f"{url.rstrip('/')}/"


class _Connection(H11Protocol):
    """A connection. Of the connections without the token, only the newest stay open."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A dict keeps the order of arrival, unlike the server's set.
        strangers: dict[_Connection, None] = self.app_state.setdefault("strangers", {})
        strangers[self] = None
        for one in [one for one in strangers if one.is_known or one.transport.is_closing()]:
            del strangers[one]
        while len(strangers) > _MAX_STRANGERS:
            oldest = next(iter(strangers))
            del strangers[oldest]
            oldest.transport.abort()

    @property
    def is_known(self) -> bool:
        """Whether the latest request had the token."""
        return bool(self.scope) and IS_KNOWN in self.scope["state"]


@attrs.define(eq=False, slots=False, repr=False)
class Viewer:
    """Serves the page of some runs.

    ```python
    with open_runs("runs") as runs, Viewer(runs) as viewer:
        print(viewer.url)
        viewer.wait()
    ```

    **Threading.** `start` starts a thread for the server. A second thread looks for stopped runs if there is
    a webhook, and a third looks for changes while a page is open. `close` ends all of them.

    Args:
        runs: open; the viewer doesn't close it unless `owns_runs` is true.
        host: the address to bind.
        port: the port to bind; None for 8377, or any free port if that is taken.
        token: the token of the URL; None for a random one.
        allowed_hosts: names that browsers may use for the server, beside addresses and `localhost`.
        source: where the runs come from, if they are copies, which can't be edited.
        read_only: refuses all edits.
        base_url: the address at which a proxy serves the page, such as "https://example.org/runs/". The proxy
            strips its path. The host of this address is allowed.
        webhook: the viewer posts `{"text": ...}` to this URL when a run stops beating; Slack and others
            accept it.
        owns_runs: whether `close` closes the runs.
        limits: the budget of one answer.
        clock: returns the time in seconds since 1970.

    Raises:
        ValueError: the token is empty or short, `base_url` isn't an http or https address, or `webhook` isn't
            https.
    """

    runs: Runs
    host: str = attrs.field(default="127.0.0.1", kw_only=True)
    _wanted_port: int | None = attrs.field(default=None, kw_only=True, alias="port")
    token: str = attrs.field(default=None, kw_only=True, converter=_checked_token)
    _allowed_hosts: Collection[str] = attrs.field(default=(), kw_only=True)
    _source: str = attrs.field(default="", kw_only=True)
    _read_only: bool = attrs.field(default=False, kw_only=True)
    _base: str | None = attrs.field(default=None, kw_only=True, alias="base_url", converter=_checked_base)
    _webhook: str | None = attrs.field(default=None, kw_only=True)
    _owns_runs: bool = attrs.field(default=False, kw_only=True)
    _limits: Limits | None = attrs.field(default=None, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.time, kw_only=True)

    def __attrs_post_init__(self) -> None:
        webhook = self._webhook
        self._watch = None if webhook is None else HeartbeatWatch(self.runs, webhook, self._clock)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._changes: Changes | None = None
        self._charts: ChartReader | None = None

    @property
    def port(self) -> int:
        """The bound port; 0 before `start`."""
        return 0 if self._socket is None else int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"{self._base or f'{self.address}/'}?token={self.token}"

    @property
    def address(self) -> str:
        """The address of the server, without the token."""
        host = socket.gethostname() if self.host in _ALL_ADDRESSES else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def start(self) -> Self:
        """Binds the port and serves in a thread; returns when the server answers requests.

        Raises:
            OSError: the port can't be bound.
        """
        if self._thread is not None:
            return self
        self._socket = self._bound()
        catalog = Catalog(self.runs, source=self._source, read_only=self._read_only, clock=self._clock)
        self._charts = ChartReader()
        self._changes = Changes(catalog, self._charts.cache)
        app = App(catalog, self._charts, self._changes, self._limits)
        hosts = [*self._allowed_hosts, *([] if self.is_local else [socket.gethostname(), socket.getfqdn()])]
        guard = Guard(app.asgi, token=self.token, port=self.port, hosts=hosts, base_url=self._base)
        config = uvicorn.Config(
            guard,
            lifespan="off",
            ws="none",
            # Always the same HTTP server, whatever else is installed.
            http=_Connection,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            loop="asyncio",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, args=([self._socket],), name="viewer", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not server.started:
            self.close()
            raise OSError(f"the server of the page did not start on {self.host}:{self.port}.")
        if self._watch is not None:
            self._watch.start()
        return self

    def wait(self) -> None:
        """Blocks until the server ends."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.5)

    def close(self) -> None:
        """Ends the server. Idempotent."""
        if self._watch is not None:
            self._watch.stop()
        if self._changes is not None:
            self._changes.close()
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
        if self._charts is not None:
            self._charts.close()
        if self._socket is not None:
            self._socket.close()
        self._thread = self._server = self._socket = None
        if self._owns_runs:
            self.runs.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        url, text = html.escape(self.url), html.escape(self.address)
        return f'<a href="{url}" target="_blank" rel="noopener">{text}</a>'

    def _bound(self) -> socket.socket:
        """Returns the listening socket."""
        try:
            return self._bound_to(DEFAULT_PORT if self._wanted_port is None else self._wanted_port)
        except OSError as error:
            if self._wanted_port is None:
                return self._bound_to(0)
            raise OSError(
                error.errno,
                f"port {self._wanted_port} of {self.host} cannot be bound ({error.strerror}). "
                "Give another --port, or leave it out.",
            ) from error

    def _bound_to(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio turns off Nagle's algorithm only if the socket names its protocol; otherwise an answer takes
        # 40 ms.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self.host, port))
            bound.listen(_BACKLOG)
        except BaseException:
            bound.close()
            raise
        return bound
