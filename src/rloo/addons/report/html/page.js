// The page: verdicts first, then charts, time, samples and options.

let data = JSON.parse(document.getElementById("data").textContent);
const chosen = { run: 0, moment: 0, group: 0, shade: "advantage" };

function page() {
  view.redraws = [];
  const several = data.runs.length > 1;
  const set = section("options", several ? "Options that differ" : data.named ? "Options that were set" : "Options unlike their defaults", options(several));
  const sections = [
    section("verdict", several ? "What the runs did" : "What the run did", verdicts(several)),
    several ? set : null,
    ...data.sections.map((s, i) => charts(s, several, i === 0 ? viewBar() : null)),
    distributions(several),
    section("spent", "Where time and memory went", data.runs.map((run) => spent(run, several))),
    section("samples", "What was sampled", samplesOf()),
    section("completions", "All recorded completions", completionsSection()),
    several ? null : set,
  ].filter(Boolean);
  const links = sections.map((s) => el("a", { href: `#${s.id}` }, s.dataset.title));
  document.getElementById("page").replaceChildren(
    el("header", {}, el("h1", {}, data.runs.map((r) => r.name).join(" · ")), themeButton(), el("nav", { "aria-label": "Sections" }, links)),
    el("main", { id: "main", tabindex: "-1" }, sections),
    el("footer", {}, `rloo ${data.version}. Healthy bands say where runs that are well mostly lie: a value outside is a question, not always a fault.`));
}

function section(id, title, ...content) {
  const made = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), content);
  made.dataset.title = title;
  return made;
}

function themeButton() {
  const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const button = el("button", { type: "button", class: "theme" }, isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    button.textContent = isDark() ? "Light" : "Dark";
  });
  return button;
}

function verdicts(several) {
  const cards = data.runs.map((run) => el("article", { class: `card ${run.status === "finished" ? "" : "unfinished"}` },
    several ? el("h3", {}, run.name) : null,
    run.status === "finished" ? null : el("p", { class: "status" }, run.status === "not ended" ? "Not ended" : `This run ${run.status === "failed" ? "failed" : `was ${run.status}`}.`),
    run.verdict.map((line, i) => el("p", { class: i === 0 ? "lead" : "" }, line)),
    run.findings.map(finding), alarms(run),
    run.notes.length ? [el("h3", {}, "Notes"), el("ul", {}, run.notes.map((note) => el("li", {}, note)))] : null,
    several ? null : el("dl", { class: "facts" }, Object.entries(run.facts).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value))))));
  if (!several) return cards;
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.facts)))];
  return [el("div", { class: "card" }, table("Runs side by side", ["figure", ...data.runs.map((run) => run.name)],
    names.map((name) => [name, ...data.runs.map((run) => run.facts[name] || "–")]))), ...cards];
}

function finding(of) {
  return el("div", { class: "finding" }, el("h3", {}, of.title || of.name || ""),
    of.evidence ? el("p", {}, words(of.evidence)) : null,
    of.examples && of.examples.length ? el("ul", { class: "examples" }, of.examples.map((e) => el("li", {}, el("code", {}, words(e))))) : null,
    of.why ? el("p", {}, words(of.why)) : null,
    of.change ? el("p", {}, el("strong", {}, "Change: "), words(of.change)) : null,
    of.command ? el("pre", { class: "command" }, words(of.command)) : null);
}

function words(value) {
  return typeof value === "string" ? value : Array.isArray(value) ? value.map(words).join("; ") : JSON.stringify(value);
}

function alarms(run) {
  if (!run.outside.length) return null;
  return [el("h3", {}, "Outside of its healthy band"), el("ul", { class: "alarms" }, run.outside.map((o) => {
    const of = data.metrics[o.name] || { unit: "", meaning: "" };
    const band = bandOf({ band: o.band, unit: of.unit });
    const count = o.steps === o.of ? "in every step" : `in ${o.steps.toLocaleString("en")} of ${o.of.toLocaleString("en")} steps`;
    return el("li", {}, el("code", {}, o.name), ` ${shown(o.value, of.unit)}, healthy: ${band}; ${count}. `, prose(of.meaning));
  }))];
}

function charts(of, several, bar) {
  const id = of.title.toLowerCase().replace(/[^a-z]+/g, "-");
  const made = of.charts.flatMap((c) => several ? c.names.map((name) => overlay(c, name)) : [single(c)]);
  const grid = el("div", { class: "charts" });
  const zero = of.zero.length ? el("p", { class: "small" }, "Always 0: ", of.zero.map((name, i) => [i ? ", " : "", el("code", {}, name)]), ".") : null;
  if (!of.closed) { grid.append(...made.map((one) => one())); return section(id, of.title, bar, grid, zero); }
  const more = el("details", {}, el("summary", {}, `${made.length} more charts`), grid);
  more.addEventListener("toggle", () => { if (more.open && !grid.childElementCount) grid.append(...made.map((one) => one())); });
  return section(id, of.title, bar, more, zero);
}

function single(of) {
  const { curves, axes } = data.runs[0];
  const first = data.metrics[of.names[0]];
  return () => chart({
    title: of.title, meaning: first.meaning, band: bandOf(first),
    limit: limitOf(of.names[0]),
    curves: of.names.map((name) => ({ ...curves[name], axes, label: short(name, of.names), unit: data.metrics[name].unit })),
  });
}

