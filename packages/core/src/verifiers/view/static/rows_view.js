// The saved rollouts of a run, or of a training step: plots, filters and the table. Used by both pages.

import { h, replace, visible } from "./dom.js";
import { count, duration, interval, isKnown, number, plural, short } from "./format.js";
import { columnName } from "./expression.js";
import { address, card, chooser, problem, remember, rewardChip, select, shownColumns } from "./page.js";
import { barList, extent, histogram } from "./plots.js";
import { VIEW } from "./rows.js";
import { Table } from "./table.js";

export const labelName = (label) => ({ 1: h("span", { class: "good" }, "right"), 0: h("span", { class: "bad" }, "wrong") })[label] ?? "";
const MAX_METRIC_COLUMNS = 4;
const MAX_CELLS = 64; // rollouts of one example that the table shows
const SHOWN_ANYWAY = new Set(["num_turns"]); // it has a column of its own

export function viewOf(query) {
  const view = { ...VIEW };
  for (const name of ["sort", "q", "error", "stop", "where", "by"]) if (query[name]) view[name] = query[name];
  for (const name of ["low", "high"]) if (query[name]) view[name] = Number(query[name]);
  return view;
}

export function queryOf(view) {
  return Object.fromEntries(Object.entries(view).filter(([name, value]) => value !== VIEW[name] && value !== null));
}

export function rewardRange(rows) {
  const [low, high] = extent((rows.columns.reward || []).filter(isKnown));
  return [Math.min(0, low), Math.max(low >= 0 ? 1 : high, high)];
}

