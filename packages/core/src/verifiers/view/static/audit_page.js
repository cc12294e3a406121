// The audit of a run's environment, as `vf-audit ENV --certify` stored it beside the environment's code.

import { ask } from "./api.js";
import { h, replace, visible } from "./dom.js";
import { count, isKnown, number, plural } from "./format.js";
import { address, card, pageOf, problem, runName } from "./page.js";
import { histogram } from "./plots.js";

const SHOWN = 12; // non-solutions, before "show all"

export async function auditPage(main, { parts }) {
  const run = await ask("run", { run: parts[1] });
  const found = run.certificate;
  const back = { crumbs: [[run.env || run.name, pageOf(run)], ["audit", null]], title: `audit of ${run.env}`, keys: { u: () => (location.hash = pageOf(run)) }, help: [["u", "back to the run"]], close: () => {} };
  if (!found) {
    replace(main, h("h1", null, "Audit"), h("p", null, "The environment of this run has no certificate here. ", h("code", null, `vf-audit ${run.env} --certify`), " makes one."));
    return back;
  }
  const repeatable = { true: "yes", false: "no" }[String(found.is_repeatable)] || "not recorded";
  replace(main, h("div", { class: "title" }, h("h1", null, visible(`Audit of ${found.environment}`)), h("span", { class: `status ${found.ok ? "finished" : "failed"}` }, found.ok ? "passed" : "failed"),
    h("span", { class: "facts" }, visible([found.date, [found.package, found.version].filter(Boolean).join(" "), runName(run)].filter(Boolean).join(" · ")))),
  found.is_fresh ? null : problem("The environment's files have changed since this audit: run it again."),
  h("div", { class: "cards" }, card("a right answer earns", number(found.solution_reward)),
    card("best non-solution", number(found.best_non_solution?.reward), found.best_non_solution?.name || ""),
    card("same reply, same reward", repeatable), card("solved means", found.success_metric || "not known"),
    card("rows", count(found.num_rows)), card("rollouts", count(found.num_rollouts), isKnown(found.seconds) ? `${number(found.seconds)} s, no model` : "no model")),
  findings(found), panel(found), profile(found), notes(found));
  return back;
}

function findings(found) {
  const all = found.findings || [...(found.errors || []).map((code) => ({ kind: "error", code })), ...(found.warnings || []).map((code) => ({ kind: "warning", code }))];
  if (!all.length) return h("p", { class: "good" }, "No way to be paid without solving the task was found.");
  return h("section", { class: "findings" }, h("h2", null, "Findings"), all.map((one) => h("div", { class: `finding ${one.kind}` },
    h("b", null, visible(`${one.kind}: ${one.code}`)), one.message ? h("p", null, visible(one.message)) : null, one.fix ? h("p", { class: "facts" }, visible(`fix: ${one.fix}`)) : null)));
}

function panel(found) {
  const all = found.non_solutions;
  if (!all) return h("p", { class: "none" }, "This certificate holds a summary; certify again for the panel of non-solutions.");
  const share = (value) => (isKnown(value) ? `${(100 * value).toFixed(0)}%` : "–");
  const line = (paid, name = "") => h("tr", { class: name }, h("td", null, visible(paid.name), paid.needs_the_answer && !name ? h("small", null, " needs the right answer") : null), h("td", null, visible(paid.family || "")),
    h("td", { class: "number" }, number(paid.reward)), h("td", { class: "number" }, share(paid.solved)), h("td", { class: "number" }, share(paid.paid_though_wrong)));
  const sorted = [...all].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const body = h("tbody", null, found.oracle ? line({ ...found.oracle, name: "a right answer" }, "oracle") : null, sorted.slice(0, SHOWN).map((paid) => line(paid)));
  const more = h("button", { type: "button", class: "more", onclick: () => (body.append(...sorted.slice(SHOWN).map((paid) => line(paid))), more.remove()) }, `show all ${plural(sorted.length, "non-solution")}`);
  return h("section", null, h("h2", null, "What was paid for what"), h("table", { class: "compared" }, h("thead", null, h("tr", null, ["reply", "family", "mean reward", "solved", "paid though wrong"].map((title, i) => h("th", { class: i > 1 ? "number" : null }, title)))), body),
    sorted.length > SHOWN ? more : null);
}

function profile(found) {
  const rows = found.profile || [];
  if (!rows.length) return h("p", { class: "none" }, "No pass-rate profile: vf-audit ENV -m MODEL --certify adds one.");
  const rates = rows.map((row) => row.solved / row.rollouts);
  const kinds = [["never solved", (rate) => rate === 0], ["sometimes", (rate) => rate > 0 && rate < 1], ["always", (rate) => rate === 1]];
  return h("section", null, h("h2", null, "How often a model solved each row"), h("div", { class: "cards" }, kinds.map(([name, holds]) => card(name, count(rates.filter(holds).length), `of ${plural(rows.length, "row")}`))),
    h("div", { class: "plots one" }, histogram(rates, { title: "Pass rate", range: [0, 1], bins: 11 })));
}

function notes(found) {
  return (found.notes || []).length ? h("section", null, h("h2", null, "Notes"), h("ul", null, found.notes.map((note) => h("li", null, visible(note))))) : null;
}

export const auditLink = (run) => (run.certificate ? h("a", { class: "button", href: address(["audit", run.id]), title: run.audit }, run.certificate.ok && run.certificate.is_fresh ? "audit passed" : "audit") : null);
