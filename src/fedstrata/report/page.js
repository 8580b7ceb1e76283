// The page: its sections, from top to bottom, and what is chosen in them.

const chosen = { seed: 0, curve: 0, quantity: null, series: 0, layer: 0, direction: "up", cumulative: false };
const seeds = [...new Set(report.series.flatMap((series) => series.runs.map((run) => run.seed)))].sort((a, b) => a - b);
const several = report.series.length > 1;

// The run of a series with the chosen seed, or else its first one.
const runOf = (series) => series.runs.find((run) => run.seed === seeds[chosen.seed]) ?? series.runs[0];
const nameOf = (series) => (series.runs.length > 1 || seeds.length > 1 ? `${series.name}, seed ${runOf(series).seed}` : series.name);
const swatch = (at) => make("span", { class: `swatch series-${at % 8}`, "aria-hidden": "true" });

function section(id, title, ...content) {
  return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), ...content);
}

// A part of the page that is made anew when a choice changes it.
function renewed(content) {
  const box = make("div");
  const renew = () => {
    const focus = [...box.querySelectorAll("select")].indexOf(document.activeElement);
    box.replaceChildren(...[content()].flat().filter((child) => child !== null));
    box.querySelectorAll("select")[focus]?.focus();
  };
  renew();
  return { box, renew };
}

// --- outcome ---

function written(estimate, show) {
  if (!estimate) return "–";
  const shown = [...new Set(estimate.values.map((value) => show(value)))];
  if (shown.length === 1) return shown[0];
  if (!estimate.interval) return estimate.values.map((value) => show(value)).join(", ");
  return make("span", {}, show(estimate.median), " ", make("span", { class: "interval" }, `[${estimate.interval.map((end) => show(end)).join(", ")}]`));
}

function outcomes() {
  const common = (get) => { const all = [...new Set(report.series.map(get))]; return all.length === 1 ? all[0] : null; };
  const metricName = common((series) => series.outcome.metric), target = common((series) => series.outcome.target);
  const targeted = report.series.some((series) => series.outcome.target !== null);
  const goal = target === null ? "target" : digits(target);
  const seeded = report.series.some((series) => series.runs.length > 1);
  const head = ["algorithm", seeded ? "seeds" : "seed", "rounds", metricName ?? "metric", "best", "upload",
    ...(targeted ? [`rounds to ${goal}`, `upload to ${goal}`] : []), "time"];
  const body = report.series.map((series, at) => {
    const outcome = series.outcome, rounds = [...new Set(series.runs.map((run) => run.rounds))];
    const reached = outcome.target === null ? ["–", "–"] : [
      written(outcome.roundsToTarget, (value) => (value === null ? `>${outcome.within}` : digits(value))),
      written(outcome.uploadToTarget, bytes)];
    return [make("span", {}, swatch(at), series.name), series.runs.map((run) => run.seed).join(", "), rounds.join(", "),
      written(outcome.final, (value) => metric(value) + (metricName ? "" : ` ${outcome.metric}`)), written(outcome.best, metric),
      written(outcome.upload, bytes), ...(targeted ? reached : []), duration(outcome.seconds)];
  });
  return section("outcome", "Outcome", table("outcome", head, body),
    seeded ? make("p", { class: "quiet" }, `From ${report.enoughSeeds} seeds on, medians over seeds with 95 % bootstrap intervals; below that, every seed's value. Time: all seeds together.`) : null);
}

function notices() {
  const notes = [];
  for (const series of report.series) {
    for (const run of series.runs.filter((run) => !run.finished)) {
      notes.push(`Not finished: ${series.name}, seed ${run.seed}, has ${run.rounds} of ${run.planned} rounds. Go on with: fedstrata run --resume ${run.path}`);
    }
  }
  for (const problem of report.leftOut) notes.push(`Left out: ${problem}`);
  if (report.summary) notes.push("Too many numbers for one page: clients are summarised. Layers show the maximum, quartiles, minimum and mean over each round's clients.");
  if (report.every > 1) notes.push(`Of the numbers per layer, every ${report.every}th round is shown; bytes are sums over the rounds between.`);
  return notes.length ? make("div", { class: "notice", role: "note" }, notes.map((note) => make("p", {}, note))) : null;
}

