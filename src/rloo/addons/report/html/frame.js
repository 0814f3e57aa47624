// The frame of a chart: title, plot with a cursor that the pointer or the arrow keys move, zoom, a
// table of all points, and its numbers and picture as files.

const HEIGHT = 210, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 24;

// of: {title, name, meaning, notes, legend: [[index or null, label]], domain() the whole interval of
// the axis, positions(range) where the cursor may stand, draw(x, width, range) the elements of the
// plot, read(position) {at, values}, table() and csv() rows with a head}. All are asked anew when the
// axis, the smoothing or the zoom changes.
function frame(of) {
  const figure = el("figure", { class: "chart" });
  const plot = el("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${of.name}. Arrow keys move along the axis, plus and minus zoom.`, "aria-valuemin": "0" });
  const values = of.legend.map(() => el("output", {}));
  const at = el("span", { class: "at" });
  const legend = el("ul", { class: "legend" }, of.legend.map(([index, label], i) => el("li", {}, index === null ? null : swatch(index), el("span", { class: "name" }, label), values[i])));
  const all = el("button", { type: "button", class: "all", hidden: true, onclick: () => zoom(null) }, "Show all");
  const state = { range: of.domain(), positions: [], cursor: 0, width: 0, x: null, from: null };

  function update() {
    const domain = of.domain(), zoomed = view.zoom.get(of.title);
    state.range = zoomed || domain;
    all.hidden = !zoomed;
    state.positions = of.positions(state.range);
    state.cursor = state.positions.length - 1;
    plot.setAttribute("aria-valuemax", String(Math.max(0, state.cursor)));
    draw();
  }

  function draw() {
    state.width = Math.max(240, Math.round(plot.clientWidth || 480));
    const [first, last] = state.range, inside = state.width - LEFT - RIGHT;
    state.x = (value) => LEFT + ((value - first) / (last - first || 1)) * inside;
    const root = svg("svg", { viewBox: `0 0 ${state.width} ${HEIGHT}`, width: "100%", "aria-hidden": "true" }, ...of.draw(state.x, state.width, state.range));
    root.append(...axisTicks(state.x, state.width, state.range), svg("line", { class: "cursor", x1: LEFT, x2: LEFT, y1: TOP, y2: HEIGHT - BOTTOM }));
    plot.replaceChildren(root);
    move(state.cursor);
  }

  function move(to) {
    state.cursor = Math.max(0, Math.min(state.positions.length - 1, to));
    const position = state.positions[state.cursor];
    const read = position === undefined ? { at: "", values: values.map(() => "–") } : of.read(position);
    read.values.forEach((text, i) => { values[i].textContent = text; });
    at.textContent = read.at;
    plot.setAttribute("aria-valuenow", String(state.cursor));
    plot.setAttribute("aria-valuetext", `${read.at}: ${of.legend.map(([, label], i) => `${label} ${read.values[i]}`).join(", ")}`);
    const line = plot.querySelector(".cursor");
    if (line && position !== undefined) for (const end of ["x1", "x2"]) line.setAttribute(end, state.x(position));
  }

  function zoom(range) {
    const [first, last] = of.domain();
    const cut = range && [Math.max(first, range[0]), Math.min(last, range[1])];
    if (!cut || cut[1] - cut[0] >= last - first) view.zoom.delete(of.title);
    else if (of.positions(cut).length) view.zoom.set(of.title, cut);
    update();
  }

  function zoomBy(factor) {
    const center = state.positions[state.cursor] ?? state.range[0], half = ((state.range[1] - state.range[0]) * factor) / 2;
    zoom([center - half, center + half]);
    const nearest = state.positions.findIndex((position) => position >= center);
    move(nearest < 0 ? state.positions.length - 1 : nearest);
  }

  plot.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(state.positions.length / 10)), { cursor } = state;
    const to = { ArrowRight: cursor + 1, ArrowUp: cursor + 1, ArrowLeft: cursor - 1, ArrowDown: cursor - 1,
      PageUp: cursor + far, PageDown: cursor - far, Home: 0, End: state.positions.length - 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (to !== undefined) move(to);
    else if (event.key === "+" || event.key === "=") zoomBy(0.5);
    else if (event.key === "-" || event.key === "−") zoomBy(2);
    else if (event.key === "Escape" || event.key === "0") zoom(null);
    else return;
    event.preventDefault();
  });
  pointers(plot, state, { move, zoom });
  new ResizeObserver(() => { if (Math.max(240, Math.round(plot.clientWidth || 480)) !== state.width) draw(); }).observe(plot);
  view.redraws.push(() => { if (figure.isConnected) { update(); rows.open = false; rows.replaceChildren(rows.firstChild); } });
  const rows = el("details", { class: "data" }, el("summary", {}, "Table"));
  rows.addEventListener("toggle", () => { if (rows.open && rows.childElementCount === 1) rows.append(of.table()); });
  const file = fileName(of.title);
  figure.append(
    el("figcaption", {}, el("h3", {}, of.title), of.meaning ? el("p", {}, prose(of.meaning)) : null, of.notes),
    plot, el("div", { class: "reading" }, at, " ", all, legend),
    el("div", { class: "foot" }, rows,
      ...fileButtons(of.title, () => save(csvBlob(of.csv()), `${file}.csv`), () => savePicture(figure, `${file}.png`))));
  update();
  return figure;
}

