// A prompt's completions side by side: a column for each step and run that recorded it.

const MOST_COLUMNS = 40;

// [{run, step, records}], by step, then by run.
function columnsOf(prompt) {
  const found = new Map();
  for (const record of browsed.records) {
    if (record.prompt !== prompt) continue;
    const key = `${record.step} ${record.run}`;
    if (!found.has(key)) found.set(key, { run: record.run, step: record.step, records: [] });
    found.get(key).records.push(record);
  }
  return [...found.values()].sort((a, b) => a.step - b.step || a.run - b.run);
}

// The first, the last, and evenly between them.
function spreadOver(items, most) {
  if (items.length <= most) return items;
  return Array.from({ length: most }, (_, i) => items[Math.round((i * (items.length - 1)) / (most - 1))]);
}

// `opener` gets the focus back when the columns are closed.
function showCompared(place, prompt, opener) {
  const all = columnsOf(prompt), columns = spreadOver(all, MOST_COLUMNS);
  const close = () => {
    browsed.compared = null;
    place.replaceChildren();
    (opener && opener.isConnected ? opener : document.getElementById("query-text")).focus();
  };
  const heading = el("h3", { tabindex: "-1" }, `One prompt side by side, ${columns.length === all.length ? counted(all.length, "time") : `${columns.length} of ${all.length} times`}`);
  const box = el("div", { class: "card" },
    el("div", { class: "heading" }, heading, el("button", { type: "button", class: "close", onclick: close }, "Close")),
    el("pre", { class: "text" }, browsed.log.prompts[prompt]),
    el("div", { class: "columns scroll", tabindex: "0", role: "group", "aria-label": "Completions by step" }, columns.map(column)));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    close();
  });
  place.replaceChildren(box);
  browsed.compared = prompt;
  if (opener) heading.focus();
}

function column(of) {
  const rewards = of.records.map((record) => record.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const best = [...of.records].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const name = data.runs.length > 1 ? `${data.runs[of.run].name}, step` : "Step";
  return el("section", { class: "column" },
    el("h4", {}, `${name} ${of.step.toLocaleString("en")}`),
    el("p", { class: "small" }, `${counted(best.length, "completion")}, mean reward ${shown(mean)}`),
    best.map((record) => el("div", {}, el("p", { class: "facts" }, valuesOf(record).join(" · ")), el("pre", { class: "text" }, record.text))));
}
