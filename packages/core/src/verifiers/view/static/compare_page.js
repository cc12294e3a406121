// Comparison of runs: two example by example, sorted by the difference; several in a table. The server has the statistics.

import { ask } from "./api.js";
import { diffView, settingsDiff } from "./diff.js";
import { h, replace, visible } from "./dom.js";
import { count, interval, isKnown, number, plural } from "./format.js";
import { address, card, pageOf, problem, remember, rewardChip, runName, select } from "./page.js";
import { histogram } from "./plots.js";
import { rowsOf } from "./rows.js";
import { rewardRange } from "./rows_view.js";
import { Table } from "./table.js";
import { facts, transcript } from "./transcript.js";

const SAME = 1e-9;

// Examples of both runs: [{name, a: rows, b: rows, left, right, change}]; rewards are means over siblings.
export function paired(a, b) {
  const byHash = a.columns.key.some(Boolean) && b.columns.key.some(Boolean) && shares(a, b, "key");
  const [left, right] = [grouped(a, byHash), grouped(b, byHash)];
  const pairs = [];
  for (const [name, ours] of left) {
    const theirs = right.get(name);
    if (!theirs) continue;
    const means = [a.mean("reward", ours).mean, b.mean("reward", theirs).mean];
    pairs.push({ name: String(a.columns.example[ours[0]] ?? name), key: String(name), a: a.sort(ours, "example"), b: b.sort(theirs, "example"), left: means[0], right: means[1], change: means[1] - means[0] });
  }
  return { pairs, onlyLeft: left.size - pairs.length, onlyRight: right.size - pairs.length };
}

function shares(a, b, column) {
  const known = new Set(a.columns[column]);
  return b.columns[column].some((value) => value && known.has(value));
}

