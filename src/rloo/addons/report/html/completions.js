// The list of all recorded completions: fields of a query, a page of results, and their texts.

const PER_PAGE = 25, SNIPPET = 160;
const browsed = { log: null, records: [], found: [], page: 0, query: emptyQuery(), compared: null };

function completionsSection() {
  if (browsed.log !== data.log) Object.assign(browsed, { log: data.log, records: recordsOf(data.log) });
  if (!browsed.records.length) return el("p", {}, "No completion was recorded.");
  const lower = () => browsed.records.forEach(lowered);
  if ("requestIdleCallback" in window) requestIdleCallback(lower);
  const list = el("div", { class: "results" });
  const compared = el("div", { class: "compared" });
  const place = el("div", { class: "records" }, queryFields(() => { browsed.page = 0; showResults(list, compared); }), thinnedNote(), compared, list);
  place.addEventListener("keydown", (event) => {
    const open = event.key === "Escape" && event.target.closest("details[open]");
    if (!open) return;
    open.open = false;
    open.firstChild.focus();
  });
  showResults(list, compared);
  if (browsed.compared !== null) showCompared(compared, browsed.compared, null);
  return place;
}

function thinnedNote() {
  const { groups, total } = browsed.log;
  if (groups.length === total) return null;
  return el("p", { class: "small" }, `This file has ${plain(groups.length)} of ${plain(total)} recorded prompts, so that it is not too large: every second prompt of the older half was left out, until the rest fitted. completions.jsonl has all of them.`);
}

function queryFields(changed) {
  const { query, log } = browsed;
  const input = (name, label, type, size) => {
    const field = el("input", { id: `query-${name}`, type, value: query[name], size, inputmode: size ? "decimal" : null, autocomplete: "off", spellcheck: "false" });
    field.addEventListener("input", () => { query[name] = field.value.trim(); changed(); });
    return el("label", {}, label, field);
  };
  const select = (name, label, options) => {
    const field = el("select", { id: `query-${name}` }, options.map(([value, text]) => el("option", { value, selected: String(query[name]) === value }, text)));
    field.addEventListener("change", () => { query[name] = name === "descending" ? field.value === "true" : field.value; changed(); });
    return el("label", {}, label, field);
  };
  const measures = measuresOf(log);
  const fields = el("div", { class: "query", role: "search", "aria-label": "Completions" },
    input("text", "Text", "search", null),
    select("where", "in", [["both", "prompts and completions"], ["completion", "completions"], ["prompt", "prompts"]]),
    data.runs.length > 1 ? select("run", "Run", [["", "all"], ...data.runs.map((run, i) => [String(i), run.name])]) : null,
    el("span", { class: "range" }, input("first", "Steps from", "text", 5), input("last", "to", "text", 5)),
    el("span", { class: "range" }, select("measure", "With", measures), input("low", "from", "text", 5), input("high", "to", "text", 5)),
    select("truncated", "Truncated", [["", "any"], ["yes", "yes"], ["no", "no"]]),
    el("span", { class: "range" }, select("order", "Sort by", [["step", "step"], ...measures, ["truncated", "truncated"], ["text", "text"]]),
      select("descending", "", [["false", "lowest first"], ["true", "highest first"]])));
  fields.querySelector("#query-descending").setAttribute("aria-label", "Direction");
  fields.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault();  // else the key would open the completion that has the focus next
    fields.parentElement.querySelector(".results summary")?.focus();
  });
  return fields;
}

function showResults(list, compared) {
  browsed.found = search(browsed.records, browsed.log, browsed.query);
  const pages = Math.max(1, Math.ceil(browsed.found.length / PER_PAGE));
  const first = browsed.page * PER_PAGE, shown = browsed.found.slice(first, first + PER_PAGE);
  const turn = (by, label) => {
    const to = browsed.page + by;
    return el("button", { type: "button", "data-turn": String(by), disabled: to < 0 || to >= pages, onclick: () => {
      browsed.page = to;
      showResults(list, compared);
      list.querySelector("summary")?.focus();
    } }, label);
  };
  const all = browsed.records.length.toLocaleString("en"), number = browsed.found.length.toLocaleString("en");
  list.replaceChildren(
    el("p", { class: "count", role: "status" }, `${number} of ${all} completions`),
    el("ol", { start: first + 1 }, shown.map((record) => el("li", {}, result(record, compared)))),
    pages > 1 ? el("p", { class: "pages" }, turn(-1, "Previous"), ` page ${(browsed.page + 1).toLocaleString("en")} of ${pages.toLocaleString("en")} `, turn(1, "Next")) : "");
}

function factsOf(record) {
  const name = data.runs.length > 1 ? [data.runs[record.run].name] : [];
  return [...name, `step ${record.step.toLocaleString("en")}`, ...valuesOf(record)];
}

function valuesOf(record) {
  return [
    `reward ${shown(record.reward)}`,
    record.scores.length > 1 ? record.scores.map((score, i) => `${browsed.log.functions[i]} ${shown(score)}`) : [],
    record.advantage === null ? [] : `advantage ${record.advantage > 0 ? "+" : ""}${plain(record.advantage)}`,
    record.length === null || record.length === undefined ? [] : counted(record.length, "token"),
    record.truncated ? "truncated" : [],
  ].flat();
}

function result(record, compared) {
  const facts = factsOf(record).map((fact) => el("span", { class: fact === "truncated" ? "fact cut" : "fact" }, fact));
  const details = el("details", {}, el("summary", {}, facts, el("span", { class: "snippet" }, marked(snippet(record), browsed.query.text))));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const columns = columnsOf(record.prompt);
    details.append(
      el("h4", {}, "Prompt"), el("pre", { class: "text" }, marked(browsed.log.prompts[record.prompt], browsed.query.text)),
      el("h4", {}, "Completion"), el("pre", { class: "text" }, marked(record.text, browsed.query.text)),
      columns.length > 1 ? el("button", { type: "button", class: "compare", onclick: (event) => showCompared(compared, record.prompt, event.target) }, `This prompt side by side, ${columns.length} times`) : el("p", { class: "small" }, "This prompt was recorded once."));
  });
  return details;
}

// The part of a completion around the first match, in one line.
function snippet(record) {
  const at = browsed.query.text ? lowered(record).indexOf(browsed.query.text.toLowerCase()) : -1;
  const from = Math.max(0, at - SNIPPET / 2), text = record.text.slice(from, from + SNIPPET).replace(/\s+/g, " ");
  return `${from > 0 ? "… " : ""}${text}${from + SNIPPET < record.text.length ? " …" : ""}`;
}

// The text with its matches in mark elements.
function marked(text, words) {
  if (!words) return [text];
  const lower = text.toLowerCase(), wanted = words.toLowerCase(), parts = [];
  if (lower.length !== text.length) return [text];  // a letter whose small form is longer
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0 && parts.length < 1000; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
