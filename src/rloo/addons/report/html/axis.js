// The horizontal axis that all charts share: by step, completions, tokens or the time of the steps.

const AXES = {
  step: { label: "Step", text: (value) => value.toLocaleString("en") },
  completions: { label: "Completions", text: (value) => `${short10(value)} completions` },
  tokens: { label: "Tokens", text: (value) => `${short10(value)} tokens` },
  seconds: { label: "Wall time", text: (value) => (value ? seconds(value) : "0 s") },
};
// `zoom` has the shown interval of each chart that shows a part; `redraws` draw all charts again.
const view = { axis: "step", smoothing: 0, zoom: new Map(), redraws: [] };

// A large number with at most four digits: 12,340 as 12.34k.
function short10(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / (letter === "k" ? 1e3 : size)).toPrecision(4))}${letter}`;
  }
  return Math.round(value).toLocaleString("en");
}

// The axes that every run with steps has recorded.
function axesOfAll(runs) {
  const having = runs.filter((run) => run.axes.step.length);
  return Object.keys(AXES).filter((name) => having.every((run) => run.axes[name]));
}

// The place of the end of a step on an axis, by default the chosen one. Between recorded steps it is
// interpolated.
function axisValue(axes, step, axis = view.axis) {
  const values = axes[axis], steps = axes.step;
  if (axis === "step" || !values || !steps.length) return step;
  let low = 0, high = steps.length - 1;
  if (step >= steps[high]) return values[high];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  const [step0, value0] = low ? [steps[low - 1], values[low - 1]] : [0, 0];
  if (steps[low] === step0) return values[low];
  return value0 + ((values[low] - value0) * Math.max(0, step - step0)) / (steps[low] - step0);
}

// The means of exponential smoothing, without the bias of its start; unknown values stay unknown.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function redrawAll() {
  view.redraws.forEach((redraw) => redraw());
}

function viewBar() {
  const axes = axesOfAll(data.runs);
  if (!axes.includes(view.axis)) view.axis = "step";
  const output = el("output", {}, String(view.smoothing));
  const slider = el("input", { id: "smoothing", type: "range", min: "0", max: "0.99", step: "0.01", value: String(view.smoothing) });
  slider.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    output.textContent = slider.value;
    redrawAll();
  });
  return el("div", { class: "choices view" },
    axes.length > 1 ? radios("Horizontal axis", "axis", axes.map((name) => [name, AXES[name].label]), view.axis, (name) => {
      view.axis = name;
      view.zoom.clear();
      redrawAll();
    }) : null,
    el("label", {}, "Smoothing", slider, output),
    el("p", { class: "small" }, "Drag over a chart to zoom, or press + and − at the cursor. Escape or a double click shows all."));
}
