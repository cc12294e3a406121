// The start page: all runs, newest first.

import { ask, isCopy } from "./api.js";
import { h, replace, visible } from "./dom.js";
import { ago, bytes, count, interval, isKnown, plural } from "./format.js";
import { address, follow, pageOf, remember, select, status } from "./page.js";
import { sparkline } from "./plots.js";
import { Table } from "./table.js";

const COLUMNS = [
  { id: "pick", title: "", width: "2.2rem", className: "pick" },
  { id: "env", title: "Run", width: "minmax(16rem, 2fr)", sort: "env" },
  { id: "model", title: "Model", width: "minmax(8rem, 1.2fr)", sort: "model" },
  { id: "reward", title: "Reward", width: "9.5rem", sort: "reward", className: "number" },
  { id: "rollouts", title: "Rollouts", width: "8.5rem", sort: "rollouts", className: "number" },
  { id: "errors", title: "Errors", width: "5rem", sort: "errors", className: "number" },
  { id: "status", title: "Status", width: "7rem", sort: "status" },
  { id: "date", title: "Date", width: "7.5rem", sort: "date", className: "number" },
  { id: "size", title: "Size", width: "5rem", sort: "size", className: "number" },
];

export async function runsPage(main, { query }) {
  let runs = [];
  const view = { q: query.q || "", kind: query.kind || "", status: query.status || "", sort: query.sort || "-date" };
  const picked = new Set((query.pick || "").split("\n").filter(Boolean));
  const compare = h("a", { class: "button primary", hidden: true }, "Compare");
  const summary = h("p", { class: "facts", role: "status" });
  const search = h("input", { type: "search", placeholder: "environment, model, folder   /", "aria-label": "Find runs", value: view.q, oninput: () => set({ q: search.value }) });
  const table = new Table({
    label: "runs", columns: COLUMNS, height: 52, onsort: (name) => set({ sort: view.sort === name ? `-${name}` : name }),
    href: (run) => pageOf(run),
    draw: (run) => [
      run.kind === "evaluation" ? h("input", { type: "checkbox", class: "above", "aria-label": `compare ${run.id}`, checked: picked.has(run.id), onchange: () => pick(run) }) : "",
      h("div", { class: "two" }, h("b", null, visible(run.env || run.name)), h("small", null, visible(run.kind === "training" ? `training · ${run.id}` : run.id))),
      visible(run.model || "–"),
      run.kind === "training" ? [sparkline(run.curve || [], 64), " ", interval(run.reward, NaN)] : interval(run.reward, run.stderr),
      run.kind === "training" ? `step ${count(run.rollouts)}${run.planned ? ` / ${count(run.planned)}` : ""}` : progress(run),
      run.errors ? h("span", { class: "bad" }, count(run.errors)) : count(run.errors),
      status(run),
      h("time", { datetime: run.date, title: run.date }, ago(run.date)), bytes(run.size),
    ],
  });
  const controls = h("div", { class: "controls" }, search,
    select("Kind", [["", "evaluations and trainings"], ["evaluation", "evaluations"], ["training", "trainings"]], view.kind, (kind) => set({ kind })),
    select("Status", [["", "any status"], ["running", "running"], ["finished", "finished"], ["interrupted", "interrupted"], ["failed", "failed"], ["ended", "ended"]], view.status, (value) => set({ status: value })),
    compare, summary);

  function progress(run) {
    if (!isKnown(run.rollouts)) return "–";
    return run.planned && run.planned !== run.rollouts ? `${count(run.rollouts)} / ${count(run.planned)}` : count(run.rollouts);
  }

  function pick(run) {
    if (!picked.delete(run.id)) picked.add(run.id);
    while (picked.size > 2) picked.delete(picked.values().next().value);
    compare.hidden = picked.size !== 2;
    compare.href = address(["compare", ...picked]);
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
      const [left, right] = [a[name] ?? null, b[name] ?? null];
      if (left === null || right === null) return (left === null) - (right === null);
      const order = typeof left === "number" ? left - right : String(left).localeCompare(String(right), "en", { numeric: true });
      return down ? -order : order;
    });
    table.layout(COLUMNS, view.sort);
    table.show(chosen);
    const running = runs.filter((run) => run.status === "running").length;
    summary.textContent = [chosen.length === runs.length ? plural(runs.length, "run") : `${chosen.length} of ${plural(runs.length, "run")}`, running ? `${running} running` : ""].filter(Boolean).join(", ");
  }

  async function load() {
    const answer = await ask("runs");
    runs = answer.runs;
    if (runs.length) show();
    else replace(main, h("section", { class: "empty" }, h("h1", null, "No runs yet"),
      h("p", null, `There is no run below ${answer.folders.join(", ")}. This page shows the first one as soon as it is there:`), h("pre", null, "vf-eval ENVIRONMENT -n 20")));
    if (runs.length && !table.element.isConnected) (replace(main, h("h1", { class: "hidden" }, "Runs"), controls, table.element), show());
  }

  await load();
  const stop = isCopy ? () => {} : follow(null, load);
  return {
    crumbs: [], title: "runs",
    keys: { "/": () => search.focus(), x: () => table.focused >= 0 && table.order[table.focused].kind === "evaluation" && pick(table.order[table.focused]), c: () => !compare.hidden && compare.click() },
    onkey: (name) => table.key(name),
    help: [["j k", "next, previous run"], ["Enter", "open"], ["x", "mark for comparing"], ["c", "compare the two marked"]],
    close: () => (stop(), table.close()),
  };
}
