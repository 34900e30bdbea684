// A tier as a grid of cells, on two canvases: the cells, drawn again only where they change, and over them what lights up.

import { drawCell, drawSlot, palette } from "./paint.js";

const FLASH = 900; // milliseconds that a copied block's ring takes to fade
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Grid {
  // field: the element with the two canvases; most: how high it may become, in CSS pixels, or a function of its width.
  constructor(field, count, { most, largest = 26, slots = false }) {
    [this.base, this.over] = field.querySelectorAll("canvas");
    Object.assign(this, { field, count, most, largest, draw: slots ? drawSlot : drawCell });
    this.drawn = new Uint32Array(count);
    this.looks = new Uint32Array(count);
    this.lit = null; // a Set of cells, or null when none is to stand out
    this.cursor = -1;
    this.flashes = new Map(); // cell -> when its ring began
    this.layout();
  }

  // The largest cells that fit the room.
  layout() {
    const width = this.field.clientWidth, dpr = globalThis.devicePixelRatio || 1;
    if (!width) return;
    const most = (this.room = typeof this.most === "function" ? this.most(width) : this.most);
    let cell = this.largest;
    while (cell > 5 && Math.ceil(this.count / Math.floor(width / cell)) * cell > most) cell -= cell > 12 ? 1 : 0.5;
    this.pitch = Math.max(3, Math.round(cell * dpr)); // device pixels from one cell to the next
    this.gap = Math.max(1, Math.round((cell < 9 ? 1 : cell < 16 ? 2 : 3) * (dpr > 1.5 ? dpr * 0.75 : 1)));
    this.columns = Math.max(1, Math.floor((width * dpr + this.gap) / this.pitch));
    this.columns = Math.min(this.columns, this.count);
    const rows = Math.ceil(this.count / this.columns);
    for (const canvas of [this.base, this.over]) {
      canvas.width = this.columns * this.pitch - this.gap;
      canvas.height = rows * this.pitch - this.gap;
      canvas.style.width = `${canvas.width / dpr}px`;
      canvas.style.height = `${canvas.height / dpr}px`;
    }
    this.dpr = dpr;
    this.paintAll();
  }

  paintAll() {
    this.drawn.fill(0xffffffff);
    this.base.getContext("2d").clearRect(0, 0, this.base.width, this.base.height);
    this.show(this.looks);
    this.light();
  }

  corner(cell) { return [(cell % this.columns) * this.pitch, Math.floor(cell / this.columns) * this.pitch]; }

  show(looks) {
    const ctx = this.base.getContext("2d"), s = this.pitch - this.gap;
    this.looks = looks;
    for (let i = 0; i < looks.length; i++) {
      if (looks[i] === this.drawn[i]) continue;
      const x = (i % this.columns) * this.pitch, y = Math.floor(i / this.columns) * this.pitch;
      ctx.clearRect(x, y, s, s);
      this.draw(ctx, x, y, s, looks[i]);
      this.drawn[i] = looks[i];
    }
  }

  // Cells that were just written as copies of others.
  flash(cells) {
    if (still.matches) return;
    for (const cell of cells) this.flashes.set(cell, performance.now());
    if (cells.length) this.light();
  }

  light() {
    const ctx = this.over.getContext("2d"), s = this.pitch - this.gap, p = palette(), now = performance.now();
    ctx.clearRect(0, 0, this.over.width, this.over.height);
    if (this.lit) {
      ctx.globalAlpha = 0.72;
      ctx.fillStyle = p.card;
      ctx.fillRect(0, 0, this.over.width, this.over.height);
      ctx.globalAlpha = 1;
      for (const cell of this.lit) { const [x, y] = this.corner(cell); ctx.clearRect(x, y, s, s); }
    }
    for (const [cell, began] of this.flashes) {
      const left = 1 - (now - began) / FLASH;
      if (left <= 0) { this.flashes.delete(cell); continue; }
      const [x, y] = this.corner(cell), grow = (1 - left) * s * 0.6;
      ctx.globalAlpha = left;
      this.ring(ctx, x - grow, y - grow, s + 2 * grow, p.ink);
      ctx.globalAlpha = 1;
    }
    if (this.cursor >= 0) { const [x, y] = this.corner(this.cursor); this.ring(ctx, x, y, s, p.ink, 2); }
    if (this.flashes.size && !this.waiting) {
      this.waiting = true;
      requestAnimationFrame(() => { this.waiting = false; this.light(); });
    }
  }

  ring(ctx, x, y, s, colour, width = 1.5) {
    const line = Math.max(1, Math.round(width * this.dpr)), out = line / 2 + (s > 8 ? 1 : 0);
    ctx.strokeStyle = colour;
    ctx.lineWidth = line;
    ctx.beginPath();
    ctx.roundRect(x - out, y - out, s + 2 * out, s + 2 * out, s > 8 ? s / 4 : 1);
    ctx.stroke();
  }

  // The cell under a pointer, -1 for none.
  under(event) {
    const box = this.base.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) * this.dpr) / this.pitch);
    const row = Math.floor(((event.clientY - box.top) * this.dpr) / this.pitch);
    const cell = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && cell < this.count ? cell : -1;
  }
}
