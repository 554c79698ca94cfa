"""Access to the page, and content that it never shows as a document, over HTTP as an attacker."""

import contextlib
import http.client
import json
import os
import socket
from urllib.parse import urlencode

import pytest

from destinations import cli
from destinations.runs import open_runs
from destinations.runs.commands.running import UsageError
from destinations.viewer import Viewer
from destinations.viewer.commands import _token_of
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.viewer.served import served

SECRET = "the secret of the machine"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Gives a folder with a hostile run, and a secret beside it."""
    base = tmp_path_factory.mktemp("hostile")
    (base / "secret.txt").write_text(SECRET)
    run = write_run(base / "runs" / "one")
    (run / "media").mkdir()
    (run / "media" / "picture.svg").write_text("<svg onload='alert(1)'/>")
    (run / "media" / "page.html").write_text("<script>alert(1)</script>")
    (run / "media" / "picture.png").write_text("<script>alert(1)</script>")
    (run / "media" / "link.png").symlink_to(base / "secret.txt")
    (run / "media" / "folder").symlink_to(base)
    (run / ".hidden").write_text(SECRET)
    os.mkfifo(run / "media" / "fifo.png")
    return base / "runs"


@pytest.fixture(scope="module")
def page(root):
    """Gives a page that shows it."""
    with served(root) as client:
        yield client


@pytest.fixture(scope="module")
def run_id(page):
    """Gives the id of the run."""
    return page.run_id("one")


EVERYTHING = [
    "/",
    "/static/app.css",
    "/static/chart.js",
    "/api/info",
    "/api/runs",
    "/api/fields",
    "/nothing",
]


@pytest.mark.parametrize("path", EVERYTHING)
@pytest.mark.parametrize("token", [None, "", "wrong", "ö"])
def test_without_the_token_nothing_is_read(page, path, token):
    """Every address answers 401, even with a wrong token in a header, a cookie or the URL."""
    headers = {"Authorization": token and f"Bearer {token}".encode()}
    cookie = {"Cookie": token and f"destinations-{page.viewer.port}={token}".encode()}

    answers = [
        page.request("GET", path, headers=headers, token=False),
        page.request("GET", path, headers=cookie, token=False),
        page.request("GET", path, {"token": token or ""}, token=False),
    ]

    assert [answer.status for answer in answers] == [401] * 3
    assert all("needs the token" in json.loads(answer.content)["error"] for answer in answers)


def test_a_refused_reader_gets_a_page(page):
    """A browser gets a page, which shows what it sent as text."""
    sent = {"Host": "<script>alert(1)</script>.example", "Accept": "text/html,*/*"}
    foreign = page.request("GET", "/", headers=sent)
    nameless = page.request("GET", "/", headers={"Accept": "text/html,*/*"}, token=False)

    assert [answer.status for answer in (foreign, nameless)] == [403, 401]
    assert {answer.headers["Content-Type"] for answer in (foreign, nameless)} == {"text/html; charset=utf-8"}
    assert b"<script>" not in foreign.content
    assert b"&lt;script&gt;alert(1)" in foreign.content
    assert "<p>This page needs the token of its server." in nameless.content.decode()


def test_without_the_token_nothing_is_written(page, run_id, root):
    """The page's own origin needs the token too."""
    answer = page.request(
        "PATCH",
        f"/api/runs/{run_id}",
        body={"note": "x"},
        headers={"Origin": f"http://{page.host}"},
        token=False,
    )

    assert answer.status == 401
    assert not (root / "one" / "edits.json").exists()


def test_the_token_of_the_url_becomes_a_cookie_hidden_from_scripts_and_other_sites(page):
    """The redirect leads to the address without the token, and keeps the rest of the view."""
    answer = page.request("GET", "/", {"run": "a b", "token": page.viewer.token}, token=False)
    cookie = answer.headers["Set-Cookie"]
    value = cookie.partition(";")[0]
    again = page.request("GET", "/api/info", headers={"Cookie": f"other=1; {value}"}, token=False)

    assert (answer.status, answer.headers["Location"]) == (303, "/?run=a+b")
    assert {part.strip().lower() for part in cookie.split(";")} >= {"httponly", "samesite=strict", "path=/"}
    assert again.status == 200


