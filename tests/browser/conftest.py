"""A headless Chromium, and pages in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from looking import SHOTS, paced

from serving import Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    SHOTS.mkdir(parents=True, exist_ok=True)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; at the end none of them may have complained, but for what it was ``expected`` to."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open(server: Served, width: int = 1440, height: int = 900, expected: str = "\0", **given: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **given)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)

        def complain(text: str) -> None:
            if expected not in text:
                complaints.append(text)

        page.on("console", lambda message: message.type in ("error", "warning") and complain(message.text))
        page.on("pageerror", lambda error: complain(str(error)))
        page.goto(server.url)
        return page

    yield open
    for context in contexts:
        context.close()
    assert not complaints, complaints


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with paced(monkeypatch) as running:
        yield running
