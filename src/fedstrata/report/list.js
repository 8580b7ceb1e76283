"use strict";
// The list of runs that are watched. Names go in as text, never as HTML.
(() => {
  let { runs } = JSON.parse(document.getElementById("data").textContent);

  function make(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
    element.append(...children.flat());
    return element;
  }

  const link = (key, text) => make("a", { href: `view?of=${encodeURIComponent(key)}` }, text);
  const digits = (value, count) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(count))));

  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    for (; value >= 1000 && at < units.length - 1; at++) value /= 1000;
    return `${digits(value, 3)} ${units[at]}`;
  }

  function time(seconds) {
    if (seconds === null || seconds === undefined) return "";
    if (seconds < 60) return `${digits(seconds, 2)} s`;
    return seconds < 3600 ? `${digits(seconds / 60, 2)} min` : `${digits(seconds / 3600, 2)} h`;
  }

  function row(run) {
    const cell = (label, ...content) => make("td", { "data-label": label }, ...content);
    const name = make("th", { scope: "row", "data-label": "run" }, link(run.key, run.name), make("span", { class: "quiet" }, ` ${run.what}`));
    if (run.state === "damaged") return make("tr", { class: "damaged" }, name, cell("state", "damaged"), make("td", { colspan: 5, class: "words" }, run.why));
    const bar = make("progress", { max: run.rounds, value: run.round, "aria-label": "rounds" });
    return make("tr", { class: run.state }, name, make("td", { "data-label": "state", class: "state" }, run.state), cell("rounds", make("span", {}, bar, ` ${run.round}/${run.rounds}`)),
      cell("time left", time(run.left)), cell("best", run.best === null ? "–" : `${run.metric} ${digits(run.best, 4)}`), cell("upload", bytes(run.upload)), cell("lost replies", String(run.lost || "·")));
  }

  function show() {
    const head = ["run", "state", "rounds", "time left", "best", "upload", "lost replies"];
    const running = runs.runs.filter((run) => run.state === "running").length;
    const groups = runs.groups.map(({ key, name, runs: count, running: going }) => make("li", {}, link(key, name), make("span", { class: "quiet" }, ` ${count} runs${going ? `, ${going} running` : ""}`)));
    document.getElementById("page").replaceChildren(
      make("header", {}, make("h1", {}, "Runs"), make("p", { class: "quiet" }, `${running} running, ${runs.runs.length} in all · ${runs.folders.join(", ")}`)),
      ...(groups.length ? [make("section", { id: "groups" }, make("h2", {}, "Together"), make("ul", { class: "findings" }, groups))] : []),
      make("section", { id: "runs" }, make("h2", {}, "One by one"), runs.runs.length
        ? make("div", { class: "scroll" }, make("table", { class: "cards", "aria-label": "runs" }, make("thead", {}, make("tr", {}, head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, runs.runs.map(row))))
        : make("p", {}, "There is no run here yet; this page shows it as soon as it begins.")));
  }

  let busy = false, again = false;
  async function refresh() {
    if (busy) return void (again = true);
    busy = true;
    const answer = await fetch("runs").catch(() => null);
    if (answer?.ok) { runs = await answer.json(); show(); }
    busy = false;
    if (again) { again = false; setTimeout(refresh, 250); }
  }

  show();
  new EventSource("events").addEventListener("changed", refresh);
})();
