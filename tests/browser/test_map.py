"""The live map in a real browser: it shows what the pool is, now and in the last minutes, to everybody."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from looking import PROMPT, SHOTS, STORY, come_true, paced

from octavo.server.settings import ServerSettings
from serving import Served, until, user

Opened = Callable[..., Any]

LIVE = "octavo.history?.live"
# The page's own picture of the frame that /v1/kv tells of, beside what /v1/kv says.
BOTH = """async () => {
  const told = await (await fetch("v1/kv")).json();
  const here = () => (octavo.history.newest?.serial ?? 0) >= told.serial;
  for (let i = 0; i < 200 && !here(); i++) await new Promise((done) => setTimeout(done, 20));
  const frame = octavo.history.frames.find((f) => f.serial === told.serial);
  const full = await octavo.history.at(frame.time);
  return {told, serial: full.serial, device: [...full.device], host: [...full.host],
          sequences: full.sequences.map((s) => ({...s, tables: s.tables.map((t) => [...t])})), figures: full.figures};
}"""


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


def ask(page: Any, text: str = "sea", answers: int = 4, tokens: int = 240) -> None:
    page.fill("#n", str(answers))
    page.fill("#most", str(tokens))
    page.fill("#prompt", text)
    page.click("#send")


def running(page: Any, count: int) -> None:
    come_true(page, f"{LIVE}?.sequences.filter((s) => s.state === 1).length >= {count}")


def moment(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(
        "() => ({mode: octavo.view.mode, serial: octavo.shown?.serial, time: octavo.shown?.time,"
        " newest: octavo.history.newest?.serial, sequences: octavo.shown?.sequences.length})"
    )
    return found


def test_the_map_shows_what_v1_kv_says(server: Served, opened: Opened) -> None:
    page = opened(server)
    come_true(page, "octavo.shown")
    ask(page)
    running(page, 4)
    seen = page.evaluate(BOTH)
    told = seen["told"]
    assert seen["serial"] == told["serial"] and len(told["sequences"]) == 4
    device = told["device"]
    assert seen["device"] == [min(c, 127) | 128 * n for c, n in zip(device["counts"], device["content"], strict=True)]
    assert [["empty", "cached", "own", "moving"][s] for s in seen["host"]] == told["host"]
    for shown, said in zip(seen["sequences"], told["sequences"], strict=True):
        assert shown["tables"] == said["tables"]
        assert [shown[k] for k in ("number", "request", "branch", "tokens", "computed", "prompt")] == [
            said[k] for k in ("number", "request", "branch", "tokens", "computed", "prompt_tokens")
        ]
    assert seen["figures"] == told["figures"]
    note = page.inner_text("#pool-note")
    assert note.startswith("240 blocks of 16 tokens")


@pytest.fixture
def slow_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Answers take long enough for a hand on the mouse, on a busy machine too."""
    with paced(monkeypatch, step=0.08) as running:
        yield running


