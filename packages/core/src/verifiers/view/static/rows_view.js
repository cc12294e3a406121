// The saved rollouts of a run, or of a training step: plots, filters and the table. Used by both pages.

import { h, replace, visible } from "./dom.js";
import { count, duration, interval, isKnown, number, plural, short } from "./format.js";
import { address, card, problem, remember, rewardChip, select } from "./page.js";
import { barList, extent, histogram } from "./plots.js";
import { VIEW } from "./rows.js";
import { Table } from "./table.js";

const MAX_METRIC_COLUMNS = 4;
const SHOWN_ANYWAY = new Set(["num_turns"]); // it has a column of its own

export function viewOf(query) {
  const view = { ...VIEW };
  for (const name of ["sort", "q", "error", "stop"]) if (query[name]) view[name] = query[name];
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

// `base`: the parts of the page's address; `link(row, query)`: where a row leads; `weights`: of the reward functions.
export function rowsView(rows, { base, query, link, weights = {}, more = {} }) {
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
  const table = new Table({
    label: "rollouts", columns: [], height: 56, onsort: (name) => set({ sort: view.sort === name ? `-${name}` : view.sort === `-${name}` ? name : descendsFirst(name) ? `-${name}` : name }),
    href: (row) => link(row, queryOf(view)), draw: cells,
    prepare: async (wanted) => {
      const missing = wanted.some((row) => !rows.previewed.has(row));
      await rows.previews(wanted);
      return missing;
    },
  });
  let typing = 0;
  search.addEventListener("input", () => (clearTimeout(typing), (typing = setTimeout(() => set({ q: search.value.trim() }), 200))));

  function isReward(name) { // the only weighted function, when the reward is that function
    return Object.keys(weights).filter((other) => weights[other]).length === 1 && weights[name] === 1;
  }

  const descendsFirst = (name) => !["example", "stop_condition", "error", "row", "reward"].includes(name);

  function columns() {
    return [
      { title: "#", width: "4.5rem", sort: "example" },
      { title: "Reward", width: "5.2rem", sort: "reward", className: "number" },
      { title: "Task and last reply", width: "minmax(14rem, 1fr)", sort: null },
      ...columnNames().map((name) => ({ title: name, width: "5.2rem", sort: `metric:${name}`, className: "number" })),
      { title: "Turns", width: "4rem", sort: "turns", className: "number" },
      { title: "Tokens", width: "4.8rem", sort: "output_tokens", className: "number" },
      { title: "Time", width: "5rem", sort: "total_ms", className: "number" },
      { title: "Stopped by", width: "minmax(6rem, 10rem)", sort: "stop_condition" },
    ];
  }

  function cells(row) {
    const preview = rows.previewed.get(row);
    const error = rows.value("error", row);
    const sibling = rows.value("sibling", row);
    return [
      h("span", { class: "id" }, visible(String(rows.value("example", row) ?? row).slice(0, 12)), isKnown(sibling) ? h("small", null, `.${sibling}`) : null),
      rewardChip(rows.value("reward", row), range),
      h("div", { class: "two" }, h("small", null, preview ? visible(preview.question, view.q) : "…"), h("span", null, preview ? visible(preview.reply || "(no reply)", view.q) : "")),
      ...columnNames().map((name) => number(rows.value(`metric:${name}`, row), 2)),
      count(rows.value("turns", row)), isKnown(rows.value("output_tokens", row)) ? count(rows.value("output_tokens", row)) : h("span", { title: "characters" }, `${count(rows.value("chars", row))}c`),
      duration(rows.value("total_ms", row)),
      error ? h("span", { class: "bad" }, visible(error)) : visible(rows.value("stop_condition", row) || ""),
    ];
  }

  function set(change) {
    Object.assign(view, change);
    remember(base, { ...more, ...queryOf(view) });
    if (view.q) rows.search(view.q, show).catch((error) => replace(notes, problem(error)));
    show();
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
    replace(filters, search,
      select("Errors", [["", "errors and not"], ["none", "without error"], ["any", `with error (${count(errors.reduce((n, [, m]) => n + m, 0))})`], ...errors.map(([name, n]) => [name, `${name} (${n})`])], view.error, (error) => set({ error })),
      select("Stop condition", [["", "any stop condition"], ...stops.map(([name, n]) => [name, `${name} (${n})`])], view.stop, (stop) => set({ stop })),
      h("span", { class: "range" }, bound("low", "least"), " to ", bound("high", "most")),
      select("Sort", sorts, view.sort, (sort) => set({ sort })),
      JSON.stringify(queryOf({ ...view, sort: VIEW.sort })) === "{}" ? null : h("button", { type: "button", onclick: () => ((search.value = ""), set({ q: "", error: "", stop: "", low: null, high: null })) }, "Clear"),
      shown);
  }

  function drawPlots() {
    const rewards = rows.numbers("reward", chosen);
    const lengths = rows.numbers("output_tokens", chosen);
    const pickReward = (low, high, isLast) => set({ low: round(low), high: isLast ? null : round(high) });
    const metrics = columnNames().slice(0, 2);
    replace(plots,
      histogram(rewards, { title: "Reward", range: range[0] === 0 && range[1] === 1 ? range : null, onpick: pickReward }),
      lengths.length ? histogram(lengths, { title: "Tokens written", format: count }) : histogram(rows.numbers("chars", chosen), { title: "Characters written", format: count }),
      metrics.map((name) => histogram(rows.numbers(`metric:${name}`, chosen), { title: name })),
      barList("Stopped by", rows.counts("stop_condition", chosen), { chosen: view.stop, onpick: (stop) => set({ stop }), limit: 4 }));
  }

  const round = (value) => Number(value.toPrecision(6));

  function drawCards() {
    const reward = rows.mean("reward", chosen);
    const failed = chosen.filter((row) => rows.value("error", row) && rows.value("error", row) !== "ScoringError").length;
    const unscored = chosen.filter((row) => !isKnown(rows.value("reward", row))).length - failed;
    const times = rows.numbers("total_ms", chosen).sort((a, b) => a - b);
    const tokens = rows.numbers("output_tokens", chosen);
    const examples = new Set(chosen.map((row) => rows.columns.key[row] || rows.columns.example[row])).size;
    replace(cards,
      card("mean reward", interval(reward.mean, reward.stderr), isKnown(reward.stderr) ? `± one standard error over ${plural(examples, "example")}` : ""),
      names().filter((name) => !isReward(name) && !SHOWN_ANYWAY.has(name)).slice(0, 4).map((name) => {
        const metric = rows.mean(`metric:${name}`, chosen);
        return card(name, interval(metric.mean, metric.stderr), weights[name] ? `weight ${short(weights[name])}` : "metric");
      }),
      card("rollouts", count(chosen.length), chosen.length < rows.total - rows.replaced.size ? `of ${count(rows.total - rows.replaced.size)}` : `of ${plural(examples, "example")}`),
      failed ? card("errors", count(failed), `${((100 * failed) / chosen.length).toFixed(1)}%`) : null,
      unscored > 0 ? card("not scored", count(unscored)) : null,
      tokens.length ? card("tokens written", count(tokens.reduce((a, b) => a + b, 0)), `${count(tokens.reduce((a, b) => a + b, 0) / tokens.length)} each`) : null,
      times.length ? card("time, median", duration(times[Math.floor(times.length / 2)]), `95%: ${duration(times[Math.floor(times.length * 0.95)])}`) : null);
  }

  function show() {
    range = rewardRange(rows);
    chosen = rows.select(view);
    if (document.activeElement !== search) drawFilters();
    const searching = view.q && !rows.found.get(view.q)?.done;
    const progress = rows.complete ? "" : `, reading ${Math.round(100 * rows.progress)}%`;
    shown.textContent = `${plural(chosen.length, "rollout")}${searching ? ", searching" : ""}${progress}`;
    replace(notes, rows.damage ? problem(rows.damage) : []);
    drawCards();
    drawPlots();
    table.layout(columns(), view.sort);
    table.show(chosen);
  }

  const element = h("div", { class: "rows" }, notes, cards, plots, filters, table.element);
  return {
    element, table, show,
    async update() {
      await rows.update(show);
      if (view.q && !rows.found.has(view.q)) await rows.search(view.q, show);
    },
    keys: { "/": () => search.focus(), Escape: () => search.blur() },
    onkey: (name) => table.key(name),
    help: [["j k", "next, previous rollout"], ["Enter", "open"], ["/", "search all text"]],
    address: () => address(base, { ...more, ...queryOf(view) }),
    close: () => table.close(),
  };
}
