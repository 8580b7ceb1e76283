// Drawing: elements, line charts, stacked areas, heat maps. Text goes in as text, never as HTML.

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) element.style.setProperty(key, value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

function choice(label, options, chosen, onChange) {
  const select = make("select", { onchange: () => onChange(select.selectedIndex) },
    options.map((text, at) => make("option", { selected: at === chosen }, text)));
  return make("label", { class: "choice" }, make("span", {}, label), select);
}

// --- axes ---

function ticks(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const marks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) marks.push(Number((at * step).toPrecision(12)));
  return marks;
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : [0, 1];
}

function nearest(values, x) {
  let best = values.length - 1;
  values.forEach((value, at) => { if (Math.abs(value - x) < Math.abs(values[best] - x)) best = at; });
  return best;
}

// An empty chart with axes: `plot(frame)` draws into it, again whenever the width changes.
function chart({ title, x, y, height = 300, plot, onMove }) {
  const box = make("div", { class: "chart" });
  const draw = (width) => {
    const edge = { left: 58, right: 14, top: 30, bottom: 44 };
    const across = (value) => edge.left + ((value - x.low) / (x.high - x.low || 1)) * (width - edge.left - edge.right);
    const up = (value) => height - edge.bottom - ((value - y.low) / (y.high - y.low || 1)) * (height - edge.top - edge.bottom);
    const marksX = ticks(x.low, x.high, Math.max(2, Math.floor(width / 110))).filter((mark) => !x.whole || Number.isInteger(mark));
    const cursor = svg("line", { class: "cursor-line", y1: edge.top, y2: height - edge.bottom, visibility: "hidden" });
    const picture = svg("svg", { width, height, role: "img", tabindex: 0, "aria-label": title },
      ticks(y.low, y.high, 5).map((mark) => [
        svg("line", { class: "grid-line", x1: edge.left, x2: width - edge.right, y1: up(mark), y2: up(mark) }),
        svg("text", { class: "tick", x: edge.left - 8, y: up(mark) + 4, "text-anchor": "end" }, y.show(mark)),
      ]).flat(),
      marksX.map((mark) => svg("text", { class: "tick", x: across(mark), y: height - edge.bottom + 18, "text-anchor": "middle" }, x.show(mark))),
      svg("line", { class: "axis-line", x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom }),
      svg("text", { class: "axis", x: 4, y: 16 }, y.label),
      svg("text", { class: "axis", x: width - edge.right, y: height - 6, "text-anchor": "end" }, x.label),
      plot({ across, up, left: edge.left, right: width - edge.right }), cursor);
    let at = x.high;
    const move = (value) => {
      at = Math.min(x.high, Math.max(x.low, value));
      const snapped = onMove(at);
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", across(snapped));
      cursor.setAttribute("x2", across(snapped));
    };
    const point = (event) => {
      const place = event.clientX - picture.getBoundingClientRect().left;
      move(x.low + ((place - edge.left) / (width - edge.left - edge.right)) * (x.high - x.low));
    };
    picture.addEventListener("pointermove", point);
    picture.addEventListener("pointerdown", point);
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); move(at + step * (x.step ?? (x.high - x.low) / 50)); }
    });
    box.replaceChildren(picture);
  };
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(box.clientWidth);
    if (now && now !== width) draw((width = now));
  }).observe(box);
  return make("figure", {}, make("figcaption", {}, title), box);
}

