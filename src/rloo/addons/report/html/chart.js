// A chart of curves over the axis: what it shows of them, and how it draws it.

// The most points of a curve in a chart. A curve that has more shows several of them as one point.
const MOST_POINTS = 200;

// curves: [{label, unit, from, to, mean, low, high, bars, band, axes}]; limit: {value, label} or null.
function chart({ title, meaning, band, curves, limit }) {
  let shownNow = [];
  return frame({
    title, meaning,
    name: curves.length === 1 ? title : `${title}: ${curves.map((c) => c.label).join(", ")}`,
    notes: band ? el("p", { class: "band" }, `Healthy: ${band}`) : null,
    legend: curves.map((c, i) => [i, c.label]),
    domain: () => {
      const first = Math.min(...curves.map((c) => axisValue(c.axes, c.from[0])));
      return [first, Math.max(first, ...curves.map((c) => axisValue(c.axes, c.to[c.to.length - 1])))];
    },
    positions: (range) => {
      shownNow = curves.map((c) => visible(c, range));
      return [...new Set(shownNow.flatMap((c) => c.end))].sort((a, b) => a - b);
    },
    draw: (x, width) => drawing(shownNow, x, width, limit),
    read: (position) => ({ at: placeText(shownNow, position), values: shownNow.map((c) => valueAt(c, position)) }),
    table: () => points(title, shownNow),
    csv: () => [["curve", ...CSV_PLACES, "mean", "lowest", "highest", "interval_from", "interval_to"], ...curves.flatMap((c) => c.to.map((to, i) => [
      c.label, ...csvPlaces(c.axes, c.from[i], to), c.mean[i], c.low ? c.low[i] : null, c.high ? c.high[i] : null, ...((c.bars && c.bars[i]) || [null, null])]))],
  });
}

// The points of a curve inside of a range of the axis (null: all), at most 200, and where they lie.
function visible(curve, range) {
  const ends = curve.to.map((step) => axisValue(curve.axes, step));
  const inside = ends.map((_, i) => i).filter((i) => !range || (ends[i] >= range[0] && ends[i] <= range[1]));
  const size = curve.bars ? 1 : Math.ceil(inside.length / MOST_POINTS) || 1;
  const chunks = [];
  for (let i = 0; i < inside.length; i += size) chunks.push(inside.slice(i, i + size));
  const smooth = view.smoothing ? smoothed(curve.mean, view.smoothing) : null;
  const pick = (values, join) => chunks.map((chunk) => {
    const known = chunk.map((i) => values[i]).filter((value) => value !== null && value !== undefined);
    return known.length ? join(known) : null;
  });
  const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const found = { ...curve, from: chunks.map((c) => curve.from[c[0]]), to: chunks.map((c) => curve.to[c[c.length - 1]]), mean: pick(curve.mean, average) };
  found.smooth = smooth && pick(smooth, average);
  if (curve.low || size > 1) {
    found.low = pick(curve.low || curve.mean, (values) => Math.min(...values));
    found.high = pick(curve.high || curve.mean, (values) => Math.max(...values));
  }
  if (curve.bars) found.bars = inside.map((i) => curve.bars[i]);
  found.end = found.to.map((step) => axisValue(curve.axes, step));
  found.start = found.from.map((step) => axisValue(curve.axes, step));
  return found;
}

// The number of the point at a position, or the last one before it.
function nearest(curve, position) {
  let found = -1;
  for (let i = 0; i < curve.start.length && curve.start[i] <= position; i++) found = i;
  return found >= 0 && curve.mean[found] !== null ? found : -1;
}

function valueAt(curve, position) {
  const point = nearest(curve, position);
  if (point < 0) return "–";
  const ended = point === curve.to.length - 1 && curve.end[point] < position;
  return reading(curve, point) + (ended ? `, step ${curve.to[point].toLocaleString("en")}` : "");
}

function reading(curve, point) {
  const text = shown(curve.mean[point], curve.unit) + (curve.smooth ? `, smoothed ${shown(curve.smooth[point], curve.unit)}` : "");
  const bar = curve.bars && curve.bars[point];
  if (bar) return `${text} [${shown(bar[0], curve.unit)}, ${shown(bar[1], curve.unit)}]`;
  if (!curve.low) return text;
  return `${text} (${shown(curve.low[point], curve.unit)} to ${shown(curve.high[point], curve.unit)})`;
}

function placeText(curves, position) {
  const curve = curves.find((c) => c.end.includes(position)), point = curve ? curve.end.indexOf(position) : -1;
  return point < 0 ? AXES[view.axis].text(position) : axisText(curve.from[point], curve.to[point], position);
}

function axisText(from, to, position) {
  return view.axis === "step" ? `step ${stepSpan(from, to)}` : AXES[view.axis].text(position);
}

