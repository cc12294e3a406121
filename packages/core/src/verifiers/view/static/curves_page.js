// Learning curves of several trainings over each other.

import { ask } from "./api.js";
import { settingsDiff } from "./diff.js";
import { h, replace, visible } from "./dom.js";
import { isKnown, number, plural } from "./format.js";
import { address, follow, pageOf, remember, runName, select } from "./page.js";
import { overlay, smooth } from "./plots.js";

const AXIS_NAMES = [["step", "optimizer steps"], ["tokens", "sampled tokens"], ["seconds", "seconds"]];
const FIRST_CURVE = "reward/mean";

// The points [x, value] of a metric; x: the step, all tokens sampled until then, or seconds since the first line.
export function pointsOver(lines, name, axis) {
  const points = [];
  let tokens = 0;
  const began = lines.find((line) => isKnown(line.time))?.time;
  for (const line of lines) {
    if (isKnown(line["tokens/completion"]) && !(line["batch/pass"] > 1)) tokens += line["tokens/completion"];
    const x = { step: line.step, tokens, seconds: isKnown(line.time) ? line.time - began : null }[axis];
    if (isKnown(line[name]) && isKnown(x)) points.push([x, line[name]]);
  }
  return points;
}

export async function curvesPage(main, { parts, query }) {
  const ids = parts.slice(1);
  const view = { metric: query.metric || FIRST_CURVE, axis: query.axis || "step", half: query.half ?? "5" };
  const runs = await Promise.all(ids.map((run) => ask("run", { run })));
  const read = ids.map(() => []);
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
    const names = [...new Set(read.flat().flatMap((line) => Object.keys(line).filter((name) => isKnown(line[name]))))].filter((name) => !["step", "time"].includes(name)).sort();
    if (!names.includes(view.metric)) names.push(view.metric);
    if (!controls.contains(document.activeElement) || document.activeElement === document.body) {
      replace(controls, select("Metric", names.map((name) => [name, name]), view.metric, (metric) => set({ metric })), select("Horizontal axis", AXIS_NAMES, view.axis, (axis) => set({ axis })),
        select("Smoothing", ["0", "2", "5", "10", "20", "50"].map((n) => [n, n === "0" ? "not smoothed" : `smoothed over ${n} points`]), view.half, (half) => set({ half })));
    }
    const series = runs.map((run, i) => ({ name: runName(run), id: run.id, href: pageOf(run), points: smooth(pointsOver(read[i], view.metric, view.axis), Number(view.half)) }));
    replace(plot, overlay({ title: view.metric, series, axis: AXIS_NAMES.find(([name]) => name === view.axis)?.[1] ?? view.axis }),
      h("table", { class: "compared" }, h("tbody", null, series.map((one, i) => h("tr", null, h("td", null, h("i", { class: `key c${i % 8}` }), " ", h("a", { href: one.href }, visible(one.name)), " ", h("small", null, visible(one.id))),
        h("td", { class: "number" }, one.points.length ? number(one.points[one.points.length - 1][1]) : "–"))))));
  }

  await load();
  const stops = ids.map((id) => follow(id, load));
  return { crumbs: [["learning curves", null]], title: "learning curves", keys: { u: () => (location.hash = address([])) }, help: [["u", "back to the runs"]], close: () => stops.forEach((stop) => stop()) };
}