function grouped(rows, byHash) {
  const groups = new Map();
  for (let row = 0; row < rows.total; row++) {
    if (rows.replaced.has(row)) continue;
    const name = byHash ? rows.columns.key[row] : rows.columns.example[row];
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return groups;
}

const ORDERS = {
  change: [["size", "differences first"], ["worse", "worse on the right first"], ["better", "better on the right first"], ["example", "in order of examples"]],
  size: (x, y) => apart(y) - apart(x), worse: (x, y) => x.change - y.change, better: (x, y) => y.change - x.change,
  example: (x, y) => x.name.localeCompare(y.name, "en", { numeric: true }),
};

const apart = (pair) => (isKnown(pair.change) ? Math.abs(pair.change) : isKnown(pair.left) !== isKnown(pair.right) ? Infinity : -1);

async function loadBoth(parts) {
  const ids = parts.slice(1, 3);
  const [runs, sides] = [await Promise.all(ids.map((run) => ask("run", { run }))), ids.map((id) => rowsOf(id))];
  await Promise.all(sides.map((rows) => rows.update()));
  return { ids, runs, sides, ...paired(...sides) };
}

function ordered(pairs, order, only) {
  const chosen = only ? pairs.filter((pair) => !(Math.abs(pair.change) < SAME)) : [...pairs];
  const by = ["worse", "better", "example"].includes(order) ? ORDERS[order] : ORDERS.size;
  return chosen.sort((x, y) => by(x, y) || ORDERS.example(x, y));
}

export async function comparePage(main, { parts, query }) {
  const { ids, runs, sides, pairs, onlyLeft, onlyRight } = await loadBoth(parts);
  const view = { order: query.order || "size", only: query.only || "" };
  const range = sides.map(rewardRange).reduce((x, y) => [Math.min(x[0], y[0]), Math.max(x[1], y[1])]);
  const side = (run, letter) => h("a", { class: `side ${letter}`, href: pageOf(run) }, h("b", null, letter.toUpperCase()), " ", visible(runName(run)), h("small", null, visible(run.id)));
  const known = pairs.filter((pair) => isKnown(pair.change));
  const { found, reason } = await compared(ids);
  const widest = known.reduce((most, pair) => Math.max(most, Math.abs(pair.change)), 0) || 1;
  const wins = known.filter((pair) => pair.change > SAME).length;
  const losses = known.filter((pair) => pair.change < -SAME).length;
  const table = new Table({
    label: "examples", height: 56, href: (pair) => address(["compare", ...ids, pair.key], view),
    columns: [{ title: "#", width: "6rem" }, { title: "Task", width: "minmax(18rem, 1fr)" }, { title: "A", width: "8rem", className: "number" }, { title: "B", width: "8rem", className: "number" }, { title: "B − A", width: "8rem", className: "number" }],
    draw: (pair) => [h("span", { class: "id" }, visible(pair.name.slice(0, 14))), h("div", { class: "two" }, h("span", null, visible(sides[0].previewed.get(pair.a[0])?.question || "…")), h("small", null, `${pair.a.length} and ${plural(pair.b.length, "rollout")}`)),
      rewardChip(pair.left, range), rewardChip(pair.right, range),
      h("b", { class: pair.change > SAME ? "good" : pair.change < -SAME ? "bad" : "" }, isKnown(pair.change) ? (pair.change > 0 ? "+" : "") + number(pair.change) : "–")],
    prepare: async (wanted) => {
      const first = wanted.map((pair) => pair.a[0]);
      const missing = first.some((row) => !sides[0].previewed.has(row));
      await sides[0].previews(first);
      return missing;
    },
  });
  const shown = h("p", { class: "facts", role: "status" });
  const controls = h("div", { class: "controls" }, select("Order", ORDERS.change, view.order, (order) => set({ order })),
    select("Which", [["", "all examples"], ["1", "only where they differ"]], view.only, (only) => set({ only })), shown);
  replace(main, h("div", { class: "title" }, h("h1", null, "Comparison"), side(runs[0], "a"), side(runs[1], "b"),
    h("a", { class: "button", href: address(["compare", ids[1], ids[0]]) }, "swap")),
  pairs.length ? null : problem("These runs have no example in common."),
  h("div", { class: "cards" }, card("A", interval(sides[0].mean("reward", pairs.flatMap((p) => p.a)).mean, NaN)), card("B", interval(sides[1].mean("reward", pairs.flatMap((p) => p.b)).mean, NaN)),
    card("B − A", found ? interval(found.difference, found.stderr) : "–", !found ? "" : found.stderr > 0 ? `± one standard error; ${found.interval}` : found.interval),
    card("verdict", found ? found.verdict : "–", found ? found.sentence : reason),
    card("better", count(wins)), card("worse", count(losses)), card("same", count(known.length - wins - losses)),
    card("examples", count(pairs.length), [onlyLeft ? `${count(onlyLeft)} only in A` : "", onlyRight ? `${count(onlyRight)} only in B` : ""].filter(Boolean).join(", "))),
  h("div", { class: "plots one" }, histogram(known.map((pair) => pair.change), { title: "B − A over examples", bins: 21, range: [-widest, widest] })), settingsDiff(runs), controls, table.element);
  set({});

  function set(change) {
    Object.assign(view, change);
    remember(["compare", ...ids], { order: view.order === "size" ? "" : view.order, only: view.only });
    const chosen = ordered(pairs, view.order, view.only);
    shown.textContent = plural(chosen.length, "example");
    table.show(chosen);
  }

  return { crumbs: [["comparison", null]], title: "comparison", keys: { u: () => (location.hash = "#/") }, onkey: (name) => table.key(name),
    help: [["j k", "next, previous example"], ["Enter", "open side by side"]], close: () => table.close() };
}

async function compared(ids) {
  try {
    const answer = await ask("compare", { runs: ids.join("\n") });
    return { found: answer.differences[0], reason: answer.refused.length ? `not comparable because ${answer.refused[0].because.join("; ")}` : "" };
  } catch {
    return { found: null, reason: "this copy has no statistics of these two" };
  }
}

// Any number of runs: those of equal settings with each other, else each with the first of its environment.
export async function comparedPage(main, { parts }) {
  const ids = parts.slice(1);
  const answer = await ask("compare", { runs: ids.join("\n") });
  const names = new Map(answer.runs.map((run) => [run.name, run]));
  const cell = (text, className = "") => h("td", { class: className }, text);
  const name = (id) => h("td", null, h("a", { href: address(["run", id]) }, visible(`${names.get(id).env_id} · ${names.get(id).model}`)), h("br"), h("small", null, visible(id)));
  const rows = answer.differences.map((found) => h("tr", null, name(found.baseline), name(found.run), cell(number(found.baseline_mean), "number"), cell(number(found.run_mean), "number"),
    h("td", { class: "number" }, h("a", { href: address(["compare", found.baseline, found.run]) }, interval(found.difference, found.stderr))), cell(found.interval),
    cell(`${count(found.won)} / ${count(found.lost)} / ${count(found.equal)}`, "number"), cell(found.sentence, { better: "good", worse: "bad" }[found.verdict] || "")));
  const refused = answer.refused.map((pair) => h("tr", null, name(pair.baseline), name(pair.run), h("td", { colspan: 6 }, visible(`not comparable because ${pair.because.join("; ")}`))));
  replace(main, h("h1", null, `Comparison of ${plural(ids.length, "run")}`),
    h("p", { class: "facts" }, "Differences of the mean reward, example by example, ± one standard error. p is adjusted for the number of comparisons (Holm)."),
    h("table", { class: "compared" }, h("thead", null, h("tr", null, ["A", "B", "mean of A", "mean of B", "B − A", "interval", "won / lost / equal", "verdict"].map((title) => h("th", null, title)))), h("tbody", null, rows, refused)),
    answer.without_partner.length ? h("p", { class: "facts" }, "Without a partner of the same environment, arguments, model and sampling: ", visible(answer.without_partner.join(", "))) : null);
  return { crumbs: [["comparison", null]], title: "comparison", keys: { u: () => (location.hash = "#/") }, help: [["u", "back to the runs"]], close: () => {} };
}

export async function pairPage(main, { parts, query }) {
  const { ids, runs, sides, pairs } = await loadBoth(parts);
  const order = ordered(pairs, query.order || "size", query.only);
  const at = order.findIndex((pair) => pair.key === parts[3]);
  const pair = order[at] || pairs.find((one) => one.key === parts[3]);
  if (!pair) throw new Error("this example is not in both runs");
  const place = (other) => address(["compare", ...ids, other.key], query);
  const go = (move) => order[at + move] && location.replace(place(order[at + move]));
  const opened = [null, null];
  const difference = h("section", { class: "differences", hidden: true });
  const drawDifference = () => !difference.hidden && opened.every(Boolean) && replace(difference, h("p", { class: "facts" }, "What B wrote in place of what A wrote."), diffView(...opened.map(written)));
  const panes = ["a", "b"].map((letter, i) => {
    const content = h("div");
    const open = async (row) => {
      const rollout = await ask("rollout", { run: ids[i], row });
      opened[i] = rollout;
      replace(content, transcript(rollout), h("aside", null, facts(rollout)));
      drawDifference();
    };
    const choices = pair[letter].map((row, n) => [String(row), `rollout ${n + 1} of ${pair[letter].length}, reward ${number(sides[i].value("reward", row))}`]);
    return { open: () => open(pair[letter][0]), element: h("section", { class: `pane ${letter}`, "aria-label": `run ${letter}` },
      h("header", null, h("b", null, letter.toUpperCase()), " ", visible(runName(runs[i])), select(`Rollout of ${letter}`, choices, choices[0][0], open)), content) };
  });
  const link = (text, other, key) => h("a", { class: "button", href: other ? place(other) : null, "aria-disabled": other ? null : "true", title: `key ${key}` }, text);
  replace(main, h("nav", { class: "pager", "aria-label": "examples" }, link("← previous", order[at - 1], "k"), link("next →", order[at + 1], "j"), h("span", { class: "facts" }, `${count(at + 1)} of ${count(order.length)}`),
    h("b", null, visible(`example ${pair.name}`)), h("span", { class: pair.change > 0 ? "good" : pair.change < 0 ? "bad" : "" }, `B − A ${number(pair.change)}`),
    h("button", { type: "button", "aria-pressed": "false", onclick: toggleDifference, title: "key d" }, "difference of the texts")), difference,
  h("div", { class: "panes" }, panes.map((pane) => pane.element)));
  function toggleDifference() {
    difference.hidden = !difference.hidden;
    drawDifference();
  }

  await Promise.all(panes.map((pane) => pane.open()));
  const up = address(["compare", ...ids], query);
  return { crumbs: [["comparison", up], [`example ${pair.name}`, null]], title: "comparison",
    keys: { j: () => go(1), ArrowRight: () => go(1), k: () => go(-1), ArrowLeft: () => go(-1), d: toggleDifference, u: () => (location.hash = up) },
    help: [["j k", "next, previous example"], ["d", "difference of the texts"], ["u", "back to the comparison"]], close: () => {} };
}

// What a rollout's model wrote, with its tool calls.
function written(rollout) {
  const said = rollout.messages.filter((message) => message.section === "completion" && message.role === "assistant");
  return said.map((message) => [message.reasoning, ...message.parts.filter((part) => part.type === "text").map((part) => part.text), ...(message.calls || []).map((call) => `${call.name}(${typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments)})`)].filter(Boolean).join("\n")).join("\n\n");
}
