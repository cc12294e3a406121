// Create elements from data. Text always becomes text nodes; no text is parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

export const NARROW = matchMedia("(max-width: 40rem)"); // a phone, as in style.css

export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, set] of Object.entries(value)) element.style.setProperty(key, set);
    else element.setAttribute(name, value === true ? "" : value);
  }
  return appended(element, children);
}

export function replace(element, ...children) {
  element.replaceChildren();
  return appended(element, children);
}

// One at a time, as in `pushAll`: a call has a limited number of arguments, and a long text has more nodes.
function appended(element, children) {
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

export function pushAll(list, more) {
  for (const item of more) list.push(item);
}

// Characters that move, hide or reorder text (terminal escapes, bidi marks, tags, zero-width, lone surrogates).
const CONTROL =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\u{e0000}-\u{e007f}\p{Cs}]/gu;

function spell(char) {
  const code = char.codePointAt(0);
  const hex = code.toString(16);
  return code < 256 ? `\\x${hex.padStart(2, "0")}` : code < 65536 ? `\\u${hex.padStart(4, "0")}` : `\\u{${hex}}`;
}

// The text with such characters escaped, as a string.
export function spelled(text) {
  return String(text).replace(CONTROL, spell);
}

// The same as nodes, with the escaped characters marked; `mark` is a text to highlight.
export function visible(text, mark = "") {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(CONTROL)) {
    pushAll(nodes, marked(text.slice(end, match.index), mark));
    const name = `U+${match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    nodes.push(h("span", { class: "control", title: name }, spell(match[0])));
    end = match.index + match[0].length;
  }
  pushAll(nodes, marked(text.slice(end), mark));
  return nodes;
}

function marked(text, mark) {
  if (!mark) return text ? [text] : [];
  const nodes = [];
  const lower = text.toLowerCase();
  const wanted = mark.toLowerCase();
  let end = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, end)) {
    nodes.push(text.slice(end, at), h("mark", null, text.slice(at, at + wanted.length)));
    end = at + wanted.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
