// One evaluation: its scores and rollouts.

import { ask, Runs } from "./api.js";
import { auditLink } from "./audit_page.js";
import { settingsTable } from "./diff.js";
import { h, replace } from "./dom.js";
import { ago, bytes, count, duration, number } from "./format.js";
import { address, follow, runName, select, status, successOf } from "./page.js";
import { rowsOf } from "./rows.js";
import { rowsView } from "./rows_view.js";

const MAX_OTHERS = 200; // runs to compare with that are offered; any others are marked in the list of runs

export async function runPage(main, { parts, query }) {
  const id = parts[1];
  let run = await ask("run", { run: id });
  let [others, closed] = [[], false];
  const rows = rowsOf(id);
  const head = h("div");
  const body = rowsView(rows, { base: ["run", id], query, weights: run.weights, success: successOf(run), link: (row, view) => address(["run", id, String(row)], view) });
  replace(main, head, body.element);
  drawHead();
  if (rows.total) body.show();
  await body.update();
  findOthers().catch(() => {}); // beside the page, which does not wait for very many runs
  const stop = follow(id, async () => {
    run = await ask("run", { run: id });
    await body.update();
    drawHead();
  });

  async function findOthers() {
    const known = new Runs();
    do await known.more();
    while (!known.isWhole && !closed);
    others = known.all.filter((other) => other.kind === "evaluation" && other.id !== id);
    others = others.sort((a, b) => (b.env === run.env) - (a.env === run.env)).slice(0, MAX_OTHERS);
    if (!closed) drawHead();
  }

  function drawHead() {
    const passed = Object.entries(run.pass_at_k || {});
    replace(head, h("div", { class: "title" }, h("h1", null, run.env || run.name), h("span", { class: "facts" }, run.model), status(run),
      h("span", { class: "facts" }, [run.planned && run.rollouts !== run.planned ? `${count(rows.total)} of ${count(run.planned)} rollouts` : "", ago(run.date), duration(1000 * (run.seconds ?? NaN)), bytes(run.size)].filter((text) => text && text !== "–").join(" · ")),
      isOver() && run.success !== null && run.success !== undefined ? h("span", { class: "facts", title: solved() }, `success ${number(run.success)}`) : null,
      isOver() && passed.length > 1 ? h("span", { class: "facts", title: solved() }, passed.map(([k, p]) => `pass@${k} ${number(p)}${interval(k)}${behind(k)}`).join(" · ")) : null,
      isOver() && run.unknown ? h("span", { class: "facts bad" }, `unknown: ${run.unknown}`) : null,
      (run.coverage || []).map(([name, text]) => h("span", { class: "facts bad" }, `${name}: ${text}`)),
      auditLink(run),
      others.length ? select("Compare with another run", [["", "compare with …"], ...others.map((other) => [other.id, `${runName(other)} · ${other.name}`])], "", (other) => (location.hash = address(["compare", id, other]))) : null),
    settingsTable(run, [["folder", run.path], ["endpoint", run.metadata.base_url], ["fingerprint", run.metadata.fingerprint], ["audit of the environment", run.audit || "none"], ...(run.provenance || [])].filter(([, text]) => text)));
  }

  function isOver() { // before, the numbers of the metadata are older than those of the rows
    return run.status !== "running";
  }

  function solved() {
    if (run.success_metric) return `solved: ${run.success_metric} is 1`;
    return run.pass_threshold === null || run.pass_threshold === undefined ? "solved: the reward is 1" : `solved: a reward of at least ${number(run.pass_threshold)}`;
  }

  function interval(k) {
    const bounds = (run.pass_at_k_interval || {})[k];
    return bounds ? ` [${bounds[0].toFixed(2)}, ${bounds[1].toFixed(2)}]` : "";
  }

  function behind(k) { // the examples with k known rollouts, where others have fewer
    const counts = run.pass_at_k_examples || {};
    return counts[k] < counts[1] ? ` (${count(counts[k])} of ${count(counts[1])} examples)` : "";
  }

  return {
    crumbs: [[run.env || run.name, null]], title: runName(run), keys: { ...body.keys, u: () => (location.hash = "#/") },
    onkey: body.onkey, help: [...body.help, ["u", "back to the runs"]], close: () => ((closed = true), stop(), body.close()),
  };
}
