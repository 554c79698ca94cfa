"""The routes of the server: from parameters to answers of `catalog`, `details` and `charts` as JSON."""

import asyncio
import contextlib
import hashlib
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from destinations.runs import (
    BudgetError,
    EditError,
    MetricNotFoundError,
    RecordedRun,
    RunNotFoundError,
    RunsError,
)
from destinations.runs.budget import Budget, Limits, points_each
from destinations.runs.views import RunView
from uploads import exposition

from . import details
from .answers import encode
from .catalog import Catalog
from .changes import Changes
from .charts import Axis, ChartReader
from .files import page_file, run_file

__all__ = ["App"]

_WAIT_SECONDS = 25.0
_MAX_RUNS = 1000
_MAX_SERIES = 2000
_MAX_COMPARED = 20
_MAX_POINTS = 10_000
_MAX_BODY_BYTES = 1 << 20
# Answers that are read at the same time; others wait. Answers with curves and media may take long, so the
# others, such as the table, have turns of their own.
_AT_ONCE = 16
_LONG_AT_ONCE = 8

# Files of runs aren't compressed: most already are, and some are large. An answer with 100 curves takes
# 6 ms at level 1. Level 5 takes 25 ms, and saves a tenth of the bytes.
_COMPRESSED = [Middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)]

_Answer = Callable[[Request], Any]


