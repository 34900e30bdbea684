// Each sequence's block table as a row: its cells in the order of the text, one line for each layer group.

import { nameOf, RESTING, RUNNING, SWAPPED, WAITING } from "./frames.js";
import { colourOf, drawCell, drawSlot, palette } from "./paint.js";

const MOST = 96; // rows
const SAID = { [WAITING]: "waiting", [RUNNING]: "running", [SWAPPED]: "swapped out", [RESTING]: "resting" };
const ORDER = [RUNNING, SWAPPED, WAITING, RESTING];

export class Rows {
  // hooks: over(sequence number or null), pick(number), block(id or null), seen() when other rows have come into view
  constructor(list, hooks) {
    this.list = list;
    this.hooks = hooks;
    this.rows = new Map(); // sequence number -> {item, ...}
    this.width = 0;
    this.seeing = new IntersectionObserver((changes) => { // a row that nobody sees is not drawn
      for (const { target, isIntersecting } of changes) {
        const row = [...this.rows.values()].find((r) => r.item === target);
        if (row) row.seen = isIntersecting;
      }
      this.hooks.seen();
    }, { rootMargin: "60px" });
  }

  show(full, looks, host, picked) {
    const listed = [...full.sequences].sort((a, b) =>
      ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.request - b.request || a.branch - b.branch).slice(0, MOST);
    const wanted = new Set(listed.map((s) => s.number));
    for (const [number, row] of this.rows) {
      if (wanted.has(number)) continue;
      this.seeing.unobserve(row.item);
      row.item.remove();
      this.rows.delete(number);
    }
    let place = this.list.firstElementChild;
    for (const sequence of listed) {
      let row = this.rows.get(sequence.number);
      if (!row) this.rows.set(sequence.number, (row = this.make(sequence.number)));
      if (row.item === place) place = place.nextElementSibling;
      else this.list.insertBefore(row.item, place);
      this.fill(row, sequence, sequence.state === SWAPPED ? host : looks, picked === sequence.number);
    }
    return full.sequences.length - listed.length;
  }

  make(number) {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.className = "row";
    const swatch = document.createElement("i"), name = document.createElement("b"), state = document.createElement("span");
    const strip = document.createElement("canvas");
    swatch.className = "swatch";
    state.className = "state";
    button.append(swatch, name, state, strip);
    item.append(button);
    const { over, pick, block } = this.hooks;
    button.addEventListener("pointerenter", () => over(number));
    button.addEventListener("pointerleave", () => { over(null); block(null); });
    button.addEventListener("focus", () => { if (button.matches(":focus-visible")) over(number); });
    button.addEventListener("blur", () => over(null));
    button.addEventListener("click", () => pick(number));
    const row = { item, button, swatch, name, state, strip, sequence: null, drawn: null, seen: false };
    this.seeing.observe(item);
    strip.addEventListener("pointermove", (event) => block(this.under(row, event)));
    return row;
  }

  fill(row, sequence, looks, picked) {
    const { button, swatch, name, state, strip } = row;
    row.sequence = sequence;
    const said = `${sequence.computed.toLocaleString("en")} / ${sequence.tokens.toLocaleString("en")}`;
    const idle = sequence.state === RUNNING ? "" : `, ${SAID[sequence.state]}`;
    swatch.className = `swatch c${colourOf(sequence)}`;
    if (name.textContent !== nameOf(sequence)) name.textContent = nameOf(sequence);
    if (state.textContent !== said + idle) state.textContent = said + idle;
    if (picked !== row.picked) button.setAttribute("aria-pressed", String((row.picked = picked)));
    let entries = 0;
    for (const table of sequence.tables) for (const block of table) entries += block >= 0;
    const label = `Sequence ${nameOf(sequence)}, ${SAID[sequence.state]}, ` +
      `${sequence.computed} of ${sequence.tokens} tokens computed, ${entries} blocks`;
    if (label !== row.label) button.setAttribute("aria-label", (row.label = label));
    if (row.seen) this.draw(row, strip, sequence, looks);
  }

  draw(row, strip, sequence, looks) {
    const dpr = globalThis.devicePixelRatio || 1, tables = sequence.tables, length = tables[0]?.length ?? 0;
    const width = this.width || (this.width = Math.max(60, strip.clientWidth));
    const size = tables.length > 2 ? 7 : Math.max(5, Math.min(15, Math.floor(width / Math.max(1, length))));
    const perLine = Math.max(1, Math.floor(width / size)), lines = Math.max(1, Math.ceil(length / perLine));
    const pitch = Math.round(size * dpr), gap = Math.max(1, Math.round((size > 9 ? 2 : 1) * dpr));
    const band = tables.length * pitch + (lines > 1 && tables.length > 1 ? gap : 0);
    // Only what is seen decides whether it is drawn again.
    let drawn = Math.imul(width, 31) + sequence.state;
    for (const table of tables) {
      for (const block of table) {
        drawn = Math.imul(drawn ^ block ^ (block < 0 ? 0 : Math.imul(looks[block], 0x9e3779b1)), 0x01000193);
      }
    }
    if (row.drawn === drawn) return;
    row.drawn = drawn;
    Object.assign(row, { pitch: pitch / dpr, perLine, band: band / dpr });
    strip.width = width * dpr;
    strip.height = lines * band;
    strip.style.height = `${strip.height / dpr}px`;
    const ctx = strip.getContext("2d"), p = palette(), cell = sequence.state === SWAPPED ? drawSlot : drawCell;
    tables.forEach((table, g) => table.forEach((block, i) => {
      const x = (i % perLine) * pitch, y = Math.floor(i / perLine) * band + g * pitch, s = pitch - gap;
      if (block >= 0) { cell(ctx, x, y, s, looks[block]); return; }
      ctx.fillStyle = p.line; // a hole: its window has passed, or it is found by content
      ctx.fillRect(x + s * 0.3, y + s * 0.45, s * 0.4, Math.max(1, s * 0.12));
    }));
  }

  under(row, event) {
    const box = row.strip.getBoundingClientRect(), tables = row.sequence.tables;
    const column = Math.floor((event.clientX - box.left) / row.pitch), y = event.clientY - box.top;
    const line = Math.floor(y / row.band), group = Math.floor((y - line * row.band) / row.pitch);
    const block = column < row.perLine ? tables[group]?.[line * row.perLine + column] : undefined;
    return block >= 0 && row.sequence.state !== SWAPPED ? block : null;
  }

  // Rows of these sequences stand out; null: all do.
  light(numbers) {
    for (const [number, row] of this.rows) row.item.classList.toggle("dim", numbers !== null && !numbers.has(number));
  }

  redraw() {
    this.width = 0;
    for (const row of this.rows.values()) row.drawn = null;
  }
}
