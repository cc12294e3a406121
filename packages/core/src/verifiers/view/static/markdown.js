// Markdown as elements: headings, lists, tables, quotes, code, emphasis and formulas, of text that may be hostile. Text
// becomes text nodes and nothing else: HTML in it is shown as written, no address is linked or loaded. Every text node
// knows its place in the text, so that what is copied is the text as it was written.

import { h, pushAll, spelled, visible } from "./dom.js";
import { copyButton } from "./copy.js";
import { formula } from "./latex.js";

const MAX_NESTED = 8;
const MAX_FORMULA_LINES = 100;
// Each pattern takes time in proportion to the line: hostile text must not stop the page.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +)(?=\S)/;
const DIVIDER = /^\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/;
const LINK = /\[([^[\]\n]{0,300})\]\((https?:\/\/[^\s()]{1,500})\)/y;
const DISPLAYS = [["$$", "$$"], ["\\[", "\\]"]];
const INLINES = [["\\(", "\\)"], ["$", "$"]];
const EMPHASES = [["***", "strong"], ["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

const sources = new WeakMap(); // text node -> {start, end, exact}: where it stands in the text

// The nodes of a text; `mark` is a text to highlight.
export function markdown(text, mark = "") {
  let at = 0;
  const lines = text.split("\n").map((line) => {
    const placed = { text: line, at };
    at += line.length + 1;
    return placed;
  });
  return blocks(lines, { mark }, 0);
}

// The part of `raw` that a selection covers within `box`, which holds the nodes of `markdown(raw)`; null for none.
export function selected(box, range, raw) {
  let [from, to] = [Infinity, -1];
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const place = sources.get(node);
    if (!place || !range.intersectsNode(node)) continue;
    const first = node === range.startContainer ? range.startOffset : 0;
    const last = node === range.endContainer ? range.endOffset : node.data.length;
    if (first >= last) continue;
    from = Math.min(from, place.exact ? place.start + first : place.start);
    to = Math.max(to, place.exact ? place.start + last : place.end);
  }
  return to < 0 ? null : raw.slice(from, to);
}

// --- blocks -----------------------------------------------------------------------------------------------------

function blocks(lines, context, depth) {
  const found = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].text.trim()) {
      i++;
      continue;
    }
    const block = depth < MAX_NESTED && BLOCKS.map((read) => read(lines, i, context, depth)).find(Boolean);
    const end = block ? block.next : endOfParagraph(lines, i, depth);
    found.push(block ? block.node : paragraph(lines.slice(i, end), context));
    i = end;
  }
  return found;
}

const BLOCKS = [code, displayed, tabled, gridded, heading, rule, quote, listed, indented];

function endOfParagraph(lines, start, depth) {
  let end = start + 1;
  while (end < lines.length && lines[end].text.trim() && !(depth < MAX_NESTED && begins(lines, end))) end++;
  return end;
}

function begins(lines, i) {
  const { text } = lines[i];
  return FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || ITEM.test(text) || DISPLAYS.some(([open]) => text.trimStart().startsWith(open)) || isTable(lines, i) || isGrid(lines, i);
}

function code(lines, i, context) {
  const match = lines[i].text.match(FENCE);
  if (!match) return null;
  const [fence, language] = [match[1], match[2].trim().split(/\s/)[0]];
  let end = i + 1;
  const isEnd = (text) => text.trim().length >= fence.length && text.trim() === fence[0].repeat(text.trim().length) && !text.startsWith("    ");
  while (end < lines.length && !isEnd(lines[end].text)) end++;
  return { node: verbatim(lines.slice(i + 1, end), context, language), next: Math.min(end + 1, lines.length) };
}

function verbatim(lines, context, language = "") {
  const joined = join(lines);
  return h("figure", { class: "code" }, h("figcaption", null, h("span", null, visible(language.slice(0, 40))), copyButton(() => joined.text)),
    h("pre", null, h("code", null, leaf(joined, 0, joined.text.length, context))));
}

