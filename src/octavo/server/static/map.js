// The page: frames come in, one of them is shown, the newest or one of the past.

import { bars, filling, lines } from "./charts.js";
import { Chat } from "./chat.js";
import { History, nameOf, split, SWAPPED } from "./frames.js";
import { Grid } from "./grid.js";
import { ask, keep, key } from "./link.js";
import { colourOf, hostLooks, looksOf, palette } from "./paint.js";
import { Rows } from "./rows.js";

const byId = (id) => document.getElementById(id);
const number = (n) => Math.round(n).toLocaleString("en");
const plural = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;
const SPAN = 120; // seconds that the charts show
const BACK = 300; // seconds that the slider goes back

let about, history, grid, hostGrid, rows;
const chat = new Chat(() => openDoor("That key is not known here."));
const view = { mode: "live", time: 0, since: 0 }; // live | still (at time) | replay (from time, since then)
let shown = null; // the unfolded frame on the page
let ahead = 0; // the server's clock less ours, seconds
const aim = { block: null, sequence: null, pinBlock: null, pinSequence: null };

// ---- frames --------------------------------------------------------------------------------------------------------

const clock = () => Date.now() / 1000 + ahead;

async function start() {
  palette();
  about = await (await ask("v1/kv")).json();
  history = new History(about);
  ahead = about.time - Date.now() / 1000;
  byId("model").textContent = about.model;
  if (!about.chat) byId("as").value = "text"; // the model has no chat template
  byId("host").hidden = !history.slots;
  document.body.classList.toggle("with-host", history.slots > 0);
  if (history.slots) hostGrid = new Grid(byId("host-field"), history.slots, { most: 96, largest: 16, slots: true });
  grid = new Grid(byId("pool-field"), history.blocks, { most: roomFor });
  rows = new Rows(byId("rows"), {
    over: (n) => point({ sequence: n, block: null }),
    pick: (n) => pin({ sequence: aim.pinSequence === n ? null : n }),
    block: (b) => point({ block: b }),
    seen: render,
  });
  new ResizeObserver(() => { if (Math.abs(grid.room - roomFor(0)) > 4) grid.layout(); }).observe(byId("pool-note"));
  const past = new Uint8Array(await (await ask("v1/kv/history")).arrayBuffer());
  for (const bytes of split(past)[0]) await history.take(bytes);
  render();
  setInterval(tick, 250);
  follow();
}

// Height for the pool's cells: on a desk's screen what the other parts of its card leave, else a part of the screen.
function roomFor(width) {
  if (innerWidth < 600) return Math.max(340, width);
  if (innerWidth < 1240) return Math.max(220, Math.min(width * 0.75, innerHeight - (history.slots ? 660 : 560)));
  const card = byId("pool"), others = [...card.children].filter((c) => c.id !== "pool-field" && c.id !== "inspector");
  return Math.max(160, card.clientHeight - others.reduce((sum, c) => sum + c.offsetHeight, 0) - 28 - 22 - 12 - 112);
}