function overlay(of, name) {
  const meta = data.metrics[name], having = data.runs.filter((run) => run.curves[name]);
  return () => chart({
    title: of.names.length > 1 && short(name, of.names) !== of.title.toLowerCase() ? `${of.title}: ${short(name, of.names)}` : of.title,
    meaning: meta.meaning, band: bandOf(meta), limit: limitOf(name),
    curves: having.map((run) => ({ ...run.curves[name], axes: run.axes, label: run.name, unit: meta.unit })),
  });
}

const HISTOGRAMS = {
  reward: ["Rewards", "The rewards of all completions: the stronger the colour, the larger the share of completions."],
  length: ["Lengths", "The lengths of all completions in tokens."],
  advantage: ["Advantages", "The advantages of all completions. Advantages by token are averaged over a completion."],
};

function distributions(several) {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.histograms)))];
  if (!names.length) return null;
  const made = names.flatMap((name) => data.runs.filter((run) => run.histograms[name]).map((run) => {
    const [title, meaning] = HISTOGRAMS[name] || [`Scores of ${name.replace("rewards/", "")}`, "The scores of one reward function."];
    return heat({ ...run.histograms[name], axes: run.axes, unit: "", title: several ? `${title}: ${run.name}` : title, meaning });
  }));
  return section("distributions", "Distributions over time", el("div", { class: "charts" }, made));
}

function bandOf(meta) {
  return meta.band && meta.unit === "share" && !meta.band.includes("start")
    ? meta.band.replace(/[\d.]+/g, (n) => shown(Number(n), "share")) : meta.band;
}

function limitOf(name) {
  const limits = new Set(data.runs.map((run) => run.limit));
  const [value] = limits;
  return name === "completions/mean_length" && limits.size === 1 && value ? { value, label: "max_completion_length" } : null;
}

// The name in a legend: without what all of them have in common.
function short(name, among) {
  const own = name.replace(/^eval\//, "").replace(/^rewards\/(.*)\/(mean|raw_mean|failed)$/, "$1");
  if (among.length < 2 || name.includes("rewards/")) return own;
  return own.replace(/^(completions|time|idle|sampling)\//, "").replace(/^(mean_)?(.*)$/, (_, mean, rest) => rest.replace(/_/g, " "));
}

function samplesOf() {
  const place = el("div", {});
  const redraw = (name) => {
    const run = data.runs[chosen.run];
    place.replaceChildren(
      data.runs.length > 1 ? radios("Run", "run", data.runs.map((r, i) => [i, r.name]), chosen.run, (i) => { chosen.run = i; redraw("run"); }) : "",
      samples(run, chosen, redraw));
    if (name) place.querySelector(`input[name=${name}]:checked`)?.focus();
  };
  redraw();
  return place;
}

function options(several) {
  const first = data.options.filter((o) => several ? o.differ : o.set);
  const head = ["option", ...(several ? data.runs.map((r) => r.name) : ["value"]), "default"];
  const rows = (of) => of.map((o) => [el("code", {}, o.name), ...o.values, o.default]);
  const versions = data.runs.map((run) => Object.entries(run.versions).map(([n, v]) => `${n} ${v}`).join(", "));
  const all = el("details", {}, el("summary", {}, `All ${data.options.length} options`));
  all.addEventListener("toggle", () => { if (all.open && all.childElementCount === 1) all.append(table("All options", head, rows(data.options))); });
  return [
    first.length ? table(several ? "Options that differ" : "Options with another value than their default", head, rows(first)) : el("p", {}, several ? "All options are the same." : data.named ? "No option was set." : "All options have their defaults."),
    data.options.length ? all : null,
    [...new Set(versions)].filter(Boolean).map((line) => el("p", { class: "small" }, line)),
    data.runs.filter((run) => run.commit || run.host).map((run) => el("p", { class: "small" }, several ? `${run.name}: ` : "",
      run.commit ? ["commit ", el("code", {}, run.commit)] : null, run.commit && run.host ? ", " : "", run.host ? `host ${run.host}` : "")),
  ];
}

function placeOf(details) {
  const chart = details.closest("figure");
  return [details.closest("section").id, chart && chart.querySelector("h3").textContent, details.firstChild.textContent].join("/");
}

function reachable() {
  return [...document.querySelectorAll("a, button, input, select, summary, [tabindex='0']:not(.scroll)")];
}

async function follow() {
  try {
    const answer = await fetch("data.json", { cache: "no-store" });
    if (answer.ok) {
      const fresh = await answer.text();
      if (fresh !== follow.last) {
        follow.last = fresh;
        data = { ...JSON.parse(fresh), follows: true };
        const open = [...document.querySelectorAll("details[open]")].map(placeOf), at = scrollY;
        const active = reachable().indexOf(document.activeElement), count = reachable().length, named = document.activeElement.id;
        page();
        document.querySelectorAll("details").forEach((d) => { d.open = open.includes(placeOf(d)); });
        const again = (named && document.getElementById(named)) || (reachable().length === count && reachable()[active]);
        if (again) again.focus({ preventScroll: true });
        scrollTo(0, at);
      }
    }
  } catch { /* the server has ended: what is shown stays */ }
  setTimeout(follow, 5000);
}

page();
if (data.follows) setTimeout(follow, 5000);