// `success`: {metric, threshold} of a solved rollout, see Rows.isFailure.
// `base`: the parts of the page's address; `link(row, query)`: where a row leads; `weights`: of the reward functions.
export function rowsView(rows, { base, query, link, weights = {}, more = {}, success = {} }) {
  const view = viewOf(query);
  let chosen = [];
  let range = [0, 1];
  const names = () => Object.keys(rows.metrics).sort((a, b) => Object.hasOwn(weights, b) - Object.hasOwn(weights, a));
  const columnNames = () => names().filter((name) => !isReward(name) && !SHOWN_ANYWAY.has(name)).slice(0, MAX_METRIC_COLUMNS);
  const cards = h("div", { class: "cards" });
  const plots = h("div", { class: "plots" });
  const notes = h("div");
  const shown = h("p", { class: "facts", role: "status" });
  const search = h("input", { type: "search", placeholder: "search all text   /", "aria-label": "Search the text of all rollouts", value: view.q });
  const filters = h("div", { class: "controls" });
  const clear = h("button", { type: "button", hidden: true, onclick: () => ((search.value = ""), set({ q: "", error: "", stop: "", low: null, high: null, where: "" })) }, "Clear");
  const where = h("input", { type: "text", class: "wide", placeholder: "filter: reward < 1 and turns > 3", "aria-label": "Filter by an expression", value: view.where, spellcheck: "false" });
  const table = new Table({
    label: "rollouts", columns: [], height: 56, onsort: (name) => set({ sort: view.sort === name ? `-${name}` : view.sort === `-${name}` ? name : descendsFirst(name) ? `-${name}` : name }),
    href: (item) => (typeof item === "object" && "key" in item ? groupLink(item) : link(first(item), queryOf(view))),
    prepare: async (items) => {
      const wanted = items.map(first);
      const missing = wanted.some((row) => !rows.previewed.has(row));
      await rows.previews(wanted);
      return missing;
    },
  });
  const first = (item) => (typeof item === "number" ? item : item.rows[0]);
  let typing = 0;
  const whileTyping = (input, name) => input.addEventListener("input", () => (clearTimeout(typing), (typing = setTimeout(() => set({ [name]: input.value.trim() }), 200))));
  whileTyping(search, "q");
  whileTyping(where, "where");

  function isReward(name) { // the only weighted function, when the reward is that function
    return Object.keys(weights).filter((other) => weights[other]).length === 1 && weights[name] === 1;
  }

  const descendsFirst = (name) => !["example", "stop_condition", "error", "row", "reward", "mean", "passed"].includes(name);

  function columns() {
    if (view.by === "example") return exampleColumns();
    return view.by ? groupColumns() : shownColumns("rows", allColumns());
  }

  function allColumns() {
    const first = new Set(columnNames());
    const metrics = names().filter((name) => !isReward(name) && !SHOWN_ANYWAY.has(name));
    return [
      { id: "example", title: "#", width: "4.5rem", sort: "example", narrow: "3.5rem", cell: idCell },
      { id: "reward", title: "Reward", width: "5.2rem", sort: "reward", className: "number", narrow: "4.6rem", cell: (row) => rewardChip(rows.value("reward", row), range, reasonOf(row)) },
      { id: "texts", title: "Task and last reply", width: "minmax(14rem, 1fr)", narrow: "minmax(0, 1fr)", cell: textCell },
      { id: "answer", title: "Answer", width: "minmax(6rem, 12rem)", optional: true, cell: (row) => visible(rows.previewed.get(row)?.answer || "") },
      ...metrics.map((name) => ({ id: `metric:${name}`, title: name, width: "5.2rem", sort: `metric:${name}`, className: "number", optional: !first.has(name), cell: (row) => number(rows.value(`metric:${name}`, row), 2) })),
      { id: "turns", title: "Turns", width: "4rem", sort: "turns", className: "number", cell: (row) => count(rows.value("turns", row)) },
      { id: "tokens", title: "Tokens", width: "4.8rem", sort: "output_tokens", className: "number", cell: (row) => (isKnown(rows.value("output_tokens", row)) ? count(rows.value("output_tokens", row)) : h("span", { title: "characters" }, `${count(rows.value("chars", row))}c`)) },
      { id: "read", title: "Tokens read", width: "5.5rem", sort: "input_tokens", className: "number", optional: true, cell: (row) => count(rows.value("input_tokens", row)) },
      ...(rows.numbers("trained", chosen.slice(0, 1)).length ? [{ id: "trained", title: "Trained", width: "4.8rem", sort: "trained", cell: (row) => ({ 1: "yes", 0: "no" })[rows.value("trained", row)] ?? "" }] : []),
      ...(rows.agreement ? [{ id: "label", title: "Label", width: "4.4rem", sort: "label", cell: (row) => labelName(rows.value("label", row)) }] : []),
      { id: "time", title: "Time", width: "5rem", sort: "total_ms", className: "number", cell: (row) => duration(rows.value("total_ms", row)) },
      { id: "task", title: "Name of the task", width: "7rem", sort: "task", optional: true, cell: (row) => visible(String(rows.value("task", row) ?? "")) },
      { id: "stop", title: "Stopped by", width: "minmax(6rem, 10rem)", sort: "stop_condition", cell: (row) => (rows.value("error", row) ? h("span", { class: "bad" }, visible(rows.value("error", row))) : visible(rows.endedBy(rows.value("stop_condition", row), row) || "")) },
    ];
  }

  function idCell(row) {
    const sibling = rows.value("sibling", row);
    return h("span", { class: "id" }, visible(String(rows.value("example", row) ?? row).slice(0, 12)), isKnown(sibling) ? h("small", null, `.${sibling}`) : null);
  }

  function textCell(row) {
    const preview = rows.previewed.get(row);
    return h("div", { class: "two" }, h("small", null, preview ? visible(preview.question, view.q) : "…"), h("span", null, preview ? visible(preview.reply || "(no reply)", view.q) : ""));
  }

  // One row for each example; its cells are the siblings, coloured by their rewards.
  function exampleColumns() {
    return [
      { id: "example", title: "#", width: "4.5rem", sort: "example", narrow: "3.5rem", cell: (item) => h("span", { class: "id" }, visible(String(rows.value("example", item.rows[0]) ?? item.rows[0]).slice(0, 12))) },
      { id: "mean", title: "Mean", width: "5.2rem", sort: "mean", className: "number", narrow: "4.6rem", cell: (item) => rewardChip(item.mean, range) },
      { id: "passed", title: "Solved", width: "5rem", sort: "passed", className: "number", cell: (item) => `${item.solved} / ${item.rows.length}` },
      { id: "spread", title: "Spread", width: "5rem", sort: "spread", className: "number", cell: (item) => number(item.spread) },
      { id: "siblings", title: "Rollouts", width: "minmax(10rem, 1fr)", narrow: "minmax(0, 1fr)", cell: (item) => h("div", { class: "heat above" }, item.rows.slice(0, MAX_CELLS).map(heatCell), item.rows.length > MAX_CELLS ? ` and ${count(item.rows.length - MAX_CELLS)} more` : "") },
      { id: "task", title: "Task", width: "minmax(10rem, 1fr)", cell: (item) => visible(rows.previewed.get(item.rows[0])?.question || "…") },
    ];
  }

  // One row for each value of a column, which leads to its rollouts.
  function groupColumns() {
    return [
      { id: "value", title: view.by, width: "minmax(10rem, 1fr)", sort: "value", narrow: "minmax(0, 1fr)", cell: (item) => visible(item.value === null ? "none" : String(item.value)) },
      { id: "mean", title: "Mean", width: "5.2rem", sort: "mean", className: "number", narrow: "4.6rem", cell: (item) => rewardChip(item.mean, range) },
      { id: "stderr", title: "Standard error", width: "7rem", className: "number", cell: (item) => (item.stderr > 0 ? `± ${number(item.stderr)}` : "") },
      { id: "passed", title: "Solved", width: "6rem", sort: "passed", className: "number", cell: (item) => `${count(item.solved)} / ${count(item.rows.length)}` },
      { id: "examples", title: "Examples", width: "5.5rem", sort: "examples", className: "number", cell: (item) => count(item.examples) },
      { id: "errors", title: "Errors", width: "5rem", sort: "errors", className: "number", cell: (item) => (item.errors ? h("span", { class: "bad" }, count(item.errors)) : "0") },
    ];
  }

  function grouped(name) {
    const groups = new Map();
    for (const row of chosen) {
      const key = rows.named(name, row) ?? null;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
    const items = [...groups].map(([key, members]) => {
      const { mean, stderr } = rows.mean("reward", members);
      const solved = members.filter((row) => !rows.isFailure(row, success)).length;
      return { key, value: key, rows: members, mean: isKnown(mean) ? mean : null, stderr, solved, passed: solved / members.length,
        examples: new Set(members.map((row) => rows.columns.key[row] ?? rows.columns.example[row])).size, errors: members.filter((row) => rows.value("error", row)).length };
    });
    const down = view.sort.startsWith("-");
    const by = ["mean", "passed", "examples", "errors"].find((one) => one === view.sort.replace("-", "")) || "value";
    const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    return items.sort((a, b) => (a[by] === null) - (b[by] === null) || (down ? order(b[by], a[by]) : order(a[by], b[by])));
  }

  // The rollouts of a group, by a filter that says what the group has in common.
  function groupLink(item) {
    const quote = typeof item.key !== "string" ? "" : item.key.includes('"') ? "'" : '"';
    const value = item.key === null ? "unknown" : typeof item.key === "string" ? `${quote}${item.key}${quote}` : String(item.key);
    const test = `${columnName(view.by)} = ${value}`;
    return address(base, { ...more, ...queryOf({ ...view, by: "", sort: VIEW.sort, where: view.where ? `(${view.where}) and ${test}` : test }) });
  }

  function heatCell(row) {
    const reward = rows.value("reward", row);
    const share = isKnown(reward) ? (range[1] > range[0] ? (reward - range[0]) / (range[1] - range[0]) : 1) : 0;
    return h("a", { class: isKnown(reward) ? "cell" : "cell unknown", href: link(row, queryOf(view)), title: `rollout ${rows.value("sibling", row) ?? row}: ${isKnown(reward) ? number(reward) : "unknown"}`,
      "aria-label": `rollout ${row}, reward ${number(reward)}`, vars: { "--share": Math.max(0, Math.min(1, share)).toFixed(3) } });
  }

  const rounded = (value) => (value < 1e-9 ? 0 : value); // equal rewards differ by the rounding of their mean

  function examples() {
    const groups = new Map();
    for (const row of chosen) {
      const name = rows.columns.key[row] ?? rows.columns.example[row];
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(row);
    }
    const items = [...groups.values()].map((members) => {
      const known = members.map((row) => rows.value("reward", row)).filter(isKnown);
      const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
      const squares = known.reduce((sum, value) => sum + (value - mean) ** 2, 0);
      const solved = members.filter((row) => !rows.isFailure(row, success)).length;
      return { rows: rows.sort(members, "example"), mean, solved, passed: solved / members.length, spread: known.length > 1 ? rounded(Math.sqrt(squares / (known.length - 1))) : null };
    });
    const down = view.sort.startsWith("-");
    const name = down ? view.sort.slice(1) : view.sort;
    if (!["mean", "passed", "spread"].includes(name)) return down && name === "example" ? items.reverse() : items;
    return items.sort((a, b) => (a[name] === null) - (b[name] === null) || (down ? b[name] - a[name] : a[name] - b[name]));
  }

  function set(change) {
    Object.assign(view, change);
    remember(base, { ...more, ...queryOf(view) });
    if (where.value.trim() !== view.where) where.value = view.where;
    if (view.q) rows.search(view.q, show).catch((error) => replace(notes, problem(error)));
    loadUsed();
    show();
  }

  // Fetch the columns of `info` that the filter reads.
  function loadUsed() {
    try {
      if (view.by.startsWith("info.")) rows.load(view.by, show).catch((error) => replace(notes, problem(error)));
      for (const name of view.where ? rows.filter(view.where).used : []) rows.load(name, show).catch((error) => replace(notes, problem(error)));
    } catch { /* show() says what is wrong with the filter */ }
  }

  function pick(name) {
    return (low, high, isLast) => {
      const column = columnName(name);
      const range = `${column} >= ${round(low)} and ${column} ${isLast ? "<=" : "<"} ${round(high)}`;
      set({ where: view.where ? `(${view.where}) and ${range}` : range });
    };
  }

  function drawFilters() {
    const all = [...Array(rows.total).keys()].filter((row) => !rows.replaced.has(row));
    const errors = rows.counts("error", all).filter(([name]) => name !== "none");
    const stops = rows.counts("stop_condition", all);
    const metricSorts = names().map((name) => [[`-metric:${name}`, `${name}, high first`], [`metric:${name}`, `${name}, low first`]]).flat();
    const sorts = [["example", "in order of examples"], ["reward", "lowest reward first"], ["-reward", "highest reward first"], ["-output_tokens", "longest first"], ["output_tokens", "shortest first"],
      ["-turns", "most turns first"], ["-total_ms", "slowest first"], ["-row", "newest first"], ["row", "oldest first"], ["error", "errors first"], ...metricSorts];
    if (!sorts.some(([key]) => key === view.sort)) sorts.push([view.sort, view.sort.replace("metric:", "")]);
    const bound = (name, label) => {
      const input = h("input", { type: "number", step: "any", class: "short", "aria-label": `${label} reward`, placeholder: label, value: view[name] ?? "",
        onchange: () => set({ [name]: input.value === "" ? null : Number(input.value) }) });
      return input;
    };
    replace(filters, search, where,
      select("Rows of the table", [["", "a row per rollout"], ["example", "a row per example"], ["task", "a row per task"], ...rows.info.map((name) => [name, `a row per ${name}`])], view.by, (by) => set({ by, sort: VIEW.sort })),
      select("Errors", [["", "errors and not"], ["none", "without error"], ["any", `with error (${count(errors.reduce((n, [, m]) => n + m, 0))})`], ...errors.map(([name, n]) => [name, `${name} (${n})`])], view.error, (error) => set({ error })),
      select("Stop condition", [["", "any stop condition"], ...stops.map(([name, n]) => [name, `${rows.endedBy(name)} (${n})`])], view.stop, (stop) => set({ stop })),
      h("span", { class: "range" }, bound("low", "least"), " to ", bound("high", "most")),
      select("Sort", sorts, view.sort, (sort) => set({ sort })),
      clear,
      view.by ? null : chooser("rows", allColumns(), show),
      shown);
  }

  function drawPlots() {
    const rewards = rows.numbers("reward", chosen);
    const lengths = rows.numbers("output_tokens", chosen);
    const pickReward = (low, high, isLast) => set({ low: round(low), high: isLast ? null : round(high) });
    const metrics = columnNames().slice(0, 2);
    replace(plots,
      histogram(rewards, { title: "Reward", range: range[0] === 0 && range[1] === 1 ? range : null, onpick: pickReward }),
      lengths.length ? histogram(lengths, { title: "Tokens written", format: count, onpick: pick("output_tokens") }) : histogram(rows.numbers("chars", chosen), { title: "Characters written", format: count, onpick: pick("chars") }),
      metrics.map((name) => histogram(rows.numbers(`metric:${name}`, chosen), { title: name, onpick: pick(name) })),
      barList("Stopped by", rows.counts("stop_condition", chosen), { chosen: view.stop, onpick: (stop) => set({ stop }), limit: 4, label: (stop) => rows.endedBy(stop) }));
  }

  const round = (value) => Number(value.toPrecision(6));

  function drawCards() {
    const reward = rows.mean("reward", chosen);
    const left = chosen.filter((row) => rows.value("trained", row) === 1);
    const failed = chosen.filter((row) => rows.value("error", row) && rows.value("error", row) !== "ScoringError").length;
    const unscored = chosen.filter((row) => !isKnown(rows.value("reward", row)) && [null, undefined, "ScoringError"].includes(rows.value("error", row)));
    const times = rows.numbers("total_ms", chosen).sort((a, b) => a - b);
    const tokens = rows.numbers("output_tokens", chosen);
    const examples = new Set(chosen.map((row) => rows.columns.key[row] || rows.columns.example[row])).size;
    replace(cards,
      card("mean reward", interval(reward.mean, reward.stderr), isKnown(reward.stderr) ? `${reward.stderr > 0 ? "± one standard error over" : "the same in all"} ${plural(examples, "example")}` : ""),
      left.length && left.length < chosen.length ? card("mean reward, trained", number(rows.mean("reward", left).mean), `${count(left.length)} of ${count(chosen.length)}`) : null,
      names().filter((name) => !isReward(name) && !SHOWN_ANYWAY.has(name)).slice(0, 4).map((name) => {
        const metric = rows.mean(`metric:${name}`, chosen);
        return card(name, interval(metric.mean, metric.stderr), weights[name] ? `weight ${short(weights[name])}` : "metric");
      }),
      card("rollouts", count(chosen.length), chosen.length < rows.total - rows.replaced.size ? `of ${count(rows.total - rows.replaced.size)}` : `of ${plural(examples, "example")}`),
      failed ? card("errors", count(failed), `${((100 * failed) / chosen.length).toFixed(1)}%`) : null,
      ...agreementCards(),
      unscored.length ? card("not scored", count(unscored.length), visible(reasons(unscored))) : null,
      tokens.length ? card("tokens written", count(tokens.reduce((a, b) => a + b, 0)), `${count(tokens.reduce((a, b) => a + b, 0) / tokens.length)} each`) : null,
      times.length ? card("time, median", duration(times[Math.floor(times.length / 2)]), `95%: ${duration(times[Math.floor(times.length * 0.95)])}`) : null);
  }

  // Why a reward is unknown: the innermost exception and where it was raised.
  const reasonOf = (row) => (isKnown(rows.value("reward", row)) ? "" : rows.value("cause", row) || rows.value("error", row) || "no reward function gave a number");

  function reasons(unscored) {
    const counted = new Map();
    for (const row of unscored) counted.set(reasonOf(row), (counted.get(reasonOf(row)) || 0) + 1);
    const most = [...counted].sort((a, b) => b[1] - a[1]);
    const rest = most.slice(3).reduce((sum, [, n]) => sum + n, 0);
    return [...most.slice(0, 3).map(([reason, n]) => `${count(n)} × ${reason}`), rest ? `${count(rest)} × others` : ""].filter(Boolean).join("; ");
  }

  // How far the reward of all rollouts agrees with a person's labels, as vf-compare --labels says it.
  function agreementCards() {
    const found = rows.agreement;
    if (!found) return [];
    return [card("labelled", count(found.num_labelled), `${(100 * found.accuracy).toFixed(0)}% as the reward says`), card("Cohen's kappa", number(found.kappa), found.kappa_stderr > 0 ? `± ${number(found.kappa_stderr)}` : ""),
      isKnown(found.corrected_mean) ? card("corrected share", number(found.corrected_mean), `of all rollouts; judged ${number(found.judged_mean)}, 95% ${number(found.low)} to ${number(found.high)}`) : null];
  }

  function show() {
    range = rewardRange(rows);
    let wrong = null;
    const isTyping = [search, where].includes(document.activeElement);
    try {
      chosen = rows.select(view);
    } catch (error) { // while a filter is typed, the last whole one stays
      wrong = rows.total ? error : null;
      if (!isTyping) chosen = rows.select({ ...view, where: "" });
    }
    clear.hidden = JSON.stringify(queryOf({ ...view, sort: VIEW.sort, by: VIEW.by })) === "{}";
    if (!isTyping && !filters.querySelector(".chooser[open]")) drawFilters();
    const searching = view.q && !rows.found.get(view.q)?.done;
    const progress = rows.complete ? "" : `, reading ${Math.round(100 * rows.progress)}%`;
    shown.textContent = `${plural(chosen.length, "rollout")}${searching ? ", searching" : ""}${progress}`;
    replace(notes, rows.damage ? problem(rows.damage) : [], wrong ? problem(wrong) : []);
    drawCards();
    drawPlots();
    table.layout(columns(), view.sort);
    table.show(view.by === "example" ? examples() : view.by ? grouped(view.by) : chosen);
  }

  function toFailure() {
    const isFailure = (item) => (typeof item === "number" ? rows.isFailure(item, success) : item.passed < 1);
    const at = table.order.findIndex((item, i) => i > table.focused && isFailure(item));
    if (at >= 0) table.focus(at);
  }

  const element = h("div", { class: "rows" }, notes, cards, plots, filters, table.element);
  return {
    element, table, show,
    async update() {
      await rows.update(show);
      loadUsed();
      if (view.q && !rows.found.has(view.q)) await rows.search(view.q, show);
    },
    keys: { "/": () => search.focus(), Escape: () => search.blur(), f: () => toFailure() },
    onkey: (name) => table.key(name),
    help: [["j k", "next, previous rollout"], ["Enter", "open"], ["/", "search all text"], ["f", "next failure"]],
    address: () => address(base, { ...more, ...queryOf(view) }),
    close: () => table.close(),
  };
}
