// Sets of runs: the list of them, and one as a table of models and environments.

import { ask, isCopy } from "./api.js";
import { h, replace, visible } from "./dom.js";
import { ago, count, interval, isKnown, number, plural } from "./format.js";
import { address, follow, problem } from "./page.js";

const setAddress = (id) => address(["set", id]);
const states = (one) => Object.entries(one.states).map(([state, n]) => `${count(n)} ${state}`).join(", ");

// A link to the sets, shown once there is one.
export function setsLink() {
  const link = h("a", { class: "button", href: address(["sets"]), hidden: true }, "Sets");
  ask("sets").then(({ sets }) => (link.hidden = !sets.length)).catch(() => {});
  return link;
}

export async function setsPage(main) {
  async function draw() {
    const { sets } = await ask("sets");
    const row = (one) => h("tr", null, h("td", null, h("a", { href: setAddress(one.id) }, visible(`${one.name} / ${one.set}`))),
      h("td", null, visible(states(one))), h("td", null, visible(one.models.join(", "))), h("td", null, visible(one.environments.join(", "))),
      h("td", { class: "number" }, h("time", { datetime: one.created, title: one.created }, ago(one.created))));
    replace(main, h("h1", null, plural(sets.length, "set") + " of runs"),
      sets.length ? h("div", { class: "wide-table" }, h("table", { class: "compared" }, h("thead", null, h("tr", null, ["set", "runs", "models", "environments", "begun"].map((title) => h("th", null, title)))), h("tbody", null, sets.map(row))))
        : h("p", { class: "none" }, "No set yet: ", h("code", null, "vf-eval nightly.toml"), " of several runs makes one."));
  }

  await draw();
  return { crumbs: [["sets", null]], title: "sets", keys: { u: () => (location.hash = "#/") }, help: [["u", "all runs"]], close: isCopy ? () => {} : follow(null, draw) };
}

export async function setPage(main, { parts }) {
  const up = address(["sets"]);
  async function draw() {
    const one = await ask("set", { set: parts[1] });
    const rows = [...new Set(one.cells.map((cell) => cell.row))];
    const columns = [...new Set(one.cells.map((cell) => cell.column))];
    const failed = one.cells.filter((cell) => cell.errors || cell.state === "failed").length;
    const verdicts = one.cells.map((cell) => cell.change?.verdict);
    const worse = verdicts.filter((verdict) => verdict === "worse" || verdict === "lower").length;
    replace(main, h("div", { class: "title" }, h("h1", null, visible(`${one.name} / ${one.set}`)),
      h("span", { class: `status ${one.complete ? "finished" : "interrupted"}` }, one.complete ? "complete" : "not complete"),
      h("span", { class: "facts" }, visible(`${states(one)} · begun ${one.created.slice(0, 16).replace("T", " ")} UTC${failed ? ` · ${plural(failed, "run")} with errors` : ""}${worse ? ` · ${count(worse)} worse` : ""}`))),
    h("p", { class: "facts" }, one.before ? ["Mean reward ± one standard error, and the change against ", h("a", { href: setAddress(one.before) }, visible(one.before)), "; p is adjusted for all pairs (Holm)."]
      : "Mean reward ± one standard error. No complete set precedes this one here."),
    one.problem ? problem(one.problem) : null,
    h("div", { class: "wide-table" }, h("table", { class: "compared set" },
      h("thead", null, h("tr", null, h("th", null, "model"), columns.map((name) => h("th", { class: "number" }, visible(name))))),
      h("tbody", null, rows.map((name) => h("tr", null, h("th", { scope: "row" }, visible(name)),
        columns.map((column) => h("td", { class: "number" }, one.cells.filter((cell) => cell.row === name && cell.column === column).map(drawn)))))))),
    one.without_partner.length ? h("p", { class: "facts" }, visible(`Without a partner: ${one.without_partner.join(", ")}`)) : null);
  }

  await draw();
  return { crumbs: [["sets", up], [parts[1], null]], title: parts[1], keys: { u: () => (location.hash = up) }, help: [["u", "all sets"]], close: isCopy ? () => {} : follow(null, draw) };
}

// The numbers of a run: reward, errors, change.
function drawn(cell) {
  const reward = cell.run ? h("a", { href: address(["run", cell.run]) }, isKnown(cell.reward) ? interval(cell.reward, cell.stderr) : cell.state) : visible(cell.state);
  const notes = [];
  if (cell.run && cell.state !== "complete") notes.push(h("small", { class: "bad" }, visible(cell.state)));
  if (cell.errors) notes.push(h("small", { class: "bad" }, plural(cell.errors, "error")));
  if (cell.unscored) notes.push(h("small", null, `${count(cell.unscored)} not scored`));
  return h("div", { class: "two" }, reward, changed(cell), notes);
}

function changed({ run, change }) {
  if (!change) return null;
  const text = isKnown(change.difference) ? `${change.difference > 0 ? "+" : ""}${number(change.difference)} ${change.verdict}` : "not compared";
  const kind = { worse: "bad", lower: "bad", better: "good", higher: "good" }[change.verdict] || "";
  return h("small", null, h("a", { class: kind, href: address(["compare", change.baseline, run]), title: change.sentence }, visible(text)));
}
