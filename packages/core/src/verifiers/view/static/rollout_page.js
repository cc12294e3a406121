// One rollout: its conversation, scores and siblings, and links to the previous and next rollout of the list.

import { ask, label } from "./api.js";
import { copyButton } from "./copy.js";
import { h, replace, visible } from "./dom.js";
import { count, isKnown } from "./format.js";
import { address, keep, problem, rewardChip, runName, setting, stepName, successOf } from "./page.js";
import { rowsOf } from "./rows.js";
import { labelName, queryOf, rewardRange, viewOf } from "./rows_view.js";
import { facts, outline, toggleRendered, toggleTokens, transcript } from "./transcript.js";

export async function rolloutPage(main, { parts, query }) {
  const isTraining = parts[0] === "training";
  const [run, step, ...which] = isTraining ? [parts[1], Number(parts[2]), ...parts.slice(3)] : [parts[1], null, ...parts.slice(2)];
  const base = isTraining ? ["training", run, String(step)] : ["run", run];
  const listBase = isTraining ? ["training", run] : base;
  const view = viewOf(query);
  const labelled = h("span", { class: "labelled" });
  const place = (other) => address([...base, String(other)], queryOf(view));
  const rows = rowsOf(run, step);
  const row = which[0] === "example" ? await rowOf(rows, which[1], Number(which[2])) : Number(which[0]);
  const [rollout, described] = await Promise.all([ask("rollout", { run, step, row }), ask("run", { run })]);
  const branches = h("div");
  const side = h("aside", { "aria-label": "scores" }, outline(rollout), branches, facts(rollout));
  const bar = h("nav", { class: "pager", "aria-label": "rollouts" });
  replace(main, bar, h("div", { class: "rollout" }, transcript(rollout, { mark: view.q }), side));
  let order = [row];
  const go = (move) => {
    const at = order.indexOf(row) + move;
    if (at >= 0 && at < order.length) location.replace(place(order[at]));
  };
  const toSibling = (move) => {
    const same = rows.siblings(row);
    const other = same[same.indexOf(row) + move];
    if (other !== undefined) location.replace(place(other));
  };

  function toFailure() {
    const at = order.indexOf(row);
    const other = order.find((one, i) => i > at && rows.isFailure(one, successOf(described)));
    if (other !== undefined) location.replace(place(other));
  }

  const permalink = () => location.href.split("#")[0] + address([...base, "example", String(rollout.example_id), String(rows.siblingNumber(row))]);

  function drawLabel() {
    const now = rows.value("label", row) ?? null;
    if (!rows.canLabel) return replace(labelled, now === null ? null : h("span", { class: "facts", title: "a person's label of this rollout" }, "labelled ", labelName(now)));
    const choice = (text, value, key) => h("button", { type: "button", class: value ? "right" : "wrong", "aria-pressed": String(now === Number(value)), title: `key ${key}; again takes it back`, onclick: () => mark(value) }, text);
    replace(labelled, choice("right", true, "y"), choice("wrong", false, "n"));
  }

  async function mark(value) {
    if (!rows.canLabel) return;
    try {
      rows.takeLabels(await label(run, row, rows.value("label", row) === Number(value) ? null : value));
      drawLabel();
    } catch (error) {
      replace(labelled, problem(error));
    }
  }

  function drawBar() {
    const at = order.indexOf(row);
    const same = rows.total ? rows.siblings(row) : [];
    const link = (text, other, key) => h("a", { class: "button", href: other === undefined ? null : place(other), "aria-disabled": other === undefined ? "true" : null, title: `key ${key}` }, text);
    replace(bar, link("← previous", order[at - 1], "k"), link("next →", order[at + 1], "j"),
      h("span", { class: "facts" }, at < 0 ? "not in the filtered list" : `${count(at + 1)} of ${count(order.length)}`),
      h("b", null, visible(`example ${rollout.example_id ?? row}${isKnown(rollout.sibling) ? `.${rollout.sibling}` : ""}`)),
      labelled,
      rows.total ? copyButton(permalink, { label: "copy link", title: "an address of this example and sibling, which also opens it in a later copy of the run" }) : null,
      h("button", { type: "button", class: "quiet", title: "Markdown and formulas drawn, or the text as it was written (key v)", onclick: () => toggleRendered(main) }, "raw / drawn"),
      same.length > 1 ? h("span", { class: "siblings" }, "siblings ", same.map((other) => h("a", { href: place(other), "aria-current": other === row ? "true" : null, title: `reward of rollout ${other}` },
        rewardChip(rows.value("reward", other), rewardRange(rows))))) : null);
  }

  drawBar();
  await rows.update();
  drawLabel();
  replace(branches, tree(rows, row, place));
  if (view.q) await rows.search(view.q, () => {});
  try {
    if (view.where) await Promise.all(rows.filter(view.where).used.map((name) => rows.load(name)));
    order = rows.select(view);
  } catch { // a wrong filter, which the list explains
    order = rows.select({ ...view, where: "" });
  }
  drawBar();
  const toggle = (name) => {
    const on = !document.body.classList.contains(name);
    document.body.classList.toggle(name, on);
    keep(name, on ? "1" : "");
  };
  for (const name of ["mono", "folded"]) document.body.classList.toggle(name, Boolean(setting(name, "")));
  return {
    crumbs: [[described.env || described.name, address(listBase, isTraining ? { step, ...queryOf(view) } : queryOf(view))], [`${isTraining ? `${stepName(step)}, ` : ""}example ${rollout.example_id ?? row}${isKnown(rollout.sibling) ? `.${rollout.sibling}` : ""}`, null]],
    title: `${runName(described)}, rollout ${row}`,
    keys: {
      j: () => go(1), ArrowRight: () => go(1), k: () => go(-1), ArrowLeft: () => go(-1), "]": () => toSibling(1), "[": () => toSibling(-1),
      f: () => toFailure(),
      y: () => mark(true), n: () => mark(false), m: () => toggle("mono"), v: () => toggleRendered(main), r: () => toggle("folded"),
      l: toggleTokens,
      u: () => (location.hash = address(listBase, isTraining ? { step, ...queryOf(view) } : queryOf(view))),
    },
    help: [["j k or arrows", "next, previous rollout of the list"], ["[ ]", "siblings of the example"], ["f", "next failure of the list"], ["y n", "label as right, wrong"], ["r", "fold reasoning"], ["l", "log-probabilities"], ["m", "fixed-width text"], ["v", "text as it was written, or drawn"], ["u", "back to the list"]],
    close: () => {},
  };
}

