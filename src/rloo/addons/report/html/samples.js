// Prompts with their completions, whose tokens are shaded by advantage or by mismatch.

function samples(run, chosen, redraw) {
  if (!run.samples.length) return el("p", {}, "No completion was recorded.");
  const moment = run.samples[Math.min(chosen.moment, run.samples.length - 1)];
  const group = moment.groups[Math.min(chosen.group, moment.groups.length - 1)];
  const choose = (name) => (value) => { chosen[name] = value; redraw(name); };
  const has = (name) => group.completions.some((c) => c.tokens && c[name] !== null && c[name] !== undefined);
  const shades = ["advantage", "mismatch"].filter(has);
  if (!shades.includes(chosen.shade) && chosen.shade !== "none") chosen.shade = shades[0] || "none";
  const [most, scale] = largest(group, chosen.shade);
  const order = [...group.completions].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const total = group.total && group.total > order.length ? ` of ${group.total}` : "";
  return el("div", { class: "samples" },
    el("div", { class: "choices" },
      radios("Moment", "moment", run.samples.map((m, i) => [i, `${m.title}, step ${m.step.toLocaleString("en")}`]), chosen.moment, choose("moment")),
      radios("Prompt", "group", moment.groups.map((_, i) => [i, String(i + 1)]), chosen.group, choose("group")),
      shades.length ? radios("Shade tokens by", "shade", [...shades, "none"].map((s) => [s, s]), chosen.shade, choose("shade")) : null),
    scale ? el("p", { class: "key" }, scale) : null,
    group.completions.some((c) => c.trained) ? el("p", { class: "key" }, "Grey: not the model's words but a tool's, with what the template puts around them; not trained.") : null,
    el("h3", {}, "Prompt"), el("pre", { class: "text" }, group.prompt),
    el("h3", {}, `${total ? `${order.length}${total} completions` : counted(order.length, "completion")}, best reward first`),
    el("ol", { class: "completions" }, order.map((c) => completion(c, chosen.shade, most))));
}

function radios(legend, name, options, value, choose) {
  return el("fieldset", {}, el("legend", {}, legend), options.map(([key, label]) => {
    const input = el("input", { type: "radio", name, value: String(key), checked: key === value });
    input.addEventListener("change", () => choose(key));
    return el("label", {}, input, label);
  }));
}

function numbers(completion, shade) {
  const value = completion[shade];
  if (value === null || value === undefined) return null;
  return Array.isArray(value) ? value : completion.tokens.map(() => value);
}

function largest(group, shade) {
  const all = group.completions.filter((c) => c.tokens).flatMap((c) => numbers(c, shade) || []).map(Math.abs);
  if (shade === "none" || !all.length) return [0, ""];
  const most = Math.max(...all);
  return [most, shade === "advantage"
    ? `Blue: made more likely, orange: less likely. The darkest shade is an advantage of ${plain(most)}.`
    : `The darker, the further engine and trainer are apart on a token; the darkest is ${plain(most)} nats.`];
}

function completion(of, shade, most) {
  const scores = Object.entries(of.scores).map(([name, value]) => `${name} ${shown(value)}`);
  const advantage = Array.isArray(of.advantage) ? null : of.advantage;
  const apart = of.mismatch ? Math.max(...of.mismatch.map(Math.abs)) : null;
  const facts = [
    Object.keys(of.scores).length > 1 || !scores.length ? [`reward ${shown(of.reward)}`, ...scores] : [`reward ${shown(of.reward)}`],
    advantage === null || advantage === undefined ? [] : [`advantage ${advantage > 0 ? "+" : ""}${plain(advantage)}`],
    of.length === null || of.length === undefined ? [] : [counted(of.length, "token")],
    of.finish === "length" ? ["cut off"] : [],
    apart === null ? [] : [`mismatch at most ${plain(apart)}`],
    of.episode ? episode(of.episode) : [],
  ].flat();
  return el("li", {}, el("p", { class: "facts" }, facts.map((fact) => el("span", { class: fact === "cut off" ? "fact cut" : "fact" }, fact))),
    of.tokens ? tokens(of, shade, most) : el("pre", { class: "text" }, of.text || ""));
}

function episode(of) {
  return [counted(of.turns, "turn"), of.calls ? counted(of.calls, "call") : [], of.errors ? counted(of.errors, "error") : [], of.failed ? `failed: ${of.failed}` : []].flat();
}

function tokens(of, shade, most) {
  const values = shade === "none" ? null : numbers(of, shade);
  const kind = shade === "mismatch" ? "apart" : "more";
  const parts = of.tokens.map((text, i) => {
    const value = values ? values[i] : null;
    if (of.trained && !of.trained[i]) return el("span", { class: "told", title: "context, not trained" }, text);
    if (!value || !most) return document.createTextNode(text);
    const span = el("span", { class: `token ${value < 0 && shade === "advantage" ? "less" : kind}`, title: `${shade} ${plain(value)}` }, text);
    span.style.setProperty("--strength", `${Math.round(45 * Math.abs(value) / most)}%`);
    return span;
  });
  if (of.gap) parts.splice(of.head, 0, el("span", { class: "gap" }, ` [${counted(of.gap, "token")} left out] `));
  return el("pre", { class: "text" }, parts);
}
