"""A small, fast S3 server in threads that counts puts (create-only too), looks, deletions and a listing."""

import contextlib
import email.utils
import hashlib
import http.server
import re
import threading
import urllib.parse
import xml.sax.saxutils
from collections import Counter

from tests.servers.s3_servers import BUCKET


class CountingS3:
    """Objects and their metadata by key. The lock guards everything.

    Attributes:
        objects: Bytes by key.
        puts: How often each key was put with success.
        refused: How often each key was refused because it existed.
    """

    def __init__(self) -> None:  # noqa: C901  # the handler's few methods count as branches
        self.objects: dict[str, bytes] = {}
        self.puts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._metadata: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # One packet for an answer.

            def handle_expect_100(self):
                super().handle_expect_100()
                self.wfile.flush()
                return True

            def do_POST(self):  # A batch of deletions; obstore sends one for a single deletion too.
                body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
                for key in re.findall("<Key>(.*?)</Key>", body):
                    store._delete(xml.sax.saxutils.unescape(key))
                self._answer(200, {"Content-Type": "application/xml"}, b"<DeleteResult></DeleteResult>")

            def do_PUT(self):
                count = int(self.headers["Content-Length"] or 0)
                body = self.rfile.read(count)
                if len(body) < count:  # Its client was killed half-way.
                    self.close_connection = True
                    return
                self._answer(*store._put(self._key(), body, self.headers))

            def do_HEAD(self):
                self._answer(*store._head(self._key()))

            def do_DELETE(self):
                store._delete(self._key())
                self._answer(204, {})

            def do_GET(self):
                query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
                self._answer(200, {"Content-Type": "application/xml"}, store._list(query.get("prefix", "")))

            def _key(self):
                return urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

            def _answer(self, status, headers, body=b""):
                with contextlib.suppress(ConnectionError):
                    self.send_response_only(status)
                    for name, value in {"Content-Length": str(len(body)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *args):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass  # A client that was killed.

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def uri(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint_url={self.endpoint_url}"

    def under(self, prefix: str) -> dict[str, bytes]:
        """The objects under a prefix, named without it."""
        with self._lock:
            return {
                key.removeprefix(f"{prefix}/"): data
                for key, data in self.objects.items()
                if key.startswith(f"{prefix}/")
            }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _put(self, key, body, headers):
        with self._lock:
            if headers["If-None-Match"] == "*" and key in self.objects:
                self.refused[key] += 1
                return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
            self.objects[key] = body
            self.puts[key] += 1
            self._metadata[key] = {
                name: value for name, value in headers.items() if name.lower().startswith("x-amz-meta-")
            }
        return 200, {"ETag": _etag(body)}

    def _head(self, key):
        with self._lock:
            if key not in self.objects:
                return 404, {}
            body, metadata = self.objects[key], self._metadata[key]
        return 200, {
            **metadata,
            "Content-Length": str(len(body)),
            "ETag": _etag(body),
            "Last-Modified": email.utils.formatdate(usegmt=True),
        }

    def _delete(self, key):
        with self._lock:
            self.objects.pop(key, None)

    def _list(self, prefix):
        with self._lock:
            keys = sorted(key for key in self.objects if key.startswith(prefix))
            sizes = {key: len(self.objects[key]) for key in keys}
        items = "".join(
            f"<Contents><Key>{xml.sax.saxutils.escape(key)}</Key><Size>{size}</Size>"
            f"<LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for key, size in sizes.items()
        )
        return f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