// --- curves ---

function curves() {
  const labels = [...new Set(report.series.flatMap((series) => series.curves.map((curve) => curve.label)))];
  if (!labels.length) return section("curves", "Curves", make("p", {}, "No round is done yet."));
  const view = renewed(() => {
    const label = labels[chosen.curve];
    const lines = report.series.map((series, at) => ({ series, at, curve: series.curves.find((curve) => curve.label === label) })).filter((line) => line.curve);
    const legend = make("div", { class: "legend", "aria-live": "polite" });
    const say = (x, key) => {  // every curve's value at the place pointed to; the legend is where they are read
      let snapped = x;
      legend.replaceChildren(...lines.map(({ series, at, curve }) => {
        const near = nearest(curve[key], x), value = curve.median[near];
        if (at === lines[0].at && near >= 0) snapped = curve[key][near];
        const interval = curve.low ? ` [${metric(curve.low[near])}, ${metric(curve.high[near])}]` : "";
        const where = `round ${curve.rounds[near]}, ${bytes(curve.upload[near])}: ${metric(value)}${interval}`;
        return make("span", { class: "entry" }, swatch(at), make("b", {}, series.name), " ", near < 0 ? "no value" : where);
      }));
      return snapped;
    };
    say(Infinity, "rounds");
    const all = lines.flatMap(({ curve }) => [...curve.median, ...(curve.low ?? []), ...(curve.high ?? []), ...curve.seeds.flatMap((seed) => seed.values)]);
    const target = label === labels[0] ? report.series[0].outcome.target : null;
    const [low, high] = range([...all, target]);
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    const y = { low: low - room, high: high + room, label, show: (v) => digits(v) };
    const draw = (title, key, x) => chart({
      title, x, y, onMove: (place) => say(place, key),
      plot: (frame) => [
        target === null ? null : svg("line", { class: "target-line", x1: frame.left, x2: frame.right, y1: frame.up(target), y2: frame.up(target) }),
        target === null ? null : svg("text", { class: "tick", x: frame.left + 6, y: frame.up(target) - 6 }, `target ${digits(target)}`),
        ...lines.flatMap(({ at, curve }) => [
          curve.low ? svg("path", { class: `band series-${at % 8}`, d: bandPath(curve[key].map((x, t) => [x, curve.low[t], curve.high[t]]), frame) }) : null,
          ...curve.seeds.map((seed) => svg("path", { class: `thin series-${at % 8}`, d: linePath(seed[key].map((x, t) => [x, seed.values[t]]), frame) })),
          svg("path", { class: `curve series-${at % 8}`, d: linePath(curve[key].map((x, t) => [x, curve.median[t]]), frame) }),
          curve[key].length === 1 && curve.median[0] !== null ? svg("circle", { class: `dot series-${at % 8}`, cx: frame.across(curve[key][0]), cy: frame.up(curve.median[0]), r: 4 }) : null,
        ]),
      ].filter((mark) => mark !== null),
    });
    const extent = (key) => range(lines.flatMap(({ curve }) => [...curve[key], ...curve.seeds.flatMap((seed) => seed[key])]));
    const [firstRound, lastRound] = extent("rounds"), [, most] = extent("upload");
    const banded = lines.some(({ curve }) => curve.low), thin = lines.some(({ curve }) => curve.seeds.length);
    return [
      legend,
      make("div", { class: "pair" },
        draw("Over rounds", "rounds", { low: firstRound, high: lastRound, label: "round", whole: true, step: 1, show: String }),
        draw("Against upload", "upload", { low: 0, high: most, label: "uploaded so far, all clients", show: bytes })),
      banded || thin ? make("p", { class: "quiet" }, [banded ? "Lines are medians over seeds, bands their 95 % bootstrap intervals." : "", thin ? "Thick lines are medians over seeds, thin ones single seeds." : ""].join(" ")) : null,
    ];
  });
  return section("curves", "Curves", choice("curve", labels, chosen.curve, (at) => { chosen.curve = at; view.renew(); }), view.box);
}

