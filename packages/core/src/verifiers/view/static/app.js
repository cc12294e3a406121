// The page's frame: routing, the bar at the top, and the keyboard shortcuts.

import { auditPage } from "./audit_page.js";
import { comparePage, comparedPage, pairPage } from "./compare_page.js";
import { curvesPage } from "./curves_page.js";
import { h, replace, spelled, visible } from "./dom.js";
import { keep, parsedAddress, problem, setting } from "./page.js";
import { rolloutPage } from "./rollout_page.js";
import { runPage } from "./run_page.js";
import { runsPage } from "./runs_page.js";
import { setPage, setsPage } from "./sets_page.js";
import { trainingPage } from "./training_page.js";

const bar = document.getElementById("bar");
const main = document.getElementById("main");
const places = new Map(); // address -> scroll position
let current = null;
let shownAddress = "";
let turn = 0;

function pageFor({ parts }) {
  const [kind] = parts;
  if (kind === "run" && parts.length === 2) return runPage;
  if ((kind === "run" && [3, 5].includes(parts.length)) || (kind === "training" && [4, 6].includes(parts.length))) return rolloutPage;
  if (kind === "training" && parts.length === 2) return trainingPage;
  if (kind === "sets" && parts.length === 1) return setsPage;
  if (kind === "set" && parts.length === 2) return setPage;
  if (kind === "audit" && parts.length === 2) return auditPage;
  if (kind === "curves" && parts.length > 1) return curvesPage;
  if (kind === "compare" && parts.length === 3) return comparePage;
  if (kind === "compare" && parts.length === 4) return pairPage;
  if (kind === "compared" && parts.length > 2) return comparedPage;
  return runsPage;
}

async function open() {
  const mine = ++turn;
  places.set(shownAddress, scrollY);
  const to = parsedAddress();
  shownAddress = location.hash.split("?")[0];
  current?.close();
  current = null;
  document.body.classList.add("loading");
  const stage = h("div", { class: "stage" });
  const timer = setTimeout(() => mine === turn && replace(main, h("p", { class: "none" }, "reading …")), 300);
  const observer = new MutationObserver(() => { // the page has its first content: insert it
    observer.disconnect();
    clearTimeout(timer);
    if (mine === turn) place(stage);
  });
  observer.observe(stage, { childList: true });
  let page;
  try {
    page = await pageFor(to)(stage, to);
  } catch (error) {
    page = { crumbs: [], title: "problem", keys: {}, help: [], close: () => {} };
    replace(stage, problem(error), h("p", null, h("a", { href: "#/" }, "all runs")));
  }
  clearTimeout(timer);
  if (mine !== turn) return page.close();
  current = page;
  if (stage.parentElement !== main) place(stage);
  document.body.classList.remove("loading");
  document.title = `${spelled(page.title)} · vf-view`;
  drawBar();
  scrollTo(0, places.get(shownAddress) || 0);
  dispatchEvent(new Event("scroll"));
  main.dataset.ready = shownAddress || "#/";
}

function place(stage) {
  replace(main, stage);
  dispatchEvent(new Event("scroll")); // tables render the rows that are now visible
}

function drawBar() {
  replace(bar, h("a", { class: "logo", href: "#/" }, "vf-view"),
    h("nav", { "aria-label": "where" }, (current?.crumbs || []).map(([text, href]) => [h("span", { class: "slash", "aria-hidden": "true" }, "/"), href ? h("a", { href }, visible(text)) : h("span", null, visible(text))])),
    h("span", { class: "space" }), h("span", { class: "lost", role: "status" }, "the server has stopped; this is what was last known"),
    h("button", { type: "button", onclick: turnTheme, title: "light, dark or as the system (key t)", "aria-label": "change the theme" }, "◐"),
    h("button", { type: "button", onclick: showHelp, title: "keys (?)", "aria-label": "keys" }, "?"));
}

function turnTheme() {
  const order = ["", "light", "dark"];
  const next = order[(order.indexOf(setting("theme", "")) + 1) % order.length];
  keep("theme", next);
  applyTheme(next);
}

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function showHelp() {
  const rows = [...(current?.help || []), ["/", "search"], ["g", "all runs"], ["t", "light or dark"], ["?", "these keys"]];
  const dialog = h("dialog", { "aria-label": "keys" }, h("h2", null, "Keys"), h("dl", null, rows.map(([key, text]) => [h("dt", null, h("kbd", null, key)), h("dd", null, text)])),
    h("form", { method: "dialog" }, h("button", { class: "button" }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest?.("input:not([type=checkbox]), select, textarea");
  if (typing && event.key === "Escape") return void typing.blur();
  if (typing) return;
  if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
  const keys = { g: () => (location.hash = "#/"), t: turnTheme, "?": showHelp, ...(current?.keys || {}) };
  if (current?.keys?.Escape === undefined && keys.u) keys.Escape = keys.u;
  if (keys[event.key]) keys[event.key]();
  else if (!current?.onkey?.(event.key)) return;
  event.preventDefault();
}

applyTheme(setting("theme", ""));
history.scrollRestoration = "manual";
addEventListener("hashchange", open);
addEventListener("keydown", onKey);
drawBar();
open();