HOSTS = {
    "localhost:1": 200,
    "127.0.0.1": 200,
    "[::1]:80": 200,
    "192.168.0.7:8377": 200,
    "allowed.example": 200,
    "ALLOWED.example.:99": 200,
    "evil.example": 403,
    "localhost.evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "": 403,
    None: 400,
}


def test_a_foreign_host_is_refused(root):
    """A foreign name that resolves to this machine reaches nothing, even with the token."""
    with served(root, allowed_hosts=["Allowed.Example"]) as page:
        found = {host: page.request("GET", "/api/info", headers={"Host": host}).status for host in HOSTS}

    assert found == HOSTS


@pytest.mark.parametrize(
    ("origin", "status"),
    [("own", 200), ("http://evil.example", 403), ("null", 403), (None, 403), ("http://127.0.0.1:1", 403)],
)
def test_a_change_must_come_from_the_page(page, run_id, origin, status):
    """The cookie is enough, as a browser sends it."""
    headers = {
        "Cookie": f"destinations-{page.viewer.port}={page.viewer.token}",
        "Origin": f"http://{page.host}" if origin == "own" else origin,
    }
    answer = page.request("PATCH", f"/api/runs/{run_id}", body={"note": "ours"}, headers=headers, token=False)

    assert answer.status == status


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_reads_nothing(page, site):
    """Not even a page on another port of this machine gets an answer, but a link to the page works."""
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}

    refused = page.request("GET", "/api/runs", headers=headers)
    followed = page.request("GET", "/api/info", headers=headers | {"Sec-Fetch-Mode": "navigate"})

    assert (refused.status, followed.status) == (403, 200)


OUTSIDE = [
    "../../secret.txt",
    "..%2f..%2fsecret.txt",
    "%2e%2e/%2e%2e/secret.txt",
    "..%252f..%252fsecret.txt",
    "media/../../../secret.txt",
    "media/link.png",
    "media/folder/secret.txt",
    "media/fifo.png",
    "media/picture.png%00.txt",
    "media",
    "",
    "/etc/passwd",
    "%2fetc%2fpasswd",
    ".hidden",
    "media/" + "a" * 5000,
    "%ff%fe",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_path_leaves_a_run(page, run_id, path):
    """The server answers 404 however the path is written, and follows no links or devices."""
    answer = page.request("GET", f"/api/runs/{run_id}/files/{path}")

    assert answer.status == 404
    assert SECRET.encode() not in answer.content


def test_the_icon_is_at_the_address_browsers_request(page):
    """Some browsers ask for `/favicon.ico` before they read the page."""
    assert page.request("GET", "/favicon.ico").content == page.request("GET", "/static/icon.svg").content


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "%00", ".", "app.py", "x/../app.css", ""])
def test_only_files_of_the_page_are_served(page, name):
    """The server sends no Python file, and nothing above the folder."""
    answer = page.request("GET", f"/static/{name}")

    assert answer.status == 404
    assert b"import" not in answer.content


@pytest.mark.parametrize("run", ["..", "%2e%2e", "one", "../one", "0" * 12, "0" * 11, "a" * 10_000, "%00"])
def test_only_an_id_names_a_run(page, run):
    """A name or a path isn't an id."""
    assert page.request("GET", f"/api/runs/{run}").status == 404


@pytest.mark.parametrize(
    "path", ["../../secret.txt", "media/link.png", "media/fifo.png", "/etc/passwd", "\0"]
)
def test_no_decoder_reads_outside(page, run_id, path):
    """They follow the same rules as files."""
    answer = page.request("GET", f"/api/runs/{run_id}/points", {"file": path})

    assert answer.status in {400, 404}
    assert SECRET.encode() not in answer.content


@pytest.mark.parametrize("name", ["picture.svg", "page.html"])
def test_documents_of_a_run_are_downloaded_and_never_shown(page, run_id, name):
    """The server sends them as bytes, in a sandbox."""
    answer = page.file(run_id, f"media/{name}")

    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Disposition"].startswith("attachment")
    assert answer.headers["Content-Security-Policy"] == "default-src 'none'; sandbox"


