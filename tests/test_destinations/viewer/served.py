"""Requests to a page over HTTP, as a browser sends them."""

import contextlib
import http.client
import json
from types import SimpleNamespace
from urllib.parse import quote, urlencode

import numpy as np

from destinations.runs import open_runs
from destinations.viewer import Viewer
from tests.test_destinations.runs.written import Written

__all__ = ["Client", "served", "write_demo"]

WAIT_SECONDS = 120


class Client:
    """Requests from a server; `get` returns the answer's JSON."""

    def __init__(self, viewer):
        self.viewer = viewer
        self.host = f"127.0.0.1:{viewer.port}"

    def request(self, method, path, parameters=(), *, headers=None, body=None, token=True):
        """Returns status, headers and content."""
        found = {"Host": self.host}
        if token:
            found["Authorization"] = f"Bearer {self.viewer.token}"
        found |= headers or {}
        connection = http.client.HTTPConnection("127.0.0.1", self.viewer.port, timeout=WAIT_SECONDS)
        try:
            query = urlencode(parameters, doseq=True)
            connection.putrequest(
                method, f"{path}?{query}" if query else path, skip_host=True, skip_accept_encoding=True
            )
            content = b"" if body is None else json.dumps(body).encode()
            if body is not None:
                found["Content-Length"] = str(len(content))
            for name, value in found.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(content)
            answer = connection.getresponse()
            return SimpleNamespace(status=answer.status, headers=answer.headers, content=answer.read())
        finally:
            connection.close()

    def get(self, path, parameters=(), *, status=200, **more):
        """Returns the JSON of an answer with this status."""
        answer = self.request("GET", path, parameters, **more)
        assert answer.status == status, answer.content[:1000]
        return json.loads(answer.content, parse_constant=_refuse)

    def run_id(self, name):
        """Returns the id of the run of this name."""
        (row,) = [row for row in self.get("/api/runs", {"archived": "all"})["rows"] if row["name"] == name]
        return row["id"]

    def file(self, run_id, path, **more):
        """Returns the answer to a request for a file of a run."""
        return self.request("GET", f"/api/runs/{run_id}/files/{quote(path)}", **more)


def _refuse(constant):
    raise AssertionError(f"{constant} is not strict JSON")


@contextlib.contextmanager
def served(root, **options):
    """Serves the runs of a folder; yields a `Client`."""
    with (
        open_runs(root, cache=root.parent / f"{root.name}-cache") as runs,
        Viewer(runs, port=0, **options) as viewer,
    ):
        yield Client(viewer)


def write_demo(root, name="digits", rows=300, **options):
    """Writes a run with one of each record; returns its folder."""
    with Written(root / name, **options) as run:
        log = run.logger
        log.log_hyperparameters({"optim": {"lr": 0.1, "name": "adam"}, "seed": 3, "bad": float("nan")})
        for step in range(rows):
            values = {"loss": 1 / (step + 1), "train/acc": step / rows}
            run.log(values | ({"val/acc": step / rows} if step % 100 == 0 else {}), step)
        rng = np.random.default_rng(0)
        image = rng.integers(0, 255, (8, 9, 3), dtype=np.uint8)
        for step in (0, 100):
            log.log_images(
                image,
                name="Inputs",
                channels_last=True,
                masks={"truth": np.eye(8, 9, dtype=np.uint8)},
                mask_class_labels={0: "sky", 1: "<b>sea</b>"},
                step=step,
            )
            log.log_histogram(rng.normal(size=100), "weights", step)
        log.log_audio(np.sin(np.linspace(0, 100, 1600)), 16000, "tone", 5)
        log.log_point_cloud(rng.normal(size=(50, 3)), "cloud", 5)
        log.log_table(["word", "count"], [["<script>", 1], ["b", None]], name="Words", step=7)
        log.log_text("it went <i>well</i>", name="Notes", step=9)
    return root / name
