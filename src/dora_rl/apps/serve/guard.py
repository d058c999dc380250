"""What every request must satisfy before it reaches a route, and the headers of every response.

Invariants:
- only GET and HEAD are answered;
- the Host header is an address, `localhost` or the name that the server was given: a foreign name that resolves to this
  machine (DNS rebinding) is refused, so no other site can read the page through a visitor's browser;
- if there is a token, nothing is answered without it: it comes in the URL once and then in an HttpOnly cookie, or as a
  bearer token; it is compared in constant time;
- scripts, styles and data come from this server only, and no other page may frame it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_TOKEN = "open the address that `dora-rl serve` printed: it has the token\n"  # noqa: S105


class Guard:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, *, token: str | None, host: str) -> None:
        self._app = app
        self._token = token
        self._host = host.lower()
        # Cookies do not distinguish ports: each token has its own name, so that two servers do not disturb each other.
        self.cookie = f"dora_rl_{hashlib.sha256((token or '').encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no web sockets
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that may not pass; None if it may."""
        headers = Headers(scope=scope)
        if not self._known_host(headers.get("host", "")):
            return PlainTextResponse("this server does not answer to that host name\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this server only answers GET\n", 405, {"Allow": "GET, HEAD"})
        if self._token is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if scope["path"] == "/" and given:
            if not self._matches(given[0]):
                return PlainTextResponse(_NO_TOKEN, 401)
            # The address without the token stays in the history of the browser.
            entry = RedirectResponse("/", 303)
            entry.set_cookie(self.cookie, self._token, httponly=True, samesite="lax", path="/")
            return entry
        bearer = headers.get("authorization", "")
        if bearer.lower().startswith("bearer ") and self._matches(bearer[7:].strip()):
            return None
        return None if self._matches(self._from_cookie(headers)) else PlainTextResponse(_NO_TOKEN, 401)

    def _from_cookie(self, headers: Headers) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _matches(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _known_host(self, header: str) -> bool:
        name = header.lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in ("localhost", self._host):
            return True
        return is_address(name)


def is_address(name: str) -> bool:
    """Whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
