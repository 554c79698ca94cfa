"""The page's server answers any request with data or with an error message.

`fuzzing` sets the number of examples.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile.fuzzing import fuzz, limit
from tests.test_destinations.runs.foreign_runs import write_full_run
from tests.test_destinations.viewer.served import served

__all__ = ["limit"]

ODD = [
    *(
        "",
        "0",
        "-1",
        "1e400",
        "9" * 30,
        "nan",
        "٣",
        "a",
        "../..",
        "%2e%2e",
        "\0",
        "\udc80",
        "\x1b[2J",
        "a" * 5000,
        "all",
    ),
    *(
        "loss",
        "val/acc",
        "step",
        "epoch",
        "time",
        "relative",
        "media/Inputs/00000003_0.png",
        "Inputs",
        "image",
        "Table",
    ),
    *(
        "summary.loss < 1",
        "(" * 5000,
        "hparams.optim.lr",
        "-created_at",
        "name",
        "1:2:3",
        "sidecar.json",
        "1",
    ),
]
NAMES = [
    *(
        "where",
        "q",
        "sort",
        "columns",
        "archived",
        "offset",
        "limit",
        "since",
        "file",
        "kind",
        "name",
        "from",
        "to",
    ),
    *("step", "points", "run", "metric", "x", "rank", "after", "branches", "group", "over", "ranks", "token"),
]
PATHS = [
    *(
        "/",
        "/api/info",
        "/api/runs",
        "/api/runs/ID",
        "/api/runs/ID/log",
        "/api/runs/ID/media",
        "/api/runs/ID/table",
    ),
    *("/api/runs/ID/points", "/api/series", "/api/band", "/api/compare", "/api/fields"),
    *(
        "/api/runs/..",
        "/api/runs/%00",
        "/static/../app.py",
        "/api",
        "/api/runs/ID/files/../x",
        "/api/runs/ID/files/%ff",
    ),
]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Returns a client of a server with two runs."""
    root = tmp_path_factory.mktemp("page")
    for name in ("first", "second"):
        write_full_run(root / "runs" / name)
    with served(root / "runs") as client:
        yield client


def test_any_query_is_answered(client):
    """No response is a server error."""
    first, second = client.run_id("first"), client.run_id("second")
    values = st.sampled_from([*ODD, first, second]) | st.text(max_size=5)
    encoded = values.map(lambda one: one.encode(errors="surrogatepass"))

    @fuzz(200)
    @given(
        st.sampled_from(PATHS),
        st.lists(st.tuples(st.sampled_from(NAMES), encoded), max_size=5),
        st.booleans(),
    )
    def check(path, parameters, is_fitting):
        asked = (
            [*parameters, ("run", first), ("run", second), ("metric", "loss")] if is_fitting else parameters
        )
        answer = client.request("GET", path.replace("ID", first), asked)
        assert answer.status < 500, answer.content[:1000]

    check()


def test_any_edit_is_answered(client):
    """The edit is refused, or the run can be shown with it."""
    run_id = client.run_id("first")
    leaves = st.sampled_from([*ODD, None, True, 1, 1.5, 10**400]) | st.text(max_size=5)
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    )
    names = st.sampled_from(["tags", "notes", "archived", "name", "added_tags", "removed_tags"]) | st.text(
        max_size=5
    )

    @fuzz(100)
    @given(st.dictionaries(names, values, max_size=3))
    def check(changes):
        answer = client.request("PATCH", f"/api/runs/{run_id}", body=changes)
        assert answer.status < 500, answer.content[:1000]
        client.get("/api/runs", {"archived": "all"})

    check()