// The tree of a rollout that shares turns with siblings: a line for each, from where it left, and the mean reward of the rollouts through each first turn.
function tree(rows, row, place) {
  const number = rows.value("tree", row);
  if (!isKnown(number)) return null;
  const members = rows.siblings(row).filter((other) => rows.value("tree", other) === number);
  if (members.length < 2) return null;
  const rewards = members.map((other) => rows.value("reward", other)).filter(isKnown);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const line = (other) => {
    const turn = rows.value("fork_turn", other);
    const from = turn ? `${"   ".repeat(turn)}└─ from turn ${turn}` : "── from the prompt";
    return h("li", null, h("a", { href: place(other), "aria-current": other === row ? "true" : null }, h("code", null, `${rows.siblingNumber(other)} ${from} `)), rewardChip(rows.value("reward", other), rewardRange(rows)));
  };
  return h("section", { class: "tree", "aria-label": "tree" }, h("h2", null, "Tree"),
    h("p", { class: "facts" }, "worth of the shared turns, the mean of its rollouts: ", rewardChip(mean, rewardRange(rows))),
    h("ul", null, members.map(line)));
}

async function rowOf(rows, example, sibling) {
  await rows.update();
  const row = rows.find(example, sibling);
  if (row === undefined) throw new Error(`no rollout ${sibling} of example ${example} is saved here`);
  return row;
}