function displayed(lines, i, context) {
  const text = lines[i].text.trimStart();
  const pair = DISPLAYS.find(([open]) => text.startsWith(open));
  if (!pair) return null;
  const indent = lines[i].text.length - text.length;
  for (let end = i; end < Math.min(lines.length, i + MAX_FORMULA_LINES) && (end === i || lines[end].text.trim()); end++) {
    const from = end === i ? indent + 2 : 0;
    const close = lines[end].text.indexOf(pair[1], from);
    if (close < 0) continue;
    if (lines[end].text.slice(close + 2).trim().length > 1) return null; // a sentence goes on: it is part of a line
    const inside = join(lines.slice(i, end + 1));
    const first = indent + 2;
    const last = inside.text.lastIndexOf(pair[1]);
    return { node: h("div", { class: "formula" }, mathOf(inside, indent, first, last, last + 2, true, context), leaf(inside, last + 2, inside.text.length, context)), next: end + 1 };
  }
  return null;
}

function heading(lines, i, context) {
  const match = lines[i].text.match(HEADING);
  if (!match) return null;
  const from = lines[i].text.length - match[2].length;
  const title = match[2].trimEnd().replace(/ #+$/, "");
  const joined = join([lines[i]]);
  return { node: h("p", { class: `heading h${match[1].length}`, role: "heading", "aria-level": String(Math.min(6, match[1].length + 2)) }, inline(joined, from, from + title.length, context)), next: i + 1 };
}

function rule(lines, i) {
  return RULE.test(lines[i].text) ? { node: h("hr"), next: i + 1 } : null;
}

function quote(lines, i, context, depth) {
  if (!QUOTE.test(lines[i].text)) return null;
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end].text)) end++;
  const inner = lines.slice(i, end).map((line) => cut(line, line.text.match(QUOTE)[0].length));
  return { node: h("blockquote", null, blocks(inner, context, depth + 1)), next: end };
}

function listed(lines, i, context, depth) {
  const first = lines[i].text.match(ITEM);
  if (!first || first[1].length > 3) return null;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let at = i;
  while (at < lines.length) {
    const match = lines[at].text.match(ITEM);
    if (!match || match[1].length > 3 || /\d/.test(match[2]) !== isOrdered || RULE.test(lines[at].text)) break;
    const width = match[0].length;
    const inner = [cut(lines[at], width)];
    for (at++; at < lines.length; at++) {
      const { text } = lines[at];
      const indent = text.length - text.trimStart().length;
      const isBlank = !text.trim();
      if (isBlank && at + 1 < lines.length && /^ {2,}\S/.test(lines[at + 1].text)) inner.push(cut(lines[at], text.length));
      else if (!isBlank && indent >= Math.min(width, 2)) inner.push(cut(lines[at], Math.min(indent, width)));
      else break;
    }
    items.push(h("li", null, blocks(inner, context, depth + 1)));
    if (at < lines.length && !lines[at].text.trim() && ITEM.test(lines[at + 1]?.text ?? "")) at++;
  }
  const start = isOrdered ? Number(first[2].slice(0, -1)) : null;
  return { node: h(isOrdered ? "ol" : "ul", start !== null && start !== 1 ? { start: String(start) } : null, items), next: at };
}

function isTable(lines, i) {
  return lines[i].text.includes("|") && (lines[i + 1]?.text ?? "").includes("-") && DIVIDER.test(lines[i + 1].text.trim()) && cells(lines[i]).length === cells(lines[i + 1]).length;
}

function tabled(lines, i, context) {
  if (!isTable(lines, i)) return null;
  const aligns = cells(lines[i + 1]).map(({ text }) => (/^ *:?-+: *$/.test(text) ? (text.trim().startsWith(":") ? "center" : "right") : null));
  const row = (line, tag) => h("tr", null, cells(line).slice(0, 50).map((cell, n) => h(tag, { class: aligns[n] }, inline(join([cell]), 0, cell.text.length, context))));
  let end = i + 2;
  while (end < lines.length && lines[end].text.trim() && lines[end].text.includes("|")) end++;
  return { node: h("div", { class: "wide-table" }, h("table", null, h("thead", null, row(lines[i], "th")), h("tbody", null, lines.slice(i + 2, end).map((line) => row(line, "td"))))), next: end };
}