async function follow() {
  for (let pause = 250; ; pause = Math.min(8000, pause * 2)) {
    try {
      const response = await ask(`v1/kv/stream?after=${history.newest?.serial ?? 0}`);
      link("well", "live");
      const reader = response.body.getReader();
      let rest = new Uint8Array(0);
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        pause = 250;
        const joined = new Uint8Array(rest.length + value.length);
        joined.set(rest);
        joined.set(value, rest.length);
        const [frames, left] = split(joined);
        rest = left.slice();
        for (const bytes of frames) await arrive(bytes);
      }
    } catch (error) {
      if (error.status === 401) { openDoor("That key is not known here."); return; }
    }
    link("gone", "no connection, trying again");
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function arrive(bytes) {
  const before = history.live, frame = await history.take(bytes);
  if (!frame) return;
  ahead = Math.max(frame.time - Date.now() / 1000, ahead - 0.05);
  if (view.mode !== "live") return;
  if (before && grid) grid.flash(copied(before, history.live));
  render();
}

// Blocks that took the place of another one in a sequence's table, which somebody else still holds.
function copied(before, now) {
  const found = [], known = new Map(before.sequences.map((s) => [s.number, s]));
  for (const sequence of now.sequences) {
    const past = known.get(sequence.number) ?? before.sequences.find((s) => s.request === sequence.request);
    if (!past || sequence.state === SWAPPED || past.state === SWAPPED) continue;
    sequence.tables.forEach((table, g) => {
      const old = past.tables[g], last = Math.min(table.length, old.length);
      for (let i = Math.max(0, last - 2); i < last; i++) {
        if (old[i] >= 0 && table[i] >= 0 && table[i] !== old[i] && (now.device[old[i]] & 127)) found.push(table[i]);
      }
    });
  }
  return found;
}

// ---- what is shown -------------------------------------------------------------------------------------------------

let due = false, looking = false;

function render() {
  if (due) return;
  due = true;
  requestAnimationFrame(async () => {
    due = false;
    if (looking) { render(); return; } // the past is still being unfolded
    looking = true;
    try { shown = view.mode === "live" ? history.live : await history.at(viewTime()); } finally { looking = false; }
    draw();
  });
}

function viewTime() {
  if (view.mode === "live") return clock();
  return view.mode === "still" ? view.time : view.time + performance.now() / 1000 - view.since;
}

const spent = []; // milliseconds of the latest drawings of the whole page

function draw() {
  if (!shown) return;
  const began = performance.now();
  const looks = looksOf(shown, history.blockSize), host = hostLooks(shown);
  grid.show(looks);
  hostGrid?.show(host);
  const more = rows.show(shown, looks, host, aim.pinSequence);
  describe(more);
  light();
  drawFigures();
  chat.tint(history.live, history.requests);
  spent.push(performance.now() - began);
  if (spent.length > 600) spent.shift();
}

function tick() {
  if (view.mode === "replay") {
    if (viewTime() >= (history.newest?.time ?? 0)) goLive(); else render();
  }
  drawFigures();
}

const tally = (full) => {
  let live = 0, shared = 0, cached = 0;
  for (const b of full.device) { if (b & 127) { live++; if ((b & 127) > 1) shared++; } else if (b) cached++; }
  return { live, shared, cached, free: full.device.length - live - cached };
};

function describe(more) {
  const { live, shared, cached, free } = tally(shown), f = shown.figures;
  byId("pool-note").textContent =
    `${number(history.blocks)} blocks of ${history.blockSize} tokens: ${number(live)} in use` +
    `${shared ? `, ${number(shared)} of them shared` : ""}, ${number(cached)} cached, ${number(free)} free`;
  const waits = Math.max(0, f.waiting - shown.sequences.filter((s) => s.state !== 1 && s.state !== 3).length) + more;
  byId("rows-note").textContent = waits > 0 ? `and ${plural(waits, "more sequence")}` : "";
  byId("rows-empty").hidden = shown.sequences.length > 0;
  if (!history.slots) return;
  let own = 0, kept = 0, moving = 0;
  for (const s of shown.host) { own += s === 2; kept += s === 1; moving += s === 3; }
  byId("host-note").textContent =
    `${plural(history.slots, "slot")}: ${number(own)} of swapped sequences, ${number(kept)} cached` +
    `${moving ? `, ${number(moving)} arriving from disk` : ""}` +
    `${f.disk_slots ? ` · disk: ${number(f.disk_used)} of ${number(f.disk_slots)}` : ""}` +
    `${f.disk_moving ? `, ${number(f.disk_moving)} moving` : ""}`;
}

// ---- figures over time ---------------------------------------------------------------------------------------------

let figuresDrawn = 0;

function drawFigures() {
  if (!history?.frames.length || performance.now() - figuresDrawn < 90) return;
  figuresDrawn = performance.now();
  const end = Math.min(viewTime(), clock()), p = palette(), first = history.oldest.time, steps = 120;
  const times = Array.from({ length: steps }, (_, i) => end - SPAN + ((i + 1) * SPAN) / steps);
  const at = (t) => (t < first ? null : history.figures(t));
  const gained = (t, span, name) => {
    const now = at(t), before = at(Math.max(first, t - span));
    return now && before ? now[name] - before[name] : null;
  };
  const rate = (t) => { const g = gained(t, 2, "generated_tokens"); return g === null ? null : g / 2; };
  const hits = (t) => {
    const asked = gained(t, 30, "prompt_tokens"), hit = gained(t, 30, "cached_tokens");
    return asked ? Math.min(1, hit / asked) : null;
  };
  const now = at(end) ?? history.frames[0].figures;
  byId("rate-value").textContent = number(rate(end) ?? 0);
  byId("rate-note").textContent = `${number(now.generated_tokens)} so far`;
  lines(byId("rate"), [{ values: times.map(rate), colour: p.accent, filled: true }]);
  byId("queue-value").textContent = number(now.running + now.waiting);
  byId("queue-note").textContent = `${number(now.running)} running, ${number(now.waiting)} waiting`;
  lines(byId("queue"), [
    { values: times.map((t) => at(t)?.running ?? null), colour: p.accent, filled: true },
    { values: times.map((t) => at(t)?.waiting ?? null), colour: p.warm, dashed: true },
  ]);
  const recent = hits(end);
  const share = recent ?? (now.prompt_tokens ? now.cached_tokens / now.prompt_tokens : null);
  byId("hits-value").textContent = share === null ? "–" : `${number(100 * share)} %`;
  byId("hits-note").textContent = `${number(now.cached_tokens)} of ${number(now.prompt_tokens)} tokens`;
  lines(byId("hits"), [{ values: times.map(hits), colour: p.accent, filled: true }], 1);
  byId("preempt-value").textContent = number(now.preemptions);
  byId("preempt-note").textContent = `${number(now.swaps)} swapped, ${number(now.copies)} copied`;
  bars(byId("preempt"), times.map((t) => gained(t, SPAN / steps, "preemptions")), p.warm);
  drawPast();
}

let pastDrawn = 0, pastParts = [];

function drawPast() {
  const end = clock();
  if (performance.now() - pastDrawn > 900) { // it moves by a pixel a second at most
    pastDrawn = performance.now();
    const steps = 300, first = history.oldest.time;
    pastParts = Array.from({ length: steps }, (_, i) => {
      const t = end - BACK + ((i + 1) * BACK) / steps;
      const f = t < first ? null : history.figures(t);
      return f && [f.blocks_live / history.blocks, f.blocks_cached / history.blocks];
    });
    filling(byId("past"), pastParts);
  }
  const when = byId("when"), back = Math.max(0, end - viewTime());
  if (document.activeElement !== when || view.mode !== "still") when.value = String(BACK - back);
  const said = view.mode === "live" ? "live" : `${back < 60 ? `${back.toFixed(1)} s` : `${Math.floor(back / 60)} min ${Math.floor(back % 60)} s`} ago`;
  byId("ago").textContent = said;
  when.setAttribute("aria-valuetext", said);
}

// ---- time ----------------------------------------------------------------------------------------------------------

function setMode(mode, time) {
  Object.assign(view, { mode, time, since: performance.now() / 1000 });
  document.body.dataset.time = mode;
  byId("play").setAttribute("aria-label", mode === "still" ? "Play" : "Pause");
  byId("now").disabled = mode === "live";
  figuresDrawn = pastDrawn = 0;
  render();
  drawFigures();
}

const goLive = () => setMode("live", 0);

function playOrPause() {
  if (view.mode === "still") {
    if (view.time >= (history.newest?.time ?? 0) - 0.3) goLive(); else setMode("replay", view.time);
  } else setMode("still", Math.min(viewTime(), clock()));
}

byId("play").addEventListener("click", playOrPause);
byId("now").addEventListener("click", goLive);
byId("when").addEventListener("input", (event) => {
  const time = clock() - BACK + Number(event.target.value);
  setMode("still", Math.max(time, history.oldest?.time ?? 0));
});
addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, button, dialog");
  if (event.key === " " && !typing && history) { event.preventDefault(); playOrPause(); }
  if (event.key === "Escape") pin({ block: null, sequence: null });
});

