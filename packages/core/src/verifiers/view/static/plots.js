// Small SVG plots: histograms, bars, sparklines, curves.

import { h, NARROW, svg } from "./dom.js";
import { count, isKnown, number, short } from "./format.js";

const FIRST = ["reward/success", "eval_success", "eval_reward", "entropy", "loss", "grad_norm", "tokens/completion", "sampler/mismatch_kl", "reward/std", "time/step"];
const AXES = new Set(["step", "policy_version", "time", "eval_reward_stderr", "reward/non_solution"]);

// Names that a training writes by itself; any other is a metric of the user's own.
const OURS = /^((alarm|batch|canary|correction|dead|entropy|env|examples|grad_norm|groups|hacking|loss|memory|offline|packing|ratio|reward|rollouts|sampler|samples|server|staleness|teacher|throughput|time|tokens|train|turns)\/|(eval|train)_|(entropy|epoch|grad_norm|kl_ref|kl_teacher|learning_rate|loss|policy_version|solved|step|time|total_flos)$)/;

// The metrics with a known value in some of the lines: rewards first, then the user's own, those that are looked at often, the others, all zeros.
export function curveNames(lines) {
  const isZero = new Map();
  for (const line of lines) for (const [name, y] of Object.entries(line)) if (isKnown(y) && !AXES.has(name)) isZero.set(name, (isZero.get(name) ?? true) && y === 0);
  const rank = (name) => (isZero.get(name) ? 200 : FIRST.includes(name) ? FIRST.indexOf(name) : !OURS.test(name) ? 3.5 : name.startsWith("reward/") ? 50 : 100);
  return [...isZero.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

export function histogram(values, { title, format = number, bins = 20, range = null, onpick = null } = {}) {
  const [low, high] = range || unit(extent(values));
  const width = 240;
  const height = 64;
  const span = high - low || 1;
  const counts = new Array(bins).fill(0);
  for (const value of values) counts[Math.min(bins - 1, Math.max(0, Math.floor(((value - low) / span) * bins)))]++;
  const most = Math.max(1, ...counts);
  const bars = counts.map((n, bin) => {
    const [from, to] = [low + (span * bin) / bins, low + (span * (bin + 1)) / bins];
    const tall = n ? Math.max(2, (n / most) * height) : 0;
    const x = (bin * width) / bins;
    return svg("g", { class: onpick && n ? "bin pick" : "bin", onclick: onpick && n ? () => onpick(from, to, bin === bins - 1) : null },
      svg("rect", { class: "hit", x, y: 0, width: width / bins, height }),
      svg("rect", { class: "bar", x: x + 0.5, y: height - tall, width: width / bins - 1, height: tall, rx: 1 }),
      svg("title", null, `${format(from)} to ${format(to)}: ${n}`));
  });
  return figure(title, values.length ? [
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", preserveAspectRatio: "none", class: "hist",
      "aria-label": `${title}: ${values.length} values from ${format(low)} to ${format(high)}` }, bars),
    h("div", { class: "ends" }, h("span", null, format(low)), h("span", null, format(high))),
  ] : [h("p", { class: "none" }, "no values")]);
}

// The range 0 to 1 for values that nearly fill it.
function unit([low, high]) {
  return low >= 0 && low < 0.05 && high > 0.95 && high <= 1 ? [0, 1] : [low, high];
}

export function barList(title, counted, { onpick = null, chosen = "", limit = 6, label = String } = {}) {
  const most = Math.max(1, ...counted.map(([, n]) => n));
  const items = counted.slice(0, limit).map(([name, n]) =>
    h("button", { class: "barline", type: "button", "aria-pressed": String(name === chosen), disabled: !onpick,
      onclick: () => onpick(name === chosen ? "" : name), vars: { "--share": `${(100 * n) / most}%` } },
      h("span", null, label(name)), h("b", null, count(n))));
  const more = counted.length > limit ? h("p", { class: "none" }, `and ${counted.length - limit} more`) : null;
  return figure(title, items.length ? [...items, more] : [h("p", { class: "none" }, "none")]);
}