function cells(line) {
  const found = [];
  const text = line.text.trimEnd();
  let from = text.match(/^ *\|?/)[0].length;
  for (let at = from; at <= text.length; at++) {
    if (at < text.length && (text[at] !== "|" || text[at - 1] === "\\")) continue;
    if (at < text.length || at > from) {
      const cell = text.slice(from, at);
      found.push({ text: cell.trim(), at: line.at + from + (cell.length - cell.trimStart().length) });
    }
    from = at + 1;
  }
  return found;
}

function indented(lines, i, context) {
  if (!/^(?: {4}|\t)\s*\S/.test(lines[i].text) || (i && lines[i - 1].text.trim())) return null;
  let end = i;
  while (end < lines.length && /^(?: {4}|\t)/.test(lines[end].text)) end++;
  return { node: verbatim(lines.slice(i, end).map((line) => cut(line, line.text[0] === "\t" ? 1 : 4)), context), next: end };
}

// Lines that draw a grid, in a fixed width.
function gridded(lines, i, context) {
  if (!isGrid(lines, i)) return null;
  let end = i;
  while (end < lines.length && isGridLine(lines[end].text)) end++;
  const joined = join(lines.slice(i, end));
  return { node: h("pre", { class: "grid-text" }, leaf(joined, 0, joined.text.length, context)), next: end };
}

const isGrid = (lines, i) => isGridLine(lines[i].text) && i + 1 < lines.length && isGridLine(lines[i + 1].text);

function paragraph(lines, context) {
  const joined = join(lines);
  return h("p", null, inline(joined, 0, joined.text.length, context));
}

function isGridLine(text) {
  const line = text.trim();
  if (line.length < 3) return false;
  if (/[\u2500-\u257f\u2580-\u259f\u25a0-\u25ff\u2b1b\u2b1c\u{1f7e5}-\u{1f7eb}]/u.test(line) || /[^\s.:,;!?] {2,}\S/.test(line)) return true;
  const words = line.split(/[\s|]+/).filter(Boolean);
  if (words.length > 2) return words.every((word) => [...word].length === 1) || words.every((word) => !/\p{L}/u.test(word) && word.length < 6);
  return words.length === 1 && line.length > 3 && /^[^\p{L}\d\s]+$/u.test(line) && new Set(line).size > 1;
}

// --- text -------------------------------------------------------------------------------------------------------

const cut = (line, width) => ({ text: line.text.slice(width), at: line.at + Math.min(width, line.text.length) });

// Lines as one text that knows where each of them stands.
function join(lines) {
  const starts = [];
  let length = 0;
  for (const line of lines) {
    starts.push([length, line.at]);
    length += line.text.length + 1;
  }
  return { text: lines.map((line) => line.text).join("\n"), starts };
}

function placeOf({ starts }, at) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle][0] <= at) low = middle;
    else high = middle - 1;
  }
  return starts.length ? starts[low][1] + at - starts[low][0] : at;
}

function leaf(joined, from, to, { mark }) {
  let at = from;
  const found = [];
  for (const node of joined.text.slice(from, to).split(/(?<=\n)/).flatMap((line) => visible(line, mark))) {
    const isControl = typeof node !== "string" && node.className === "control";
    const length = isControl ? String.fromCodePoint(parseInt(node.title.slice(2), 16)).length : (node.textContent ?? node).length;
    const text = typeof node === "string" ? document.createTextNode(node) : node;
    sources.set(text.firstChild ?? text, { start: placeOf(joined, at), end: placeOf(joined, at + length - 1) + 1, exact: !isControl });
    found.push(text);
    at += length;
  }
  return found;
}

function mathOf(joined, from, first, last, to, isDisplay, context) {
  const element = formula(joined.text.slice(first, last), isDisplay);
  if (!element) return h("code", { class: "formula" }, leaf(joined, from, to, context));
  const place = { start: placeOf(joined, from), end: placeOf(joined, to - 1) + 1, exact: false };
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) sources.set(node, place);
  element.setAttribute("title", spelled(joined.text.slice(first, last)));
  return element;
}

