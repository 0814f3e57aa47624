// A chart's numbers as CSV and its picture as PNG, made in the page: nothing is sent.

function save(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function fileName(title) {
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 80) || "chart";
}

function csvBlob(rows) {
  return new Blob([rows.map((row) => row.map(csvCell).join(",")).join("\n") + "\n"], { type: "text/csv" });
}

// A text that a spreadsheet would compute (`=...`) gets an apostrophe, which marks it as text.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// The columns of a step: itself, and its place on the other axes.
function csvPlaces(axes, from, to) {
  const others = ["completions", "tokens", "seconds"];
  return [from, to, ...others.map((name) => (axes[name] ? axisValue(axes, to, name) : null))];
}

const CSV_PLACES = ["first_step", "last_step", "completions", "tokens", "seconds"];

function fileButtons(title, saveNumbers, saveImage) {
  return [["CSV", saveNumbers], ["PNG", saveImage]].map(([kind, onclick]) => el("button", { type: "button", onclick, "aria-label": `${kind} of ${title}` }, kind));
}

function savePicture(figure, name) {
  picture(figure).toBlob((blob) => save(blob, name), "image/png");
}

// The plot with its title and legend on a canvas, with the colours that the page has now.
function picture(figure) {
  const plot = figure.querySelector(".plot > svg, .shares > svg"), box = plot.viewBox.baseVal, scale = 2;
  const names = [...figure.querySelectorAll(".legend li:has(.swatch), .phase")], head = 28, row = 20;
  const inset = plot.parentElement.matches(".shares") ? 8 : 0, outer = box.width + 2 * inset;
  const canvas = el("canvas", { width: outer * scale, height: (head + box.height + row * names.length + 8) * scale });
  const context = canvas.getContext("2d"), style = getComputedStyle(figure);
  context.scale(scale, scale);
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = style.color;
  context.font = "600 15px system-ui, sans-serif";
  context.fillText(figure.querySelector("h3").textContent, 8, 19, outer - 16);
  context.translate(inset, head);
  for (const element of plot.querySelectorAll("*:not(.cursor, title)")) paint(context, element);
  names.forEach((item, i) => {
    context.setTransform(scale, 0, 0, scale, 8 * scale, (head + box.height + row * i) * scale);
    paint(context, item.querySelector(".swatch > *"));
    context.fillStyle = style.color;
    context.font = "13px system-ui, sans-serif";
    context.fillText(item.dataset.said ?? item.querySelector(".name").textContent, 32, 9, outer - 48);
  });
  return canvas;
}

function paint(context, element) {
  const style = getComputedStyle(element), number = (name) => Number(element.getAttribute(name));
  const path = new Path2D();
  context.save();
  if (element.tagName === "text") {
    context.fillStyle = style.fill;
    context.font = `${style.fontSize} system-ui, sans-serif`;
    context.textAlign = style.textAnchor === "middle" ? "center" : style.textAnchor;
    context.fillText(element.textContent, number("x"), number("y"));
  } else {
    if (element.tagName === "line") { path.moveTo(number("x1"), number("y1")); path.lineTo(number("x2"), number("y2")); }
    else if (element.tagName === "rect") path.rect(number("x"), number("y"), number("width"), number("height"));
    else if (element.tagName === "circle") path.arc(number("cx"), number("cy"), number("r"), 0, 2 * Math.PI);
    else element.getAttribute("points").trim().split(/\s+/).forEach((pair, i) => path[i ? "lineTo" : "moveTo"](...pair.split(",").map(Number)));
    if (element.tagName === "polygon") path.closePath();
    if (style.fill !== "none" && element.tagName !== "line") {
      context.globalAlpha = Number(style.fillOpacity) * Number(style.opacity);
      context.fillStyle = style.fill;
      context.fill(path);
    }
    if (style.stroke !== "none") {
      context.globalAlpha = Number(style.strokeOpacity) * Number(style.opacity);
      context.strokeStyle = style.stroke;
      context.lineWidth = parseFloat(style.strokeWidth);
      context.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(",").map(parseFloat));
      context.stroke(path);
    }
  }
  context.restore();
}