// --- layers ---

function layers() {
  const names = Object.keys(QUANTITIES).filter((name) => report.series.some((series) => series.runs.some((run) => hasQuantity(run, name))));
  if (!names.length) return section("layers", "Layers", make("p", {}, "Nothing is known per layer: record.layers was off, or no round is done yet."));
  chosen.quantity ??= names[0];
  const upper = renewed(overviews), lower = renewed(detail);
  const choose = (quantity) => { chosen.quantity = quantity; upper.renew(); lower.renew(); };
  const pick = (at, layer) => { chosen.series = at; chosen.layer = layer; lower.renew(); };

  function overviews() {
    const quantity = QUANTITIES[chosen.quantity];
    const shown = report.series.map((series, at) => ({ series, at, run: runOf(series) })).filter(({ run }) => hasQuantity(run, chosen.quantity));
    const grids = shown.map(({ series, run }) => overview(series, run, chosen.quantity)), scale = colourScale(grids, quantity.linear);
    const over = quantity.over === "max" ? "largest of all clients" : `${quantity.over} over clients`;
    return make("div", {},
      make("p", {}, make("b", {}, quantity.title), `: ${quantity.about}`),
      make("h3", {}, `All layers over rounds, ${over}`),
      make("p", { class: "quiet" }, "Point at a cell, or use the arrow keys, to read its value; click a layer to see its clients below."), scaleLegend(scale, quantity.show),
      make("div", { class: "multiples" }, shown.map(({ series, at, run }, k) => heatmap({
        title: make("span", {}, several ? swatch(at) : null, nameOf(series)), label: `${quantity.title}, ${nameOf(series)}: layers over rounds`,
        grid: grids[k], scale, columnTitle: "round", onPick: (row) => pick(at, row), said: extremes(grids[k]),
        describe: (row, column) => [make("b", {}, shownValue(grids[k].values[row][column])), ` ${grids[k].rows[row]}, round ${run.shown[column]}, ${over}`],
      }))),
      shown.length ? null : make("p", {}, "No run with this seed has it."));
  }

  function extremes(grid) {  // which layers stand out, said until a cell is pointed at
    const means = grid.values.map((row, l) => ({ name: grid.rows[l], value: statistic("mean", row) }))
      .filter(({ value }) => !Number.isNaN(value)).sort((a, b) => b.value - a.value);
    const high = means[0], low = means[means.length - 1], show = QUANTITIES[chosen.quantity].show;
    if (!high || show(high.value) === show(low.value)) return [];
    return [make("span", { class: "finding" }, "largest in ", make("b", {}, high.name), ` (${show(high.value)}), smallest in `, make("b", {}, low.name), ` (${show(low.value)}), mean over rounds`)];
  }

  function detail() {
    const series = report.series[chosen.series], run = runOf(series), quantity = QUANTITIES[chosen.quantity];
    chosen.layer = Math.min(chosen.layer, series.layers.length - 1);
    const choices = make("div", { class: "choices" },
      several ? choice("run", report.series.map(nameOf), chosen.series, (at) => { chosen.series = at; lower.renew(); }) : null,
      choice("layer", series.layers.map((layer) => layer.name), chosen.layer, (at) => { chosen.layer = at; lower.renew(); }));
    const heading = make("h3", {}, report.summary ? "One layer: summary over clients, over rounds" : "One layer: clients over rounds");
    if (!hasQuantity(run, chosen.quantity)) return [heading, choices, make("p", {}, `${nameOf(series)} has no ${quantity.title}.`)];
    const layer = series.layers[chosen.layer], grid = oneLayer(series, run, chosen.quantity, chosen.layer), scale = colourScale([grid], quantity.linear);
    return [heading, choices, scaleLegend(scale, quantity.show), heatmap({
      title: `${quantity.title} in ${layer.name}, ${nameOf(series)}`, label: `${quantity.title} in ${layer.name}: clients over rounds`, grid, scale, columnTitle: "round",
      describe: (row, column) => [make("b", {}, shownValue(grid.values[row][column])), ` ${grid.rows[row]}, round ${run.shown[column]}, ${layer.name}`],
    }), layerTable(series, run)];
  }

  function shownValue(value) {
    const quantity = QUANTITIES[chosen.quantity];
    if (Number.isNaN(value)) return "no value";
    return quantity.exact ? `${quantity.show(value)} (${quantity.exact(value)})` : quantity.show(value);
  }

  return section("layers", "Layers",
    make("div", { class: "choices" }, choice("quantity", names.map((name) => QUANTITIES[name].title), names.indexOf(chosen.quantity), (at) => choose(names[at]))), upper.box, lower.box);
}

