"""A page as a real browser lays it out: headless Chromium, without a driver."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
    "--dump-dom",
)
_TIMEOUT = 60

_PAGE = """<!doctype html>
<html><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<style>body {{ background: Canvas; color: CanvasText; margin: 8px }}</style></head>
<body>{body}<script type="application/json" id="measured"></script>
<script>addEventListener("load", () => {{
  let answer;
  try {{ answer = (() => {{ {script} }})() }} catch (error) {{ answer = {{error: String(error)}} }}
  document.getElementById("measured").textContent = JSON.stringify(answer);
}})</script></body></html>"""


def measure(
    body: str, script: str, folder: Path, *, width: int = 1200, is_dark: bool = False
) -> dict[str, Any]:
    """Return what ``script`` returns, a body of a function, run where ``body`` is rendered.

    Skips the test where there is no browser, or fails it if GDA_BROWSER=required is set.
    """
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        reason = f"no browser to render in: none of {', '.join(_NAMES)} is installed"
        if os.environ.get("GDA_BROWSER") == "required":
            pytest.fail(f"{reason}, and GDA_BROWSER=required")
        pytest.skip(reason)
    page = folder / "page.html"
    page.write_text(_PAGE.format(body=body, script=script), encoding="utf-8")
    options = [*_OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900"]
    if is_dark:
        options.append("--force-dark-mode")
    # Chromium is several processes, which all end with their session.
    with subprocess.Popen(
        [browser, *options, page.as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=_TIMEOUT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return _answer(output.decode(), errors.decode(errors="replace"))


def _answer(page: str, errors: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="measured">(.*?)</script>', page, re.S)
    assert found is not None, f"the browser rendered nothing: {errors[-2000:]}"
    assert found[1], "the page did not finish loading"
    answer = json.loads(html.unescape(found[1]) if found[1].startswith("&") else found[1])
    assert "error" not in answer, answer["error"]
    return answer
