// A histogram over time: a column for each time, whose bins have a stronger colour the more values they have.

// of: {title, meaning, unit, edges, from, to, counts, quartiles, axes}
function heat(of) {
  const number = of.from.length, totals = of.counts.map((counts) => counts.reduce((sum, count) => sum + count, 0));
  const end = (i) => axisValue(of.axes, of.to[i]);
  const begin = (i) => (view.axis === "step" ? of.from[i] - 1 : i ? end(i - 1) : 0);
  const inside = (i, [first, last]) => end(i) > first && begin(i) < last;
  const places = Array.from({ length: number }, (_, i) => i);
  return frame({
    ...of, name: of.title, notes: null,
    legend: [[null, "median"], [null, "middle half"], [null, "values"]],
    domain: () => [begin(0), end(number - 1)],
    positions: (range) => places.filter((i) => inside(i, range)).map(end),
    draw: (x, width, range) => [...binTicks(of, width), ...cells(of, totals, places.filter((i) => inside(i, range)), { x, begin, end, range })],
    read: (position) => {
      const i = places.find((place) => end(place) >= position);
      const [low, middle, high] = of.quartiles[i].map((value) => shown(value, of.unit));
      return { at: axisText(of.from[i], of.to[i], position), values: [middle, `${low} to ${high}`, Math.round(totals[i]).toLocaleString("en")] };
    },
    table: () => table(`${of.title}: quartiles`, ["step", "25 %", "median", "75 %", "values"], places.map((i) => [
      stepSpan(of.from[i], of.to[i]), ...of.quartiles[i].map((value) => shown(value, of.unit)), Math.round(totals[i]).toLocaleString("en")])),
    csv: () => [[...CSV_PLACES, "bin_from", "bin_to", "values"], ...places.flatMap((i) => of.counts[i].flatMap((count, bin) =>
      count ? [[...csvPlaces(of.axes, of.from[i], of.to[i]), of.edges[bin], of.edges[bin + 1], count]] : []))],
  });
}

function cells(of, totals, places, { x, begin, end, range }) {
  const bins = of.edges.length - 1, height = (HEIGHT - TOP - BOTTOM) / bins, found = [];
  for (const i of places) {
    const left = Math.round(x(Math.max(begin(i), range[0]))), right = Math.round(x(Math.min(end(i), range[1])));
    of.counts[i].forEach((count, bin) => {
      if (!count) return;
      const cell = svg("rect", { class: "cell c0", x: left, width: Math.max(1, right - left), y: HEIGHT - BOTTOM - (bin + 1) * height, height });
      cell.style.fillOpacity = String(Math.min(1, 0.08 + 0.92 * Math.sqrt(count / totals[i])));
      found.push(cell);
    });
  }
  return found;
}

function binTicks(of, width) {
  const low = of.edges[0], high = of.edges[of.edges.length - 1];
  return ticks(low, high, 5).map((value) => {
    const y = HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    return svg("text", { class: "tick end", x: LEFT - 6, y: y + 4 }, shown(value, of.unit));
  });
}
