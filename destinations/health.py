"""`Health`: serves the health of a run and its uploads to monitors on the same machine."""

import http.server
import socketserver
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from .base import LoggerDestination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from events import Logger, State
    from uploads import Gauge, UploadQueue

__all__ = ["Health"]

_STOP_SECONDS = 5.0
_MAX_PORT = 65535
_OWN_HOSTS = ("127.0.0.1", "localhost")


class _Server(socketserver.ThreadingTCPServer):
    """A server that, unlike `http.server`'s, doesn't look up its host name, which may take seconds."""

    allow_reuse_address = True
    daemon_threads = True


class Health(LoggerDestination):
    """Serves `/healthz` and `/metrics` on 127.0.0.1 while the run is open.

    ```python
    Trainer(..., loggers=[RunDirectory("runs/digits"), Artifacts("s3://bucket/digits"), Health(port=9464)])
    ```

    `/healthz` answers `ok` as long as the process lives. `/metrics` answers in
    [Prometheus' text format](https://prometheus.io/docs/instrumenting/exposition_formats/): the batch, the
    seconds since the last one, the records that destinations dropped or failed to write, and for each upload
    queue the waiting files and bytes, the age of the oldest file, the free disk space, and the time of the
    last success.

    **Threading.** One thread answers, and reads the counters of other threads. Training never waits for it.

    **Ranks.** Local rank 0 of each node serves.

    Args:
        port: the port to bind; 0 for any free one, see `address`.
        require: whether to stop the run if the port can't be bound.

    Raises:
        ValueError: the port is out of range.
    """

    def __init__(self, port: int, *, require: bool = False) -> None:
        if not 0 <= port <= _MAX_PORT:
            raise ValueError(f"port must be from 0 to 65535, got {port}.")
        super().__init__(require=require)
        self._port = port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._beat = 0.0

    @property
    def address(self) -> str:
        """The address of the server, such as "http://127.0.0.1:9464"; "" if it isn't running."""
        return "" if self._server is None else f"http://127.0.0.1:{self._server.server_address[1]}"

    def place(self) -> str:
        """Returns the address."""
        return self.address

    def init(self, state: "State", logger: "Logger") -> None:
        self._beat = time.monotonic()
        if state.local_rank:
            return
        handler = _handler_of(lambda: list(self._gauges(state, logger)))
        self._server = _Server(("127.0.0.1", self._port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    def batch_end(self, state: "State", logger: "Logger") -> None:
        del state, logger
        self._beat = time.monotonic()

    def post_close(self) -> None:
        server, self._server = self._server, None
        thread, self._thread = self._thread, None
        if server is not None and thread is not None:
            server.shutdown()
            thread.join(_STOP_SECONDS)
            server.server_close()

    def _gauges(self, state: "State", logger: "Logger") -> "Iterator[Gauge]":
        from uploads import Gauge, spool_gauges

        run = {"run": state.run_name}
        beat = time.monotonic() - self._beat
        yield Gauge("destinations_batch", "Batches trained.", int(state.timestamp.batch), run)
        yield Gauge("destinations_last_batch_seconds", "Seconds since the last batch ended.", beat, run)
        for (name, action, error), count in logger.faults.counts.items():
            labels = {**run, "destination": name, "action": action, "error": error}
            yield Gauge(
                "destinations_errors", "Errors of destinations, which training survived.", count, labels
            )
        for destination in logger.destinations:
            name = type(destination).__name__
            counts: Any = getattr(destination, "counts", None)
            found = attrs.asdict(counts) if attrs.has(type(counts)) else counts
            for what, count in found.items() if isinstance(found, Mapping) else ():
                if isinstance(count, int):
                    labels = {**run, "destination": name, "what": what}
                    yield Gauge(
                        "destinations_records", "What a destination counts of its records.", count, labels
                    )
            queue: UploadQueue | None = getattr(destination, "queue", None)
            if queue is not None:
                yield from spool_gauges(queue.spool.path)
                lost = queue.backlog().lost
                yield Gauge(
                    "destinations_upload_lost_files", "Files that a spool refused or lost.", lost, run
                )


def _handler_of(gauges: "Callable[[], list[Gauge]]") -> type[http.server.BaseHTTPRequestHandler]:
    """Returns a handler for `/healthz` and `/metrics`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        server_version = "destinations"
        timeout = 10.0

        def do_GET(self) -> None:
            from uploads import exposition

            host = self.headers.get("Host", "").rpartition(":")[0]
            match self.path:
                case _ if host not in _OWN_HOSTS:
                    # A page of another site, whose name resolves to this machine.
                    self._answer(403, "text/plain", f"ask for {' or '.join(_OWN_HOSTS)}.\n")
                case "/healthz":
                    self._answer(200, "text/plain", "ok\n")
                case "/metrics":
                    try:
                        text = exposition(gauges())
                    except Exception as error:  # noqa: BLE001  # the next look may succeed
                        self._answer(500, "text/plain", f"{error}\n")
                    else:
                        self._answer(200, "text/plain; version=0.0.4; charset=utf-8", text)
                case _:
                    self._answer(404, "text/plain", "there are /healthz and /metrics.\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode("utf-8", "replace")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing, because monitors ask every few seconds."""

    return Handler
