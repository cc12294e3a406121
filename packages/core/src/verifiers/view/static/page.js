// Shared by all pages: addresses, stored settings, polling of a running run, small controls.

import { ask, isCopy } from "./api.js";
import { h, visible } from "./dom.js";
import { isKnown, number } from "./format.js";

const POLL_MS = 1000;

export function address(parts, query = {}) {
  const path = parts.map((part) => encodeURIComponent(part)).join("/");
  const entries = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `#/${path}${entries.length ? `?${new URLSearchParams(entries)}` : ""}`;
}

export function parsedAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => decodeURIComponent(part));
  return { parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

// Change the query of this page's address without reloading the page.
export function remember(parts, query) {
  history.replaceState(null, "", address(parts, query));
}

// Call `changed` whenever the version of a run (without one: of the list) changes; returns a function that stops it.
export function follow(run, changed) {
  if (isCopy) return () => {};
  let [known, stopped, busy] = [null, false, false];
  const look = async () => {
    if (stopped || busy || document.hidden) return;
    busy = true;
    try {
      const { version } = await ask("version", { run });
      document.body.classList.remove("offline");
      if (known !== null && version !== known && !stopped) await changed();
      known = version;
    } catch {
      document.body.classList.add("offline");
    } finally {
      busy = false;
    }
  };
  const timer = setInterval(look, POLL_MS);
  look();
  return () => ((stopped = true), clearInterval(timer));
}

export function setting(name, otherwise) {
  try {
    return localStorage.getItem(`vf-view.${name}`) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`vf-view.${name}`, value);
  } catch { /* without storage the setting lasts as long as the page */ }
}

export function select(label, options, value, onchange) {
  const control = h("select", { "aria-label": label, onchange: () => onchange(control.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return control;
}

// A button with a check box for each column; `all`: [{id, title, optional}], remembered under `name`. Columns that are
// `optional` are hidden until they are chosen, all others are shown.
export function chooser(name, all, changed) {
  const chosen = chosenColumns(name);
  return h("details", { class: "chooser" }, h("summary", { class: "button" }, "Columns"),
    h("div", { class: "menu" }, all.map((column) => {
      const box = h("input", { type: "checkbox", checked: isShown(column, chosen), onchange: () => {
        const now = chosenColumns(name);
        now[column.id] = box.checked;
        keep(`columns.${name}`, JSON.stringify(now));
        changed();
      } });
      return h("label", null, box, " ", visible(column.title || column.id));
    })));
}

export function shownColumns(name, all) {
  const chosen = chosenColumns(name);
  return all.filter((column) => isShown(column, chosen));
}

const isShown = (column, chosen) => (column.id in chosen ? chosen[column.id] : !column.optional);

function chosenColumns(name) {
  try {
    return Object.assign(Object.create(null), JSON.parse(setting(`columns.${name}`, "{}")));
  } catch {
    return Object.create(null);
  }
}

// What counts as solved in a run, see Rows.isFailure.
export const successOf = (run) => ({ metric: run.success_metric ? "success" : "", threshold: run.pass_threshold ?? 1 });

export function status(run) {
  return h("span", { class: `status ${run.status}`, title: visible(run.ended || "") }, run.status);
}

// A reward as number and bar; `range`: lowest and highest reward of the run.
export function rewardChip(reward, [low, high], reason = "") {
  if (!isKnown(reward)) return h("span", { class: "chip unknown", title: reason || null }, "unknown");
  const share = high > low ? (reward - low) / (high - low) : 1;
  return h("span", { class: "chip", vars: { "--share": Math.max(0, Math.min(1, share)).toFixed(3) } }, number(reward));
}

export function card(title, value, more = "") {
  return h("div", { class: "card" }, h("span", null, title), h("b", null, value), more ? h("small", null, more) : null);
}

export function problem(error) {
  return h("p", { class: "problem", role: "alert" }, visible(String(error.message || error)));
}

export const runName = (run) => [run.env, run.model].filter(Boolean).join(" · ") || run.id;

export const pageOf = (run, query) => address([run.kind === "training" ? "training" : "run", run.id], query);

// Of a training's file of rollouts: those of step 3, or (-3) those that were dropped before it.
export const stepName = (step) => (step < 0 ? `dropped before step ${-step}` : `step ${step}`);
