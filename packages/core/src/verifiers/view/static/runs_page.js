// The start page: all runs, newest first.

import { isCopy, Runs } from "./api.js";
import { h, NARROW, replace, visible } from "./dom.js";
import { ago, bytes, count, duration, interval, isKnown, number } from "./format.js";
import { bySetting } from "./diff.js";
import { address, chooser, follow, pageOf, remember, select, shownColumns, status } from "./page.js";
import { sparkline } from "./plots.js";
import { setsLink } from "./sets_page.js";
import { leastRem, Table } from "./table.js";

const MAX_VARYING = 3; // settings shown without being chosen, where the other columns leave room
const SHOW_MS = 500; // between two views of a list that is still being read
const ORDER = new Intl.Collator("en", { numeric: true });
const whole = (n) => n.toLocaleString("en");

// The settings in which runs of one environment differ.
export function varying(runs) {
  const seen = new Map();
  const names = new Set(runs.flatMap((run) => Object.keys(run.settings || {})));
  for (const name of names) {
    for (const run of runs) {
      const key = `${run.kind} ${run.env} ${name}`;
      if (!seen.has(key)) seen.set(key, new Set());
      seen.get(key).add(JSON.stringify((run.settings || {})[name] ?? null));
    }
  }
  return [...names].filter((name) => runs.some((run) => seen.get(`${run.kind} ${run.env} ${name}`).size > 1)).sort(bySetting);
}

