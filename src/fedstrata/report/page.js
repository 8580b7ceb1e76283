"use strict";
// The view of runs: sections, the choices in them, and the parts that they show (report/view.py). Charts are drawn by
// Vega from the definitions in fedstrata.plots; names go in as text, never as HTML.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const chosen = {}, hidden = new Set(), blocks = [], night = matchMedia("(prefers-color-scheme: dark)");

  // --- elements ---

  function make(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (key.startsWith("--")) element.style.setProperty(key, value);
      else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null));
    return element;
  }

  const button = (text, label, onclick) => make("button", { type: "button", "aria-label": label, onclick }, text);

  function save(name, content, type) {
    const address = typeof content === "string" && type === "" ? content : URL.createObjectURL(new Blob([content], { type }));
    make("a", { href: address, download: name.replace(/[^\p{L}\p{N}]+/gu, "-") + (/\.\w+$/.exec(name)?.[0] ?? "") }).click();
  }

  function csv(rows) {
    const cell = (value) => (/[",\n]/.test(value ?? "") ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
    return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
  }

  // --- parts ---

  const known = new Map();
  function part(name) {
    if (!page.live) return Promise.resolve(page.parts[name]);
    if (!known.has(name)) known.set(name, fetch(`${page.live.view}&part=${encodeURIComponent(name)}`).then((answer) => (answer.ok ? answer.json() : undefined)));
    return known.get(name);
  }

  // Three bytes a number: the inverse of report/packing.py.
  function unpack(block, count) {
    if (typeof block !== "string") return new Array(count).fill(block);
    const codes = Uint8Array.from(atob(block), (letter) => letter.charCodeAt(0)), values = new Array(count).fill(null);
    for (let at = 0; at < count; at++) {
      const code = codes[3 * at] | (codes[3 * at + 1] << 8) | (codes[3 * at + 2] << 16);
      if (code === 0) continue;
      const rest = (code - 1) >> 1, mantissa = rest % 100000, power = Math.floor(rest / 100000) - 44;
      const size = power < 0 ? mantissa / 10 ** -power : mantissa * 10 ** power;
      values[at] = (code - 1) & 1 ? -size : size;
    }
    return values;
  }

  function columnsOf(table) {
    return Object.entries(table.columns).map(([name, column]) => {
      if (column === null || typeof column !== "object") return [name, unpack(column, table.count)];
      const { of, at, each } = column;
      return [name, Array.from({ length: table.count }, (_, row) => of[at ? at[row] : Math.floor(row / each) % of.length])];
    });
  }

  // Rows of a table; of a block of clients and layers those of one layer, or of one round.
  function rowsOf(table, fix) {
    const columns = columnsOf(table), width = table.layers?.length;
    const row = (at, more) => Object.assign(Object.fromEntries(columns.map(([name, values]) => [name, values[at]])), more);
    if (!width) return Array.from({ length: table.count }, (_, at) => row(at));
    const values = (table.unpacked ??= unpack(table.values, table.count * width));
    if (fix === "layer") {
      const layer = Math.min(Number(chosen.layer), width - 1);
      return Array.from({ length: table.count }, (_, at) => row(at, { value: values[at * width + layer] }));
    }
    const found = [];
    for (let at = 0; at < table.count; at++) {
      const one = row(at);
      if (String(one.round) === chosen[fix]) table.layers.forEach((layer, l) => found.push({ ...one, layer, value: values[at * width + l] }));
    }
    return found;
  }

  // --- what is chosen ---

  const options = (name) => page.sections.flatMap((section) => section.choices).find((choice) => choice.name === name)?.options ?? [];
  const armOf = (name) => page.arms[Number(name in chosen ? chosen[name] : name)] ?? page.arms[0];
  const runOf = (arm) => arm.runs[chosen.seed] ?? Object.values(arm.runs)[0];
  const seedOf = (arm) => (chosen.seed in arm.runs ? chosen.seed : Object.keys(arm.runs)[0]);
  const called = (arm) => (page.seeds.length > 1 ? `${arm.name}, seed ${seedOf(arm)}` : page.arms.length > 1 ? arm.name : "");

  function resolved(template) {
    return template.replace(/\{run:(\w+)\}/g, (_, name) => runOf(armOf(name in chosen || /^\d+$/.test(name) ? name : "0"))).replace(/\{([\w-]+)\}/g, (_, name) => chosen[name]);
  }

  function titled(template) {
    return template.replace(/\{arm:(\d+)\}/g, (_, at) => called(armOf(at))).replace(/\{([\w-]+)\}/g, (_, name) => {
      if (name === "left" || name === "right") return name in chosen ? `${called(armOf(name))}, ` : "";
      return options(name).find(([value]) => value === chosen[name])?.[1] ?? chosen[name] ?? "";
    }).replace(/[: ]+$/, "");
  }

  function choose(name, value) {
    chosen[name] = value;
    for (const choice of document.querySelectorAll("select")) if (choice.dataset.name === name) choice.value = value;
    if (["seed", "left", "right"].includes(name)) fillRounds();
    for (const block of blocks) block.renew();
  }

  function chooser({ name, label, options }) {
    chosen[name] = options.some(([value]) => value === chosen[name]) ? chosen[name] : options[0]?.[0];
    const select = make("select", { "data-name": name, onchange: () => choose(name, select.value) }, options.map(([value, text]) => make("option", { value }, text)));
    select.value = chosen[name];
    return make("label", { class: "choice" }, make("span", {}, label), select);
  }

  function fillRounds() {  // the rounds of the run that is chosen beside them: the first on the left, the last on the right
    for (const side of ["left", "right"]) {
      const select = document.querySelector(`select[data-name="${side}-round"]`);
      if (!select) continue;
      const rounds = (page.rounds[runOf(armOf(side in chosen ? side : "0"))] ?? []).map(String), name = `${side}-round`;
      const latest = select.dataset.latest === "yes" || !rounds.includes(chosen[name]);
      if (latest) chosen[name] = side === "left" ? rounds[0] : rounds.at(-1);
      select.replaceChildren(...rounds.map((round) => make("option", { value: round }, round)));
      select.value = chosen[name];
      select.dataset.latest = side === "right" && chosen[name] === rounds.at(-1) ? "yes" : "no";
    }
  }

  // --- pictures ---

  const tip = make("div", { class: "tip", role: "tooltip", hidden: true });

  function told(value) {  // what a chart says of an item: a name and a text for each line
    return typeof value === "object" ? Object.entries(value).filter(([, text]) => !["", "null", "NaN", "undefined"].includes(String(text))) : [["", String(value)]];
  }

  function showTip(_, event, item, value) {
    tip.hidden = value === null || value === undefined || value === "";
    if (tip.hidden) return;
    tip.replaceChildren(...told(value).map(([name, text]) => make("div", {}, make("span", {}, name), make("b", {}, text))));
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), below = event.clientY + 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
  }

  // All that can be pointed at, with its place in the picture.
  function itemsOf(view) {
    const found = [], [left, top] = view.origin(), padding = view.padding();
    const walk = (mark, x, y) => {
      for (const item of mark.items ?? []) {
        if (mark.marktype === "group") for (const child of item.items ?? []) walk(child, x + (item.x ?? 0), y + (item.y ?? 0));
        else if (mark.role === "mark" && item.tooltip && item.bounds) found.push({ item, x1: x + item.bounds.x1, x2: x + item.bounds.x2, y1: y + item.bounds.y1, y2: y + item.bounds.y2 });
      }
    };
    walk(view.scenegraph().root, left + padding.left, top + padding.top);
    return found.map((one) => ({ ...one, x: (one.x1 + one.x2) / 2, y: (one.y1 + one.y2) / 2 }));
  }

  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

  function nextItem(items, now, [dx, dy]) {
    if (!now) return items.reduce((best, one) => (best && best.x + best.y <= one.x + one.y ? best : one), null);
    let best = now, least = Infinity;
    for (const one of items) {  // the next one in this row or column, else the next one anywhere
      const ahead = (one.x - now.x) * dx + (one.y - now.y) * dy, aside = Math.abs((one.x - now.x) * dy) + Math.abs((one.y - now.y) * dx);
      const cost = aside < 1 ? ahead : 1e4 + 20 * ahead + aside;
      if (ahead > 0.5 && cost < least) [best, least] = [one, cost];
    }
    return best;
  }

  function picture(block) {
    const box = make("div", { class: "chart", tabindex: 0, role: "application" }), cursor = make("div", { class: "cursor", hidden: true });
    const readout = make("output", { class: "readout", "aria-live": "polite" }), caption = make("span");
    let view = null, drawn = null, rows = [], at = null, items = null, turn = 0;

    function rename() {
      const title = titled(block.title), name = resolved(block.part);
      caption.textContent = title;
      box.setAttribute("aria-label", `${title}; arrow keys read it, + and − zoom, 0 sets back`);
      if (figure.dataset.part !== name) {
        delete figure.dataset.drawn;
        at = null;
      }
      figure.dataset.part = name;
      return name;
    }

    async function renew(anew = false) {
      const mine = ++turn, found = await part(rename()), table = found && (await part(found.table));
      if (mine !== turn) return;
      if (!table) {
        view?.finalize();
        view = drawn = null;
        box.replaceChildren(make("p", { class: "quiet" }, "This run has no such numbers."));
        return;
      }
      rows = rowsOf(table, block.fix);
      items = null;
      if (view && drawn === found.spec && !anew) {
        view.data("table", rows);
        for (const [end, value] of Object.entries(found.ends)) view.signal(end, value);
        await view.runAsync();
      } else {
        const spec = JSON.parse(typeof found.spec === "number" ? page.specs[found.spec] : found.spec);
        for (const parameter of spec.params ?? []) if (parameter.name in found.ends) parameter.value = found.ends[parameter.name];
        for (const parameter of spec.params ?? []) if (parameter.name === "hidden") parameter.value = [...hidden];
        spec.autosize = { type: "fit-x", contains: "padding" };
        spec.datasets = { ...spec.datasets, table: rows };
        view?.finalize();
        drawn = found.spec;
        const config = page.styles[night.matches ? "night" : "day"], renderer = rows.length > 1500 ? "canvas" : "svg";
        view = (await vegaEmbed(box, spec, { ast: true, actions: false, defaultStyle: false, tooltip: showTip, config, renderer, mode: "vega-lite", logLevel: 1 })).view;
        box.append(cursor);
        view.addEventListener("click", (_, item) => item && pick(item.datum));
      }
      cursor.hidden = true;
      figure.dataset.drawn = String(Number(figure.dataset.drawn ?? 0) + 1);
    }

    function pick(datum) {
      const layer = block.pick && datum ? page.arms[0].layers.indexOf(datum.layer) : -1;
      if (layer >= 0) choose("layer", String(layer));
    }

    function move(event) {
      const step = ARROWS[event.key], zoom = { "+": -240, "=": -240, "-": 240, "−": 240 }[event.key];
      const surface = box.querySelector("canvas, svg");
      if (!view || !surface || !(step || zoom || event.key === "0" || event.key === "Enter")) return;
      event.preventDefault();
      const edge = surface.getBoundingClientRect(), middle = { bubbles: true, clientX: edge.left + edge.width / 2, clientY: edge.top + Math.min(edge.height / 2, 120) };
      const target = surface.querySelector(".background") ?? surface;
      if (zoom) target.dispatchEvent(new PointerEvent("pointermove", middle));
      if (zoom) target.dispatchEvent(new WheelEvent("wheel", { ...middle, deltaY: zoom, ctrlKey: true, cancelable: true }));
      else if (event.key === "0") target.dispatchEvent(new MouseEvent("dblclick", middle));
      else if (event.key === "Enter") pick(at?.item.datum);
      if (!step) return void (items = null, cursor.hidden = tip.hidden = true);
      items ??= itemsOf(view);
      if (at && !items.includes(at)) {  // drawn anew meanwhile
        const was = at.item.datum;
        at = items.find(({ item }) => ["round", "client", "layer", "arm", "seed"].every((key) => item.datum[key] === was[key])) ?? null;
      }
      at = nextItem(items, at, step);
      if (!at) return;
      cursor.hidden = false;
      for (const [name, value] of [["left", at.x1], ["top", at.y1], ["width", at.x2 - at.x1], ["height", at.y2 - at.y1]]) cursor.style.setProperty(name, `${value}px`);
      readout.textContent = told(at.item.tooltip).map(([name, text]) => `${name} ${text}`).join(", ");
    }

    const file = () => `${page.title} ${caption.textContent}`;
    const figure = make("figure", { "data-block": block.part },
      make("figcaption", {}, caption, make("span", { class: "buttons" },
        button("CSV", "save as CSV", () => rows.length && save(`${file()}.csv`, csv([Object.keys(rows[0]), ...rows.map(Object.values)]), "text/csv")),
        button("SVG", "save as SVG", async () => view && save(`${file()}.svg`, await view.toSVG(), "image/svg+xml")),
        button("PNG", "save as PNG", async () => view && save(`${file()}.png`, await view.toImageURL("png", 2), "")))),
      box, readout);
    box.addEventListener("keydown", move);
    return { element: figure, rename, renew, hide: () => view && view.getState().signals.hidden !== undefined && view.signal("hidden", [...hidden]).runAsync() };
  }

  // --- words ---

  function table(block) {
    const box = make("div", { class: "words-of" });
    async function renew() {
      const found = await part(resolved(block.part));
      if (!found) return box.replaceChildren();
      const text = (cell) => (typeof cell === "string" ? cell : cell.text), plain = (cell) => (typeof cell === "string" ? cell : cell.value);
      const share = (cell) => (found.shaded && typeof cell !== "string" ? `${Math.min(100, (100 * cell.value) / found.shaded)}%` : null);
      const cells = (row) => row.map((cell, at) => (at === 0 ? make("th", { scope: "row", "data-label": found.columns[at] }, text(cell))
        : make("td", { class: found.words.includes(at) ? "words" : share(cell) && at < row.length - 1 ? "count" : null, "data-label": found.columns[at], ...(share(cell) ? { "--share": share(cell) } : {}) }, text(cell))));
      const whole = found.columns.length ? make("div", { class: `scroll${found.shaded ? " partition" : ""}`, tabindex: 0 }, make("table", { class: found.shaded ? "" : "cards", "aria-label": titled(block.title) },
        make("thead", {}, make("tr", {}, found.columns.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, found.rows.map((row) => make("tr", {}, cells(row)))))) : null;
      const saved = found.rows.length ? button("CSV", "save as CSV", () => save(`${page.title} ${titled(block.title)}.csv`, csv([found.columns, ...found.rows.map((row) => row.map(plain))]), "text/csv")) : null;
      box.replaceChildren(...[found.note ? make("p", { class: "quiet" }, found.note) : null, whole, saved].filter((one) => one !== null));
    }
    const title = make("span", {}, titled(block.title));
    const renamed = () => { title.textContent = titled(block.title); return renew(); };
    const element = block.folded ? make("details", { "data-block": block.part }, make("summary", {}, title), box) : make("div", { class: "wide", "data-block": block.part }, make("h3", {}, title), box);
    return { element, renew: renamed };
  }

  function lines(block) {
    const box = make("div", { class: "notice wide", role: "note", hidden: true });
    return { element: box, renew: async () => {
      const found = (await part(resolved(block.part)))?.lines ?? [];
      box.hidden = !found.length;
      box.replaceChildren(...found.map((line) => make("p", {}, line)));
    } };
  }

  function findings(block) {
    const list = make("ul", { class: "findings" }), title = make("h3");
    return { element: make("div", { class: "wide" }, title, list), renew: async () => {
      title.textContent = titled(block.title);
      title.hidden = !title.textContent;
      const found = (await part(resolved(block.part)))?.findings ?? [];
      const shown = ({ kind, text, layer }) => make("li", { class: kind }, text, page.arms[0].layers.includes(layer) ? [" ", button("show", `show ${layer}`, () => { choose("layer", String(page.arms[0].layers.indexOf(layer))); document.getElementById("clients")?.scrollIntoView(); })] : []);
      list.replaceChildren(...(found.length ? found.map(shown) : [make("li", { class: "quiet" }, "Nothing.")]));
    } };
  }

  function about(block) {
    const text = make("p", { class: "wide" });
    return { element: text, renew: () => (text.textContent = block.texts[chosen.quantity] ?? "") };
  }

  const KINDS = { picture, table, lines, findings, about };

  // --- the page ---

  const near = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      const block = blocks.find((one) => one.element === target);
      if (block) block.near(isIntersecting);
    }
  }, { rootMargin: "500px" });

  // A block is drawn when it comes near, and anew when something changed meanwhile.
  function placed(declared) {
    const { element, rename, renew, hide } = KINDS[declared.kind](declared);
    let visible = declared.kind !== "picture", stale = true;
    const settle = async (anew) => {
      if (!visible || !stale) return;
      stale = false;
      await renew(anew)?.catch?.((problem) => console.error(problem));
    };
    blocks.push({ element, declared, renew: (anew = false) => { stale = true; rename?.(); return settle(anew); }, near: (is) => { visible = is || declared.kind !== "picture"; settle(); }, hide });
    if (declared.kind === "picture") near.observe(element);
    return element;
  }

  function legend() {  // arms on and off, everywhere, also with the keyboard
    if (page.arms.length < 2) return null;
    const inks = () => page.styles[night.matches ? "night" : "day"].range.category;
    return make("fieldset", { class: "arms" }, make("legend", {}, "shown"), page.arms.map((arm, at) => {
      const box = make("input", { type: "checkbox", checked: true, onchange: () => {
        hidden[box.checked ? "delete" : "add"](arm.name);
        for (const block of blocks) { block.hide?.(); if (block.declared.arm === at) block.element.hidden = !box.checked; }
      } });
      box.checked = !hidden.has(arm.name);
      return make("label", {}, box, make("span", { class: "swatch", "--ink": inks()[at % inks().length], "aria-hidden": "true" }), arm.name);
    }));
  }

  function section({ id, title, about, choices, blocks: declared }) {
    return make("section", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title` }, title), about ? make("p", { class: "quiet" }, about) : null,
      choices.length ? make("div", { class: "choices" }, choices.map(chooser)) : null, make("div", { class: "blocks" }, declared.map(placed)));
  }

  function build() {
    near.disconnect();
    blocks.length = 0;
    const seeds = page.seeds.length > 1 ? chooser({ name: "seed", label: "seed of layers, clients and bytes", options: page.seeds.map((seed) => [seed, seed]) }) : (chosen.seed = page.seeds[0], null);
    const sections = page.sections.map(section);
    document.getElementById("page").replaceChildren(
      make("header", {}, page.live ? make("a", { href: "." }, "all runs") : "", make("h1", {}, page.title), make("p", { class: "quiet" }, page.facts.join(" · ")),
        make("nav", { "aria-label": "sections" }, page.sections.map(({ id, title }) => make("a", { href: `#${id}` }, title))), make("div", { class: "choices" }, seeds ?? "", legend() ?? "")),
      ...sections, tip);
    fillRounds();
    for (const block of blocks) block.renew();
  }

  // --- a run that goes on ---

  let busy = false, again = false;
  async function refresh() {
    if (busy) return void (again = true);
    busy = true;
    const answer = await fetch(`${page.live.view}&part=`).catch(() => null);
    if (answer?.ok) {
      const fresh = await answer.json(), same = (key) => JSON.stringify(page[key]) === JSON.stringify(fresh[key]);
      const rebuilt = !["sections", "arms", "seeds", "title"].every(same);
      Object.assign(page, fresh);
      known.clear();
      if (rebuilt) build();
      else {
        document.querySelector("header .quiet").textContent = page.facts.join(" · ");
        fillRounds();
        await Promise.all(blocks.map((block) => block.renew()));
      }
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
    busy = false;
    if (again) { again = false; refresh(); }
  }

  build();
  night.addEventListener("change", () => { for (const block of blocks) block.renew(true); });
  if (page.live) new EventSource(page.live.events).addEventListener("changed", refresh);
})();