// ---- who holds what ------------------------------------------------------------------------------------------------

function point(to) {
  Object.assign(aim, to);
  light();
}

function pin({ block = null, sequence = null }) {
  Object.assign(aim, { pinBlock: block, pinSequence: sequence });
  if (block === null && grid) grid.cursor = -1;
  for (const row of rows?.rows.values() ?? []) {
    row.picked = row.sequence.number === sequence;
    row.button.setAttribute("aria-pressed", String(row.picked));
  }
  light();
}

const holdersOf = (block) => shown.sequences.flatMap((s) => (s.state === SWAPPED ? [] : s.tables.flatMap((table, g) => {
  const place = table.indexOf(block);
  return place < 0 ? [] : [{ sequence: s, group: g, place }];
})));

// Light up what is pointed at: a block and its holders, or a sequence and its blocks.
function light() {
  if (!shown || !grid) return;
  const block = aim.block ?? (aim.sequence === null ? aim.pinBlock : null);
  const wanted = block === null ? aim.sequence ?? aim.pinSequence : null;
  const sequence = wanted === null ? null : shown.sequences.find((s) => s.number === wanted);
  grid.lit = hostLit(sequence) ?? null;
  if (block !== null) {
    const holders = holdersOf(block);
    rows.light(holders.length ? new Set(holders.map((h) => h.sequence.number)) : null);
    grid.cursor = block;
    tellBlock(block, holders);
  } else {
    grid.cursor = -1;
    rows.light(sequence ? new Set([sequence.number]) : null);
    if (sequence) tellSequence(sequence); else tellNothing();
  }
  grid.light();
  hostGrid?.light();
}

