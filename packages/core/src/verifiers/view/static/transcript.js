// A rollout's conversation, turn by turn, and its scores. No text is parsed as HTML; Markdown and formulas are drawn by
// elements (`markdown`), or the text is shown as it was written.

import { copyButton } from "./copy.js";
import { h, replace, visible } from "./dom.js";
import { count, duration, isKnown, number, plural, short } from "./format.js";
import { markdown, selected } from "./markdown.js";
import { keep, select, setting } from "./page.js";

const LONG = 20000; // characters shown before "show all"
const THINK = /^\s*<think>([\s\S]*?)<\/think>\s*/;

export function transcript(rollout, { mark = "" } = {}) {
  const messages = rollout.messages;
  const branches = rollout.branches || [];
  const split = messages.findIndex((message) => message.section === "completion");
  const blocks = [];
  let turn = 0;
  messages.forEach((message, i) => {
    const sampled = message.section === "completion" && message.role === "assistant";
    if (sampled) turn += 1;
    if (i === split && split > 0) blocks.push(h("div", { class: "divider" }, h("span", null, "rollout begins")));
    blocks.push(...branches.filter((one) => one.at === i).map((one) => branch(one, rollout, mark)));
    blocks.push(block(message, { turn: sampled ? turn : 0, step: rollout.steps[message.step], mark }));
  });
  blocks.push(...branches.filter((one) => one.at >= messages.length).map((one) => branch(one, rollout, mark)));
  if (!messages.length) blocks.push(h("p", { class: "none" }, "This rollout has no messages."));
  if (rollout.error) blocks.push(failure(rollout.error));
  else if (rollout.stop_condition) blocks.push(h("div", { class: "divider end" }, h("span", null, visible(`stopped: ${rollout.ended_by}`))));
  return h("div", { class: "transcript", oncopy: (event) => copyRaw(event) }, blocks);
}

const BRANCHES = { side: "side call", rewrite: "the agent replaced its history; what it sends now" };

// Calls of an agent beside its conversation, or a history that it wrote anew.
function branch({ role, messages }, rollout, mark) {
  const calls = messages.filter((message) => message.step !== undefined);
  const said = calls.flatMap((message) => message.parts).filter((part) => part.type === "text").map((part) => part.text).at(-1) || "";
  const facts = [calls.length > 1 ? plural(calls.length, "call") : null, calls.length ? null : plural(messages.length, "message"), said.replace(/\s+/g, " ").slice(0, 80) || null];
  return h("details", { class: `branch ${role === "rewrite" ? "rewrite" : "call-beside"}` }, h("summary", null, h("b", null, visible(BRANCHES[role] || role)), h("span", { class: "facts" }, visible(` ${facts.filter(Boolean).join(" · ")}`))),
    messages.map((message) => block(message, { turn: 0, step: rollout.steps[message.step], mark })));
}

// Markdown drawn, or every text as it was written; remembered.
export function toggleRendered(within) {
  const isRaw = !setting("raw", "");
  keep("raw", isRaw ? "1" : "");
  within.querySelectorAll(".prose").forEach((box) => drawings.get(box)?.(isRaw));
}

// What is copied out of drawn texts is what was written.
function copyRaw(event) {
  const selection = getSelection();
  if (!selection.rangeCount || selection.isCollapsed) return;
  const range = selection.getRangeAt(0);
  const boxes = [...event.currentTarget.querySelectorAll(".prose")].filter((box) => range.intersectsNode(box));
  const parts = boxes.map((box) => selected(box, range, raws.get(box)));
  if (!boxes.length || parts.includes(null)) return; // not of drawn text alone: the browser copies what is seen
  event.clipboardData.setData("text/plain", parts.join("\n\n"));
  event.preventDefault();
}

