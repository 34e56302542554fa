"""One page on the driver while a job runs: the report, live, and ``/metrics`` for Prometheus.

* **Never in the way.** It is a process of its own at low priority, which reads the event log from the file, as anybody
  could, and only while somebody looks. A page is rendered at most once a second, and rarer where rendering takes long:
  at most a tenth of the time goes there. At most `MOST_CLIENTS` are served at once, each within `CLIENT_S` seconds;
  curves and tables have a size of their own, so memory grows by the summary's 24 bytes per step alone. It ends with the
  driver, however that ends: it watches the pipe that is its standard input.
* **Not for everybody.** Loopback unless another interface is named, and nothing without the token, which is new for
  each job: in the link, or as ``Authorization: Bearer``. The page loads nothing from outside, and its own script only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from elastic_spark.core import events as ev
from elastic_spark.core.gauges import Gauges
from elastic_spark.core.metrics import Summary
from elastic_spark.core.timeline import Story
from elastic_spark.report import MOST_BARS, MOST_LINES, QUIET, render_document, render_story
from elastic_spark.tail import Tail

MOST_CLIENTS, CLIENT_S = 8, 5.0
#: Seconds that the process has to start.
START_S = 30.0
#: Points of a curve, and marks, that are kept.
MOST_POINTS = 2000
#: Share of the time that may go into rendering, and the least time between two pages in seconds.
SHARE, PERIOD_S = 0.1, 1.0

_SCRIPT = """
const story = document.getElementById('story'), state = document.getElementById('state');
const button = document.getElementById('pause'), parts = '[tabindex], summary';
let live = true;
button.hidden = false;
button.onclick = () => {
  live = !live;
  button.textContent = live ? 'Pause updates' : 'Go on updating';
  state.textContent = live ? 'Live.' : 'Updates are paused.';
};
function show(markup) {
  const at = [...story.querySelectorAll(parts)].indexOf(document.activeElement);
  const open = [...story.querySelectorAll('details')].map(item => item.open);
  story.innerHTML = markup;
  story.querySelectorAll('details').forEach((item, i) => { item.open = open[i] || false; });
  if (at >= 0) { const now = story.querySelectorAll(parts)[at]; if (now) now.focus({preventScroll: true}); }
}
async function update() {
  if (live && !document.hidden) {
    try {
      const reply = await fetch('/story' + location.search, {cache: 'no-store'});
      if (!reply.ok) throw new Error(reply.statusText);
      const markup = await reply.text();
      if (live) { show(markup); state.textContent = 'Live.'; }
    } catch {
      state.textContent = 'The job has ended, or its driver cannot be reached: this is the last that was seen.';
      button.hidden = true;
      return;
    }
  }
  setTimeout(update, 2000);
}
setTimeout(update, 2000);
"""


class StatusPage:
    """The page in its own process, until `close`.

    Args:
        log: the job's event log; it may grow, and need not be there yet.
        title: of the page.
        host, port: where to listen; port 0 takes a free one.

    Raises:
        OSError: it cannot listen there, or does not start.
    """

    def __init__(self, log: Path, title: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic_spark.status"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # Ctrl-C is the driver's
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):  # it ended, or spoke nonsense: told below
            self._process.stdin.write(json.dumps([str(log), title, host, port]) + "\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], START_S)[0]:
                told = json.loads(self._process.stdout.readline())
        self.url = told.get("url", "")
        if not self.url:
            self.close()
            raise OSError(told.get("error", f"its process did not start within {START_S:.0f} s"))

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Stop listening, and end the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._process.wait(CLIENT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Serving:
    """The page in this process, from a thread of its own until `close`. Arguments and OSError as for `StatusPage`."""

    def __init__(self, log: Path, title: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._token = secrets.token_urlsafe(24)
        self._server = _Server((host, port), _View(log, title), self._token)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/?token={self._token}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="elastic_spark status", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Whoever is being served has `CLIENT_S` seconds, which nobody waits for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLIENT_S)


class _View:
    """What the log says so far: as markup, and as figures. Asked from several threads."""

    def __init__(self, log: Path, title: str) -> None:
        self.title = title
        self._log = Tail(log)
        self._summary, self._story, self._gauges = Summary(), Story(MOST_POINTS), Gauges()
        self._told: deque[ev.Event] = deque(maxlen=MOST_LINES)
        self._lock = threading.Lock()
        self._markup, self._due = "", 0.0

    def markup(self) -> str:
        with self._lock:
            begin = time.monotonic()
            if begin >= self._due:
                self._read()
                story = self._story.result()
                story.bars = story.bars[-MOST_BARS:]
                self._markup = render_story(self._summary.result(), story, list(self._told))
                ended = time.monotonic()
                self._due = ended + max(PERIOD_S, (ended - begin) / SHARE)
            return self._markup

    def metrics(self) -> str:
        with self._lock:
            self._read()
            return self._gauges.text()

    def _read(self) -> None:
        """Takes in what was added to the log."""
        for event in self._log.read():
            for reader in (self._summary, self._story, self._gauges):
                reader.add(event)
            if not isinstance(event, QUIET):
                self._told.append(event)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = False
    request_queue_size = 4 * MOST_CLIENTS

    def __init__(self, address: tuple[str, int], view: _View, token: str) -> None:
        self.view, self.token = view, token
        self._free = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news for the job's output."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_S
    server: _Server
    server_version, sys_version = "elastic_spark", ""
    _headers: ClassVar[dict[str, str]] = {
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",  # the token is in the link
        "X-Content-Type-Options": "nosniff",
    }

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        if not self._may(parse_qs(place.query).get("token", [""])[0]):
            self._reply(HTTPStatus.FORBIDDEN, "text/plain", "The job's link holds a token: use all of it.\n")
        else:
            try:
                kind, text, policy = self._found(place.path)
            except LookupError:
                self._reply(HTTPStatus.NOT_FOUND, "text/plain", "There are / and /metrics.\n")
            except Exception as error:  # a page that fails is no reason for anything else to
                self._reply(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{type(error).__name__}: {error}\n")
            else:
                self._reply(HTTPStatus.OK, kind, text, policy)

    def _found(self, path: str) -> tuple[str, str, str]:
        """Kind, text and Content-Security-Policy; LookupError where there is nothing."""
        view = self.server.view
        if path == "/":
            return ("text/html", *_page(view))
        made = {"/story": ("text/html", view.markup), "/metrics": ("text/plain; version=0.0.4", view.metrics)}
        kind, make = made[path]
        return kind, make(), "default-src 'none'"

    def _may(self, token: str) -> bool:
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return any(hmac.compare_digest(self.server.token.encode(), given.encode()) for given in (token, bearer))

    def _reply(self, status: HTTPStatus, kind: str, text: str, policy: str = "default-src 'none'") -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        for name, value in {**self._headers, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not the job's output, and hold the token."""


def _page(view: _View) -> tuple[str, str]:
    """The page, and the policy that allows its one script."""
    nonce = secrets.token_urlsafe(12)
    head = '<link rel="icon" href="data:,"><noscript><meta http-equiv="refresh" content="5"></noscript>'
    before = '<p><span id="state" role="status">Live.</span> <button id="pause" hidden>Pause updates</button></p>'
    after = f'<script nonce="{nonce}">{_SCRIPT}</script>'
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'nonce-{nonce}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return render_document(view.title, view.markup(), head, before, after), policy


def _main() -> None:
    """The process: told what to do by the first line of its input, it says where it is, and ends with its input."""
    log, title, host, port = json.loads(sys.stdin.readline())
    os.nice(10)
    try:
        page = Serving(Path(log), title, host=host, port=port)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"url": page.url}), flush=True)
    sys.stdin.read()
    page.close()


if __name__ == "__main__":
    _main()
