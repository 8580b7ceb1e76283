"""The live page's server: the standard library's, for one person on this machine. It answers GET and nothing else.

What can be asked for are the keys of runs that were found, and the parts of their views; no path of a file is in any
address. Who is asked for by another name than this machine's own (by DNS rebinding) does not answer, and where it
listens to other machines a token is asked for.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from fedstrata.core.errors import FedstrataError, RunDirectoryError, UserError
from fedstrata.formatting import duration
from fedstrata.plots.arms import Source
from fedstrata.report.page import as_json, render
from fedstrata.report.view import LIVE_BUDGET, Part, View
from fedstrata.runs.reader import Run
from fedstrata.watch.following import Following

_COOKIE = "fedstrata"
_HEARTBEAT = 10.0  # seconds; how soon a page that was closed is noticed
_KEPT_VIEWS = 8


class Server(ThreadingHTTPServer):
    """Serves the runs below some folders."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, folders: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> None:
        self.following = Following(folders)
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(24)
        self._views: dict[str, tuple[Any, View]] = {}
        self._building = threading.Lock()
        self._ended = threading.Event()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(f"--host = {host!r}, --port = {port}: {error.strerror}; choose another") from None
        self.following.look()
        threading.Thread(target=self.following.keep_looking, args=(self._ended,), daemon=True).start()

    @property
    def address(self) -> str:
        """Where the page is."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{host}:{port}/" + (f"?{urlencode({'token': self.token})}" if self.token else "")

    def server_close(self) -> None:
        """Stop listening, and looking."""
        self._ended.set()
        super().server_close()

    @property
    def ended(self) -> bool:
        """Whether nobody is served any more."""
        return self._ended.is_set()

    def view(self, key: str) -> View:
        """The view of a run or a group as it is now; what was read of its rounds is kept."""
        with self._building:
            version = self.following.version(key)
            known, view = self._views.pop(key, (None, None))
            if view is None or known != version:
                old = {} if view is None else {source.run.path: source for source in view.runs}
                sources, problems = [], []
                for one in self.following.members(key):
                    try:
                        sources.append(_again(one.path, old))
                    except (FedstrataError, OSError) as error:
                        problems.append(str(error))
                if problems and not sources:
                    raise RunDirectoryError(problems[0])
                if not sources:
                    raise KeyError(key)
                view = View(sources, problems, LIVE_BUDGET)
            self._views[key] = (version, view)
            while len(self._views) > _KEPT_VIEWS:
                del self._views[next(iter(self._views))]
            return view

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed is no error."""


def _again(path: Path, old: Mapping[Path, Source]) -> Source:
    """A run read again, with what is known of its rounds."""
    run = Run(path)
    before = old.get(path)
    history = run.history()
    if before is None or before.run.about.id != run.about.id or len(history) < len(before.history):
        return Source(run, run.recipe.label, history)
    return before.gone_on(run, history)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedstrata", ""

    def do_GET(self) -> None:
        """Answer one request."""
        asked = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(asked.query, keep_blank_values=True).items()}
        if not self._is_for_us():
            self._say(HTTPStatus.FORBIDDEN, "asked for by another name than this machine's")
        elif not self._may(query):
            self._say(HTTPStatus.UNAUTHORIZED, "open the address that fedstrata watch has printed")
        elif "token" in query:
            cookie = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": cookie})
        else:
            self._answer(asked.path, query)

    def _is_for_us(self) -> bool:
        """Whether the browser means this machine; with a token it does, by any name."""
        if self.server.token:
            return True
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}")
            return is_loopback(host.hostname or "") and host.port in (self.server.server_address[1], None)
        except ValueError:
            return False

    def _may(self, query: Mapping[str, str]) -> bool:
        if not self.server.token:
            return True
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            found = None
        given = query.get("token", found.value if found else "")
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        key = query.get("of", "")
        try:
            if path == "/":
                self._page({"title": "runs", "runs": self.server.following.listed()}, "list.js")
            elif path == "/runs":
                self._json(self.server.following.listed())
            elif path == "/events":
                self._events(key)
            elif path != "/view":
                raise KeyError(path)
            elif "part" not in query:
                self._page(self._outline(key), "page.js")
            elif query["part"]:
                self._json(self._part(self.server.view(key), query["part"]))
            else:
                self._json(self._outline(key))
        except KeyError:
            self._say(HTTPStatus.NOT_FOUND, "there is no such run, or no such part of it")
        except (FedstrataError, OSError) as error:
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise
            self._say(HTTPStatus.NOT_FOUND, str(error))

    @staticmethod
    def _part(view: View, name: str) -> Part | None:
        """None is what this run has not, or not yet."""
        try:
            return view.part(name)
        except KeyError:
            return None

    def _outline(self, key: str) -> dict[str, Any]:
        outline = self.server.view(key).outline()
        of = urlencode({"of": key})
        told = [_told(one.about or {}) for one in self.server.following.members(key)]
        facts = [*outline["facts"], *(told if len(told) == 1 else [])]
        return {**outline, "facts": facts, "live": {"view": f"view?{of}", "events": f"events?{of}"}}

    def _page(self, content: Mapping[str, Any], script: str) -> None:
        text = render(content, script, "; connect-src 'self'")
        self._send(HTTPStatus.OK, text.encode("utf-8", errors="replace"), "text/html; charset=utf-8")

    def _json(self, content: Any) -> None:
        self._send(HTTPStatus.OK, as_json(content).encode("utf-8", errors="replace"), "application/json")

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, text.encode("utf-8", errors="replace"), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _events(self, key: str) -> None:
        """Tell whenever a run of the key has changed, or any run where there is no key."""
        following = self.server.following

        def now() -> Any:
            return following.version(key) if key else following.state()

        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        seen = None
        while not self.server.ended:
            with following.changed:
                if (found := now()) == seen:
                    following.changed.wait(_HEARTBEAT)
                    found = now()
            told = b": still here\n\n" if found == seen else b"event: changed\ndata: \n\n"
            seen = found
            self.wfile.write(told)
            self.wfile.flush()

    def log_message(self, form: str, *args: Any) -> None:
        """Nothing: the terminal has the address."""


def _told(about: Mapping[str, Any]) -> str:
    """How a run fares, in a few words."""
    text = f"{about.get('state', '')}, round {about.get('round', 0)} of {about.get('rounds', 0)}"
    left = about.get("left")
    return f"{text}, {duration(left)} left" if left is not None else text