function block(message, { turn, step, mark }) {
  const facts = [];
  if (turn) facts.push(`turn ${turn}`);
  if (step) facts.push(...stepFacts(step));
  if (message.tool_call_id) facts.push(message.tool_call_id);
  let parts = message.parts;
  let thought = message.reasoning;
  if (!thought && message.role === "assistant" && parts.length === 1 && parts[0].type === "text") {
    const match = parts[0].text.match(THINK);
    if (match) [thought, parts] = [match[1], [{ type: "text", text: parts[0].text.slice(match[0].length) }]];
  }
  const known = ["system", "user", "assistant", "tool", "text"].includes(message.role);
  const write = message.role === "tool" ? words : prose;
  const written = message.parts.filter((part) => part.type === "text").map((part) => part.text).join("\n");
  return h("article", { class: `message ${known ? message.role : "other"}${message.section === "prompt" ? " given" : ""}`, "data-turn": turn || null, tabindex: turn ? "-1" : null },
    h("header", null, h("span", { class: "role" }, visible(message.name ? `${message.role} · ${message.name}` : message.role)),
      facts.length ? h("span", { class: "facts" }, visible(facts.join(" · "))) : null,
      written || thought ? copyButton(() => written || thought) : null),
    thought ? h("details", { class: "thought", open: true }, h("summary", null, `reasoning, ${plural(thought.length, "character")}`), write(thought.trim(), mark)) : null,
    parts.map((part) => shown(part, mark, write)),
    (message.calls || []).map((call) => toolCall(call, mark)),
    !parts.length && !thought && !message.calls ? h("p", { class: "none" }, "empty") : null,
    step && step.logprobs && step.logprobs.length ? probabilities(step) : null);
}

function stepFacts(step) {
  const facts = [];
  if (step.role && step.role !== "main") facts.push(step.role);
  if (isKnown(step.completion_tokens)) facts.push(`${isKnown(step.prompt_tokens) ? `${count(step.prompt_tokens)} → ` : ""}${count(step.completion_tokens)} tokens`);
  if (isKnown(step.model_ms)) facts.push(duration(step.model_ms));
  if (isKnown(step.env_ms) && step.env_ms >= 1) facts.push(`environment ${duration(step.env_ms)}`);
  const known = (step.logprobs || []).filter(isKnown);
  if (known.length) facts.push(`mean log-prob ${number(known.reduce((a, b) => a + b, 0) / known.length, 2)}`);
  if (isKnown(step.policy_version) && step.policy_version >= 0) facts.push(`policy ${step.policy_version}`);
  if (isKnown(step.reward)) facts.push(`reward ${number(step.reward)}`);
  if (step.truncated) facts.push("cut by the length limit");
  return facts;
}

function shown(part, mark, write) {
  if (part.type === "text") return write(part.text, mark);
  if (part.type === "image") {
    // of this page, or stored beside the rows of this server or copy: no other host is asked
    return /^(data:image\/(png|jpeg|gif|webp|avif|bmp);base64,|api\/image\?|images\/[0-9a-f]{64}\.\w+$)/.test(part.url)
      ? h("img", { src: part.url, alt: "image of the message", loading: "lazy" }) : null;
  }
  if (part.type === "address") return h("p", { class: "address" }, "image not loaded: ", visible(part.text.slice(0, 500)));
  return words(JSON.stringify(part.value, null, 2), mark);
}

// A text as it was written.
export function words(text, mark = "") {
  return bounded(text, h("div", { class: "text" }), (part) => visible(part, mark));
}

const raws = new WeakMap(); // box of a drawn text -> the text
const drawings = new WeakMap(); // the same box -> draw it, as written or rendered

// A text whose Markdown and formulas are drawn; as written where a searched text would be hidden by them.
function prose(text, mark) {
  const box = h("div", { class: "text prose" });
  raws.set(box, text);
  drawings.set(box, (isRaw) => bounded(text, box, (part) => {
    const nodes = isRaw ? null : markdown(part, mark);
    const isDrawn = nodes && (!mark || !part.toLowerCase().includes(mark.toLowerCase()) || h("div", null, nodes).querySelector("mark"));
    box.classList.toggle("drawn", Boolean(isDrawn));
    return isDrawn ? nodes : visible(part, mark);
  }));
  drawings.get(box)(Boolean(setting("raw", "")));
  return box;
}

function bounded(text, box, draw) {
  replace(box, draw(text.slice(0, LONG)));
  if (text.length > LONG) {
    const more = h("button", { type: "button", class: "more", onclick: () => replace(box, draw(text)) }, `show all ${count(text.length)} characters`);
    box.append(h("br"), more);
  }
  return box;
}

