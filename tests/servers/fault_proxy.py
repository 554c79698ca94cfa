"""A proxy in front of an S3 server that misbehaves by a script: refuses, hangs, resets, answers for the server, corrupts bodies."""

import base64
import contextlib
import hashlib
import http.client
import http.server
import socket
import struct
import threading
import urllib.parse
import zlib
from collections.abc import Callable

import attrs


@attrs.frozen
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@attrs.frozen
class Answer:
    """An answer in the server's stead; with `after_forwarding`, after the server has done its work.

    `page` replaces the XML.
    """

    status: int
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    after_forwarding: bool = False
    page: bytes = b""

    def body(self) -> bytes:
        return self.page or (
            f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>scripted</Message></Error>".encode()
            if self.code
            else b""
        )


PAGE = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>Please log in<br></body></html>"


def captive_portal(request: Request) -> Answer:
    """A plan: a static page for every request, like a hotel's web server, with an ETag of its kind."""
    return Answer(200, page=PAGE, headers=(("Content-Type", "text/html"), ("ETag", '"5f2a-61bc7"')))


def front(status: int) -> Answer:
    """A proxy's own answer: a status and a page, without any header of the store."""
    return Answer(status, page=PAGE, headers=(("Content-Type", "text/html"), ("Server", "squid")))


@attrs.frozen
class Late:
    """Leaves the client without an answer, and forwards the request once the event is set.

    Then sets `is_done`.
    """

    event: threading.Event = attrs.field(factory=threading.Event)
    is_done: threading.Event = attrs.field(factory=threading.Event)


@attrs.frozen
class Dribble:
    """Forwards the request, sends so many header bytes one by one, this many seconds apart, then the rest."""

    count: int
    seconds: float


class Reset:
    """Drops the connection without an answer."""


class Hang:
    """Accepts the request and stays silent until the proxy ends."""


class Corrupt:
    """Forwards the request with one byte of its body flipped."""


@attrs.frozen
class Rewrite:
    """Forwards the request, and changes the value of one header of the answer, if it is there."""

    header: str
    change: Callable[[str], str]

    def __call__(self, headers):
        return [(key, self.change(value) if key.lower() == self.header else value) for key, value in headers]


def weak_etags(request: Request) -> Rewrite:
    """A plan: changes ETags as a proxy does that compresses answers."""
    return Rewrite("etag", lambda value: value if value.startswith("W/") else f"W/{value}")


@attrs.frozen
class Truncate:
    """Forwards the request and closes the connection after this many bytes of the answer's body."""

    count: int


class Verifier:
    """A plan for a server that compares every body with its checksum headers, and requires one.

    The first `flips` bodies arrive damaged.
    """

    def __init__(self, flips: int = 0) -> None:
        self.flips = flips
        self.refused = 0
        self.compared = 0

    def __call__(self, request: Request) -> Answer | None:
        if request.method != "PUT":
            return None
        body = request.body
        if self.flips:
            self.flips -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        headers = {key.lower(): value for key, value in request.headers.items()}
        checks = {
            "x-amz-checksum-sha256": hashlib.sha256(body).digest(),
            "x-amz-checksum-crc32": zlib.crc32(body).to_bytes(4, "big"),
        }
        found = [
            base64.b64decode(headers[name]) == value for name, value in checks.items() if name in headers
        ]
        self.compared += bool(found)
        if found and all(found):
            return None
        self.refused += 1
        return Answer(400, "BadDigest")


class FaultProxy:
    """`plan(request)` gives the fault for each request, or None to forward it.

    Counts and keeps what it saw.
    """

    def __init__(self, upstream: str, *, listens: bool = True) -> None:
        """If it does not listen yet, it still owns its port, and refuses connections until `listen`."""
        self.plan = lambda request: None
        self.seen: list[Request] = []
        self._upstream = urllib.parse.urlsplit(upstream).netloc
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.arrived = threading.Condition(self._lock)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                proxy._serve(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

            def log_message(self, *args):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass  # A client that was killed, or gave up.

        self._server = Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.server_bind()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        if listens:
            self.listen()

    def listen(self) -> None:
        self._server.server_activate()
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def count(self, method: str, part: str = "") -> int:
        with self._lock:
            return sum(request.method == method and part in request.path for request in self.seen)

    def fail_first(self, times: int, fault, *, method: str = "PUT", part: str = "") -> None:
        """Gives the fault to the first `times` requests of the method with this text in their path."""
        left = [times]

        def plan(request):
            if request.method == method and part in request.path and left[0] > 0:
                left[0] -= 1
                return fault
            return None

        self.plan = plan

    def _serve(self, handler) -> None:
        count = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(count)
        if len(body) < count:  # Its client was killed half-way, or gave up.
            handler.close_connection = True
            return
        request = Request(handler.command, urllib.parse.unquote(handler.path), dict(handler.headers), body)
        with self.arrived:
            self.seen.append(request)
            fault = self.plan(request)
            self.arrived.notify_all()
        if isinstance(fault, Reset):
            _tear_down(handler)
        elif isinstance(fault, Late):
            fault.event.wait(60)
            self._forward(handler, body)
            fault.is_done.set()
            _tear_down(handler)
        elif isinstance(fault, Dribble):
            self._forward(handler, body)
            self._dribble(handler, fault)
        elif isinstance(fault, Hang):
            self._ended.wait()
            _tear_down(handler)
        elif isinstance(fault, Answer):
            if fault.after_forwarding:
                self._forward(handler, body)
            headers = {"Content-Type": "application/xml", **dict(fault.headers)}
            _answer(handler, fault.status, headers.items(), fault.body())
        else:
            if isinstance(fault, Corrupt):
                body = bytes([body[0] ^ 1]) + body[1:]
            self._pass_on(handler, fault, body)

    def _pass_on(self, handler, fault, body: bytes) -> None:
        status, headers, answer = self._forward(handler, body)
        if isinstance(fault, Rewrite):
            headers = fault(headers)
        if isinstance(fault, Truncate):
            _answer(handler, status, headers, answer, cut=fault.count)
            handler.close_connection = True  # Closes gently: a reset would also discard data on its way.
        else:
            _answer(handler, status, headers, answer)

    def _dribble(self, handler, fault: Dribble) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Pad: ")
            for _ in range(fault.count):
                handler.wfile.write(b"a")
                handler.wfile.flush()
                if self._ended.wait(fault.seconds):
                    return
            handler.wfile.write(b"\r\nx-amz-request-id: 1\r\nContent-Length: 0\r\n\r\n")
            handler.wfile.flush()

    def _forward(self, handler, body: bytes):
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        headers = {
            key: value
            for key, value in handler.headers.items()
            if key.lower() not in {"expect", "connection"}
        }
        with contextlib.closing(connection):
            connection.request(handler.command, handler.path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()


def _answer(handler, status: int, headers, body: bytes, cut: int | None = None) -> None:
    with contextlib.suppress(ConnectionError):
        handler.send_response_only(status)
        length = None
        for key, value in headers:
            if key.lower() == "content-length":
                length = value
            elif key.lower() not in {"connection", "transfer-encoding"}:
                handler.send_header(key, value)
        handler.send_header(
            "Content-Length", length if handler.command == "HEAD" and length else str(len(body))
        )
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body if cut is None else body[:cut])
            handler.wfile.flush()


def _tear_down(handler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
