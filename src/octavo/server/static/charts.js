// Small charts over time, drawn anew a few times a second.

import { palette } from "./paint.js";

function fit(canvas) {
  const dpr = globalThis.devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight;
  if (canvas.width !== Math.round(w * dpr) || canvas.height !== Math.round(h * dpr)) {
    canvas.width = Math.round(w * dpr);
    canvas.height = Math.round(h * dpr);
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
  ctx.clearRect(0, 0, w, h);
  return [ctx, w, h];
}

// The least of 1, 2 and 5 times a power of ten that is not below a value.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((f) => f * power).find((v) => v >= value * 0.999);
}

// Lines over time.  series: [{values, colour, dashed?, filled?}], values oldest first, null where nothing is known.
export function lines(canvas, series, top = null) {
  const [ctx, w, h] = fit(canvas), p = palette();
  const high = top ?? ceiling(Math.max(1, ...series.flatMap((s) => s.values.map((v) => v ?? 0))));
  ctx.strokeStyle = p.line;
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(0, h - 0.5);
  ctx.lineTo(w, h - 0.5);
  ctx.stroke();
  for (const { values, colour, dashed, filled } of series) {
    const x = (i) => (i / (values.length - 1)) * w, y = (v) => h - 1.5 - (v / high) * (h - 4);
    const runs = [];
    values.forEach((v, i) => {
      if (v === null) return;
      if (i && values[i - 1] !== null) runs[runs.length - 1].push(i); else runs.push([i]);
    });
    for (const run of runs) {
      const path = new Path2D();
      run.forEach((i, k) => (k ? path.lineTo(x(i), y(values[i])) : path.moveTo(x(i), y(values[i]))));
      if (filled) {
        const area = new Path2D(path);
        area.lineTo(x(run[run.length - 1]), h);
        area.lineTo(x(run[0]), h);
        ctx.globalAlpha = 0.14;
        ctx.fillStyle = colour;
        ctx.fill(area);
        ctx.globalAlpha = 1;
      }
      ctx.setLineDash(dashed ? [3, 3] : []);
      ctx.strokeStyle = colour;
      ctx.lineWidth = 1.6;
      ctx.lineJoin = "round";
      ctx.stroke(path);
    }
    ctx.setLineDash([]);
  }
  return high;
}

export function bars(canvas, values, colour) {
  const [ctx, w, h] = fit(canvas), p = palette(), high = ceiling(Math.max(1, ...values.map((v) => v ?? 0)));
  ctx.fillStyle = p.line;
  ctx.fillRect(0, h - 1, w, 1);
  ctx.fillStyle = colour;
  const step = w / values.length;
  values.forEach((v, i) => {
    if (v) ctx.fillRect(i * step, h - 1 - Math.max(2, (v / high) * (h - 4)), Math.max(1.5, step - 1), Math.max(2, (v / high) * (h - 4)));
  });
}

// How full the pool was: live blocks, and cached ones on top.  parts: [[live, cached] as shares, or null]
export function filling(canvas, parts) {
  const [ctx, w, h] = fit(canvas), p = palette(), step = w / Math.max(1, parts.length);
  parts.forEach((part, i) => {
    if (!part) return;
    const x = i * step, live = part[0] * h, cached = part[1] * h;
    ctx.globalAlpha = 0.25;
    ctx.fillStyle = p.accent;
    ctx.fillRect(x, h - live - cached, step + 0.4, cached);
    ctx.globalAlpha = 0.75;
    ctx.fillRect(x, h - live, step + 0.4, live);
    ctx.globalAlpha = 1;
  });
}