class App:
    """The ASGI application, without its guard.

    Args:
        catalog: the runs.
        charts: reads curves.
        changes: knows what has changed.
        limits: the budget of one answer.
    """

    def __init__(
        self, catalog: Catalog, charts: ChartReader, changes: Changes, limits: Limits | None = None
    ) -> None:
        self.catalog = catalog
        self.charts = charts
        self.changes = changes
        self._limits = limits
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._long_turns = asyncio.Semaphore(_LONG_AT_ONCE)
        self.asgi = Starlette(
            routes=[
                Route("/", lambda _: page_file("index.html")),
                # Some browsers ask for it before they read the page.
                Route("/favicon.ico", lambda _: page_file("icon.svg")),
                Route("/metrics", _guarded(self._metrics)),
                Route(
                    "/static/{name:path}",
                    _guarded(lambda request: page_file(request.path_params["name"])),
                    middleware=_COMPRESSED,
                ),
                self._get("/api/info", self._info),
                self._get("/api/runs", self._runs),
                self._get("/api/groups", self._groups),
                self._get("/api/fields", lambda _: self.catalog.fields()),
                self._get("/api/selected", self._selected),
                self._get("/api/series", self._series, is_long=True),
                self._get("/api/band", self._band, is_long=True),
                self._get("/api/compare", self._compare, is_long=True),
                self._get("/api/importance", self._importance, is_long=True),
                _query_route("/api/changes", self._wait),
                self._get(
                    "/api/runs/{id}", lambda request: details.details(self.catalog, self._run(request))
                ),
                Route("/api/runs/{id}", self._edit, methods=["PATCH"]),
                Route("/api/views", self._edit, methods=["PATCH"]),
                self._get("/api/views", lambda _: self.catalog.views()),
                self._get("/api/runs/{id}/log", self._log),
                self._get("/api/runs/{id}/media", self._media, is_long=True),
                self._get("/api/runs/{id}/table", self._table, is_long=True),
                self._get("/api/runs/{id}/points", self._points, is_long=True),
                Route("/api/runs/{id}/files/{path:path}", _guarded(self._file), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _error_answer},
        )

    def _get(self, path: str, answer: _Answer, *, is_long: bool = False) -> Route:
        """Returns a route that reads its answer within a budget, as long as the client is connected."""
        turns = self._long_turns if is_long else self._turns

        async def endpoint(request: Request) -> Response:
            budget = Budget(self._limits)

            def read(request: Request) -> Response:
                with budget:
                    return _json(answer(request), request)

            async with turns:
                waiting = asyncio.create_task(_end_without_client(budget, request))
                try:
                    return await run_in_threadpool(_guarded(read), request)
                finally:
                    waiting.cancel()

        return _query_route(path, endpoint)

    def _metrics(self, _: Request) -> Response:
        return Response(exposition(self.catalog.gauges()), media_type="text/plain; version=0.0.4")

    # Runs.

    def _info(self, _: Request) -> Any:
        return {**self.catalog.info(), "version": self.changes.version, "site": False}

    def _runs(self, request: Request) -> Any:
        # The version comes first, so that later changes count as new.
        version = self.changes.version
        if run_ids := request.query_params.getlist("run"):
            return {**self.catalog.rows(run_ids[:_MAX_RUNS], _columns(request)), "version": version}
        page = self.catalog.page(
            _view(request),
            columns=_columns(request),
            offset=_whole(request, "offset", 0, 0, 10**9),
            limit=_whole(request, "limit", 100, 0, 1000),
        )
        return {**page, "version": version}

    def _groups(self, request: Request) -> Any:
        return self.catalog.groups(_view(request), columns=_columns(request))

    def _run(self, request: Request) -> RecordedRun:
        return self.catalog.run(request.path_params["id"])

    async def _edit(self, request: Request) -> Response:
        """Applies a JSON object of changes: edits of a run, or saved views."""
        body = await _body(request)
        if body is None:
            return _failure(413, f"an edit must have at most {_MAX_BODY_BYTES >> 20} MiB.")
        try:
            changes = json.loads(body)
            if not isinstance(changes, dict):
                raise ValueError("it is not an object")  # noqa: TRY004, TRY301  # bad content, answered below
        except (ValueError, RecursionError) as error:
            return _failure(400, f"an edit must be a JSON object, got: {error}.")
        run_id = request.path_params.get("id")

        def edit(_: Request) -> Response:
            if run_id is None:
                return _json(self.catalog.save_views(changes), request)
            row = self.catalog.edit(run_id, changes)
            self.changes.wake()
            return _json(row, request)

        return await run_in_threadpool(_guarded(edit), request)

    async def _wait(self, request: Request) -> Response:
        run_ids = request.query_params.getlist("run")[:_MAX_RUNS]
        seconds = _WAIT_SECONDS
        found = await self.changes.wait(request.query_params.get("since", ""), run_ids, seconds)
        return Response(encode(found), media_type="application/json")

    # One run.

    def _log(self, request: Request) -> Any:
        return details.log(
            self._run(request),
            request.query_params.get("file", ""),
            _whole(request, "offset", 0, -(1 << 62), 1 << 62),
            _whole(request, "limit", 1 << 18, 0, 1 << 18),
        )

    def _media(self, request: Request) -> Any:
        parameters = request.query_params
        return details.media(
            self._run(request),
            parameters.get("kind", ""),
            parameters.get("name", ""),
            start=_number(request, "from"),
            end=_number(request, "to"),
            limit=_whole(request, "limit", 1000, 1, 10_000),
        )

    def _table(self, request: Request) -> Any:
        return details.table(
            self._run(request),
            request.query_params.get("name", ""),
            _whole(request, "step", None, -(1 << 63), (1 << 63) - 1),
            offset=_whole(request, "offset", 0, 0, 1 << 62),
            limit=_whole(request, "limit", 1000, 0, 10_000),
        )

    def _points(self, request: Request) -> Any:
        file = request.query_params.get("file", "")
        return details.points(self._run(request), file, _whole(request, "limit", 50_000, 1, 200_000))

    def _file(self, request: Request) -> Response:
        run, path = self._run(request), request.path_params["path"]
        with contextlib.suppress(ValueError):
            run.file(path)
        return run_file(*run.place_of(path))

    # Curves.

    def _asked_runs(self, request: Request, most: int) -> list[tuple[str, RecordedRun | None]]:
        ids = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 1 <= len(ids) <= most:
            raise ValueError(f"run must be given 1 to {most} times, got {len(ids)}.")
        return self.catalog.runs_of(ids)

    def _selected(self, request: Request) -> Any:
        runs = [run for _, run in self._asked_runs(request, _MAX_RUNS) if run is not None]
        return {"runs": [self.catalog.selected(run) for run in runs]}

    def _series(self, request: Request) -> Any:
        runs = self._asked_runs(request, _MAX_RUNS)
        metrics = list(dict.fromkeys(request.query_params.getlist("metric")))
        if not metrics or len(metrics) * len(runs) > _MAX_SERIES:
            raise ValueError(
                f"metric must be given, for {_MAX_SERIES} series at most; got {len(metrics)} metrics "
                f"and {len(runs)} runs."
            )
        writers = sum(len(run.writers) for _, run in runs if run is not None)
        curves = (len(runs) + writers) * len(metrics)
        found = self.charts.series(
            runs,
            metrics,
            _axis(request),
            points=points_each(curves, _whole(request, "points", 1000, 1, _MAX_POINTS)),
            rank=_whole(request, "rank", 0, 0, 10**9),
            cursors=request.query_params.getlist("after"),
            branches=request.query_params.get("branches", "0") == "1",
        )
        return {"series": found}

    def _band(self, request: Request) -> Any:
        parameters = request.query_params
        runs = [(run_id, run) for run_id, run in self._asked_runs(request, _MAX_RUNS) if run is not None]
        groups = self.catalog.bands(
            runs,
            groups=[one for one in parameters.getlist("group") if one],
            over=parameters.get("over", ""),
            ranks=parameters.get("ranks", "0") == "1",
            is_split=parameters.get("split", "0") == "1",
            goal=parameters.get("goal", ""),
        )
        bands = self.charts.bands(
            groups,
            parameters.get("metric", ""),
            _axis(request),
            points=points_each(len(groups), _whole(request, "points", 1000, 1, _MAX_POINTS)),
        )
        return {"bands": bands}

    def _compare(self, request: Request) -> Any:
        runs = [(run_id, run) for run_id, run in self._asked_runs(request, _MAX_COMPARED) if run is not None]
        if len(runs) < 2:  # noqa: PLR2004  # runs
            raise ValueError("two runs or more must be given to compare.")
        return details.compare(runs, self.charts.cache)

    def _importance(self, request: Request) -> Any:
        return self.catalog.importance(request.query_params.get("metric", ""), _view(request))


def _query_route(path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> Route:
    """Returns a route for GET and POST; a query of hundreds of names comes as the body of a POST."""

    async def asked(request: Request) -> Response:
        if request.method == "POST":
            body = await _body(request)
            if body is None:
                return _failure(413, f"parameters must have at most {_MAX_BODY_BYTES >> 20} MiB.")
            request = Request({**request.scope, "query_string": body}, request.receive)
        return await endpoint(request)

    return Route(path, asked, methods=["GET", "POST"], middleware=_COMPRESSED)


async def _body(request: Request) -> bytes | None:
    """Returns the body of a request; None if it's too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            return None
    return body


async def _end_without_client(budget: Budget, request: Request) -> None:
    """Ends a budget when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    budget.end()


def _columns(request: Request) -> list[str]:
    given = request.query_params.getlist("columns")
    return [one for one in (given[0].split(",") if len(given) == 1 else given) if one]


def _view(request: Request) -> RunView:
    """Returns the view of the parameters of a request."""
    parameters = request.query_params
    known = {"0": False, "1": True, "all": None, "": False}
    archived = parameters.get("archived", "0")
    if archived not in known:
        raise ValueError(f"archived must be 0, 1 or all, got {archived!r:.50}.")
    return RunView(
        where=parameters.get("where", ""),
        q=parameters.get("q", ""),
        without=tuple(parameters.getlist("without")),
        archived=known[archived],
        sort=parameters.get("sort", ""),
        group=tuple(parameters.getlist("group")),
    )


def _axis(request: Request) -> Axis:
    return Axis.parse(request.query_params.get("x", "step"), _number(request, "from"), _number(request, "to"))


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a number, got {text!r:.100}.")
    return number


def _whole(request: Request, name: str, default: Any, least: int, most: int) -> Any:
    text = request.query_params.get(name, "")
    if not text:
        return default
    try:
        number = int(text) if len(text) < 25 else None  # noqa: PLR2004  # digits
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, got {text!r:.100}.")
    return number


# Answers.


def _json(answer: Any, request: Request) -> Response:
    body = encode(answer)
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, media_type="application/json", headers={"ETag": tag})


def _failure(status: int, text: str) -> Response:
    return Response(encode({"error": text}), status_code=status, media_type="application/json")


def _guarded(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Returns a function that turns errors into answers."""

    def guarded(request: Request) -> Response:
        try:
            return answer(request)
        except (RunNotFoundError, FileNotFoundError, NotADirectoryError) as error:
            return _failure(404, _text_of(error))
        except EditError as error:
            return _failure(409, _text_of(error))
        except MetricNotFoundError as error:
            return _failure(404 if "id" in request.path_params else 400, _text_of(error))
        except BudgetError as error:
            return _failure(413, _text_of(error))
        except (RunsError, ValueError, OSError) as error:
            return _failure(400, _text_of(error))

    return guarded


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def _http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _failure(
        status, {404: "nothing is here.", 405: "this method is not known here."}.get(status, str(error))
    )


async def _error_answer(_: Request, error: Exception) -> Response:
    return _failure(500, f"the server failed: {type(error).__name__}: {error}")