// The pointer moves the cursor; a drag along the axis selects an interval.
function pointers(plot, state, { move, zoom }) {
  const value = (event) => {
    const box = plot.getBoundingClientRect(), pixel = ((event.clientX - box.left) / box.width) * state.width;
    const part = Math.max(0, Math.min(1, (pixel - LEFT) / (state.width - LEFT - RIGHT)));
    return state.range[0] + part * (state.range[1] - state.range[0]);
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    state.from = { value: value(event), pixel: event.clientX };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    const here = value(event);
    let best = 0;
    state.positions.forEach((position, i) => { if (Math.abs(position - here) < Math.abs(state.positions[best] - here)) best = i; });
    move(best);
    plot.querySelector(".selection")?.remove();
    if (!state.from) return;
    const [first, last] = [state.from.value, here].sort((a, b) => a - b);
    plot.firstChild.append(svg("rect", { class: "selection", x: state.x(first), width: state.x(last) - state.x(first), y: TOP, height: HEIGHT - TOP - BOTTOM }));
  });
  plot.addEventListener("pointerup", (event) => {
    const { from } = state;
    state.from = null;
    plot.querySelector(".selection")?.remove();
    if (from && Math.abs(event.clientX - from.pixel) > 8) zoom([from.value, value(event)].sort((a, b) => a - b));
  });
  plot.addEventListener("pointercancel", () => { state.from = null; plot.querySelector(".selection")?.remove(); });
  plot.addEventListener("pointerleave", () => { if (!state.from) move(state.positions.length - 1); });
  plot.addEventListener("dblclick", () => zoom(null));
}

function axisTicks(x, width, [first, last]) {
  const isStep = view.axis === "step";
  const even = view.axis === "seconds" ? SPANS : null;
  const wanted = Math.max(1, Math.min(6, isStep ? last - first : 6, width / (isStep ? 90 : 120)));
  return ticks(first, last, wanted, even).filter((value) => !isStep || Number.isInteger(value)).map((value) => {
    const text = view.axis === "seconds" ? AXES.seconds.text(value).replace(/ 0 (s|min)$/, "") : isStep ? AXES.step.text(value) : short10(value);
    return svg("text", { class: `tick ${x(value) > width - 30 ? "end" : "middle"}`, x: Math.min(x(value), width - 2), y: HEIGHT - 6 }, text);
  });
}

// Seconds between ticks of a time axis; a longer axis has round numbers of seconds.
const SPANS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000];

// Round numbers inside of an interval, at one of the `spans` if these are given.
function ticks(low, high, wanted, spans) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const round = [1, 2, 2.5, 5, 10].map((m) => m * power);
  const step = (spans || []).find((span) => rough > 0.5 && span >= rough * 0.999) || round.find((m) => m >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step + 0);
  return found;
}

function swatch(index) {
  const line = svg("line", { x1: 1, x2: 23, y1: 5, y2: 5, class: `line c${index % 8} d${index % 4}` });
  return svg("svg", { class: "swatch", viewBox: "0 0 24 10", "aria-hidden": "true" }, line);
}
