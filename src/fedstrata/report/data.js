"use strict";
// The report's numbers: unpacking, arranging and writing them.

const report = JSON.parse(document.getElementById("data").textContent);

// What the quantities per client and layer are. `over` is what stands for all clients in the overview.
const QUANTITIES = {
  angle: {
    title: "angle", over: "median", show: degrees, exact: (v) => `${digits(v, 5)} rad`, linear: true,
    about: "between a client's update of a layer and the mean update of all who sent it. Near 0° clients agree; " +
      "at 90° their updates have nothing in common.",
  },
  smoothed_angle: {
    title: "smoothed angle", over: "median", show: degrees, exact: (v) => `${digits(v, 5)} rad`, linear: true,
    about: "the running mean of the angle, from which weights are made.",
  },
  relative: {
    title: "relative divergence", over: "median", show: (v) => `${digits(v * 100)} %`,
    about: "the length of a client's update in percent of the layer's length after training: how far it moved for " +
      "its size.",
  },
  divergence: { title: "divergence", over: "median", show: (v) => digits(v, 5), about: "the length of a client's update." },
  norm: { title: "norm", over: "median", show: (v) => digits(v, 5), about: "the length of a client's layer after training." },
  weight: {
    title: "weight", over: "max", show: (v) => digits(v, 5),
    about: "a client's share in the average of a layer. All shares of a layer sum to 1.",
  },
  mu: {
    title: "μ", over: "median", show: (v) => digits(v, 5),
    about: "how strongly a client's layer was held near the global one when its training ended.",
  },
  mask: {
    title: "sent", over: "mean", show: (v) => `${digits(v * 100)} %`,
    about: "how much of a layer a client sent: all of it, nothing, or a share of its units.",
  },
};

// --- writing numbers ---

function digits(value, count = 4) {
  return value === null || Number.isNaN(value) ? "no value" : String(Number(value.toPrecision(count)));
}

function degrees(value) {
  return `${digits((value * 180) / Math.PI, 5)}°`;
}

// A metric or a loss, as the command line writes it.
function metric(value) {
  return value === null || Math.abs(value) >= 1000 ? digits(value) : value.toFixed(4);
}

function bytes(value) {
  if (value === null) return "not reached";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 1000 && at < units.length - 1; at++) value /= 1000;
  return `${digits(value, 3)} ${units[at]}`;
}

function duration(seconds) {
  if (seconds < 60) return `${digits(seconds, 2)} s`;
  return seconds < 3600 ? `${digits(seconds / 60, 3)} min` : `${digits(seconds / 3600, 3)} h`;
}

const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// --- unpacking (report/packing.py says how numbers are packed) ---

function unpack(block, count) {
  if (typeof block !== "string") return new Float64Array(count).fill(block ?? NaN);
  const codes = Uint8Array.from(atob(block), (letter) => letter.charCodeAt(0));
  const values = new Float64Array(count).fill(NaN);
  for (let at = 0; at < count; at++) {
    const code = codes[3 * at] | (codes[3 * at + 1] << 8) | (codes[3 * at + 2] << 16);
    if (code === 0) continue;
    const rest = (code - 1) >> 1, mantissa = rest % 100000, power = Math.floor(rest / 100000) - 44;
    const size = power < 0 ? mantissa / 10 ** -power : mantissa * 10 ** power;
    values[at] = (code - 1) & 1 ? -size : size;
  }
  return values;
}

// --- arranging ---

// Per client and layer: value(t, k, l) of the t-th shown round, its k-th client (or summary) and the l-th layer.
const tables = new Map();
function tableOf(series, run, name) {
  const key = `${report.series.indexOf(series)} ${run.seed} ${name}`;
  if (!tables.has(key)) {
    const layers = series.layers.length;
    const sizes = run.shown.map((_, t) => (report.summary ?? run.record.clients[t]).length);
    const starts = sizes.map(((sum) => (size) => (sum += size) - size)(0));
    const values = unpack(run.record[name], sizes.reduce((a, b) => a + b, 0) * layers);
    tables.set(key, { sizes, value: (t, k, l) => values[(starts[t] + k) * layers + l] });
  }
  return tables.get(key);
}

const hasQuantity = (run, name) => run.record !== null && run.record[name] !== undefined;

// Rounds × layers, with the quantity's median, mean or maximum over clients.
function overview(series, run, name) {
  const table = tableOf(series, run, name), over = QUANTITIES[name].over;
  const values = series.layers.map((_, l) => run.shown.map((_, t) => {
    if (report.summary) return table.value(t, report.summary.indexOf(over), l);
    return statistic(over, Array.from({ length: table.sizes[t] }, (_, k) => table.value(t, k, l)));
  }));
  return { rows: series.layers.map((layer) => layer.name), columns: run.shown, values };
}

// Rounds × clients of one layer; clients that were not sampled in a round have no value there.
function oneLayer(series, run, name, layer) {
  const table = tableOf(series, run, name);
  const cohorts = run.shown.map((_, t) => report.summary ?? run.record.clients[t]);
  const rows = report.summary ?? [...new Set(cohorts.flat())].sort((a, b) => a - b);
  const place = new Map(rows.map((row, at) => [row, at]));
  const values = rows.map(() => run.shown.map(() => NaN));
  cohorts.forEach((cohort, t) => cohort.forEach((row, k) => (values[place.get(row)][t] = table.value(t, k, layer))));
  return { rows: rows.map((row) => (report.summary ? row : `client ${row}`)), columns: run.shown, values };
}

function statistic(name, values) {
  const known = values.filter((value) => !Number.isNaN(value)).sort((a, b) => a - b);
  if (known.length === 0) return NaN;
  if (name === "max") return known[known.length - 1];
  if (name === "min") return known[0];
  if (name === "mean") return known.reduce((a, b) => a + b) / known.length;
  return (known[(known.length - 1) >> 1] + known[known.length >> 1]) / 2;
}

// What travelled of each layer, and what else did: named rows of bytes, a number per shown round.
const LARGEST = 7;
function ledger(series, run, direction) {
  const count = run.shown.length, layers = series.layers.length;
  const table = unpack(run.bytes[direction], count * layers);
  const rows = series.layers.map((layer, l) => ({
    name: layer.name, values: run.shown.map((_, t) => table[t * layers + l] || 0),
  }));
  const total = (row) => row.values.reduce((a, b) => a + b, 0);
  const shown = new Set([...rows].sort((a, b) => total(b) - total(a)).slice(0, LARGEST + (rows.length === LARGEST + 1)));
  const rest = rows.filter((row) => !shown.has(row));
  const stack = rows.filter((row) => shown.has(row));
  if (rest.length) {
    stack.push({ name: `${rest.length} other layers`, ink: "var(--other)", values: run.shown.map((_, t) => rest.reduce((sum, row) => sum + row.values[t], 0)) });
  }
  const extra = direction === "up" ? "feedback" : "control";
  stack.push({ name: extra, ink: "var(--extra)", values: Array.from(unpack(run.bytes[extra], count), (value) => value || 0) });
  return stack.map((row) => ({ ...row, total: total(row) })).filter((row) => row.total > 0);
}
