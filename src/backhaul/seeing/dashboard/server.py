"""Server: the page and the answers to its questions, over HTTP on loopback.

Other users of this machine, and web pages in the same browser, can also reach a port on loopback. So every request
needs the secret token in the address, which nobody else knows. The Host header must name loopback, so that a page
whose name resolves to loopback (DNS rebinding) is refused. Only GET is answered. The page may load nothing from
elsewhere and run no script but its own.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import secrets
import signal
import sys
import threading
import webbrowser
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from backhaul.errors import BackhaulError
from backhaul.seeing.dashboard.answers import Answers
from backhaul.seeing.guest import Member
from backhaul.seeing.lookout import Lookout
from backhaul.seeing.top import reach
from backhaul.transport.base import Transport

HOST = "127.0.0.1"
_REQUEST_SECONDS = 10.0
_LONGEST_TARGET = 2000

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_DRAWING_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"


class Dashboard:
    """A running dashboard, until `close`. Open ``address`` in a browser.

    Raises `OSError` if the port is taken.
    """

    def __init__(self, members: Sequence[Member], transport: Transport, port: int = 0, interval: float = 1.0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._server = _Server((HOST, port), _Handler)
        self._server.token = self.token
        self.port: int = self._server.server_address[1]
        self.lookout = Lookout(members, transport, interval, metered=True)
        self._server.answers = Answers(self.lookout)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="dashboard", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.lookout.close()


def run(options: argparse.Namespace) -> int:
    """Run ``backhaul dashboard`` until it is interrupted; returns the exit code."""
    try:
        members, transport = reach(options.where, options.key_file)
        dashboard = Dashboard(members, transport, options.port, options.interval)
    except (BackhaulError, OSError) as error:
        print(f"backhaul dashboard: {error}", file=sys.stderr)
        return 1
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with dashboard:
        print(f"the dashboard of {len(members)} workers, until Ctrl-C: {dashboard.address}", flush=True)
        if not options.no_browser and ("DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ):
            webbrowser.open(dashboard.address)
        over.wait()
    return 0


@cache
def _page() -> str:
    """The page, in one file except for the nonce."""
    folder = resources.files("backhaul.seeing.dashboard")
    html, style, script = (folder.joinpath(name).read_text() for name in ("page.html", "page.css", "page.js"))
    return html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    token: str
    answers: Answers

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects during an answer."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _REQUEST_SECONDS
    server_version = "backhaul"
    sys_version = ""

    def do_GET(self) -> None:
        where = urlsplit(self.path[:_LONGEST_TARGET])
        arguments = {name: values[-1] for name, values in parse_qs(where.query).items()}
        if self.headers.get("Host", "") not in (f"{HOST}:{self._port}", f"localhost:{self._port}"):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is only for loopback")
        elif not hmac.compare_digest(arguments.get("token", "").encode(), self.server.token.encode()):
            self._refuse(
                HTTPStatus.FORBIDDEN, "open the address that `backhaul dashboard` printed, including its token"
            )
        elif where.path == "/":
            nonce = secrets.token_urlsafe(16)
            page = _page().replace("__NONCE__", nonce)
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page, _POLICY.format(nonce=nonce))
        else:
            self._answer_question(where.path, arguments)

    @property
    def _port(self) -> int:
        port: int = self.server.server_address[1]
        return port

    def _answer_question(self, path: str, arguments: dict[str, str]) -> None:
        answers = self.server.answers
        try:
            if path == "/api/view":
                found: Any = answers.view()
            elif path == "/api/threads":
                found = answers.threads(arguments.get("worker", ""))
            elif path == "/api/stuck":
                found = answers.stuck()
            elif path == "/api/drawing" and (which := _context(arguments.get("context", ""))) is not None:
                picture = answers.drawing(which) if which else answers.latest_drawing()
                self._answer(HTTPStatus.OK, "image/svg+xml; charset=utf-8", picture, _DRAWING_POLICY)
                return
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")
                return
        except BackhaulError as error:
            self._refuse(HTTPStatus.BAD_GATEWAY, str(error))
            return
        self._answer(HTTPStatus.OK, "application/json", json.dumps(found))

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, "application/json", json.dumps({"error": why}))

    def _answer(self, status: HTTPStatus, kind: str, text: str, policy: str = "default-src 'none'") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Security-Policy": policy, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests are frequent, and the line would contain the token."""


def _context(text: str) -> int | None:
    """The id of a context; 0 means the latest; None if the text is neither."""
    return 0 if text == "latest" else int(text) if text.isascii() and text.isdecimal() else None


def _refuse_others(handler: type[_Handler]) -> None:
    """Answer all methods but GET with an error."""

    def refuse(self: _Handler) -> None:
        self.close_connection = True
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read-only: use GET")

    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "CONNECT", "TRACE"):
        setattr(handler, f"do_{method}", refuse)


_refuse_others(_Handler)