function figure(title, content) {
  return h("figure", { class: "plot" }, h("figcaption", null, title), content);
}

export function sparkline(values, width = 90, height = 20) {
  const known = values.filter(isKnown);
  if (known.length < 2) return null;
  const [low, high] = extent(known);
  const points = known.map((value, i) =>
    `${((i / (known.length - 1)) * (width - 2) + 1).toFixed(1)},${(height - 2 - ((value - low) / (high - low || 1)) * (height - 4)).toFixed(1)}`);
  return svg("svg", { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    svg("polyline", { points: points.join(" ") }));
}

export function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [0, 1];
}

// Points smoothed by an exponential mean with a half-life of `half` points, fewer for a short curve; 0: not smoothed.
export function smooth(points, half) {
  half = Math.min(half, points.length / 10);
  if (half < 0.5) return points;
  const keep = 0.5 ** (1 / half);
  let [sum, weight] = [0, 0];
  return points.map(([x, y, ...more]) => {
    [sum, weight] = [sum * keep + y, weight * keep + 1];
    return [x, sum / weight, ...more];
  });
}

// One curve with its axes. `points`: [x, y]; `marks`: [x, y, halfwidth] drawn as points with intervals; `level`: [y, name]
// drawn as a dashed line; `events`: [x, name, address], upright lines that lead there.
export function curve({ title, points, marks = [], events = [], half = 0, wide = false, level = null }) {
  const big = wide && !NARROW.matches; // on a phone its text would be half as large as that of the others
  const [width, height, bottom, top] = [big ? 720 : 352, big ? 330 : 150, 18, 8];
  const all = [...points, ...marks];
  const [x0, x1] = extent(all.map(([x]) => x));
  let [y0, y1] = extent([...points.map(([, y]) => y), ...(level ? [level[0]] : []), ...marks.flatMap(([, y, e]) => [y - (e || 0), y + (e || 0)])]);
  if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y0))) [y0, y1] = [y0 - 0.5 * (Math.abs(y0) || 1), y1 + 0.5 * (Math.abs(y1) || 1)];
  const pad = (y1 - y0) * 0.06;
  [y0, y1] = [y0 - pad, y1 + pad];
  const levels = ticks(y0, y1, big ? 5 : 3);
  const left = Math.max(46, 12 + 6.2 * Math.max(0, ...levels.map((y) => short(y).length)));
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - 10);
  const py = (y) => top + (1 - (y - y0) / (y1 - y0)) * (height - top - bottom);
  const line = (pts) => pts.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ");
  const smoothed = smooth(points, half);
  const last = points.length ? points[points.length - 1] : marks[marks.length - 1];
  const read = h("output", null, last ? number(last[1]) : "–");
  const cursor = svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  const dot = svg("circle", { class: "dot", r: 3, visibility: "hidden" });
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}, last value ${last ? number(last[1]) : "unknown"}` },
    levels.map((y) => [
      svg("line", { class: "grid", x1: left, x2: width - 10, y1: py(y), y2: py(y) }),
      svg("text", { x: left - 6, y: py(y) + 3.5, "text-anchor": "end" }, short(y)),
    ]),
    (x1 > x0 ? [x0, x1] : [x0]).map((x, i) => svg("text", { x: px(x), y: height - 4, "text-anchor": i ? "end" : "start" }, count(x))),
    level ? [svg("line", { class: "level", x1: left, x2: width - 10, y1: py(level[0]), y2: py(level[0]) }),
      svg("text", { class: "level", x: width - 12, y: py(level[0]) - 4, "text-anchor": "end" }, `${level[1]} ${number(level[0])}`)] : null,
    events.map(([x, name, to]) => svg("a", { href: to }, svg("line", { class: "event", x1: px(x), x2: px(x), y1: top, y2: height - bottom }, svg("title", null, `${name}, step ${x}`)))),
    half ? svg("polyline", { class: "raw", points: line(points) }) : null,
    svg("polyline", { class: "line", points: line(smoothed) }),
    smoothed.length === 1 ? svg("circle", { class: "dot", r: 2.5, cx: px(smoothed[0][0]), cy: py(smoothed[0][1]) }) : null,
    marks.map(([x, y, e]) => [
      e ? svg("line", { class: "whisker", x1: px(x), x2: px(x), y1: py(y - e), y2: py(y + e) }) : null,
      svg("circle", { class: "mark", r: 3.5, cx: px(x), cy: py(y) }, svg("title", null, `evaluation at step ${x}: ${number(y)}${e ? `, 95% interval ${number(y - e)} to ${number(y + e)}` : ""}`)),
    ]), cursor, dot);
  const show = (event) => {
    if (!smoothed.length) return;
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    let best = 0;
    smoothed.forEach((point, i) => { if (Math.abs(px(point[0]) - x) < Math.abs(px(smoothed[best][0]) - x)) best = i; });
    const [at, value] = smoothed[best];
    for (const [name, set] of Object.entries({ x1: px(at), x2: px(at), visibility: "visible" })) cursor.setAttribute(name, set);
    for (const [name, set] of Object.entries({ cx: px(at), cy: py(value), visibility: "visible" })) dot.setAttribute(name, set);
    const raw = points[best][1];
    read.textContent = `step ${at}: ${number(raw)}${raw === value ? "" : `, smoothed ${number(value)}`}`;
  };
  const hide = () => {
    for (const shape of [cursor, dot]) shape.setAttribute("visibility", "hidden");
    read.textContent = last ? number(last[1]) : "–";
  };
  picture.addEventListener("pointermove", show);
  picture.addEventListener("pointerleave", hide);
  return h("figure", { class: wide ? "curve wide" : "curve" }, h("figcaption", null, h("span", null, title), read), picture);
}

// Several curves over each other. `series`: [{name, points: [x, y], band: [x, low, high]}], each of one colour of the page.
export function overlay({ title, series, axis, small = false, onpick = null }) {
  const [width, height, left, bottom, top] = small ? [352, 150, 46, 18, 8] : [1080, 420, 52, 34, 10];
  const all = series.flatMap((one) => [...one.points, ...(one.band || []).flatMap(([x, low, high]) => [[x, low], [x, high]])]);
  const [x0, x1] = extent(all.map(([x]) => x));
  let [y0, y1] = extent(all.map(([, y]) => y));
  if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y0))) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const px = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - 10);
  const py = (y) => top + (1 - (y - y0) / (y1 - y0)) * (height - top - bottom);
  const line = (points) => points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ");
  const around = (band) => [...band.map(([x, low]) => [x, low]), ...band.map(([x, , high]) => [x, high]).reverse()];
  const named = h("span", null, title);
  return h("figure", { class: small ? "curve" : "curve over" }, h("figcaption", null, onpick ? h("button", { type: "button", class: "quiet", title: "show it large", onclick: onpick }, named) : named), all.length ? svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} of ${series.length} trainings over ${axis}` },
    ticks(y0, y1, small ? 3 : 5).map((y) => [svg("line", { class: "grid", x1: left, x2: width - 10, y1: py(y), y2: py(y) }), svg("text", { x: left - 6, y: py(y) + 3.5, "text-anchor": "end" }, short(y))]),
    x1 > x0 && !small ? ticks(x0, x1, Math.min(6, Math.max(1, Math.floor(x1 - x0)))).map((x) => svg("text", { x: px(x), y: height - 18, "text-anchor": "middle" }, count(x))) : null,
    small ? null : svg("text", { x: width / 2, y: height - 3, "text-anchor": "middle" }, axis),
    series.map((one, i) => (one.band ? svg("polygon", { class: `band c${i % 8}`, points: line(around(one.band)) }) : null)),
    series.map((one, i) => svg("polyline", { class: `line c${i % 8}`, points: line(one.points) }, svg("title", null, one.name)))) : h("p", { class: "none" }, "none of these trainings has this metric"));
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const made = [];
  for (let y = Math.ceil(low / step) * step; y <= high; y += step) made.push(Math.abs(y) < step * 1e-9 ? 0 : y);
  return made;
}