function linePath(points, frame) {
  let path = "", pen = "M";
  for (const [x, y] of points) {
    if (y === null) { pen = "M"; continue; }  // a gap
    path += `${pen}${frame.across(x).toFixed(1)},${frame.up(y).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function bandPath(points, frame) {
  const known = points.filter(([, low, high]) => low !== null && high !== null);
  const edge = (at) => known.map((point) => `${frame.across(point[0]).toFixed(1)},${frame.up(point[at]).toFixed(1)}`);
  return known.length ? `M${edge(1).join("L")}L${edge(2).reverse().join("L")}Z` : "";
}

// --- colours of a heat map: dark is low, bright is high, also for colour-blind eyes and in grey ---

const COLOURS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37]];

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (COLOURS.length - 1), low = Math.min(Math.floor(at), COLOURS.length - 2);
  return COLOURS[low].map((part, k) => Math.round(part + (at - low) * (COLOURS[low + 1][k] - part)));
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;

// From a value to its share of the scale; logarithmic where values span more than two powers of ten, but for angles.
function colourScale(grids, linear = false) {
  const known = grids.flatMap((grid) => grid.values.flat()).filter((value) => !Number.isNaN(value));
  const [low, high] = range(known);
  const logarithmic = !linear && low > 0 && high / low > 100, place = logarithmic ? Math.log : (value) => value;
  const span = place(high) - place(low);
  return { low, high, logarithmic, empty: known.length === 0, share: (value) => (span > 0 ? (place(value) - place(low)) / span : 0.5) };
}

function scaleLegend(scale, show) {
  if (scale.empty) return null;
  const stops = COLOURS.map(css).join(",");
  return make("div", { class: "scale" }, make("span", {}, show(scale.low)),
    make("span", { class: "bar", "--bar": `linear-gradient(90deg,${stops})` }), make("span", {}, show(scale.high)),
    scale.logarithmic ? make("span", { class: "quiet" }, "logarithmic") : null,
    make("span", { class: "none" }), make("span", { class: "quiet" }, "no value"));
}

// Rows × columns of coloured cells. Pointing, clicking and the arrow keys choose one; `describe(row, column)` says what
// it holds, and `onPick` hears of clicks and Enter.
function heatmap({ title, label, grid, scale, describe, onPick, said = [], columnTitle }) {
  const { rows, columns, values } = grid;
  const canvas = make("canvas", { width: columns.length, height: rows.length, tabindex: 0, role: "img", "aria-label": `${label}; arrow keys move from cell to cell` });
  const image = new ImageData(columns.length, rows.length);
  values.forEach((row, r) => row.forEach((value, c) => {
    if (!Number.isNaN(value)) image.data.set([...colour(scale.share(value)), 255], 4 * (r * columns.length + c));
  }));
  canvas.getContext("2d").putImageData(image, 0, 0);
  const cursor = make("div", { class: "cursor", hidden: true });
  const readout = make("output", { class: "readout", "aria-live": "polite" }, ...said);
  let at = [0, 0], held = false;
  const go = (row, column) => {
    at = [Math.min(Math.max(row, 0), rows.length - 1), Math.min(Math.max(column, 0), columns.length - 1)];
    cursor.hidden = false;
    for (const [side, share] of [["left", at[1] / columns.length], ["top", at[0] / rows.length], ["width", 1 / columns.length], ["height", 1 / rows.length]]) {
      cursor.style[side] = `${100 * share}%`;
    }
    readout.replaceChildren(...describe(...at));
  };
  const cell = (event) => {
    const box = canvas.getBoundingClientRect();
    return [Math.floor(((event.clientY - box.top) / box.height) * rows.length), Math.floor(((event.clientX - box.left) / box.width) * columns.length)];
  };
  canvas.addEventListener("pointermove", (event) => { if (!held) go(...cell(event)); });
  canvas.addEventListener("click", (event) => { go(...cell(event)); held = true; onPick?.(...at); });
  canvas.addEventListener("pointerleave", () => { if (!held) cursor.hidden = true; });
  canvas.addEventListener("pointerenter", () => { held = false; });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (step) { event.preventDefault(); go(at[0] + step[0], at[1] + step[1]); }
    if (event.key === "Enter") onPick?.(...at);
  });
  const height = rows.length <= 12 ? 24 : rows.length <= 40 ? 16 : rows.length <= 100 ? 8 : 4;
  const every = Math.ceil(14 / height);
  const names = rows.map((row, r) => (r % every ? null : make("span", { class: "row", title: row, "--at": `${(100 * (r + 0.5)) / rows.length}%` }, row)));
  const marks = new Set(ticks(columns[0], columns[columns.length - 1], 6).map((mark) => nearest(columns, mark)));
  const numbers = [...marks].map((c) => make("span", { class: "column", "--at": `${(100 * (c + 0.5)) / columns.length}%` }, String(columns[c])));
  return make("figure", { class: "heat" }, title ? make("figcaption", {}, title) : null,
    make("div", { class: "heat-grid", "--height": `${height * rows.length}px` },
      make("div", { class: "rows" }, rows.map((row) => make("span", { class: "width", "aria-hidden": "true" }, row)), names),
      make("div", { class: "cells" }, canvas, cursor), make("div", { class: "columns" }, numbers),
      make("div", { class: "column-title" }, columnTitle)), readout);
}

// A table that becomes a list of cards where the window is narrow, unless it is `narrow` itself.
function table(label, head, body, narrow = false) {
  const cell = (content, at) => {
    const element = content instanceof Element && content.tagName === "TD" ? content : make(at ? "td" : "th", at ? {} : { scope: "row" }, content);
    if (at) element.dataset.label = head[at];
    return element;
  };
  return make("div", { class: narrow ? "scroll" : "scroll cards", tabindex: 0, role: "region", "aria-label": label },
    make("table", {}, make("thead", {}, make("tr", {}, head.map((text, at) => make("th", { scope: "col", class: body[0]?.[at]?.className ?? null }, text)))),
      make("tbody", {}, body.map((row) => make("tr", {}, row.map(cell))))));
}
