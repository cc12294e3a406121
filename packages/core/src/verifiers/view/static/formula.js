// Formulas as elements, by KaTeX. The text may be hostile: nothing in it links, loads or reaches out of its message, macros
// and sizes are bounded, and what KaTeX cannot draw is null. KaTeX makes elements, never markup.

import { h } from "./dom.js";

const MAX_TEX_CHARS = 2000;
const MAX_FORMULA_CELLS = 200; // "&" and "\\": a cell is a dozen elements
const MAX_WIDTH_EM = 20; // of what a formula itself measures: \rule, \kern
const MAX_EXPANSIONS = 300;
const TASK_MS = 400; // of drawing at once; the formulas after that are drawn when they are seen

let spentMs = 0;
const waiting = new WeakMap(); // element of a formula as written -> draws it
const observer = new IntersectionObserver(onSeen, { rootMargin: "50%" });

// A formula, or `written`, an element with its text, where there is none; later in its place where many stand before it.
// `drawn` is called with the formula's element.
export function formulaOr(written, tex, isDisplay, drawn) {
  if (!tex.trim() || tex.length > MAX_TEX_CHARS || tex.split(/&|\\\\/).length > MAX_FORMULA_CELLS) return written;
  const draw = () => {
    if (!spentMs) setTimeout(() => (spentMs = 0));
    const started = performance.now();
    const element = formula(tex, isDisplay);
    spentMs += performance.now() - started;
    if (element) drawn(element);
    return element;
  };
  if (spentMs < TASK_MS) return draw() ?? written;
  waiting.set(written, draw);
  observer.observe(written);
  return written;
}

function onSeen(entries) {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    observer.unobserve(target);
    if (spentMs < TASK_MS) target.replaceWith(waiting.get(target)() ?? target);
    else observer.observe(target); // is reported again, in the next task
  }
}

function formula(tex, isDisplay) {
  const options = { displayMode: isDisplay, trust: false, strict: "ignore", throwOnError: true, maxExpand: MAX_EXPANSIONS, maxSize: MAX_WIDTH_EM };
  try {
    const tree = window.katex.__renderToDomTree(tex, options);
    styleByProperty(tree);
    return h("span", { class: "formula" }, tree.toNode());
  } catch { // unknown, unfinished, too deep or too much
    return null;
  }
}

// The page's policy allows no style attribute; the same declarations are set as properties.
function styleByProperty(node) {
  const style = node.attributes?.style;
  if (style) {
    delete node.attributes.style;
    const make = node.toNode;
    node.toNode = () => {
      const element = make.call(node);
      element.style.cssText = style;
      return element;
    };
  }
  node.children?.forEach(styleByProperty);
}
