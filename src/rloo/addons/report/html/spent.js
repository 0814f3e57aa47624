// The time of a run by phase: a bar, a table of its parts, and both as files.

const BAR_WIDTH = 720, BAR_HEIGHT = 24;

function spent(run, several) {
  const parts = Object.entries(run.seconds).filter(([, value]) => value > 0);
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return el("p", {}, `${run.name}: no time was recorded.`);
  const title = several ? `Time of ${run.name}` : "Time of the run", file = fileName(title);
  const share = (value) => (value < total / 1000 ? "< 0.1 %" : `${(100 * value / total).toFixed(1)} %`);
  const rows = parts.map(([name, value], i) => [phase(name, i, `${name}: ${seconds(value)}, ${share(value)}`), seconds(value), share(value)]);
  const memory = Object.entries(run.facts).filter(([name]) => name.startsWith("peak")).map(([name, value]) => [name, value, ""]);
  const figure = el("figure", { class: "spent" }, el("figcaption", {}, el("h3", {}, title)), el("div", { class: "shares" }, bar(parts, total)),
    table(`Time by phase${memory.length ? ", and memory" : ""}`, ["phase", "spent", "share"], [...rows, ["all", seconds(total), ""], ...memory]),
    run.seconds["the rest"] ? el("p", { class: "small" }, "The rest is evaluations, saving and loading.") : null);
  const csv = () => csvBlob([["phase", "seconds", "share"], ...parts.map(([name, value]) => [name, value, value / total])]);
  figure.append(el("div", { class: "foot" }, ...fileButtons(title, () => save(csv(), `${file}.csv`), () => savePicture(figure, `${file}.png`))));
  return figure;
}

// A phase's name with its colour. `said` is its line in the picture.
function phase(name, index, said) {
  const box = svg("svg", { class: "swatch", viewBox: "0 0 24 10", "aria-hidden": "true" }, svg("rect", { class: `cell c${index % 8}`, x: 1, y: 0, width: 22, height: 10 }));
  const found = el("span", { class: "phase" }, box, el("span", { class: "name" }, name));
  found.dataset.said = said;
  return found;
}

function bar(parts, total) {
  let end = 0;
  const pieces = parts.map(([name, value], i) => {
    const begin = end;
    end += (value / total) * BAR_WIDTH;
    return svg("rect", { class: `cell c${i % 8}`, x: begin, y: 0, width: Math.max(1, end - begin - 1), height: BAR_HEIGHT }, svg("title", {}, name));
  });
  return svg("svg", { viewBox: `0 0 ${BAR_WIDTH} ${BAR_HEIGHT}`, width: "100%", height: BAR_HEIGHT, preserveAspectRatio: "none", "aria-hidden": "true" }, ...pieces);
}
