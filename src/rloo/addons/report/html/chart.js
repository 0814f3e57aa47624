// A chart of curves over steps: one figure with its meaning, a cursor that the pointer or the arrow
// keys move, a legend that has the values there, and a table of all points.

const HEIGHT = 210, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 24;

// curves: [{label, unit, from, to, mean, low, high, bars, band}]; limit: {value, label} or null.
function chart({ title, meaning, band, curves, limit }) {
  const figure = el("figure", { class: "chart" });
  const name = curves.length === 1 ? title : `${title}: ${curves.map((c) => c.label).join(", ")}`;
  const plot = el("div", {
    class: "plot", tabindex: "0", role: "slider", "aria-label": `${name}. Arrow keys move over the steps.`,
    "aria-valuemin": "0",
  });
  const steps = [...new Set(curves.flatMap((c) => c.to))].sort((a, b) => a - b);
  plot.setAttribute("aria-valuemax", String(steps.length - 1));
  const values = curves.map(() => el("output", {}));
  const at = el("span", { class: "at" });
  const legend = el("ul", { class: "legend" }, curves.map((c, i) =>
    el("li", {}, swatch(i), el("span", { class: "name" }, c.label), values[i])));
  let cursor = steps.length - 1;

  function move(to) {
    cursor = Math.max(0, Math.min(steps.length - 1, to));
    const words = curves.map((c, i) => {
      const point = nearest(c, steps[cursor]);
      const ended = point === c.to.length - 1 && c.to[point] < steps[cursor];
      values[i].textContent = point < 0 ? "–" : reading(c, point) + (ended ? `, step ${c.to[point].toLocaleString("en")}` : "");
      return `${c.label} ${values[i].textContent}`;
    });
    at.textContent = `step ${spanAt(curves, steps[cursor])}`;
    plot.setAttribute("aria-valuenow", String(cursor));
    plot.setAttribute("aria-valuetext", `${at.textContent}: ${words.join(", ")}`);
    const line = plot.querySelector(".cursor");
    if (line && plot.scaleX) for (const end of ["x1", "x2"]) line.setAttribute(end, plot.scaleX(steps[cursor]));
  }

  plot.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(steps.length / 10));
    const to = { ArrowRight: cursor + 1, ArrowUp: cursor + 1, ArrowLeft: cursor - 1, ArrowDown: cursor - 1,
      PageUp: cursor + far, PageDown: cursor - far, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!plot.scaleX) return;
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * plot.width;
    let best = 0;
    for (let i = 1; i < steps.length; i++) {
      if (Math.abs(plot.scaleX(steps[i]) - x) < Math.abs(plot.scaleX(steps[best]) - x)) best = i;
    }
    move(best);
  });
  plot.addEventListener("pointerleave", () => move(steps.length - 1));

  const draw = () => {
    const width = Math.max(240, Math.round(plot.clientWidth || 480));
    if (plot.width === width) return;
    plot.width = width;
    plot.replaceChildren(drawing(plot, curves, steps, width, limit));
    move(cursor);
  };
  new ResizeObserver(draw).observe(plot);
  const data = el("details", { class: "data" }, el("summary", {}, "Table"));
  data.addEventListener("toggle", () => {
    if (data.open && data.childElementCount === 1) data.append(points(title, curves, steps));
  });
  figure.append(
    el("figcaption", {}, el("h3", {}, title), meaning ? el("p", {}, prose(meaning)) : null,
      band ? el("p", { class: "band" }, `Healthy: ${band}`) : null),
    plot, el("div", { class: "reading" }, at, legend), data);
  move(cursor);
  return figure;
}

function swatch(index) {
  const line = svg("line", { x1: 1, x2: 23, y1: 5, y2: 5, class: `line c${index % 8} d${index % 4}` });
  return svg("svg", { class: "swatch", viewBox: "0 0 24 10", "aria-hidden": "true" }, line);
}

// The number of the point that stands for a step, or the last one before it.
function nearest(curve, step) {
  let found = -1;
  for (let i = 0; i < curve.from.length && curve.from[i] <= step; i++) found = i;
  return found >= 0 && curve.mean[found] !== null ? found : -1;
}