def test_four_answers_share_the_prompt_and_part(slow_server: Served, opened: Opened) -> None:
    server = slow_server
    page = opened(server)
    come_true(page, "octavo.shown")
    talk = [{"role": "system", "content": PROMPT}, *user("sea")]
    body = {"messages": talk, "n": 4, "max_tokens": 240}
    thread = threading.Thread(target=lambda: server.post("/v1/chat/completions", body))
    thread.start()
    running(page, 4)
    # A block of the prompt: its mark counts four, the pointer on it names all four, and all four rows stay lit.
    come_true(page, "octavo.shown.device.some((b) => (b & 127) === 4)")
    block = page.evaluate("octavo.shown.device.findIndex((b) => (b & 127) === 4)")
    x, y, box = *page.evaluate(f"octavo.grid.corner({block})"), page.locator("#pool-field .base").bounding_box()
    page.mouse.move(box["x"] + x + 4, box["y"] + y + 4)
    assert re.fullmatch(rf"Block {block}: held by 4 sequences, tokens \d+ to \d+", page.inner_text("#what"))
    assert page.locator("#chips .chip").all_inner_texts() == ["1a", "1b", "1c", "1d"]
    come_true(page, "document.getElementById('text').textContent.length >= 16")
    assert page.inner_text("#text").strip() in f"system:{PROMPT}"
    page.mouse.move(2, 2)
    # A sequence: its blocks light up, and no other.
    come_true(page, "octavo.shown.sequences.length === 4 && octavo.shown.figures.copies > 0")
    page.locator("#rows button").nth(1).hover(position={"x": 30, "y": 8})  # on its name: its cells are blocks
    come_true(page, "octavo.grid.lit?.size")
    lit, table = page.evaluate("[[...octavo.grid.lit], [...octavo.shown.sequences[1].tables[0]]]")
    assert set(lit) >= set(table[:-1])
    said = page.inner_text("#what")
    assert said.startswith("Sequence 1b: ") and "shared with others" in said
    # The blocks after the prompt are each one's own.
    tables = page.evaluate("octavo.shown.sequences.map((s) => [...s.tables[0]])")
    shared = set(tables[0]).intersection(*tables[1:])
    assert shared and len(set(sum(tables, []))) == len(shared) + sum(len(set(t) - shared) for t in tables)
    page.screenshot(path=SHOTS / "sharing.png")
    thread.join()


def test_the_chat_box_shows_each_answer_in_its_sequences_colour(server: Served, opened: Opened) -> None:
    page = opened(server)
    ask(page, "sea", tokens=300)
    come_true(page, "document.querySelectorAll('.answer.tinted').length === 4")
    assert len(set(page.eval_on_selector_all(".answer", "(a) => a.map((n) => n.className)"))) == 4
    page.wait_for_selector("#send:visible")
    texts = page.eval_on_selector_all(".answer span", "(a) => a.map((n) => n.textContent)")
    assert texts == [STORY] * 4
    page.locator(".answer").nth(2).click()
    ask(page, "again", answers=1)
    come_true(page, "document.querySelectorAll('.answers').length === 2")
    page.wait_for_selector("#send:visible")
    assert page.locator(".answers").nth(1).inner_text().endswith("Once more.")
    assert page.locator(".answer.left").count() == 3, "the talk goes on with the answer that was chosen"
    assert page.inner_text("#hits-value") != "–", "the second question found the first one's blocks"
    page.select_option("#how", "beam")
    ask(page, "sea", answers=3, tokens=20)
    page.wait_for_selector("#send:visible")
    assert page.inner_text("#ask-note") == "choose the answer to go on with"
    beams = page.locator(".answers").nth(2).locator(".answer span").all_text_contents()
    assert len(beams) == 3 and all(beams)


def test_pause_scrub_and_play(server: Served, opened: Opened) -> None:
    page = opened(server)
    come_true(page, "octavo.shown")
    ask(page, tokens=270)
    running(page, 4)
    page.click("#play")
    page.wait_for_timeout(150)
    held = moment(page)
    come_true(page, f"octavo.history.newest.serial > {held['serial'] + 3}")
    assert moment(page)["serial"] == held["serial"] and held["mode"] == "still"
    page.wait_for_selector("#send:visible")
    server.settled()
    page.click("#now")
    come_true(page, "octavo.shown.sequences.length === 0")
    # With the keys, back to where four sequences ran.
    page.focus("#when")
    for _ in range(600):
        if moment(page)["sequences"] == 4:
            break
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(10)
    past = moment(page)
    assert past["mode"] == "still" and past["sequences"] == 4 and past["serial"] < past["newest"]
    assert page.inner_text("#ago").endswith("ago")
    assert page.locator("#rows button").count() == 4
    page.click("#play")
    come_true(page, f"octavo.view.mode !== 'still' && octavo.shown.serial > {past['serial']}")
    come_true(page, "octavo.view.mode === 'live'")
    assert page.inner_text("#ago") == "live"


