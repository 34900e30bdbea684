// Frames of the pool: taken in as they come, kept for some minutes, unfolded again for a moment in the past.
// The format is that of octavo/watch/snapshot.py.

const KEY = 0x80000000;
const KEPT = 330; // seconds

export const WAITING = 0, RUNNING = 1, SWAPPED = 2, RESTING = 3;

// Owns: the frames and the newest one unfolded.  A frame: {serial, key, time, figures, body}, the body still packed.
// Unfolded: {serial, time, figures, device, host, sequences}, of typed arrays that nobody changes.
export class History {
  constructor(about) {
    this.names = Object.keys(about.figures);
    this.blocks = about.device.counts.length;
    this.slots = about.host.length;
    this.groups = about.groups.length;
    this.blockSize = about.block_size;
    this.frames = [];
    this.live = null;
    this.requests = new Map(); // number -> id, of those seen lately
    this.unfolded = null; // what was looked at last
  }

  get newest() { return this.frames[this.frames.length - 1] ?? null; }
  get oldest() { return this.frames[0] ?? null; }

  async take(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const mark = view.getUint32(0, true);
    const frame = { serial: (mark & ~KEY) >>> 0, key: mark >= KEY, time: view.getFloat64(4, true), figures: {} };
    this.names.forEach((name, i) => { frame.figures[name] = view.getFloat64(12 + 8 * i, true); });
    frame.body = bytes.slice(12 + 8 * this.names.length);
    const last = this.newest;
    if (last && frame.serial <= last.serial) { // a server that started anew
      this.frames = [];
      this.live = this.unfolded = null;
    }
    if (!frame.key && frame.serial !== (this.newest?.serial ?? -1) + 1) return null; // of no use without the one before
    this.live = await this.unfold(frame, frame.key ? null : this.live);
    this.frames.push(frame);
    this.trim();
    return frame;
  }

  trim() {
    const limit = this.newest.time - KEPT;
    let keep = 0;
    for (let i = 1; i < this.frames.length && this.frames[i].time < limit; i++) if (this.frames[i].key) keep = i;
    if (keep) this.frames.splice(0, keep);
    for (const number of this.requests.keys()) {
      if (this.requests.size <= 4096) break;
      this.requests.delete(number);
    }
  }

  // Index of the last frame at or before a time; 0 if there is none.
  index(time) {
    let low = 0, high = this.frames.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].time <= time) low = middle; else high = middle;
    }
    return low;
  }

  figures(time) { return this.frames.length ? this.frames[this.index(time)].figures : null; }

  // The pool at a moment: unfolded from the key before it, or from where the last look left off.
  async at(time) {
    const index = this.index(time);
    const wanted = this.frames[index];
    if (!wanted || wanted === this.newest) return this.live;
    let start = index;
    while (start > 0 && !this.frames[start].key) start--;
    let full = null;
    const known = this.unfolded;
    if (known && known.serial >= this.frames[start].serial && known.serial <= wanted.serial) {
      full = known;
      start = index - (wanted.serial - known.serial) + 1;
    }
    for (const frame of this.frames.slice(start, index + 1)) full = await this.unfold(frame, full);
    this.unfolded = full;
    return full;
  }

  async unfold(frame, before) {
    const stream = new Blob([frame.body]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const length = new DataView(buffer).getUint32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let at = 4 + length;
    const states = new Uint8Array(buffer.slice(at, at + this.blocks + this.slots));
    at += states.length;
    const old = frame.key ? null : before;
    if (old) for (let i = 0; i < states.length; i++) states[i] ^= old.states[i];
    const entries = new Int32Array(buffer.slice(at));
    const known = new Map(old ? old.sequences.map((s) => [s.number, s]) : []);
    let next = 0;
    const sequences = head.sequences.map(([number, request, branch, state, tokens, computed, prompt, groups]) => {
      const past = known.get(number);
      const tables = groups.map(([holes, kept, more], g) => {
        const table = new Int32Array(kept + more);
        if (kept) table.set(past.tables[g].subarray(0, kept));
        table.set(entries.subarray(next, next + more), kept);
        next += more;
        return table.fill(-1, 0, Math.min(holes, table.length));
      });
      return { number, request, branch, state, tokens, computed, prompt, tables };
    });
    for (const [number, id] of Object.entries(head.requests)) this.requests.set(Number(number), id);
    return {
      serial: frame.serial, time: frame.time, figures: frame.figures, states, sequences,
      device: states.subarray(0, this.blocks), host: states.subarray(this.blocks),
    };
  }
}

// The frames in a run of bytes that may end in the middle of one; and that rest.
export function split(bytes) {
  const frames = [];
  let at = 0;
  while (bytes.length - at >= 4) {
    const length = new DataView(bytes.buffer, bytes.byteOffset + at, 4).getUint32(0, true);
    if (bytes.length - at - 4 < length) break;
    if (length) frames.push(bytes.subarray(at + 4, at + 4 + length));
    at += 4 + length;
  }
  return [frames, bytes.subarray(at)];
}

// "12b": the second branch of request 12.
export function nameOf(sequence) {
  let letters = "", n = sequence.branch;
  do {
    letters = String.fromCharCode(97 + (n % 26)) + letters;
    n = Math.floor(n / 26) - 1;
  } while (n >= 0);
  return `${sequence.request}${letters}`;
}
