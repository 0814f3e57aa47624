"use strict";
// Elements and numbers. Text becomes a text node, always: nothing here parses markup.

function el(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function table(caption, head, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) =>
        i === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell)))))));
}

// Text whose words in backticks are names.
function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

// A number as people read it; a share in per cent.
function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${plain(100 * value)} %`;
  return plain(value);
}

function plain(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function seconds(value) {
  if (value < 60) return `${plain(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}
