"""Guards the server: only a browser with the token, on our own page, gets answers.

- Other users and programs of the machine lack the random token, which is in the URL once, then in a cookie.
- Connections without the token are bounded; the oldest is closed.
- Other web pages that use a form or `fetch`: the cookie is SameSite=Strict, and the guard checks
  `Sec-Fetch-Site` and `Origin`.
- DNS rebinding, where a foreign name resolves to this machine: `Host` must be an address, `localhost`, or an
  allowed name.
- HTML or scripts in names, texts or files of a run: a Content-Security-Policy without inline scripts, fixed
  types, `nosniff`.
- A foreign page that embeds ours: `frame-ancestors 'none'`.

Browsers send the cookie to all ports of the same host. So other servers of that host can read the token if
the user visits them with the same browser.
"""

import html
import ipaddress
import secrets
from collections.abc import Collection
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CONTENT_SECURITY_POLICY", "HEADERS", "IS_KNOWN", "Guard", "new_token"]

# Scripts of the page set places and colours as inline styles.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
IS_KNOWN = "is_known"
"""Marks the state of a request that passed the guard."""
_READS = {"GET", "HEAD"}
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>destinations</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 60ch; margin: 15vh auto; padding: 0 20px; overflow-wrap: anywhere; }}
</style>
<h1>destinations view</h1>
{said}
</html>
"""
_YEAR_SECONDS = 365 * 24 * 3600


def new_token() -> str:
    """Returns a random token of 192 bits."""
    return secrets.token_urlsafe(24)


class Guard:
    """Refuses requests without the token or from other sites, and adds headers to every answer.

    Args:
        app: the guarded application.
        token: what a request must have: as the parameter `token` of the page, which turns it into a cookie;
            in that cookie; or in `Authorization: Bearer TOKEN`.
        port: the port of the server, part of the cookie's name, so that two servers don't share a cookie.
        hosts: allowed values of `Host`, beside addresses and `localhost`.
        base_url: the address of the page behind a proxy, with a final slash; None without a proxy.
    """

    def __init__(
        self, app: ASGIApp, *, token: str, port: int, hosts: Collection[str] = (), base_url: str | None = None
    ) -> None:
        self._app = app
        self._token = token
        self._cookie = f"destinations-{port}"
        base = urlsplit(base_url or "/")
        self._path = base.path
        self._origin = f"{base.scheme}://{base.netloc}"
        self._hosts = {host.lower().rstrip(".") for host in (*hosts, base.hostname) if host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "private, no-cache")
            await send(message)

        # Probes need no token, and learn nothing.
        is_probe = scope["path"] == "/healthz"
        answer = PlainTextResponse("ok\n") if is_probe else self._refusal(scope) or self._entry(scope)
        if answer is None:
            scope.setdefault("state", {})[IS_KNOWN] = True
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_ours(host):
            return _error(
                headers,
                403,
                f"host {host!r:.100} is not one of this server. Use the address that it printed, "
                "or start it with --allow-host NAME.",
            )
        # Programs and old browsers don't send it. Following a link to the page is harmless.
        site = headers.get("sec-fetch-site", "none")
        is_navigation = headers.get("sec-fetch-mode") == "navigate" and scope["method"] in _READS
        if site not in {"none", "same-origin"} and not is_navigation:
            return _error(
                headers, 403, f"requests from other sites are refused, got Sec-Fetch-Site {site!r:.50}."
            )
        if scope["method"] not in _READS and not self._has_bearer(headers):
            origin = headers.get("origin", "")
            if origin not in {f"http://{host}", f"https://{host}", self._origin}:
                return _error(
                    headers, 403, f"a change must come from the page itself, got Origin {origin!r:.100}."
                )
        return None

    def _entry(self, scope: Scope) -> Response | None:
        """Returns None if the request has the token; otherwise a redirect with the cookie, or a refusal."""
        parameters = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in parameters if name == "token"]
        if given and scope["path"] == "/" and scope["method"] in _READS and self._is_token(given[-1]):
            rest = urlencode([(name, value) for name, value in parameters if name != "token"])
            target = f"{self._path}?{rest}" if rest else self._path
            answer: Response = RedirectResponse(target, status_code=303)
            if Headers(scope=scope).get("sec-fetch-site", "none") != "none":
                # A browser that comes from another site, such as the file of `--open`, wouldn't send the new
                # cookie on a redirect. It does after a page of ours.
                answer = HTMLResponse(f'<meta http-equiv="refresh" content="0; url={html.escape(target)}">')
            answer.set_cookie(
                self._cookie,
                self._token,
                max_age=_YEAR_SECONDS,
                httponly=True,
                samesite="strict",
                path=self._path,
            )
            return answer
        headers = Headers(scope=scope)
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        if self._is_token(cookie) or self._has_bearer(headers):
            return None
        return _error(
            headers,
            401,
            "this page needs the token of its server. Open the address that `destinations view` printed, "
            "with ?token=… in it.",
            "The browser keeps the token: open this link again after that. A server that was started again "
            "has another token, and prints another address.",
        )

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode("utf-8", "replace"), self._token.encode())

    def _has_bearer(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(token.strip())

    def _is_ours(self, host: str) -> bool:
        host = host.lower()
        is_v6 = host.startswith("[")
        name = host.partition("]")[0][1:] if is_v6 else host.partition(":")[0].rstrip(".")
        if name == "localhost" or name in self._hosts:
            return True
        try:
            # A page of another site reaches this server by a name; an address cannot be rebound.
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _error(headers: Headers, status: int, text: str, more: str = "") -> Response:
    """Returns a refusal, as JSON for programs and as a page for browsers."""
    if "text/html" not in headers.get("accept", ""):
        return JSONResponse({"error": text}, status_code=status)
    said = "".join(f"<p>{html.escape(one[0].upper() + one[1:])}</p>" for one in (text, more) if one)
    return HTMLResponse(_PAGE.format(said=said), status_code=status)