def test_a_page_that_is_opened_later_has_the_past(server: Served, opened: Opened) -> None:
    server.ask("/v1/chat/completions", messages=user("sea"), n=4, max_tokens=150)
    server.settled()
    page = opened(server)
    come_true(page, "octavo.shown")
    most = page.evaluate("""async () => {
      let most = 0;
      for (const f of octavo.history.frames) most = Math.max(most, (await octavo.history.at(f.time)).sequences.length);
      return most; }""")
    assert most == 4 and moment(page)["sequences"] == 0
    seconds = page.evaluate(
        "Date.now() / 1000 - octavo.history.frames[Math.floor(octavo.history.frames.length / 2)].time"
    )
    page.evaluate(f"""() => {{ const when = document.getElementById('when');
      when.value = String(300 - {seconds}); when.dispatchEvent(new Event('input')); }}""")
    come_true(page, "octavo.shown.sequences.length > 0")


def test_keys_and_labels(server: Served, opened: Opened) -> None:
    page = opened(server)
    come_true(page, "octavo.shown")
    ask(page)
    running(page, 4)
    page.click("#play")  # on a busy machine the answers may end before the last key is pressed
    come_true(page, "octavo.view.mode === 'still'")
    page.focus("#pool-field")
    page.keyboard.press("ArrowRight")
    assert re.match(r"Block 0: held by \d sequences?, tokens 0 to 15: 1a", page.inner_text("#said"))
    columns = page.evaluate("octavo.grid.columns")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#said").startswith(f"Block {columns}: ")
    page.keyboard.press("End")
    assert page.inner_text("#said").startswith("Block 239: free")
    page.keyboard.press("Escape")
    assert page.inner_text("#what").startswith("Point at")
    page.keyboard.press("Tab")
    for _ in range(3):
        if page.evaluate("document.activeElement.classList.contains('row')"):
            break
        page.keyboard.press("Tab")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.match(r"Sequence 1a, running, \d+ of \d+ tokens computed, \d+ blocks", label)
    assert page.inner_text("#what").startswith("Sequence 1a: "), "the focused sequence lights up"
    names = page.evaluate("""[...document.querySelectorAll('button, input, select, textarea, [tabindex="0"]')]
      .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
      .map((e) => e.outerHTML)""")
    assert not names, "these have no name for a screen reader"
    page.click("#now")
    come_true(page, "document.getElementById('summary').textContent.includes('blocks in use')")