def test_a_script_named_as_a_picture_is_served_as_a_picture(page, run_id):
    """The name decides the type, and browsers may not guess."""
    answer = page.file(run_id, "media/picture.png")

    assert answer.headers["Content-Type"] == "image/png"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/api/info", "/api/nothing", "/api/runs/0/files/x", "/nothing"])
def test_every_answer_has_security_headers(page, path):
    """The headers allow only our own scripts, no frames, no referrer, and no caching by proxies."""
    headers = page.request("GET", path).headers

    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["frame-ancestors"]) == (
        "'none'",
        "'self'",
        "'none'",
    )
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "private" in headers["Cache-Control"]


def test_browsers_revalidate_every_file_of_the_page(page, run_id):
    """Browsers ask again after an update, so that old and new files don't mix."""
    cached = {
        path: page.request("GET", path).headers["Cache-Control"]
        for path in ("/static/app.js", f"/api/runs/{run_id}")
    }

    assert cached == {
        "/static/app.js": "private, no-cache",
        f"/api/runs/{run_id}": "private, no-cache",
    }


def test_an_edit_of_many_megabytes_is_refused(page, run_id):
    """The server answers 413 before it has read all of it."""
    answer = page.request("PATCH", f"/api/runs/{run_id}", body={"note": "x" * (2 << 20)})

    assert answer.status == 413


def test_broken_requests_end_alone(page):
    """After garbage, half a request, and a header without end, the server answers others."""
    for garbage in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x",
        b"GET /" + b"a" * 200_000,
        b"PATCH / HTTP/9",
    ):
        with socket.create_connection(("127.0.0.1", page.viewer.port), 30) as connection:
            connection.sendall(garbage)

    assert page.get("/api/info")["name"] == "runs"


def test_the_server_listens_on_this_machine_only(root, tmp_path):
    """It binds to this machine only by default; the token is always there, and must be long."""
    with open_runs(root, cache=tmp_path) as runs:
        with Viewer(runs, port=0) as viewer:
            assert viewer._socket.getsockname()[0] == "127.0.0.1"
            assert viewer.is_local
        with Viewer(runs, port=0, host="0.0.0.0") as viewer:  # noqa: S104  # what is tested
            assert not viewer.is_local
            assert len(viewer.token) == 32
            connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=30)
            connection.request("GET", "/api/info")
            assert connection.getresponse().status == 401
            connection.close()
        with pytest.raises(ValueError, match="token must have at least 16 characters, got 3"):
            Viewer(runs, token="abc")


