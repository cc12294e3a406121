// The columns of one file of saved rollouts in the browser: updated, filtered, sorted and counted here.

import { ask } from "./api.js";
import { compile } from "./expression.js";
import { isKnown } from "./format.js";

const cache = new Map();
const MAX_CACHED = 6;
const MAX_PREVIEWS = 4000;

// The saved rollouts of a run, or of one step of a training run; cached while in use.
export function rowsOf(run, step = null) {
  const key = `${run}\n${step ?? ""}`;
  const rows = cache.get(key) || new Rows(run, step);
  cache.delete(key);
  cache.set(key, rows);
  while (cache.size > MAX_CACHED) cache.delete(cache.keys().next().value);
  return rows;
}

export const VIEW = { sort: "example", q: "", error: "", stop: "", low: null, high: null, where: "", by: "" };

const ALIASES = { tokens: "output_tokens", stop: "stop_condition" };
const HIDDEN = new Set(["key"]);

export class Rows {
  constructor(run, step) {
    this.run = run;
    this.step = step;
    this.found = new Map(); // searched text -> {rows, done}
    this.previewed = new Map();
    this.reset(-1);
  }

  reset(generation) {
    this.generation = generation;
    this.total = 0;
    this.progress = 0;
    this.complete = false;
    this.damage = null;
    this.columns = Object.create(null); // without a prototype: a metric may be called __proto__ or constructor
    this.metrics = Object.create(null);
    this.extra = Object.create(null); // info.<key> -> its values, loaded on demand
    this.info = [];
    this.ends = {};
    this.replaced = new Set();
    this.groups = null;
    this.agreement = null;
    this.canLabel = false;
    this.found.clear();
    this.previewed.clear();
  }

  // Fetch new rows; `changed` is called after each response.
  async update(changed = () => {}) {
    do {
      const answer = await ask("columns", {
        run: this.run, step: this.step, first: this.total, generation: this.generation,
      });
      if (answer.generation !== this.generation || answer.first !== this.total) this.reset(answer.generation);
      this.take(answer);
      changed();
    } while (!this.complete);
    if (this.step === null) this.takeLabels(await ask("labels", { run: this.run }));
    changed();
  }

  // A person's labels of the rollouts: 1 right, 0 wrong, null unknown.
  takeLabels(answer) {
    this.canLabel = Boolean(answer.token) || this.canLabel;
    this.agreement = answer.agreement;
    this.columns.label = new Array(this.total).fill(null);
    for (const [row, isRight] of Object.entries(answer.labels)) this.columns.label[row] = Number(isRight);
  }

  take(answer) {
    const before = answer.first;
    for (const [name, values] of Object.entries(answer.columns)) {
      const plain = values && values.codes ? values.codes.map((code) => (code < 0 ? null : values.names[code])) : values;
      this.columns[name] = extend(this.columns[name], plain);
    }
    for (const [name, values] of Object.entries(answer.metrics)) {
      this.metrics[name] = extend(this.metrics[name] || new Array(before).fill(null), values);
    }
    if (answer.total > this.total) (this.found.clear(), (this.groups = null));
    Object.assign(this, { total: answer.total, progress: answer.progress, complete: answer.complete, damage: answer.damage, info: answer.info || [], ends: answer.ends || {} });
    this.replaced = new Set(answer.replaced);
  }

  value(name, row) {
    if (name === "row") return row;
    if (name.startsWith("metric:")) return (this.metrics[name.slice(7)] || [])[row];
    if (name.startsWith("info.")) return (this.extra[name] || [])[row];
    return (this.columns[name] || [])[row];
  }

  // What ended a rollout of one turn, or, without a row, those of a run whose rollouts all have one.
  endedBy(stop, row = null) {
    const { turns = [] } = this.columns;
    const isOne = row === null ? turns.every((n) => !(n > 1)) : turns[row] === 1;
    return isOne && Object.hasOwn(this.ends, stop) ? this.ends[stop] : stop;
  }

  // A column by the name that a filter has for it.
  named(name, row) {
    if (name === "seconds") return isKnown(this.columns.total_ms?.[row]) ? this.columns.total_ms[row] / 1000 : null;
    if (name === "label" && name in this.metrics) return this.metrics[name][row];
    if (name in this.columns && !HIDDEN.has(name)) return this.columns[name][row];
    if (Object.hasOwn(ALIASES, name) && !(name in this.metrics)) return this.value(ALIASES[name], row);
    return name in this.metrics ? this.metrics[name][row] : this.value(name, row);
  }

  get names() {
    return [...new Set([...Object.keys(this.columns).filter((name) => !HIDDEN.has(name)), "seconds", ...Object.keys(ALIASES), ...Object.keys(this.metrics), ...this.info])];
  }

  // The test of a filter, which throws a sentence for a wrong one.
  filter(where) {
    const { test, used } = compile(where, this.names);
    return { test: (row) => test((name) => this.named(name, row)), used };
  }

  // Fetch a column of `info` up to the last row; `changed` is called after each response.
  async load(name, changed = () => {}) {
    if (!name.startsWith("info.")) return;
    this.extra[name] ||= [];
    const values = this.extra[name];
    while (values.length < this.total) {
      const first = values.length;
      const answer = await ask("values", { run: this.run, step: this.step, name, first });
      if (this.extra[name] !== values || values.length !== first || !answer.values.length) return;
      for (const value of answer.values) values.push(value);
      changed();
    }
  }

