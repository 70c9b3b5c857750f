"""The page in a real Chromium: nothing hangs over, and axe-core finds nothing wrong, in light and dark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final

import pytest

from tests.samples import failure, gpu
from tests.unit.expose.views import NOW, day, view
from vllm_headroom.expose.page import render_page, respond_html
from vllm_headroom.expose.view import History, LastIncident, View
from vllm_headroom.model import Snapshot
from vllm_headroom.vocabulary import Source

pytestmark = pytest.mark.browser

FOLDER: Final = Path(os.environ.get("BROWSER_FOLDER", ".browser"))
WIDTHS: Final = (320, 400, 768, 1400)
FRAME: Final = "<!doctype html><body><iframe src=page.html width={} height=900></iframe></body>"
"""Holds the page, since no window of Chromium is narrower than 500 pixels."""

SCHEMES: Final = {"light": "preferredColorScheme=1", "dark": "preferredColorScheme=0"}
JUDGE: Final = """
axe.run().then(found => {
  parent.document.body.dataset.found = JSON.stringify({
    problems: found.violations.map(v => v.id + ': ' + v.nodes.map(n => n.html).join(' | ')),
    checked: found.passes.length,
    overhang: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    ground: getComputedStyle(document.body).backgroundColor,
  });
});
"""


def nothing_seen() -> View:
    return View(version="1", interval_seconds=5.0, history=History())


def all_failed() -> View:
    silent = Snapshot(
        time_seconds=NOW,
        monotonic_seconds=0.0,
        engines=failure(Source.ENGINE),
        gpus=failure(Source.NVML),
        processes=failure(Source.PROCESS),
    )
    return view(at=silent)


SCENES: Final[dict[str, Callable[[], View]]] = {
    "healthy": day,
    "leak": lambda: day(leaking=frozenset({0})),
    "eight": lambda: day(gpus=8, leaking=frozenset({3})),
    "unwell": lambda: day(
        stall_reason="not turned for 40 s", notice="simulated: scenario leak", runbooks="https://wiki"
    ),
    "long words": lambda: day(
        last_incident=LastIncident(
            seconds=NOW, kind="ended", reason=None, sentence="gone " * 20, file=f"/{'state' * 20}"
        )
    ),
    "failed": all_failed,
    "empty": nothing_seen,
    "foreign": lambda: view(
        at=Snapshot(
            time_seconds=NOW, monotonic_seconds=0.0, engines=failure(Source.ENGINE), gpus=(gpu(),), processes=()
        )
    ),
}


def judged(page: str, folder: Path, *, width: int, scheme: str) -> dict[str, Any]:
    """Return what axe-core and the layout report about a page."""
    axe = (FOLDER / "node_modules/axe-core/axe.min.js").read_text(encoding="utf-8")
    scripts = f"<script>{axe}</script><script>{JUDGE}</script>"
    (folder / "page.html").write_text(page.replace("</body>", f"{scripts}</body>"), encoding="utf-8")
    file = folder / "frame.html"
    file.write_text(FRAME.format(width), encoding="utf-8")
    command = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--blink-settings={SCHEMES[scheme]}")
    readable = ("--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}")
    sized = (*readable, f"--window-size={max(WIDTHS) + 50},1000", "--virtual-time-budget=20000")
    dumped = subprocess.run(
        [*command, *sized, "--dump-dom", file.as_uri()], capture_output=True, text=True, check=True, timeout=300
    )
    match = re.search(r'data-found="([^"]*)"', dumped.stdout)
    assert match, dumped.stderr[-2000:]
    result: dict[str, Any] = json.loads(unescape(match[1]))
    return result


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", SCENES)
def test_everyone_can_read_it(tmp_path: Path, scene: str, width: int, scheme: str) -> None:
    judgements = judged(render_page(SCENES[scene]()), tmp_path, width=width, scheme=scheme)

    assert judgements["problems"] == []
    assert judgements["checked"] > 5
    assert judgements["overhang"] <= 0
    assert (judgements["ground"] == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_judge_finds_what_is_wrong(tmp_path: Path) -> None:
    pale = render_page(day()).replace("--dim:#57606a", "--dim:#cccccc")

    judgements = judged(pale, tmp_path, width=768, scheme="light")

    assert any(problem.startswith("color-contrast") for problem in judgements["problems"])


def test_the_page_follows_its_sidecar_without_being_loaded_again(tmp_path: Path) -> None:
    quiet, leaking = (
        respond_html(render_page(day(gpus=8, leaking=gpus))) for gpus in (frozenset[int](), frozenset({3}))
    )
    answers = chain([quiet], repeat(leaking))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            newest = next(answers)
            self.send_response(newest.status)
            for name, value in (*newest.headers, ("Content-Type", newest.content_type)):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(newest.body)

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}")
        dumped = subprocess.run(
            [*command, "--virtual-time-budget=12000", "--dump-dom", f"http://127.0.0.1:{server.server_port}/"],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        server.shutdown()

    assert "<title>ALARM: GPU 3 leaking" in dumped
    assert "<h1>ALARM: GPU 3 leaking</h1>" in dumped
    assert ">No answer from the sidecar" not in dumped