// The turns of a rollout with their rewards; a click goes to the turn.
export function outline(rollout) {
  const turns = rollout.messages.filter((message) => message.section === "completion" && message.role === "assistant");
  if (turns.length < 2) return null;
  const open = (turn) => {
    const article = document.querySelector(`[data-turn="${turn}"]`);
    article?.scrollIntoView({ block: "start" });
    article?.focus({ preventScroll: true });
  };
  return h("nav", { class: "outline", "aria-label": "turns" }, h("h3", null, "Turns"), h("ol", null, turns.map((message, i) => {
    const step = rollout.steps[message.step] || {};
    const calls = (message.calls || []).map((call) => `${call.name}()`).join(", ");
    const text = message.parts.filter((part) => part.type === "text").map((part) => part.text).join(" ").replace(THINK, "");
    return h("li", null, h("button", { type: "button", onclick: () => open(i + 1) }, h("span", null, visible((calls || text.slice(0, 200).replace(/\s+/g, " ").trim() || "empty").slice(0, 60))),
      isKnown(step.completion_tokens) ? h("small", null, count(step.completion_tokens)) : null,
      isKnown(step.reward) ? h("b", { title: "reward of the turn" }, number(step.reward)) : null));
  })));
}

function toolCall(call, mark) {
  let text = call.arguments ?? "";
  try {
    const parsed = typeof text === "string" ? JSON.parse(text) : text;
    text = isFlat(parsed) ? Object.entries(parsed).map(([key, value]) => `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n")
      : JSON.stringify(parsed, null, 2);
  } catch { /* not JSON: shown as the model wrote it */ }
  return h("div", { class: "call" }, h("header", null, h("b", null, visible(`${call.name}()`)), call.id ? h("span", { class: "facts" }, visible(String(call.id))) : null),
    text ? words(String(text), mark) : null);
}

function isFlat(value) {
  return value && typeof value === "object" && !Array.isArray(value) && Object.values(value).every((v) => typeof v !== "object" || v === null);
}

const COLOURS = [["logprob", "log-probability when sampled"], ["ratio", "ratio, now to when sampled"], ["advantage", "advantage"], ["weight", "weight in the loss"], ["mask", "loss mask"]];
const paints = new WeakMap(); // details of a turn -> colour its tokens by the chosen number

const at = (values, i) => (Array.isArray(values) ? values[i] : values); // one number stands for all tokens of a turn

function tokenNumbers(step, i) {
  const [logprob, policy, old] = [step.logprobs, step.policy_logprobs, step.old_logprobs].map((values) => at(values, i));
  return {
    logprob, policy, old, mask: at(step.mask, i), advantage: at(step.advantage, i), weight: at(step.weight, i), version: at(step.policy_version, i),
    ratio: isKnown(policy) && isKnown(logprob) ? Math.exp(policy - logprob) : undefined,
  };
}

function tokenTitle(step, i) {
  const found = tokenNumbers(step, i);
  const lines = [`token ${i + 1}${isKnown(step.ids?.[i]) ? `, id ${step.ids[i]}` : ""}: log-prob ${number(found.logprob)}, ${isKnown(found.logprob) ? `${(100 * Math.exp(found.logprob)).toPrecision(3)}%` : "unknown"}`];
  if (isKnown(found.policy)) lines.push(`in the step: log-prob ${number(found.policy)}, ratio ${number(found.ratio)}`);
  if (isKnown(found.old)) lines.push(`when the batch was built: log-prob ${number(found.old)}, ratio ${number(Math.exp(found.policy - found.old))}`);
  if (isKnown(found.advantage)) lines.push(`advantage ${number(found.advantage)}, weight ${number(found.weight)}`);
  if (isKnown(found.mask)) lines.push(found.mask ? "in the loss" : "not in the loss");
  if (isKnown(found.version) && found.version >= 0) lines.push(`policy ${found.version}`);
  return lines.join("\n");
}

// The class of a token: its level from 0 to 8, and whether it is above or below the neutral value.
function tokenClass(found, by, most) {
  const level = (share) => Math.max(0, Math.min(8, Math.round(8 * share)));
  const sided = (value, share) => `p${level(share)}${value < 0 ? " below" : " over"}`;
  if (by === "ratio" && isKnown(found.ratio)) return sided(Math.log(found.ratio), Math.abs(Math.log(found.ratio)) / Math.log(2));
  if (by === "advantage" && isKnown(found.advantage)) return sided(found.advantage, Math.abs(found.advantage) / most);
  if (by === "weight" && isKnown(found.weight)) return `p${level(found.weight / most)} over`;
  if (by === "mask" && isKnown(found.mask)) return found.mask ? "p4 over" : "p0";
  return by === "logprob" && isKnown(found.logprob) ? `p${Math.min(8, Math.floor(-found.logprob * 2))}` : "p0";
}

// Tokens coloured by one of their numbers, in place of the text; one cell per token when their texts are unknown.
function probabilities(step) {
  const shown = Math.min(step.logprobs.length, 4000);
  const found = Array.from({ length: shown }, (_, i) => tokenNumbers(step, i));
  const tokens = found.map((_, i) => h("span", { title: tokenTitle(step, i) }, step.pieces ? visible(step.pieces[i] ?? "") : ""));
  const rest = step.logprobs.length - shown;
  const choices = COLOURS.filter(([name]) => found.some((one) => isKnown(one[name])));
  const paint = () => {
    const by = choices.some(([name]) => name === setting("colour", "logprob")) ? setting("colour", "logprob") : "logprob";
    const most = found.reduce((top, one) => Math.max(top, Math.abs(one[by] ?? 0)), 0) || 1;
    tokens.forEach((token, i) => (token.className = `token ${tokenClass(found[i], by, most)}${found[i].mask === 0 ? " masked" : ""}`));
    if (control) control.value = by;
    const ends = { logprob: ["likely", "unlikely"], ratio: ["less likely now", "more likely now"], advantage: ["negative", "positive"], weight: ["none", number(most)], mask: ["masked", "in the loss"] }[by];
    replace(legend, `${ends[0]} `, (by === "ratio" || by === "advantage" ? ["p8 below", "p4 below", "p0", "p4 over", "p8 over"] : by === "logprob" ? ["p0", "p2", "p4", "p6", "p8"] : ["p0", "p4 over", "p8 over"])
      .map((name) => h("i", { class: `token ${name}` })), ` ${ends[1]}`);
  };
  const legend = h("span", { class: "legend", "aria-hidden": "true" });
  const control = choices.length < 2 ? null : select("Colour of the tokens", choices, "logprob", (by) => {
    keep("colour", by);
    document.querySelectorAll(".probabilities").forEach((details) => paints.get(details)?.());
  });
  const details = h("details", { class: step.pieces ? "probabilities named" : "probabilities", open: Boolean(step.pieces) && setting("tokens", "1") === "1" },
    h("summary", null, `log-probabilities of ${plural(step.logprobs.length, "token")}`), h("div", { class: "colours" }, control, legend),
    h("div", { class: step.pieces ? "tokens named" : "tokens" }, tokens, rest > 0 ? ` and ${count(rest)} more` : ""),
    step.pieces ? null : h("p", { class: "none" }, "One cell for each token; vf-view --tokenizer NAME shows their texts."));
  paint();
  paints.set(details, paint);
  return details;
}

// The texts, or in their place the tokens coloured; remembered.
export function toggleTokens() {
  const all = [...document.querySelectorAll(".probabilities")];
  const isOpen = all.some((details) => !details.open);
  keep("tokens", isOpen ? "1" : "0");
  all.forEach((details) => (details.open = isOpen));
}

function failure(error) {
  const scoring = error.error === "ScoringError";
  return h("section", { class: "failure", role: "note" },
    h("h3", null, visible(`${scoring ? "not scored" : "failed"}: ${error.error || "error"}`)),
    error.message ? words(error.message) : null,
    error.where ? h("p", { class: "facts" }, visible(`in ${error.where}`)) : null,
    error.traceback ? h("details", null, h("summary", null, "traceback"), h("div", { class: "text mono" }, visible(error.traceback))) : null);
}

const reasons = { no_signal: "all siblings had the same reward", overlong: "too long", truncated: "cut by a length limit", unscored: "unknown reward", empty: "no tokens" };

// The panel beside the conversation: reward and its parts, answer, numbers, further columns.
export function facts(rollout) {
  const scores = [...rollout.scores].sort((a, b) => (b.weight !== null) - (a.weight !== null));
  const weighs = scores.some((score) => score.weight !== null); // the rollouts of a training are saved without weights
  const timing = rollout.timing || {};
  const usage = rollout.usage || {};
  const spent = ["setup_ms", "model_ms", "env_ms", "scoring_ms", "overhead_ms"].filter((name) => timing[name] >= 0.5);
  return [
    h("section", { class: "reward" }, h("h3", null, "Reward"), h("p", { class: "big" }, isKnown(rollout.reward) ? number(rollout.reward) : "unknown"),
      isKnown(rollout.reward) ? null : h("p", { class: "facts" }, visible(rollout.error ? `${rollout.error.error || "error"}: ${(rollout.error.message || "").split("\n")[0].slice(0, 200)}` : "no reward function gave a number")),
      isKnown(rollout.advantage) ? h("p", { class: "facts" }, `advantage ${number(rollout.advantage)}`) : null,
      scores.length ? h("table", null,
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "function"), h("th", { scope: "col" }, "value"), weighs && ["weight", "part"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", null, scores.map((score) => h("tr", { class: score.weight === null ? "metric" : null },
          h("th", { scope: "row" }, visible(score.name)), h("td", null, number(score.value)),
          weighs && [h("td", null, score.weight === null ? "" : `× ${short(score.weight)}`), h("td", null, score.part === null ? "" : number(score.part))])))) : null),
    ...(rollout.agent ? agentFacts(rollout.agent) : []),
    given(rollout.answer) ? h("section", null, h("h3", null, "Answer"), value(rollout.answer)) : null,
    h("section", null, h("h3", null, "Numbers"), list([
      ["stopped by", rollout.ended_by], ["truncated", rollout.is_truncated ? "yes" : null],
      ["tokens read", isKnown(usage.input_tokens) ? count(usage.input_tokens) : null],
      ["tokens written", isKnown(usage.output_tokens) ? count(usage.output_tokens) : null],
      ["time", isKnown(timing.total_ms) ? duration(timing.total_ms) : null],
      ...spent.map((name) => [`· ${name.slice(0, -3).replace("env", "environment")}`, duration(timing[name])]),
      ["attempts", rollout.attempts > 1 ? rollout.attempts : null], ["task", rollout.task],
      ["trained on", rollout.trained === null || rollout.trained === undefined ? null : rollout.trained ? "yes" : `no: ${reasons[rollout.excluded] || rollout.excluded || "unknown"}`]])),
    given(rollout.info) ? h("section", null, h("details", null, h("summary", null, "Info"), value(rollout.info))) : null,
    Object.entries(rollout.more || {}).map(([name, column]) => h("section", null, h("details", null, h("summary", null, visible(name)), value(column)))),
    rollout.steps.length ? null : h("p", { class: "none" }, isKnown(rollout.group) ? "The numbers of its tokens were not kept: log_tokens bounds them." : `Tokens, log-probabilities and time of each turn${rollout.agent ? ", and the agent's calls beside its conversation," : ""} are kept by vf-eval -C trajectory.`),
    rollout.tools && rollout.tools.length ? h("section", null, h("details", null, h("summary", null, plural(rollout.tools.length, "tool")), value(rollout.tools))) : null,
  ];
}

// An agent program: how it ended, its log, and the files that were collected.
function agentFacts(agent) {
  const counts = {};
  for (const role of agent.roles || []) counts[role] = (counts[role] || 0) + 1;
  return [
    h("section", { class: "agent" }, h("h3", null, "Agent"), list([
      ["program", [agent.name, agent.version].filter(Boolean).join(" ")], ["ended", agent.ended],
      ["exit code", isKnown(agent.exit_code) ? agent.exit_code : null],
      ["time", isKnown(agent.seconds) ? duration(1000 * agent.seconds) : null],
      ["calls", Object.entries(counts).map(([role, n]) => `${n} ${role}`).join(", ")],
      ["history rewritten", agent.rewrites || null], ["requests repeated", agent.repeats || null],
      ["left behind", (agent.left || []).join(", ")], ["notes", (agent.notes || []).join("\n")]]),
    h("details", { open: true }, h("summary", null, `log, ${plural(agent.log_bytes || 0, "byte")}`), agent.log ? h("div", { class: "mono log" }, words(agent.log.replace(/\x1b\[[0-9;]*m/g, ""))) : h("p", { class: "none" }, "empty"))),
    ...Object.entries(agent.files || {}).map(([name, text]) => h("section", null, h("details", null, h("summary", null, visible(name)), value(text)))),
  ];
}

function given(value) {
  return !(value === null || value === undefined || value === "" || (typeof value === "object" && !Object.keys(value).length));
}

export function value(content) {
  return words(typeof content === "string" ? content : JSON.stringify(content, null, 2));
}

export function list(pairs) {
  return h("dl", null, pairs.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([name, v]) => [h("dt", null, visible(String(name))), h("dd", null, visible(String(v)))]));
}
