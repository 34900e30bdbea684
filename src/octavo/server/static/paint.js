// How a block looks.  A cell's look is one number, so that only cells whose number changes are drawn again:
//
//   bits 0-19   colours of up to four holders, five bits each, from 1
//   bits 20-26  how many hold it
//   bit  27     has content that a prompt can hit
//   bits 28-31  sixteenths that are filled; 0: all

export const COLOURS = 12;
// The branches of a request are of different colours, and so are requests that follow each other.
export const colourOf = (sequence) => (sequence.request * 5 + sequence.branch) % COLOURS;

let paint = null;

// The page's colours, as CSS has them for light or dark.
export function palette(anew = false) {
  if (paint && !anew) return paint;
  const css = getComputedStyle(document.documentElement);
  const value = (name) => css.getPropertyValue(name).trim();
  paint = {
    free: value("--free"), cached: value("--cached"), card: value("--card"), ink: value("--ink"), soft: value("--soft"),
    line: value("--line"), accent: value("--accent"), warm: value("--warm"), other: value("--other"),
    sequences: Array.from({ length: COLOURS }, (_, i) => value(`--s${i}`)),
  };
  return paint;
}

// Looks of all blocks of the pool in one unfolded frame.
export function looksOf(full, blockSize) {
  const looks = new Uint32Array(full.device.length), holders = new Uint8Array(full.device.length);
  for (let b = 0; b < looks.length; b++) looks[b] = full.device[b] << 20;
  for (const sequence of full.sequences) {
    if (sequence.state === 2) continue; // its table names slots of the host tier
    const colour = colourOf(sequence) + 1;
    for (const table of sequence.tables) {
      for (let i = 0; i < table.length; i++) {
        const b = table[i];
        if (b >= 0 && holders[b] < 4) looks[b] |= colour << (5 * holders[b]++);
      }
      const last = table[table.length - 1];
      const filled = sequence.computed - (table.length - 1) * blockSize;
      if (last >= 0 && filled < blockSize && full.device[last] < 128) {
        looks[last] = (looks[last] & 0x0fffffff) | (Math.max(1, Math.ceil((15 * Math.max(0, filled)) / blockSize)) << 28);
      }
    }
  }
  return looks;
}

// Looks of the host tier's slots: bits 0-4 the owner's colour, bits 5-6 the state.
export function hostLooks(full) {
  const looks = new Uint32Array(full.host.length);
  for (let i = 0; i < looks.length; i++) looks[i] = full.host[i] << 5;
  for (const sequence of full.sequences) {
    if (sequence.state !== 2) continue;
    for (const table of sequence.tables) for (const slot of table) if (slot >= 0) looks[slot] |= colourOf(sequence) + 1;
  }
  return looks;
}

function box(ctx, x, y, w, h, radius) {
  if (radius < 2) { ctx.fillRect(x, y, w, h); return; }
  ctx.beginPath();
  ctx.roundRect(x, y, w, h, radius);
  ctx.fill();
}

function hollow(ctx, x, y, s, colour) {
  const line = Math.max(1, Math.round(s / 10));
  ctx.strokeStyle = colour;
  ctx.lineWidth = line;
  if (s < 10) { ctx.strokeRect(x + line / 2, y + line / 2, s - line, s - line); return; }
  ctx.beginPath();
  ctx.roundRect(x + line / 2, y + line / 2, s - line, s - line, s / 5);
  ctx.stroke();
}

// One cell with its upper left corner at (x, y) and sides of s device pixels.
export function drawCell(ctx, x, y, s, look) {
  const p = palette(), radius = s >= 10 ? s / 5 : 0;
  const count = (look >>> 20) & 127;
  if (count === 0) {
    if ((look >>> 27) & 1) return hollow(ctx, x, y, s, p.cached);
    ctx.fillStyle = p.free;
    return box(ctx, x, y, s, s, radius);
  }
  const colours = [];
  for (let i = 0; i < 4; i++) {
    const colour = (look >>> (5 * i)) & 31;
    if (colour) colours.push(p.sequences[colour - 1]);
  }
  if (!colours.length) colours.push(p.other); // held by a sequence that is not listed
  const sixteenths = look >>> 28;
  let top = 0;
  if (sixteenths && s >= 5) {
    ctx.fillStyle = p.free;
    box(ctx, x, y, s, s, radius);
    top = s - Math.max(2, Math.round((s * sixteenths) / 15));
  }
  const bands = count > 1 && s >= 4 ? Math.min(colours.length, s >= 8 ? 4 : 2) : 1;
  if (radius) {
    ctx.save();
    ctx.beginPath();
    ctx.roundRect(x, y, s, s, radius);
    ctx.clip();
  }
  for (let i = 0; i < bands; i++) {
    const from = Math.round((s * i) / bands), to = Math.round((s * (i + 1)) / bands);
    ctx.fillStyle = colours[i];
    ctx.fillRect(x + from, y + top, to - from, s - top);
  }
  if (radius) ctx.restore();
  if (count > 1) drawCount(ctx, x, y, s, count);
}

// How many hold it: a number where there is room, else pips as on a die, else one dot.
function drawCount(ctx, x, y, s, count) {
  const p = palette(), dpr = globalThis.devicePixelRatio || 1, cx = x + s / 2, cy = y + s / 2;
  ctx.fillStyle = p.card;
  const disc = (px, py, r) => { ctx.beginPath(); ctx.arc(px, py, r, 0, 7); ctx.fill(); };
  if (s >= 13 * dpr) {
    disc(cx, cy, s * 0.34);
    ctx.fillStyle = p.ink;
    ctx.font = `600 ${Math.round(s * (count > 9 ? 0.4 : 0.48))}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(count > 99 ? "99" : String(count), cx, cy + s * 0.03);
  } else if (s >= 8) {
    const r = Math.max(1, s * 0.12), d = s * 0.22;
    const places = count === 2 ? [[-d, -d], [d, d]] : count === 3 ? [[-d, -d], [0, 0], [d, d]]
      : [[-d, -d], [d, -d], [-d, d], [d, d], ...(count > 4 ? [[0, 0]] : [])];
    for (const [dx, dy] of places) disc(cx + dx, cy + dy, r);
  } else {
    const r = s >= 6 ? 2 : 1;
    ctx.fillRect(Math.round(cx - r / 2), Math.round(cy - r / 2), r, r);
  }
}

// A slot of the host tier: a sequence's own block is cut along the diagonal, so that it never looks like one of the pool.
export function drawSlot(ctx, x, y, s, look) {
  const p = palette(), state = (look >>> 5) & 3, colour = look & 31;
  if (state === 1) return hollow(ctx, x, y, s, p.cached);
  ctx.fillStyle = p.free;
  box(ctx, x, y, s, s, s >= 10 ? s / 5 : 0);
  if (state === 0) return;
  ctx.fillStyle = colour ? p.sequences[colour - 1] : p.other;
  ctx.beginPath();
  if (state === 2) { ctx.moveTo(x, y); ctx.lineTo(x + s, y + s); ctx.lineTo(x, y + s); }
  else ctx.arc(x + s / 2, y + s / 2, s / 4, 0, 7);
  ctx.fill();
}
