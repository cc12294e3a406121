// One training run: its learning curves, and the rollouts that each step trained on.

import { ask } from "./api.js";
import { auditLink } from "./audit_page.js";
import { settingsTable } from "./diff.js";
import { h, replace, visible } from "./dom.js";
import { ago, count, duration, interval, isKnown, number, plural } from "./format.js";
import { address, card, follow, keep, remember, runName, setting, status, stepName } from "./page.js";
import { curve, curveNames } from "./plots.js";
import { rowsOf } from "./rows.js";
import { queryOf, rowsView, viewOf } from "./rows_view.js";

// Alarm of a reward that is paid without solving the task -> the view of the rollouts that show it.
const UNSOLVED = { where: "success < 1 and reward > 0", sort: "-reward" };
const HACKED = {
  ...Object.fromEntries(["cheap_replies", "copied", "grading", "same_reply"].map((name) => [`hacking_${name}`, { where: `\`hacking/${name}\` > 0` }])),
  hacking_unsolved: UNSOLVED, hacking_format: UNSOLVED, success: UNSOLVED, hacking_length: { sort: "-output_tokens" }, hacking_flat: { sort: "-reward" }, hacking_cheap_probability: {},
};
const SMOOTHING = [0, 2, 5, 10, 20, 50];

export async function trainingPage(main, { parts, query }) {
  const id = parts[1];
  let run = await ask("run", { run: id });
  let lines = [];
  let generation = "";
  let steps = [];
  let step = query.step ? Number(query.step) : null;
  let following = step === null;
  let samples = null;
  let half = Number(setting("smoothing", "5"));
  let wanted = query.curve || "";
  const head = h("div");
  const cards = h("div", { class: "cards" });
  const hacked = h("div");
  const proved = h("div");
  const curves = h("div", { class: "curves" });
  const sampled = h("section", { class: "samples" });
  const find = h("input", { type: "search", placeholder: "find curves   /", "aria-label": "Find curves", value: wanted, oninput: () => ((wanted = find.value), drawCurves()) });
  const amount = h("output", null, String(half));
  const slider = h("input", { type: "range", min: 0, max: SMOOTHING.length - 1, value: Math.max(0, SMOOTHING.indexOf(half)), "aria-label": "smoothing", oninput: () => {
    half = SMOOTHING[slider.value];
    amount.textContent = String(half);
    keep("smoothing", half);
    drawCurves();
  } });
  const controls = h("div", { class: "controls" }, find, h("label", null, "smoothing over ", amount, " steps ", slider));
  replace(main, head, cards, hacked, proved, controls, curves, sampled);

  async function load() {
    const answer = await ask("metrics", { run: id, first: lines.length, generation });
    generation = answer.generation;
    lines = answer.first ? [...lines, ...answer.lines] : answer.lines;
    steps = answer.steps;
    drawHead();
    drawProof(answer.proof);
    drawHacked();
    drawCurves();
    const newest = steps[steps.length - 1];
    if (following && steps.length && step !== newest) await openStep(newest);
    else if (!samples && steps.length) await openStep(steps.includes(step) ? step : newest);
    else drawPicker();
  }

  const points = (name) => lines.filter((line) => isKnown(line[name])).map((line) => [line.step, line[name]]);
  const last = (name) => points(name).pop()?.[1];

  function drawHead() {
    const [evals, newest] = [points("eval_reward"), lines[lines.length - 1] || {}];
    replace(head, h("div", { class: "title" }, h("h1", null, run.env || run.name), h("span", { class: "facts" }, visible([run.name, run.model].filter(Boolean).join(" · "))), status(run),
      h("span", { class: "facts" }, [`step ${count(newest.step)}${run.planned ? ` of ${count(run.planned)}` : ""}`, ago(run.date), duration((run.seconds || 0) * 1000)].join(" · ")),
      run.ended ? h("span", { class: "facts bad" }, visible(`ended: ${run.ended}`)) : null,
      (run.coverage || []).map(([name, text]) => h("span", { class: "facts bad" }, `${name}: ${text}`)), auditLink(run)),
    settingsTable(run, [["folder", run.path], Object.keys(run.flat).length ? null : ["others", "known from the first checkpoint on"], ...(run.provenance || [])].filter(Boolean)));
    const rewards = points("reward/mean");
    const early = rewards.slice(0, Math.max(1, Math.floor(rewards.length / 10)));
    const late = rewards.slice(-early.length);
    const average = (pts) => pts.reduce((sum, [, y]) => sum + y, 0) / pts.length;
    replace(cards, card("reward now", number(average(late)), `first steps ${number(average(early))}`),
      evals.length ? card("evaluation", interval(evals[evals.length - 1][1], last("eval_reward_stderr")), `first ${number(evals[0][1])}`) : null,
      points("reward/success").length ? card("solved now", number(average(points("reward/success").slice(-early.length)))) : null,
      card("entropy", number(last("entropy"))), card("tokens per rollout", number(last("tokens/completion") / (last("rollouts/generated") ?? last("rollouts/trained")), 1)),
      card("time per step", duration(1000 * last("time/step"))), card("errors", count(points("rollouts/errors").reduce((sum, [, y]) => sum + y, 0))));
  }

  // Where an alarm of a hacked reward begins: [step, name, address of the rollouts that show it].
  function warnings() {
    return Object.keys(HACKED).flatMap((name) => lines.filter((line, i) => line[`alarm/${name}`] && !lines[i - 1]?.[`alarm/${name}`]).slice(0, 1)
      .map(({ step: at }) => [at, name.replace("hacking_", "").replaceAll("_", " "), address(["training", id], { step: at, ...HACKED[name] })])).sort((a, b) => a[0] - b[0]);
  }

  function drawHacked() {
    const all = warnings();
    replace(hacked, all.length ? h("p", { class: "bad", role: "alert" }, "The reward may be paid without solving the task: ", all.map(([at, name, to], i) => [i ? ", " : "", h("a", { href: to }, `${name}, step ${count(at)}`)])) : null);
  }

  function drawProof(proof) {
    const { tokens, largest, versions } = proof;
    const words = { agree: "the policy that sampled is the policy that was trained", inconclusive: "no push moved the answers by more than the noise: a server that kept its first weights would look the same", alarm: "sampler and trainer disagreed", ended: "a disagreement ended the run", unknown: "sampler and trainer were not compared" }[proof.verdict] || proof.verdict;
    const small = (value) => (isKnown(value) ? String(Number(value.toPrecision(2))) : "–"); // 0.000025, not 0.000
    const times = (canary) => (canary ? `${small(canary.disagreement)} × ${small(canary.noise)}` : "–");
    const lags = (lag) => Object.entries(lag || {}).map(([age, n]) => `${count(n)} at lag ${age}`).join(", ") || "–";
    const facts = [`${plural(proof.compared, "comparison")} of ${count(proof.compared_tokens)} tokens`, proof.unknown ? `${count(proof.unknown)} more of too few tokens` : null, largest ? `at most ${small(largest.disagreement)} times the noise (${largest.where}); 2 is an alarm, 4 ends the run` : null, `${count(tokens.sampled)} tokens sampled, ${count(tokens.trained)} trained`,
      ...Object.entries(tokens.untrained).map(([reason, n]) => `${count(n)} not trained: ${reason}`), `${count(proof.pushes)} weight updates`, plural(proof.restarts, "restart")].filter(Boolean);
    const wasOpen = proved.firstChild?.open;
    replace(proved, h("details", { class: "settings proof", open: wasOpen ?? proof.verdict === "ended" }, h("summary", null, visible(`Proof: ${words}`)), h("p", null, visible(facts.join(" · "))), proof.reason ? h("p", null, visible(proof.reason)) : null,
      h("table", { class: "compared" }, h("thead", null, h("tr", null, ["version", "canary, × noise in nats", "moved by the push, nats", "tokens trained", "checksum"].map((title) => h("th", null, title)))),
        h("tbody", null, versions.map((entry) => h("tr", null, [count(entry.version), times(entry.canary), small(entry.moved), lags(entry.trained_by_lag), entry.canary?.checksum?.toString(16) ?? "–"].map((text) => h("td", null, visible(text)))))))));
  }

  function drawCurves() {
    const words = wanted.toLowerCase();
    const evals = lines.filter((line) => isKnown(line.eval_reward)).map((line) => [line.step, line.eval_reward, isKnown(line.eval_reward_stderr) ? 1.96 * line.eval_reward_stderr : 0]);
    const chosen = curveNames(lines).filter((name) => name !== "reward/mean" && name.toLowerCase().includes(words));
    const small = (name) => curve({ title: name, points: points(name), half: name.startsWith("eval") ? 0 : half });
    const shown = words ? chosen : chosen.slice(0, 8);
    replace(curves, !words || "reward/mean".includes(words) ? curve({ title: "reward/mean", points: points("reward/mean"), marks: evals, events: warnings(), half, wide: true, level: isKnown(last("reward/non_solution")) ? [last("reward/non_solution"), "best non-solution"] : null }) : null,
      shown.map(small),
      chosen.length > shown.length ? h("button", { type: "button", class: "more", onclick: () => replace(curves, [...curves.children].slice(0, -1), chosen.slice(8).map(small)) }, `show ${plural(chosen.length - shown.length, "more curve")}`) : null);
  }

  const picker = h("div", { class: "controls" });

  function drawPicker() {
    if (!steps.length) return replace(sampled, h("p", { class: "none" }, "No rollouts were kept yet."));
    const at = steps.indexOf(step);
    const go = (to) => steps[to] !== undefined && ((following = to === steps.length - 1 && run.status === "running"), openStep(steps[to]));
    const range = h("input", { type: "range", min: 0, max: steps.length - 1, value: at, class: "wide", "aria-label": "step", "aria-valuetext": stepName(step), onchange: () => go(Number(range.value)) });
    replace(picker, h("h2", null, step < 0 ? `Rollouts ${stepName(step)}` : `Rollouts of step ${step}`), h("button", { type: "button", disabled: at <= 0, onclick: () => go(at - 1), title: "key [" }, "←"), range,
      h("button", { type: "button", disabled: at >= steps.length - 1, onclick: () => go(at + 1), title: "key ]" }, "→"), h("span", { class: "facts" }, `${count(at + 1)} of ${count(steps.length)} steps${following && run.status === "running" ? ", following" : ""}`));
    moveStep = (by) => go(at + by);
  }
  let moveStep = () => {};

  async function openStep(to) {
    const view = queryOf(samples ? viewOf(Object.fromEntries(new URLSearchParams(samples.address().split("?")[1] || ""))) : viewOf(query));
    samples?.close();
    step = to;
    const place = ["training", id];
    samples = rowsView(rowsOf(id, step), { base: place, query: view, more: { step }, link: (row, now) => address([...place, String(step), String(row)], now) });
    if (!following) remember(place, { step, ...view });
    drawPicker();
    replace(sampled, picker, samples.element);
    await samples.update();
  }

  await load();
  const stop = follow(id, async () => {
    run = await ask("run", { run: id });
    await load();
  });
  return {
    crumbs: [[run.env || run.name, null]], title: runName(run),
    keys: { "/": () => find.focus(), "[": () => moveStep(-1), "]": () => moveStep(1), u: () => (location.hash = "#/") },
    onkey: (name) => Boolean(samples?.onkey(name)),
    help: [["[ ]", "previous, next step"], ["j k", "rollouts of the step"], ["/", "find curves"], ["u", "back to the runs"]],
    close: () => (stop(), samples?.close()),
  };
}