function hostLit(sequence) {
  const cells = sequence ? new Set(sequence.tables.flatMap((t) => [...t].filter((b) => b >= 0))) : null;
  if (hostGrid) hostGrid.lit = sequence?.state === SWAPPED ? cells : null;
  return sequence?.state === SWAPPED ? new Set() : cells;
}

function chip(sequence) {
  const node = document.createElement("span"), swatch = document.createElement("i");
  node.className = "chip";
  swatch.className = `swatch c${colourOf(sequence)}`;
  node.append(swatch, nameOf(sequence));
  return node;
}

let told = "";

function tellBlock(block, holders) {
  const state = shown.device[block], count = state & 127, b = history.blockSize;
  const groups = history.groups > 1 && holders.length ? `, layer group ${holders[0].group + 1}` : "";
  const span = holders.length ? `tokens ${holders[0].place * b} to ${(holders[0].place + 1) * b - 1}${groups}` : "";
  const who = count ? `held by ${plural(count, "sequence")}` : state ? "cached: free, but a prompt can hit it" : "free";
  byId("what").textContent = `Block ${block}: ${who}${span ? `, ${span}` : ""}`;
  byId("chips").replaceChildren(...holders.slice(0, 24).map((h) => chip(h.sequence)));
  say(`block ${block} ${state}`, `v1/kv/blocks/${block}`, (found) => [found.text], state > 0);
}

function tellSequence(sequence) {
  const own = new Set(sequence.tables.flatMap((t) => [...t].filter((b) => b >= 0)));
  let shared = 0;
  if (sequence.state !== SWAPPED) for (const b of own) shared += (shown.device[b] & 127) > 1;
  byId("what").textContent =
    `Sequence ${nameOf(sequence)}: ${number(sequence.computed)} of ${number(sequence.tokens)} tokens computed, ` +
    `${plural(own.size, sequence.state === SWAPPED ? "slot of host memory" : "block", sequence.state === SWAPPED ? "slots of host memory" : "blocks")}` +
    `${shared ? `, ${number(shared)} shared with others` : ""}`;
  byId("chips").replaceChildren();
  say(`sequence ${sequence.number} ${sequence.tokens >> 4}`, `v1/kv/sequences/${sequence.number}`, (found) => found.blocks, true);
}

