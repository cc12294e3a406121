// Differences of two texts, word by word, and of the settings of runs.

import { h, visible } from "./dom.js";
import { runName } from "./page.js";

const MAX_EDITS = 1500; // beyond these, what is not common at both ends counts as replaced

// [kind, text] in order: "same", "removed" or "added". A shortest edit script (Myers 1986, "An O(ND) difference algorithm").
export function textDiff(before, after) {
  const [a, b] = [wordsOf(before), wordsOf(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const middle = edits(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const whole = [...a.slice(0, start).map((word) => ["same", word]), ...middle, ...a.slice(a.length - end).map((word) => ["same", word])];
  const merged = [];
  for (const [kind, word] of whole) {
    if (merged.length && merged[merged.length - 1][0] === kind) merged[merged.length - 1][1] += word;
    else merged.push([kind, word]);
  }
  return merged;
}

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^]/gu) || [];

function edits(a, b) {
  const replaced = [...a.map((word) => ["removed", word]), ...b.map((word) => ["added", word])];
  const most = Math.min(a.length + b.length, MAX_EDITS);
  const trace = [];
  let reach = new Map([[1, 0]]); // diagonal -> furthest place in a
  for (let d = 0; d <= most; d++) {
    trace.push(new Map(reach));
    for (let k = -d; k <= d; k += 2) {
      let x = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1)) ? reach.get(k + 1) : reach.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      reach.set(k, x);
      if (x >= a.length && x - k >= b.length) return walked(a, b, trace);
    }
  }
  return replaced;
}

function walked(a, b, trace) {
  const found = [];
  let [x, y] = [a.length, b.length];
  for (let d = trace.length - 1; d >= 0; d--) {
    const reach = trace[d];
    const k = x - y;
    const before = k === -d || (k !== d && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1)) ? k + 1 : k - 1;
    const [fromX, fromY] = d ? [reach.get(before), reach.get(before) - before] : [0, 0];
    while (x > fromX && y > fromY) [x, y] = (found.push(["same", a[x - 1]]), [x - 1, y - 1]);
    if (d) found.push(x === fromX ? ["added", b[y - 1]] : ["removed", a[x - 1]]);
    [x, y] = [fromX, fromY];
  }
  return found.reverse();
}

export function diffView(before, after) {
  const tags = { same: "span", removed: "del", added: "ins" };
  return h("div", { class: "text difference" }, textDiff(before, after).map(([kind, text]) => h(tags[kind], null, visible(text))));
}

const GROUPS = [/^model$/, /^sampling/, /^env_args/, /^(?!num_examples$|rollouts_per_example$)/];
const groupOf = (name) => GROUPS.findIndex((group) => group.test(name)) >>> 0;

// What a reader looks for first: the model, sampling, the environment's arguments; counts last.
export const bySetting = (a, b) => groupOf(a) - groupOf(b) || a.localeCompare(b);

// The settings of a run, folded.
export function settingsTable(run, more = []) {
  const settings = Object.entries({ model: run.model, ...run.flat }).filter(([, value]) => value !== "").sort(([a], [b]) => bySetting(a, b));
  return h("details", { class: "settings" }, h("summary", null, "Settings"),
    h("table", { class: "compared" }, h("tbody", null, [...settings, ...more].map(([name, value]) => h("tr", null, h("th", { scope: "row" }, visible(name)), h("td", null, visible(String(value))))))));
}

// A table of the settings in which runs differ, a column for each.
export function settingsDiff(runs) {
  const flats = runs.map((run) => new Map(Object.entries({ model: run.model, ...run.flat })));
  const names = [...new Set(flats.flatMap((flat) => [...flat.keys()]))].sort(bySetting);
  const differing = names.filter((name) => new Set(flats.map((flat) => JSON.stringify(flat.get(name) ?? null))).size > 1);
  if (!differing.length) return h("p", { class: "none" }, "Their recorded settings are the same.");
  return h("details", { class: "settings", open: true }, h("summary", null, `Settings that differ (${differing.length} of ${names.length})`),
    h("table", { class: "compared" }, h("thead", null, h("tr", null, h("th", null, "setting"), runs.map((run) => h("th", null, visible(runName(run)), h("br"), h("small", null, visible(run.id)))))),
      h("tbody", null, differing.map((name) => h("tr", null, h("th", { scope: "row" }, visible(name)), flats.map((flat) => h("td", null, flat.has(name) ? visible(String(flat.get(name)).slice(0, 300)) : "–")))))));
}
