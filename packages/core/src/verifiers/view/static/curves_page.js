// Learning curves of several trainings over each other.

import { ask } from "./api.js";
import { settingsDiff } from "./diff.js";
import { h, replace, visible } from "./dom.js";
import { isKnown, number, plural } from "./format.js";
import { address, follow, pageOf, remember, runName, select } from "./page.js";
import { curveNames, extent, overlay, smooth } from "./plots.js";

const AXIS_NAMES = [["step", "optimizer steps"], ["tokens", "sampled tokens"], ["seconds", "seconds"]];
const FIRST_CURVE = "reward/mean";
const NUM_SMALL = 8; // curves below the large one
const NAMES = new Set(["seed", "data_seed", "run_name", "output_dir"]); // settings of the members of a group

// Trainings that differ in nothing but their seed, in the order of `runs`: [[index, ...], ...].
export function bySeed(runs) {
  const groups = new Map();
  runs.forEach((run, i) => {
    const settings = Object.entries(run.flat).filter(([name]) => !NAMES.has(name)).sort();
    const key = settings.length ? JSON.stringify([run.model, settings]) : i;
    groups.set(key, [...(groups.get(key) || []), i]);
  });
  return [...groups.values()];
}

// The mean of curves [x, value, step] at the steps that all have, and the band from their lowest to their highest.
export function meanCurve(curves) {
  const at = curves.map((points) => new Map(points.map((point) => [point[2], point])));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const shared = [...at[0].keys()].filter((step) => at.every((points) => points.has(step))).map((step) => at.map((points) => points.get(step)));
  return { points: shared.map((points) => [mean(points.map(([x]) => x)), mean(points.map(([, y]) => y))]),
    band: curves.length > 1 ? shared.map((points) => [mean(points.map(([x]) => x)), ...extent(points.map(([, y]) => y))]) : null };
}

// The points [x, value, step] of a metric; x: the step, all tokens sampled until then, or the seconds of the steps (of
// lines without them: since the first line), so that a resumed run has no gap where it did not run.
export function pointsOver(lines, name, axis) {
  const points = [];
  let tokens = 0, seconds = 0;
  const hasSteps = lines.some((line) => isKnown(line["time/step"]));
  const began = lines.find((line) => isKnown(line.time))?.time;
  for (const line of lines) {
    if (isKnown(line["tokens/completion"]) && !(line["batch/pass"] > 1)) tokens += line["tokens/completion"];
    if (isKnown(line["time/step"])) seconds += line["time/step"];
    else if (!hasSteps) seconds = isKnown(line.time) ? line.time - began : null;
    const x = { step: line.step, tokens, seconds }[axis];
    if (isKnown(line[name]) && isKnown(x)) points.push([x, line[name], line.step]);
  }
  return points;
}

export async function curvesPage(main, { parts, query }) {
  const ids = parts.slice(1);
  const view = { metric: query.metric || FIRST_CURVE, axis: query.axis || "step", half: query.half ?? "5", seeds: query.seeds || "" };
  const runs = await Promise.all(ids.map((run) => ask("run", { run })));
  const read = ids.map(() => []);
  const groups = bySeed(runs);
  const controls = h("div", { class: "controls" });
  const plot = h("div", { class: "curves" });
  replace(main, h("div", { class: "title" }, h("h1", null, `Learning curves of ${plural(ids.length, "training")}`)), controls, plot, settingsDiff(runs));

  async function load() {
    const answers = await Promise.all(ids.map((run) => ask("metrics", { run })));
    answers.forEach((answer, i) => (read[i] = answer.lines));
    draw();
  }

  function set(change) {
    Object.assign(view, change);
    remember(parts, view);
    draw();
  }

  function draw() {
    const ranked = curveNames(read.flat());
    const names = [...new Set([...ranked, view.metric])].sort();
    if (!controls.contains(document.activeElement) || document.activeElement === document.body) {
      replace(controls, select("Metric", names.map((name) => [name, name]), view.metric, (metric) => set({ metric })), select("Horizontal axis", AXIS_NAMES, view.axis, (axis) => set({ axis })),
        select("Smoothing", ["0", "2", "5", "10", "20", "50"].map((n) => [n, n === "0" ? "not smoothed" : `smoothed over ${n} points`]), view.half, (half) => set({ half })),
        groups.length < runs.length ? select("Seeds", [["", "mean over seeds, lowest to highest"], ["each", "each seed"]], view.seeds, (seeds) => set({ seeds })) : null);
    }
    const shown = view.seeds ? runs.map((_, i) => [i]) : groups;
    const axis = AXIS_NAMES.find(([name]) => name === view.axis)?.[1] ?? view.axis;
    const seriesOf = (metric, half) => shown.map((members) => ({ name: runName(runs[members[0]]), members, ...meanCurve(members.map((i) => smooth(pointsOver(read[i], metric, view.axis), half))) }));
    const small = (metric) => overlay({ title: metric, series: seriesOf(metric, Number(view.half)), axis, small: true, onpick: () => set({ metric }) });
    const others = ranked.filter((name) => name !== view.metric);
    const raw = seriesOf(view.metric, 0);
    replace(plot, overlay({ title: view.metric, series: seriesOf(view.metric, Number(view.half)), axis }),
      h("table", { class: "compared" }, h("tbody", null, raw.map((one, i) => h("tr", null, h("td", null, h("i", { class: `key c${i % 8}` }), " ", one.members.map((m) => [h("a", { href: pageOf(runs[m]) }, visible(runName(runs[m]))), " ", h("small", null, visible(runs[m].id)), " "])),
        h("td", { class: "number" }, lastOf(one)))))),
      others.slice(0, NUM_SMALL).map(small),
      others.length > NUM_SMALL ? h("button", { type: "button", class: "more", onclick: (event) => event.target.replaceWith(...others.slice(NUM_SMALL).map(small)) }, `show ${plural(others.length - NUM_SMALL, "more curve")}`) : null);
  }

  // The newest value, not smoothed.
  function lastOf({ points, band, members }) {
    if (!points.length) return "–";
    const [, low, high] = band?.[band.length - 1] || [];
    return number(points[points.length - 1][1]) + (band ? `, mean of ${members.length} (${number(low)} to ${number(high)})` : "");
  }

  await load();
  const stops = ids.map((id) => follow(id, load));
  return { crumbs: [["learning curves", null]], title: "learning curves", keys: { u: () => (location.hash = address([])) }, help: [["u", "back to the runs"]], close: () => stops.forEach((stop) => stop()) };
}