function tellNothing() {
  if (told === "") return;
  told = "";
  clearTimeout(asking);
  byId("what").textContent = "Point at a block or a sequence to see who holds it.";
  byId("chips").replaceChildren();
  byId("text").replaceChildren();
}

let asking = 0;

// Texts are the server's to tell, and of the present only.
function say(what, path, pick, any) {
  if (told === what) return;
  const fresh = told.split(" ").slice(0, 2).join() !== what.split(" ").slice(0, 2).join();
  told = what;
  clearTimeout(asking);
  if (fresh) byId("text").replaceChildren();
  if (!any || !about.texts) return;
  if (view.mode !== "live") { byId("text").textContent = "Texts are those of the present: go back to live to read them."; return; }
  asking = setTimeout(async () => {
    let parts = [];
    try { parts = pick(await (await ask(path)).json()) ?? []; } catch { /* it has ended meanwhile */ }
    if (told !== what) return;
    byId("text").replaceChildren(...parts.filter((t) => t !== null).map((text) => {
      const node = document.createElement("span");
      node.textContent = text;
      return node;
    }));
  }, fresh ? 90 : 400);
}

const field = byId("pool-field");
field.addEventListener("pointermove", (event) => {
  if (!grid || event.pointerType === "touch") return;
  const cell = grid.under(event);
  point({ block: cell < 0 ? null : cell });
});
field.addEventListener("pointerleave", () => point({ block: null }));
field.addEventListener("click", (event) => {
  if (!grid) return;
  const cell = grid.under(event);
  pin({ block: cell < 0 || cell === aim.pinBlock ? null : cell });
});
field.addEventListener("keydown", (event) => {
  if (!grid || !shown) return;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
  const at = aim.pinBlock ?? -1;
  let to = step === undefined ? null : at < 0 ? 0 : at + step;
  if (event.key === "Home") to = 0;
  if (event.key === "End") to = history.blocks - 1;
  if (to === null || to < 0 || to >= history.blocks) return;
  event.preventDefault();
  aim.block = null;
  pin({ block: to });
  const names = holdersOf(to).map((h) => nameOf(h.sequence));
  byId("said").textContent = byId("what").textContent + (names.length ? `: ${names.slice(0, 8).join(", ")}` : "");
});

// ---- the rest ------------------------------------------------------------------------------------------------------

function link(state, said) {
  byId("link").dataset.state = state;
  byId("link").querySelector("span").textContent = said;
}

function openDoor(note) {
  byId("door-note").textContent = key() ? note : "";
  link("gone", "a key is needed");
  if (!byId("door").open) byId("door").showModal();
}

byId("door-form").addEventListener("submit", () => {
  keep(byId("key").value.trim());
  location.reload();
});

let summed = "";
setInterval(() => { // for those who listen: what the page shows, when it has changed, not too often
  if (!shown || view.mode !== "live") return;
  const { live, shared } = tally(shown), f = shown.figures;
  const said = `${plural(f.running, "sequence")} running, ${number(f.waiting)} waiting; ` +
    `${number(live)} of ${number(history.blocks)} blocks in use, ${number(shared)} shared`;
  if (said !== summed) byId("summary").textContent = summed = said;
}, 8000);

function repaint() {
  if (!grid) return;
  palette(true);
  for (const g of [hostGrid, grid]) g?.layout(); // the pool has what the host tier leaves
  rows.redraw();
  figuresDrawn = pastDrawn = 0;
  render();
}

let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(repaint, 120); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// For the console, and for tests.
globalThis.octavo = {
  get shown() { return shown; },
  get history() { return history; },
  get view() { return view; },
  get grid() { return grid; },
  spent,
};

start().catch((error) => {
  if (error.status === 401) openDoor("That key is not known here.");
  else link("gone", error.message);
});