// The last round in numbers: medians over clients, and the range of weights.
function layerTable(series, run) {
  const shown = Object.keys(QUANTITIES).filter((name) => hasQuantity(run, name) && name !== "smoothed_angle"), last = run.shown.length - 1;
  const column = (name, l) => {
    const cells = tableOf(series, run, name);
    if (report.summary) return (over) => cells.value(last, report.summary.indexOf(over), l);
    const values = Array.from({ length: cells.sizes[last] }, (_, k) => cells.value(last, k, l));
    return (over) => statistic(over, values);
  };
  const up = unpack(run.bytes.up, run.shown.length * series.layers.length);
  const body = series.layers.map((layer, l) => [layer.name, layer.numbers.toLocaleString("en"), ...shown.map((name) => {
    const get = column(name, l), show = (over) => (Number.isNaN(get(over)) ? "no value" : QUANTITIES[name].show(get(over)));
    return name === "weight" && !Number.isNaN(get("min")) ? `${digits(get("min"), 3)}–${digits(get("max"), 3)}` : show(name === "mask" ? "mean" : "median");
  }), bytes(run.shown.reduce((sum, _, t) => sum + (up[t * series.layers.length + l] || 0), 0))]);
  return make("details", {}, make("summary", {}, `Layers of ${nameOf(series)} in round ${run.shown[last]}, in numbers`),
    table("layers in numbers", ["layer", "numbers", ...shown.map((name) => QUANTITIES[name].title), "uploaded"], body),
    make("p", { class: "quiet" }, "Medians over clients; of weights the range, of “sent” the mean. Uploaded: in all rounds."));
}

// --- bytes ---

function traffic() {
  const view = renewed(() => {
    const shown = report.series.map((series, at) => ({ series, at, run: runOf(series) })).filter(({ run }) => run.rounds);
    const stacks = shown.map(({ series, run }) => ledger(series, run, chosen.direction).map((row) => ({ ...row, values: chosen.cumulative ? running(row.values) : perRound(row.values, run) })));
    const [, high] = range(stacks.flatMap((stack) => (stack[0]?.values ?? []).map((_, t) => stack.reduce((sum, row) => sum + row.values[t], 0))));
    return make("div", { class: "multiples" }, shown.map(({ series, at, run }, k) => stackChart(series, at, run, stacks[k], high)));
  });
  const directions = ["up", "down"];
  return section("bytes", "Bytes", make("p", {}, "What travelled between server and clients, layer by layer, summed over clients. Point at a round to read it."),
    make("div", { class: "choices" },
      choice("direction", ["upload", "download"], directions.indexOf(chosen.direction), (at) => { chosen.direction = directions[at]; view.renew(); }),
      choice("count", ["in each round", "so far"], Number(chosen.cumulative), (at) => { chosen.cumulative = at === 1; view.renew(); })), view.box);
}