  // Whether the task was not done: an error, an unknown reward, or not solved by the metric or the threshold.
  isFailure(row, { metric = "", threshold = 1 } = {}) {
    if (this.columns.error?.[row]) return true;
    const solved = metric && metric in this.metrics ? this.metrics[metric][row] : null;
    if (isKnown(solved)) return solved < 1;
    const reward = this.columns.reward?.[row];
    return !isKnown(reward) || reward < threshold;
  }

  // Row numbers of each example, in file order, without replaced ones.
  byExample() {
    if (!this.groups) {
      const { example = [], key = [] } = this.columns;
      this.groups = new Map();
      for (let row = 0; row < this.total; row++) {
        if (this.replaced.has(row)) continue;
        const name = key[row] ?? example[row];
        if (!this.groups.has(name)) this.groups.set(name, []);
        this.groups.get(name).push(row);
      }
    }
    return this.groups;
  }

  // Row numbers of a view, in its order.
  select(view) {
    const chosen = [];
    const hits = view.q ? this.found.get(view.q)?.rows || new Set() : null;
    const { reward = [], error = [], stop_condition: stop = [] } = this.columns;
    const where = view.where ? this.filter(view.where) : null;
    for (let row = 0; row < this.total; row++) {
      if (this.replaced.has(row) || (hits && !hits.has(row))) continue;
      if (view.low !== null && !(reward[row] >= view.low)) continue;
      if (view.high !== null && !(reward[row] <= view.high)) continue;
      if (view.error === "any" ? !error[row] : view.error === "none" ? error[row] : view.error && error[row] !== view.error) continue;
      if (view.stop && (stop[row] || "none") !== view.stop) continue;
      if (where && !where.test(row)) continue;
      chosen.push(row);
    }
    return this.sort(chosen, view.sort);
  }

  sort(chosen, by) {
    const down = by.startsWith("-");
    const name = down ? by.slice(1) : by;
    if (name === "row") return down ? chosen.reverse() : chosen;
    const { example = [], sibling = [] } = this.columns;
    const position = (a, b) => compare(example[a], example[b]) || compare(sibling[a], sibling[b]) || a - b;
    if (name === "example") return chosen.sort(down ? (a, b) => position(b, a) : position);
    const keys = new Map(chosen.map((row) => [row, this.value(name, row) ?? null]));
    return chosen.sort((a, b) => {
      const [left, right] = [keys.get(a), keys.get(b)];
      if (left === null || right === null) return (left === null) - (right === null) || position(a, b);
      return (down ? compare(right, left) : compare(left, right)) || position(a, b);
    });
  }

  // Search the texts of all rows; `changed` is called after each response. A new search cancels the previous one.
  async search(text, changed) {
    if (!text || this.found.has(text)) return;
    const entry = { rows: new Set(), done: false };
    this.found.set(text, entry);
    this.wanted = text;
    let first = 0;
    while (first !== null && this.wanted === text && this.found.get(text) === entry) {
      const answer = await ask("search", { run: this.run, step: this.step, text, first });
      answer.rows.forEach((row) => entry.rows.add(row));
      first = answer.next;
      entry.done = first === null;
      changed();
    }
    if (!entry.done && this.found.get(text) === entry) this.found.delete(text);
  }

  async previews(wanted) {
    const missing = wanted.filter((row) => !this.previewed.has(row));
    if (!missing.length) return;
    const answer = await ask("previews", { run: this.run, step: this.step, rows: missing.join(",") });
    if (this.previewed.size > MAX_PREVIEWS) this.previewed.clear();
    for (const row of missing) this.previewed.set(row, answer.previews[row]);
  }

  // Rows of the same example, sorted by sibling number.
  siblings(row) {
    const { example = [], key = [] } = this.columns;
    return this.sort([...(this.byExample().get(key[row] ?? example[row]) || [])], "example");
  }

  // Number of a row among its siblings, as saved or, where that is not, in the order of the file.
  siblingNumber(row) {
    const number = this.value("sibling", row);
    return isKnown(number) ? number : this.siblings(row).indexOf(row);
  }

  // The row of an example's id, as text, and a sibling's number; undefined without one.
  find(example, sibling) {
    return [...this.byExample().values()].flatMap((rows) => (String(this.columns.example[rows[0]]) === example ? rows : [])).find((row) => this.siblingNumber(row) === sibling);
  }

  numbers(name, chosen) {
    return chosen.map((row) => this.value(name, row)).filter(isKnown);
  }

  counts(name, chosen) {
    const counted = new Map();
    for (const row of chosen) {
      const value = this.value(name, row) ?? "none";
      counted.set(value, (counted.get(value) || 0) + 1);
    }
    return [...counted].sort((a, b) => b[1] - a[1]);
  }

  // Mean of the known values and its standard error, siblings counted as dependent (Miller 2024, eq. 4).
  mean(name, chosen) {
    const sums = new Map();
    let n = 0;
    let total = 0;
    for (const row of chosen) {
      const value = this.value(name, row);
      if (isKnown(value)) [n, total] = [n + 1, total + value];
    }
    const center = total / n;
    for (const row of chosen) {
      const value = this.value(name, row);
      if (!isKnown(value)) continue;
      const cluster = this.columns.key[row] || this.columns.example[row];
      sums.set(cluster, (sums.get(cluster) || 0) + value - center);
    }
    const squares = [...sums.values()].reduce((sum, part) => sum + part * part, 0);
    const stderr = sums.size < 2 ? NaN : Math.sqrt((sums.size / (sums.size - 1)) * squares) / n;
    return { n, mean: n ? center : NaN, stderr };
  }
}

function extend(before, values) {
  if (!before || !before.length) return values;
  for (const value of values) before.push(value);
  return before;
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined || b === null || b === undefined) return (a ?? null) === null ? 1 : -1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