function inline(joined, from, to, context, depth = 0) {
  const { text } = joined;
  const found = [];
  const absent = new Map(); // closing mark -> there is none after this place
  let plain = from;
  const add = (start, end, ...nodes) => {
    if (start > plain) pushAll(found, leaf(joined, plain, start, context));
    pushAll(found, nodes);
    plain = end;
    return end;
  };
  const seek = (wanted, start, fits = () => true) => {
    if (absent.get(wanted) <= start) return -1;
    for (let at = text.indexOf(wanted, start), tries = 0; at >= 0 && at + wanted.length <= to && tries < 50; at = text.indexOf(wanted, at + 1), tries++) if (fits(at)) return at;
    absent.set(wanted, start);
    return -1;
  };
  const isWord = (at) => at >= from && at < to && /[\p{L}\p{N}_]/u.test(text[at]);
  const isSpace = (at) => at < from || at >= to || /\s/.test(text[at]);
  for (let at = from; at < to;) {
    const char = text[at];
    if (!"\\`$*_~[!".includes(char)) {
      at++;
      continue;
    }
    let next = 0;
    if (char === "`") {
      let ticks = 1;
      while (text[at + ticks] === "`") ticks++;
      const mark = "`".repeat(ticks);
      const close = seek(mark, at + ticks, (end) => text[end + ticks] !== "`" && text[end - 1] !== "`");
      if (close > 0) next = add(at, close + ticks, h("code", null, leaf(joined, at + ticks, close, context)));
      else next = at + ticks;
    } else if (char === "\\" || char === "$") {
      const isDisplay = DISPLAYS.some(([open]) => text.startsWith(open, at));
      const pair = (isDisplay ? DISPLAYS : INLINES).find(([open]) => text.startsWith(open, at));
      if (pair) {
        const first = at + pair[0].length;
        const isMoney = pair[0] === "$";
        const close = isMoney && isSpace(first) ? -1 : seek(pair[1], first, (end) => !isMoney || (text[end - 1] !== "\\" && !isSpace(end - 1) && !/\d/.test(text[end + 1] ?? "")));
        if (close > first && close - first < 2000 && !text.slice(first, close).includes("\n\n")) next = add(at, close + pair[1].length, mathOf(joined, at, first, close, close + pair[1].length, isDisplay, context));
      } else if (char === "\\" && at + 1 < to && /[*_`~[\]#>$]/.test(text[at + 1])) {
        add(at, at + 1);
        next = at + 2;
      }
    } else if (char === "[" || (char === "!" && text[at + 1] === "[")) {
      LINK.lastIndex = at + (char === "!");
      const match = LINK.exec(text);
      if (match && LINK.lastIndex <= to) {
        const start = at + (char === "!") + 1;
        const label = leaf(joined, start, start + match[1].length, context);
        const address = leaf(joined, start + match[1].length + 2, LINK.lastIndex - 1, context);
        next = add(at, LINK.lastIndex, h("span", { class: "link" }, char === "!" ? "image not loaded: " : null, label, h("small", null, " (", address, ")")));
      }
    } else {
      const emphasis = depth < MAX_NESTED && EMPHASES.find(([mark]) => text.startsWith(mark, at));
      if (emphasis) {
        const [mark, tag] = emphasis;
        const size = mark.length;
        const isTight = mark === "*" || char === "_"; // 2*3*4 and some_long_name are no emphasis
        const close = isSpace(at + size) || (isTight && isWord(at - 1)) ? -1
          : seek(mark, at + size, (end) => !isSpace(end - 1) && end > at + size && !(isTight && isWord(end + size)) && (size > 1 || text[end + 1] !== char));
        if (close > 0) next = add(at, close + size, h(tag, null, inline(joined, at + size, close, context, depth + 1)));
        else next = at + size;
      }
    }
    at = next || at + 1;
  }
  if (to > plain) pushAll(found, leaf(joined, plain, to, context));
  return found;
}