const running = (values) => values.map(((sum) => (value) => (sum += value))(0));
const perRound = (values, run) => values.map((value, t) => value / (run.shown[t] - (run.shown[t - 1] ?? 0)));

function stackChart(series, at, run, stack, high) {
  const named = stack.filter((row) => !row.ink), all = stack.reduce((sum, row) => sum + row.total, 0);
  const ink = (row) => (row.ink ?? css(colour((named.indexOf(row) + 0.5) / named.length)));
  const readout = make("output", { class: "readout", "aria-live": "polite" });
  const starts = run.shown.map((_, t) => run.shown[t - 1] ?? 0), last = run.shown[run.shown.length - 1];
  const picture = chart({
    title: `${nameOf(series)}: ${bytes(all)} in all`, height: 220,
    x: { low: 0, high: last, label: "round", whole: true, step: 1, show: String },
    y: { low: 0, high, label: chosen.cumulative ? "bytes so far" : "bytes per round", show: bytes },
    onMove: (x) => {
      const t = Math.max(0, run.shown.findIndex((round) => round >= x));
      const parts = stack.map((row) => `${row.name} ${bytes(row.values[t])}`).join(", ");
      readout.replaceChildren(make("b", {}, `round ${run.shown[t]}: ${bytes(stack.reduce((sum, row) => sum + row.values[t], 0))}`), ` ${parts}`);
      return (starts[t] + run.shown[t]) / 2;
    },
    plot: (frame) => {
      const floor = run.shown.map(() => 0);
      return stack.map((row) => {
        const top = row.values.map((value, t) => floor[t] + value);
        const steps = (heights) => heights.flatMap((height, t) => [[starts[t], height], [run.shown[t], height]]);
        const edge = (points) => points.map(([x, y]) => `${frame.across(x).toFixed(1)},${frame.up(y).toFixed(1)}`);
        const area = svg("path", { class: "area", d: `M${edge(steps(top)).join("L")}L${edge(steps(floor)).reverse().join("L")}Z`, "--ink": ink(row) });
        top.forEach((value, t) => (floor[t] = value));
        return area;
      });
    },
  });
  picture.append(make("ul", { class: "key" }, stack.map((row) => make("li", {}, make("span", { class: "swatch", "--ink": ink(row), "aria-hidden": "true" }), `${row.name} ${bytes(row.total)} (${digits((100 * row.total) / all, 3)} %)`))), readout);
  if (several) picture.querySelector("figcaption").prepend(swatch(at));
  return picture;
}

// --- data ---

function data() {
  const numbers = [...new Set(report.series.map((series) => runOf(series).partition))].filter((number) => number !== null);
  const sources = [...new Set(report.series.map((series) => runOf(series).data).filter((source) => source !== null))];
  const parts = numbers.map((number) => {
    const partition = report.partitions[number], [, most] = range([...partition.counts.flat(), 1]);
    const owners = report.series.filter((series) => runOf(series).partition === number).map(nameOf).join("; ");
    const spread = ([low, median, high], word) => (low === high ? `${digits(low)} ${word}` : `${digits(low)} to ${digits(high)} ${word} (median ${digits(median)})`);
    const left = partition.clients - partition.counts.length;
    return [
      make("p", {}, `${many(partition.clients, "client")}; each has ${spread(partition.samples, "samples")} of ${spread(partition.classesHeld, "classes")}.`,
        left ? ` The first ${partition.counts.length} are shown.` : "", numbers.length > 1 ? ` (${owners})` : ""),
      make("div", { class: "partition" }, table("samples by client and class", ["client", ...partition.classes, "all"], partition.counts.map((counts, client) => [
        String(client),
        ...counts.map((count) => make("td", { class: "count", "--share": `${(100 * count) / most}%` }, count ? String(count) : "·")),
        String(counts.reduce((a, b) => a + b, 0))]), true)),
    ];
  });
  return [sources.length ? make("p", { class: "quiet" }, `Data: ${sources.join("; ")}`) : null,
    ...(parts.length ? parts.flat() : [make("p", {}, "The run says nothing of its clients' classes.")])];
}

