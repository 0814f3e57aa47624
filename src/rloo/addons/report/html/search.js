// Which of the recorded completions match a query, and in which order. Nothing here draws.

// One object per completion, in the order of steps. `place` is the number in this order.
function recordsOf(log) {
  const found = [];
  for (const [run, step, prompt, completions] of log.groups) {
    for (const [reward, scores, length, truncated, advantage, text] of completions) {
      found.push({ place: 0, run, step, prompt, reward, scores, length, truncated, advantage, text, lower: null });
    }
  }
  found.sort((a, b) => a.step - b.step);
  found.forEach((record, place) => { record.place = place; });
  return found;
}

function lowered(record) {
  return (record.lower ??= record.text.toLowerCase());
}

function emptyQuery() {
  return { text: "", where: "both", run: "", first: "", last: "", measure: "reward", low: "", high: "", truncated: "", order: "step", descending: false };
}

// The numbers of a completion by name; reward functions have the names `score:NAME`.
function measuresOf(log) {
  return [["reward", "reward"], ["length", "length in tokens"], ["advantage", "advantage"], ...log.functions.map((name) => [`score:${name}`, name])];
}

function measured(log, name) {
  if (!name.startsWith("score:")) return (record) => record[name];
  const place = log.functions.indexOf(name.slice("score:".length));
  return (record) => record.scores[place];
}

function bound(text, otherwise) {
  return text === "" || Number.isNaN(Number(text)) ? otherwise : Number(text);
}

function search(records, log, query) {
  const words = query.text.toLowerCase();
  const prompts = words && query.where !== "completion" ? log.prompts.map((text) => text.toLowerCase().includes(words)) : [];
  const inText = query.where !== "prompt";
  const first = bound(query.first, -Infinity), last = bound(query.last, Infinity);
  const isBounded = query.low !== "" || query.high !== "";
  const low = bound(query.low, -Infinity), high = bound(query.high, Infinity), value = measured(log, query.measure);
  const found = records.filter((record) => {
    if (query.run !== "" && record.run !== Number(query.run)) return false;
    if (record.step < first || record.step > last) return false;
    if (query.truncated !== "" && record.truncated !== (query.truncated === "yes")) return false;
    if (isBounded) {
      const number = value(record);
      if (number === null || number === undefined || number < low || number > high) return false;
    }
    return !words || prompts[record.prompt] || (inText && lowered(record).includes(words));
  });
  return ordered(found, log, query);
}

// Completions without the value come last in both directions; equal ones stay in the order of steps.
function ordered(found, log, query) {
  if (query.order === "step") return query.descending ? found.reverse() : found;
  const value = query.order === "text" ? lowered : measured(log, query.order);
  const sign = query.descending ? -1 : 1;
  const lacks = (item) => item === null || item === undefined;
  return found
    .map((record) => [value(record), record])
    .sort(([a, one], [b, other]) => {
      if (lacks(a) || lacks(b)) return lacks(a) - lacks(b) || one.place - other.place;
      return (a < b ? -sign : a > b ? sign : 0) || one.place - other.place;
    })
    .map(([, record]) => record);
}