def test_with_keys_the_map_asks_for_one(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    settings = ServerSettings(port=0, access_log="off")
    with paced(monkeypatch, settings=settings, keys={"the-right-key": "ann"}) as running:
        page = opened(running, expected="401")
        page.wait_for_selector("#door[open]")
        page.fill("#key", "the-wrong-key")
        page.click("#door-form button")
        come_true(page, "document.getElementById('door-note').textContent.includes('not known')")
        page.fill("#key", "the-right-key")
        page.click("#door-form button")
        come_true(page, "octavo.shown")
        ask(page, tokens=40, answers=1)
        page.wait_for_selector("#send:visible")
        assert page.locator(".answer span").first.text_content() == STORY[:40]
        assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width", "height"), [("desk", 1440, 900), ("phone", 390, 844)])
def test_pictures(server: Served, opened: Opened, scheme: str, name: str, width: int, height: int) -> None:
    """Kept to be looked at; and nothing sticks out to the side."""
    page = opened(server, width, height, color_scheme=scheme, device_scale_factor=2 if width < 500 else 1)
    come_true(page, "octavo.shown")
    ask(page)
    running(page, 4)
    page.wait_for_timeout(1200)
    page.screenshot(path=SHOTS / f"{name}-{scheme}.png", full_page=width < 500)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", paper)[:3])) > 384
    assert light == (scheme == "light")


def test_ten_thousand_blocks_are_smooth(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    """A full page is drawn again and again: 64 sequences in 10,000 blocks.  How long it takes is kept beside it."""
    with paced(  # steps so slow that a busy machine, too, draws twenty times before the answers end
        monkeypatch, 0.03, pool=10_000, block_size=4, budget=2048, max_running=64, blind=False
    ) as running_server:
        for i in range(16):
            body = {
                "messages": [{"role": "system", "content": "y" * (40 * i)}, *user(f"q{i}")],
                "n": 4,
                "max_tokens": 300,
            }
            threading.Thread(target=running_server.post, args=("/v1/chat/completions", body), daemon=True).start()
        page = opened(running_server)
        come_true(page, "octavo.shown?.sequences.length >= 64")
        page.evaluate("octavo.spent.length = 0")
        come_true(page, "octavo.spent.length >= 20")
        spent = sorted(page.evaluate("octavo.spent"))
        page.screenshot(path=SHOTS / "ten-thousand.png")
        figures = {"drawings": len(spent), "median_ms": spent[len(spent) // 2], "most_ms": spent[-1]}
        (SHOTS / "drawing.json").write_text(json.dumps(figures), encoding="utf-8")
        assert figures["drawings"] >= 20, figures
        until(lambda: not running_server.llm.parts.engine.busy, 60)


# Counts cells in place of milliseconds: those that each showing of the pool draws, and those whose look has changed.
COUNTING = """() => {
  const grid = octavo.grid, draw = grid.draw, show = grid.show;
  const told = octavo.told = { shows: [], cells: 0 };
  grid.draw = (...given) => { told.cells++; draw(...given); };
  grid.show = (looks) => {
    let changed = 0;
    for (let i = 0; i < looks.length; i++) changed += looks[i] !== grid.drawn[i];
    const before = told.cells;
    show.call(grid, looks);
    told.shows.push({ drawn: told.cells - before, changed });
  };
}"""


def test_an_update_draws_only_what_has_changed(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    """64 sequences in 10,000 blocks, and an update draws the few cells that they have filled since the one before."""
    with paced(monkeypatch, pool=10_000, block_size=4, budget=2048, max_running=64) as server:
        threads = []
        for i in range(16):
            body = {"messages": user(f"q{i}"), "n": 4, "max_tokens": 250}
            threads.append(threading.Thread(target=server.post, args=("/v1/chat/completions", body)))
            threads[-1].start()
        page = opened(server)
        come_true(page, "octavo.shown?.sequences.length >= 64")
        page.evaluate(COUNTING)
        come_true(page, "octavo.told.shows.length >= 12")
        shows = page.evaluate("octavo.told.shows")
        assert all(show["drawn"] == show["changed"] for show in shows)
        assert any(show["drawn"] for show in shows)
        # Of 10,000 cells; a frame is some steps, and a step changes a cell or two of a sequence.
        assert sorted(show["drawn"] for show in shows)[len(shows) // 2] < 1000, shows
        for thread in threads:
            thread.join()
        server.settled()
        # At rest nothing is drawn again, wherever one points, and lighting cells up draws none of them.
        page.wait_for_timeout(600)
        cells = page.evaluate("octavo.told.cells")
        page.hover("#pool-field", position={"x": 40, "y": 40})
        page.hover("#pool-field", position={"x": 80, "y": 60})
        page.wait_for_timeout(300)
        assert page.evaluate("octavo.told.cells") == cells
        # A new layout is the one thing that draws them all.
        page.evaluate("octavo.grid.layout()")
        assert page.evaluate("octavo.told.cells") == cells + 10_000


def test_a_model_without_a_chat_template_is_asked_in_plain_text(
    monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    with paced(monkeypatch, template=None) as running_server:
        page = opened(running_server)
        come_true(page, "octavo.shown")
        assert page.input_value("#as") == "text"
        ask(page, "<sea>", answers=1, tokens=30)
        page.wait_for_selector("#send:visible")
        assert page.locator(".answer span").first.text_content() == STORY[:30]