// --- lost replies ---

function replies() {
  const answered = ({ trouble }) => !trouble.lost && !trouble.clients.length && !trouble.again;
  if (report.series.every((series) => answered(runOf(series)))) return [make("p", {}, "Every client that was asked replied, in every round.")];
  return report.series.flatMap((series) => {
    const { asked, lost, again, troubled, clients } = runOf(series).trouble;
    const text = `${several ? `${nameOf(series)}: ` : ""}${lost} of ${many(asked, "request")} to clients brought no usable reply` +
      `${again ? `; ${many(again, "attempt")} at a round had to be repeated` : ""}.`;
    const kinds = [...new Set(clients.flatMap((client) => Object.keys(client.lost)))];
    const body = clients.map((client) => [`client ${client.client}`, client.sampled === null ? "–" : String(client.sampled),
      ...kinds.map((kind) => String(client.lost[kind] ?? "·")), client.partial ? String(client.partial) : "·", make("td", { class: "words" }, client.last ?? "–")]);
    return [make("p", {}, text, troubled > clients.length ? ` The ${clients.length} clients with most losses, of ${troubled}, are listed.` : ""),
      clients.length ? table("lost replies", ["", "rounds asked", ...kinds, "did part of the work", "last lost reply"], body) : null];
  }).filter((part) => part !== null);
}

// --- settings ---

function settings() {
  const keys = [...new Set(report.series.flatMap((series) => Object.keys(series.settings)))];
  const differs = (key) => new Set(report.series.map((series) => series.settings[key])).size > 1;
  const rows = (wanted) => keys.filter((key) => differs(key) === wanted);
  const row = (key) => [key, ...report.series.map((series) => make("td", { class: "words" }, series.settings[key] ?? "–"))];
  return section("settings", "Settings",
    rows(true).length ? table("settings that differ", ["setting", ...report.series.map((series) => series.name)], rows(true).map(row)) : null,
    make("details", {}, make("summary", {}, several ? "Settings that all runs share" : "All settings"), table("settings", ["setting", "value"], rows(false).map((key) => [key, make("td", { class: "words" }, report.series[0].settings[key])]))),
    make("details", {}, make("summary", {}, "Where the runs are"), table("directories", ["run", "seed", "begun", "directory"],
      report.series.flatMap((series) => series.runs.map((run) => [series.name, String(run.seed), run.created, make("td", { class: "words" }, run.path)])))));
}

// --- all of it ---

function page() {
  const title = several ? report.title : `${report.title}: ${report.series[0].name}`;
  const clients = [...new Set(report.series.map((series) => series.clients))].join(" or ");
  const subtitle = [several ? many(report.series.length, "experiment") : null, many(seeds.length, "seed"), `${clients} clients`, `fedstrata ${report.version}`].filter((part) => part !== null);
  const parts = [["outcome", "Outcome"], ["curves", "Curves"], ["layers", "Layers"], ["bytes", "Bytes"], ["data", "Data"], ["replies", "Replies"], ["settings", "Settings"]];
  const perSeed = renewed(() => [layers(), traffic(), section("data", "Data", ...data()), section("replies", "Replies", ...replies())]);
  const seedChoice = seeds.length > 1 && report.series.some((series) => series.runs.length > 1)
    ? make("div", { class: "seed" }, choice("seed shown below", seeds.map(String), chosen.seed, (at) => { chosen.seed = at; perSeed.renew(); })) : null;
  perSeed.box.className = "sections";
  document.getElementById("page").append(
    make("header", {}, make("h1", {}, title), make("p", { class: "quiet" }, subtitle.join(" · ")),
      make("nav", { "aria-label": "sections" }, parts.map(([id, text]) => make("a", { href: `#${id}` }, text)))),
    ...[notices(), outcomes(), curves(), seedChoice, perSeed.box, settings()].filter((part) => part !== null));
}

page();