function reading(curve, point) {
  const text = shown(curve.mean[point], curve.unit);
  const bar = curve.bars && curve.bars[point];
  if (bar) return `${text} [${shown(bar[0], curve.unit)}, ${shown(bar[1], curve.unit)}]`;
  if (!curve.low) return text;
  return `${text} (${shown(curve.low[point], curve.unit)} to ${shown(curve.high[point], curve.unit)})`;
}

function spanAt(curves, step) {
  const point = curves[0].to.indexOf(step);
  const from = point < 0 ? step : curves[0].from[point];
  return from === step ? step.toLocaleString("en") : `${from.toLocaleString("en")} to ${step.toLocaleString("en")}`;
}

function points(title, curves, steps) {
  const rows = steps.map((step) => [spanAt(curves, step), ...curves.map((c) => {
    const point = c.to.indexOf(step);
    return point < 0 || c.mean[point] === null ? "" : reading(c, point);
  })]);
  const several = curves.some((c) => c.low);
  return table(several ? `${title}: mean (lowest to highest)` : title, ["step", ...curves.map((c) => c.label)], rows);
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

// Round numbers inside of an interval.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step + 0);
  return found;
}

function drawing(plot, curves, steps, width, limit) {
  const [low, high] = extent(curves, limit);
  const first = Math.min(...curves.flatMap((c) => c.from)), last = steps[steps.length - 1];
  const x = (step) => LEFT + ((step - first) / Math.max(1, last - first)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  plot.scaleX = x;
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width: "100%", "aria-hidden": "true" });
  const bands = new Set(curves.map((c) => JSON.stringify(c.band || null)));
  const band = bands.size === 1 ? curves[0].band : null;
  if (band) {
    const top = Math.max(TOP, y(band[1] === null ? high : Math.min(high, band[1])));
    const bottom = Math.min(HEIGHT - BOTTOM, y(band[0] === null ? low : Math.max(low, band[0])));
    if (bottom > top) root.append(svg("rect", { class: "healthy", x: LEFT, width: width - LEFT - RIGHT, y: top, height: bottom - top }));
  }
  for (const value of ticks(low, high, 5)) {
    root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    root.append(svg("text", { class: "tick end", x: LEFT - 6, y: y(value) + 4 }, shown(value, curves[0].unit)));
  }
  for (const step of ticks(first, last, Math.max(1, Math.min(6, last - first, width / 90))).filter(Number.isInteger)) {
    root.append(svg("text", { class: `tick ${x(step) > width - 30 ? "end" : "middle"}`, x: Math.min(x(step), width - 2), y: HEIGHT - 6 }, step.toLocaleString("en")));
  }
  if (limit && limit.value <= high) {
    root.append(svg("line", { class: "limit", x1: LEFT, x2: width - RIGHT, y1: y(limit.value), y2: y(limit.value) }));
    root.append(svg("text", { class: "tick", x: LEFT + 4, y: y(limit.value) + 14 }, limit.label));
  }
  curves.forEach((c, i) => root.append(...lines(c, i, x, y)));
  root.append(svg("line", { class: "cursor", x1: LEFT, x2: LEFT, y1: TOP, y2: HEIGHT - BOTTOM }));
  return root;
}

function lines(curve, index, x, y) {
  const kept = curve.mean.map((value, i) => i).filter((i) => curve.mean[i] !== null);
  const middle = (i) => x((curve.from[i] + curve.to[i]) / 2);
  const path = (of, order) => order.map((i) => `${middle(i).toFixed(1)},${y(of[i]).toFixed(1)}`);
  const found = [], look = `c${index % 8}`;
  if (curve.low) {
    const around = [...path(curve.high, kept), ...path(curve.low, [...kept].reverse())];
    found.push(svg("polygon", { class: `spread ${look}`, points: around.join(" ") }));
  }
  if (kept.length > 1) found.push(svg("polyline", { class: `line ${look} d${index % 4}`, points: path(curve.mean, kept).join(" ") }));
  for (const i of kept) {
    const bar = curve.bars && curve.bars[i];
    if (bar) found.push(svg("line", { class: `bar ${look}`, x1: middle(i), x2: middle(i), y1: y(bar[0]), y2: y(bar[1]) }));
    if (curve.bars || kept.length < 16) found.push(svg("circle", { class: `dot ${look}`, cx: middle(i), cy: y(curve.mean[i]), r: 3 }));
  }
  return found;
}