export async function runsPage(main, { query }) {
  const known = new Runs();
  let runs = [];
  let [reading, closed, shownAt] = [null, false, 0];
  const view = { q: query.q || "", kind: query.kind || "", status: query.status || "", sort: query.sort || "-date" };
  const picked = new Set((query.pick || "").split("\n").filter(Boolean));
  const compare = h("a", { class: "button primary", hidden: true }, "Compare");
  const summary = h("p", { class: "facts", role: "status" });
  const search = h("input", { type: "search", placeholder: "environment, model, folder   /", "aria-label": "Find runs", value: view.q, oninput: () => set({ q: search.value }) });
  const table = new Table({
    label: "runs", columns: [], height: 52, onsort: (name) => set({ sort: view.sort === name ? `-${name}` : name }),
    href: (run) => pageOf(run),
  });

  function allColumns(chosen, maxVarying) {
    const has = (name) => runs.some((run) => isKnown(run[name]));
    const areTrainings = runs.some((run) => run.kind === "training");
    const settings = varying(chosen);
    return [
      { id: "pick", title: "", width: "1.4rem", className: "pick", cell: (run) => h("input", { type: "checkbox", class: "above", "aria-label": `compare ${run.id}`, checked: picked.has(run.id), onchange: () => pick(run) }) },
      { id: "env", title: "Run", width: "minmax(8rem, 2fr)", sort: "env", narrow: "minmax(0, 1fr)", cell: (run) => h("div", { class: "two" }, h("b", null, visible(run.env || run.name)), h("small", null, visible((NARROW.matches ? [run.model || run.name, run.kind === "training" ? "training" : ""] : [run.kind === "training" ? "training" : "", run.name, run.id.slice(0, -run.name.length - 1)]).filter(Boolean).join(" · ")))) },
      { id: "model", title: "Model", width: "minmax(9.5rem, 2fr)", sort: "model", className: "lines", cell: (run) => h("span", { title: run.model }, visible(run.model || "–")) },
      ...settings.map((name, i) => ({ id: `setting:${name}`, title: name, width: "minmax(5rem, 0.6fr)", sort: `setting:${name}`, optional: i >= maxVarying, cell: (run) => visible(String((run.settings || {})[name] ?? "–")) })),
      { id: "reward", title: "Reward", width: areTrainings ? "7.6rem" : "6.6rem", sort: "reward", className: "number", narrow: "8rem", cell: (run) => (run.kind === "training" ? [sparkline(run.curve || [], 64), " ", interval(run.reward, NaN)] : interval(run.reward, run.stderr)) },
      { id: "success", title: "Success", width: "4rem", sort: "success", className: "number", optional: !has("success"), cell: (run) => number(run.success) },
      { id: "rollouts", title: "Rollouts", width: areTrainings ? "6rem" : "4.6rem", sort: "rollouts", className: "number", cell: (run) => (run.kind === "training" ? `step ${count(run.rollouts)}${run.planned ? ` / ${count(run.planned)}` : ""}` : progress(run)) },
      { id: "errors", title: "Errors", width: "3rem", sort: "errors", className: "number", cell: (run) => (run.errors ? h("span", { class: "bad" }, count(run.errors)) : count(run.errors)) },
      { id: "unscored", title: "Not scored", width: "4.2rem", sort: "unscored", className: "number", optional: !runs.some((run) => run.unscored), cell: (run) => (run.unscored ? h("span", { title: "rollouts whose reward is unknown; the page of the run says why" }, count(run.unscored)) : count(run.unscored)) },
      { id: "status", title: "Status", width: "6.3rem", sort: "status", cell: status },
      { id: "date", title: "Date", width: "5rem", sort: "date", className: "number", cell: (run) => h("time", { datetime: run.date, title: run.date }, ago(run.date)) },
      { id: "tokens", title: "Tokens", width: "3.6rem", sort: "tokens", className: "number", cell: (run) => count(run.tokens) },
      { id: "cost", title: "Cost", width: "3.8rem", sort: "cost", className: "number", optional: !has("cost"), cell: (run) => (isKnown(run.cost) ? `$${number(run.cost)}` : "–") },
      { id: "seconds", title: "Time", width: "5rem", sort: "seconds", className: "number", cell: (run) => duration(1000 * (run.seconds ?? NaN)) },
      { id: "size", title: "Size", width: "5rem", sort: "size", className: "number", optional: true, cell: (run) => bytes(run.size) },
    ];
  }

  const columnMenu = h("span");
  const controls = h("div", { class: "controls" }, search,
    select("Kind", [["", "evaluations and trainings"], ["evaluation", "evaluations"], ["training", "trainings"]], view.kind, (kind) => set({ kind })),
    select("Status", [["", "any status"], ["running", "running"], ["finished", "finished"], ["interrupted", "interrupted"], ["failed", "failed"], ["damaged", "damaged"], ["ended", "ended"]], view.status, (value) => set({ status: value })),
    compare, setsLink(), columnMenu, summary);

  function progress(run) {
    if (!isKnown(run.rollouts)) return "–";
    return run.planned && run.planned !== run.rollouts ? `${count(run.rollouts)} / ${count(run.planned)}` : count(run.rollouts);
  }

  function pick(run) {
    if (!picked.delete(run.id)) picked.add(run.id);
    const kinds = new Set(runs.filter((one) => picked.has(one.id)).map((one) => one.kind)); // only runs of one kind compare
    const areTrainings = kinds.has("training");
    compare.hidden = picked.size < 2 || kinds.size > 1 || (isCopy && !areTrainings && picked.size > 2);
    compare.href = address([areTrainings ? "curves" : picked.size > 2 ? "compared" : "compare", ...picked]);
    table.redraw();
  }

  function set(change) {
    Object.assign(view, change);
    remember([], view);
    show();
  }

  function show() {
    const words = view.q.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = runs.filter((run) => {
      const text = `${run.env} ${run.model} ${run.id} ${run.kind}`.toLowerCase();
      return words.every((word) => text.includes(word)) && (!view.kind || run.kind === view.kind) && (!view.status || run.status === view.status);
    });
    const down = view.sort.startsWith("-");
    const name = down ? view.sort.slice(1) : view.sort;
    chosen.sort((a, b) => {
      const [left, right] = [a, b].map((run) => (name.startsWith("setting:") ? run.settings?.[name.slice(8)] : run[name]) ?? null);
      if (left === null || right === null) return (left === null) - (right === null);
      const order = typeof left === "number" ? left - right : ORDER.compare(left, right);
      return down ? -order : order;
    });
    const room = (table.element.clientWidth || document.documentElement.clientWidth - 40) / parseFloat(getComputedStyle(document.documentElement).fontSize);
    let maxVarying = MAX_VARYING;
    while (maxVarying && leastRem(shownColumns("runs", allColumns(chosen, maxVarying))) > room) maxVarying -= 1;
    const all = allColumns(chosen, maxVarying);
    table.layout(shownColumns("runs", all), view.sort);
    if (!columnMenu.querySelector("[open]")) replace(columnMenu, chooser("runs", all.filter((column) => column.title), show));
    table.show(chosen);
    const running = runs.filter((run) => run.status === "running").length;
    const all_ = `${whole(runs.length)} run${runs.length === 1 ? "" : "s"}`;
    const shown = chosen.length === runs.length ? all_ : `${whole(chosen.length)} of ${all_}`;
    const rest = known.isWhole ? "" : `the others are being read: ${whole(known.total)} found`;
    summary.textContent = [shown, running ? `${running} running` : "", rest].filter(Boolean).join(", ");
  }

  // Read what is new, one part after another; the list is shown at the first, now and then, and at the last.
  async function read() {
    let changed = false;
    do {
      changed = Boolean(await known.more()) || changed;
      if (closed) return;
      if (!known.isWhole && changed && performance.now() - shownAt > SHOW_MS) (place(), (changed = false));
    } while (!known.isWhole);
    place();
  }

  // The reading in progress, or a new one.
  function load() {
    reading ??= read().finally(() => (reading = null));
    return reading;
  }

  function place() {
    shownAt = performance.now();
    runs = known.all;
    if (runs.length) show();
    else replace(main, h("section", { class: "empty" }, h("h1", null, "No runs yet"),
      h("p", null, `There is no run below ${known.folders.join(", ")}. This page shows the first one as soon as it is there:`), h("pre", null, "vf-eval ENVIRONMENT -n 20")));
    if (runs.length && !table.element.isConnected) (replace(main, h("h1", { class: "hidden" }, "Runs"), controls, table.element), show());
  }

  await known.more();
  place();
  if (!known.isWhole) load().catch((error) => replace(summary, `the other runs cannot be read: ${error.message}`));
  const stop = isCopy ? () => {} : follow(null, load);
  return {
    crumbs: [], title: "runs",
    keys: { "/": () => search.focus(), x: () => table.focused >= 0 && pick(table.order[table.focused]), c: () => !compare.hidden && compare.click() },
    onkey: (name) => table.key(name),
    help: [["j k", "next, previous run"], ["Enter", "open"], ["x", "mark for comparing"], ["c", "compare the marked ones"]],
    close: () => ((closed = true), stop(), table.close()),
  };
}