function stepSpan(from, to) {
  return from === to ? to.toLocaleString("en") : `${from.toLocaleString("en")} to ${to.toLocaleString("en")}`;
}

function points(title, curves) {
  const steps = [...new Set(curves.flatMap((c) => c.to))].sort((a, b) => a - b);
  const rows = steps.map((step) => [spanAt(curves, step), ...curves.map((c) => {
    const point = c.to.indexOf(step);
    return point < 0 || c.mean[point] === null ? "" : reading(c, point);
  })]);
  const several = curves.some((c) => c.low);
  return table(several ? `${title}: mean (lowest to highest)` : title, ["step", ...curves.map((c) => c.label)], rows);
}

function spanAt(curves, step) {
  const curve = curves.find((c) => c.to.includes(step));
  return stepSpan(curve.from[curve.to.indexOf(step)], step);
}

// The interval that the vertical axis shows: of the data, from 0 where it is near, with the edges of
// a healthy band that are not far away.
function extent(curves, limit) {
  const all = curves.flatMap((c) => [...c.mean, ...(c.low || []), ...(c.high || []), ...(c.bars || []).flat()])
    .filter((v) => v !== null && v !== undefined);
  let low = Math.min(...all), high = Math.max(...all);
  if (!all.length) return [0, 1];
  for (const edge of [...curves.flatMap((c) => c.band || []), limit ? limit.value : null]) {
    if (edge !== null && edge > high && edge <= 2 * high) high = edge;
    if (edge !== null && edge < low && edge >= low / 2) low = edge;
  }
  if (low > 0 && low < high / 2) low = 0;
  if (low === high) { low = low > 0 ? 0 : low - 1; high = high > 0 ? high * 1.2 : high + 1; }
  const margin = (high - low) * 0.05;
  const isShare = curves.every((c) => c.unit === "share");
  return [low === 0 || (isShare && low - margin < 0) ? 0 : low - margin,
    isShare && high <= 1 ? Math.min(1, high + margin) : high + margin];
}

function drawing(curves, x, width, limit) {
  const [low, high] = extent(curves, limit), found = [];
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const bands = new Set(curves.map((c) => JSON.stringify(c.band || null)));
  const band = bands.size === 1 ? curves[0].band : null;
  if (band) {
    const top = Math.max(TOP, y(band[1] === null ? high : Math.min(high, band[1])));
    const bottom = Math.min(HEIGHT - BOTTOM, y(band[0] === null ? low : Math.max(low, band[0])));
    if (bottom > top) found.push(svg("rect", { class: "healthy", x: LEFT, width: width - LEFT - RIGHT, y: top, height: bottom - top }));
  }
  for (const value of ticks(low, high, 5)) {
    found.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    found.push(svg("text", { class: "tick end", x: LEFT - 6, y: y(value) + 4 }, shown(value, curves[0].unit)));
  }
  if (limit && limit.value <= high) {
    found.push(svg("line", { class: "limit", x1: LEFT, x2: width - RIGHT, y1: y(limit.value), y2: y(limit.value) }));
    found.push(svg("text", { class: "tick", x: LEFT + 4, y: y(limit.value) + 14 }, limit.label));
  }
  curves.forEach((c, i) => found.push(...lines(c, i, x, y)));
  return found;
}

// A smoothed curve is drawn over its own faint values.
function lines(curve, index, x, y) {
  const kept = curve.mean.map((value, i) => i).filter((i) => curve.mean[i] !== null);
  const middle = (i) => x((curve.start[i] + curve.end[i]) / 2);
  const path = (of, order) => order.map((i) => `${middle(i).toFixed(1)},${y(of[i]).toFixed(1)}`);
  const found = [], look = `c${index % 8}`, faint = curve.smooth ? " faint" : "";
  if (curve.low && !curve.smooth) {
    const around = [...path(curve.high, kept), ...path(curve.low, [...kept].reverse())];
    found.push(svg("polygon", { class: `spread ${look}`, points: around.join(" ") }));
  }
  if (kept.length > 1) found.push(svg("polyline", { class: `line ${look} d${index % 4}${faint}`, points: path(curve.mean, kept).join(" ") }));
  if (kept.length > 1 && curve.smooth) found.push(svg("polyline", { class: `line smooth ${look} d${index % 4}`, points: path(curve.smooth, kept).join(" ") }));
  for (const i of kept) {
    const bar = curve.bars && curve.bars[i];
    if (bar) found.push(svg("line", { class: `bar ${look}`, x1: middle(i), x2: middle(i), y1: y(bar[0]), y2: y(bar[1]) }));
    if (curve.bars || kept.length < 16) found.push(svg("circle", { class: `dot ${look}`, cx: middle(i), cy: y(curve.mean[i]), r: 3 }));
  }
  return found;
}
