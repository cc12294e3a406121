// One evaluation: its scores and rollouts.

import { ask } from "./api.js";
import { h, replace } from "./dom.js";
import { ago, bytes, count, duration, number } from "./format.js";
import { address, follow, runName, select, status } from "./page.js";
import { rowsOf } from "./rows.js";
import { rowsView } from "./rows_view.js";
import { list, value } from "./transcript.js";

export async function runPage(main, { parts, query }) {
  const id = parts[1];
  let run = await ask("run", { run: id });
  let others = [];
  const rows = rowsOf(id);
  const head = h("div");
  const body = rowsView(rows, { base: ["run", id], query, weights: run.weights, link: (row, view) => address(["run", id, String(row)], view) });
  replace(main, head, body.element);
  drawHead();
  if (rows.total) body.show();
  await body.update();
  others = (await ask("runs")).runs.filter((other) => other.kind === "evaluation" && other.id !== id);
  others.sort((a, b) => (b.env === run.env) - (a.env === run.env));
  drawHead();
  const stop = follow(id, async () => {
    run = await ask("run", { run: id });
    await body.update();
    drawHead();
  });

  function drawHead() {
    const passed = Object.entries(run.pass_at_k || {});
    replace(head, h("div", { class: "title" }, h("h1", null, run.env || run.name), h("span", { class: "facts" }, run.model), status(run),
      h("span", { class: "facts" }, [run.planned && run.rollouts !== run.planned ? `${count(rows.total)} of ${count(run.planned)} rollouts` : "", ago(run.date), duration(1000 * (run.seconds ?? NaN)), bytes(run.size)].filter((text) => text && text !== "–").join(" · ")),
      passed.length > 1 ? h("span", { class: "facts", title: `a reward of at least ${number(run.pass_threshold)} passes` }, passed.map(([k, p]) => `pass@${k} ${number(p)}`).join(" · ")) : null,
      others.length ? select("Compare with another run", [["", "compare with …"], ...others.map((other) => [other.id, `${runName(other)} · ${other.name}`])], "", (other) => (location.hash = address(["compare", id, other]))) : null),
    h("details", { class: "settings" }, h("summary", null, "Settings"), list([["folder", run.path], ["model", run.model], ["endpoint", run.metadata.base_url], ["fingerprint", run.metadata.fingerprint]]),
      h("h3", null, "Configuration"), value(Object.keys(run.config).length ? run.config : run.metadata)));
  }

  return {
    crumbs: [[run.env || run.name, null]], title: runName(run), keys: { ...body.keys, u: () => (location.hash = "#/") },
    onkey: body.onkey, help: [...body.help, ["u", "back to the runs"]], close: () => (stop(), body.close()),
  };
}