def test_a_port_in_use_is_named(root, tmp_path, capsys):
    """The exit code is 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert cli.main(["view", str(root), "--port", str(port)]) == 1

    assert f"port {port} of 127.0.0.1 cannot be bound" in capsys.readouterr().err


def test_connections_without_the_token_are_few(page):
    """If a program opens many, the server closes the oldest, and nobody else notices."""
    known = http.client.HTTPConnection("127.0.0.1", page.viewer.port, timeout=60)
    asked = {"Host": page.host, "Authorization": f"Bearer {page.viewer.token}"}
    known.request("GET", "/api/info", headers=asked)
    known.getresponse().read()
    strangers = [socket.create_connection(("127.0.0.1", page.viewer.port)) for _ in range(600)]
    try:
        page.get("/api/info")
        known.request("GET", "/api/info", headers=asked)
        statuses = known.getresponse().status
        strangers[0].settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
        strangers[-1].settimeout(0)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)
    finally:
        known.close()
        for one in strangers:
            one.close()

    assert statuses == 200


def test_headers_have_a_limit(page):
    """The server refuses longer headers before it stores them; parameters may come as the body instead."""
    names = [f"hparams.{number:03}{'x' * 150}" for number in range(300)]
    query = urlencode({"columns": names}, doseq=True)
    connection = http.client.HTTPConnection("127.0.0.1", page.viewer.port, timeout=60)
    asked = {"Host": page.host, "Authorization": f"Bearer {page.viewer.token}"}

    long = page.request("GET", f"/api/runs?{query}")
    connection.request("POST", "/api/runs", query, asked)
    posted = connection.getresponse()

    assert long.status == 400
    assert posted.status == 400
    assert json.loads(posted.read())["error"].startswith("unknown column 'hparams.000xxx")
    connection.close()


def test_a_growing_file_is_sent_at_its_first_length(page, run_id, root):
    """The answer is as long as its header says, and the connection works for the next one."""
    log = root / "one" / "big.log"
    with log.open("wb") as file:
        file.truncate(32 << 20)
    connection = http.client.HTTPConnection("127.0.0.1", page.viewer.port, timeout=60)
    asked = {"Host": page.host, "Authorization": f"Bearer {page.viewer.token}"}
    connection.request("GET", f"/api/runs/{run_id}/files/big.log", headers=asked)
    answer = connection.getresponse()
    with log.open("ab") as file:
        file.write(b"later" * 1000)
    content = answer.read()
    log.unlink()
    first = connection.sock
    connection.request("GET", "/api/info", headers=asked)

    assert connection.getresponse().status == 200
    assert connection.sock is first
    assert (len(content), content.count(b"later")) == (32 << 20, 0)
    connection.close()


def test_a_probe_needs_no_token_and_learns_nothing(page):
    """Kubernetes probes without a token, by any name; metrics need the token."""
    probe = page.request("GET", "/healthz", headers={"Host": "pod.example"}, token=False)
    figures = page.request("GET", "/metrics", token=False)

    assert (probe.status, probe.content) == (200, b"ok\n")
    assert figures.status == 401


def test_metrics_describe_the_runs(page):
    """They count runs by status, and give heartbeats of runs that haven't ended."""
    answer = page.request("GET", "/metrics")

    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b'destinations_runs{status="completed"} 1.0\n' in answer.content
    assert b"destinations_run_heartbeat_seconds" not in answer.content


# A page for a team.


@pytest.fixture(scope="module")
def behind_a_proxy(root):
    """Gives a read-only page behind a proxy, below a path of another host."""
    with served(root, read_only=True, base_url="https://lab.example/team/runs") as client:
        yield client


def test_the_address_of_a_proxy_is_used(behind_a_proxy):
    """The printed link, the redirect, and the path of the cookie use the proxy's address."""
    viewer = behind_a_proxy.viewer
    entered = behind_a_proxy.request(
        "GET", "/", {"token": viewer.token, "x": "1"}, headers={"Host": "lab.example"}, token=False
    )

    assert viewer.url == f"https://lab.example/team/runs/?token={viewer.token}"
    assert (entered.status, entered.headers["Location"]) == (303, "/team/runs/?x=1")
    assert "Path=/team/runs/;" in entered.headers["Set-Cookie"]


def test_a_read_only_page_refuses_edits(behind_a_proxy):
    """The server refuses edits even from the page itself, which offers none."""
    run_id = behind_a_proxy.run_id("one")
    answer = behind_a_proxy.request(
        "PATCH",
        f"/api/runs/{run_id}",
        headers={"Origin": "https://lab.example"},
        body={"note": "mine"},
    )

    assert (answer.status, json.loads(answer.content)["error"]) == (409, "this page is read-only.")
    assert behind_a_proxy.get("/api/info")["writable"] is False
    assert behind_a_proxy.get(f"/api/runs/{run_id}")["note"] != "mine"


@pytest.mark.parametrize("url", ["lab.example/runs", "ftp://lab.example", "https:///runs", "https://x/?a=1"])
def test_a_base_url_is_an_address(root, tmp_path, url):
    """Anything but an http address raises, with an example."""
    with (
        open_runs(root, cache=tmp_path) as runs,
        pytest.raises(ValueError, match=r"like https://example\.org/runs/"),
    ):
        Viewer(runs, base_url=url)


def test_a_token_file_keeps_the_address(root, tmp_path):
    """The token is written once, for this user alone; a short one or a readable file is refused."""
    file = tmp_path / "token"
    first = _token_of(file)

    assert _token_of(file) == first
    assert (len(first), file.stat().st_mode & 0o777) == (32, 0o600)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        _token_of(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(UsageError, match="at least 16 characters"):
        _token_of(file)
