// Markdown as elements, read by markdown-it, of text that may be hostile. Its tokens become elements of a fixed set and
// text nodes, never markup: HTML is shown as written, no address is linked or loaded, nothing is hidden. Every text node
// knows its place in the text, so that what is copied is the text as it was written.

import { copyButton } from "./copy.js";
import { h, pushAll, spelled, visible } from "./dom.js";
import { formulaOr } from "./formula.js";

const MAX_NESTED = 16; // levels of lists and quotes; what is deeper is shown as written
const MAX_FORMULA_LINES = 100;
const MAX_FORMULA_CHARS = 2000;
const MAX_TRIES = 50; // of ends of a formula: a text must not cost the square of its length
const PAIRS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];
const isDisplayed = ([open]) => open === "$$" || open === "\\[";
const TAGS = { em: "em", strong: "strong", s: "del" };

const sources = new WeakMap(); // text node -> {start, end, exact}: where it stands in the text
const parser = makeParser();

// The nodes of a text; `mark` is a text to highlight.
export function markdown(text, mark = "") {
  // Lines end in one way, with every character where it was.
  const plain = text.replace(/\r\n?/g, (end) => (end.length === 2 ? " \n" : "\n"));
  let at = 0;
  const lines = plain.split("\n").map((line) => {
    const placed = { text: line, at };
    at += line.length + 1;
    return placed;
  });
  return blocks(parser.parse(plain, {}), lines, mark);
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

// --- the parser -------------------------------------------------------------------------------------------------

function makeParser() {
  const made = window.markdownit({ html: false, linkify: false, typographer: false });
  // What would hide or change what was written; tokens that are joined lose their place.
  made.disable(["normalize", "text_join", "html_block", "reference", "html_inline", "autolink", "entity", "fragments_join"]);
  const everywhere = { alt: ["paragraph", "reference", "blockquote", "list"] };
  made.block.ruler.before("table", "deep", deepBlock);
  made.block.ruler.before("table", "math", mathBlock, everywhere);
  made.block.ruler.before("blockquote", "grid", gridBlock, everywhere);
  made.inline.ruler.before("escape", "math", mathInline);
  made.inline.ruler.push("character", (state, isSilent) => {
    if (!isSilent) state.pending += state.src[state.pos];
    state.pos += 1;
    return true;
  });
  made.inline.State = class extends made.inline.State {
    constructor(...words) {
      super(...words);
      let pending = "";
      Object.defineProperty(this, "pending", { get: () => pending, set: (text) => {
        if (!pending) this.pendingStart = this.pos;
        pending = text;
      } });
    }

    pushPending() {
      return Object.assign(super.pushPending(), { start: this.pendingStart });
    }

    push(type, ...words) {
      const token = super.push(type, ...words);
      const before = this.tokens.at(-2); // the marks of one run are pushed from its start
      const isSameRun = type === "text" && before?.type === "text" && before.pushedAt === this.pos;
      return Object.assign(token, { pushedAt: this.pos, start: isSameRun ? before.start + before.content.length : this.pos });
    }
  };
  return made;
}

const lineOf = (state, line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);

function pushLines(state, type, start, end) {
  const token = state.push(type, "", 0);
  token.content = state.getLines(start, end, state.blkIndent, false);
  token.map = [start, end];
  state.line = end;
  return true;
}

function deepBlock(state, start, end) {
  if (state.level < MAX_NESTED) return false;
  let next = start + 1;
  while (next < end && (state.isEmpty(next) || state.sCount[next] >= state.blkIndent || state.sCount[next] < 0)) next++;
  return pushLines(state, "deep", start, next);
}

function mathBlock(state, start, end, isSilent) {
  if (state.sCount[start] - state.blkIndent >= 4) return false;
  const first = lineOf(state, start);
  const pair = PAIRS.find((one) => isDisplayed(one) && first.startsWith(one[0]));
  if (!pair) return false;
  for (let line = start; line < Math.min(end, start + MAX_FORMULA_LINES); line++) {
    if (line > start && (state.isEmpty(line) || state.sCount[line] < state.blkIndent)) return false;
    const text = lineOf(state, line);
    const close = text.indexOf(pair[1], line === start ? 2 : 0);
    if (close < 0) continue;
    if (text.slice(close + 2).trim().length > 1) return false; // a sentence goes on: it is part of a line
    return isSilent || pushLines(state, "math_block", start, line + 1);
  }
  return false;
}

// Lines that draw a grid, in a fixed width.
function gridBlock(state, start, end, isSilent) {
  const isGrid = (line) => line < end && state.sCount[line] >= state.blkIndent && isGridLine(lineOf(state, line));
  if (!isGrid(start) || !isGrid(start + 1)) return false;
  if (isSilent) return true;
  let next = start + 2;
  while (isGrid(next)) next++;
  return pushLines(state, "grid", start, next);
}

function isGridLine(text) {
  const line = text.trim();
  if (line.length < 3) return false;
  if (/[\u2500-\u257f\u2580-\u259f\u25a0-\u25ff\u2b1b\u2b1c\u{1f7e5}-\u{1f7eb}]/u.test(line) || /[^\s.:,;!?] {2,}\S/.test(line)) return true;
  const words = line.split(/[\s|]+/).filter(Boolean);
  if (words.length > 2) return words.every((word) => [...word].length === 1) || words.every((word) => !/\p{L}/u.test(word) && word.length < 6);
  return words.length === 1 && line.length > 3 && /^[^\p{L}\d\s]+$/u.test(line) && new Set(line).size > 1;
}

function mathInline(state, isSilent) {
  const { src, pos, posMax } = state;
  const pair = "$\\".includes(src[pos]) && PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const isMoney = pair[0] === "$"; // it costs $5 and $10
  const first = pos + pair[0].length;
  const isSpace = (at) => at >= posMax || /\s/.test(src[at]);
  if (isMoney && isSpace(first)) return false;
  state.noEnd ??= {}; // mark -> no formula that begins after this place has an end
  if (state.noEnd[pair[1]] <= first) return false;
  let close = src.indexOf(pair[1], first);
  for (let tries = 1; close >= 0 && isMoney && (src[close - 1] === "\\" || isSpace(close - 1) || /\d/.test(src[close + 1] ?? "")); tries++) {
    close = tries < MAX_TRIES ? src.indexOf(pair[1], close + 1) : -1;
  }
  if (close < 0) state.noEnd[pair[1]] = first;
  if (close <= first || close + pair[1].length > posMax || close - first > MAX_FORMULA_CHARS) return false;
  if (!isSilent) Object.assign(state.push("math", "", 0), { first, last: close, end: close + pair[1].length, isDisplay: isDisplayed(pair) });
  state.pos = close + pair[1].length;
  return true;
}

// --- blocks -----------------------------------------------------------------------------------------------------

function blocks(tokens, lines, mark) {
  const open = [[]]; // the nodes of each element that is open
  let row = null; // of a table: its line, and where in it the next cell begins
  const add = (nodes) => pushAll(open.at(-1), nodes);
  for (const token of tokens) {
    if (token.type === "tr_open") row = { line: lines[token.map[0]], from: 0 };
    if (token.nesting > 0) open.push([]);
    else if (token.nesting < 0) {
      const nodes = open.pop();
      add([element(token, nodes)]);
    } else if (token.type === "inline") {
      add(inline(token.children, token.map ? join(token.content, token.map[0], lines) : cell(token.content, row), mark));
    } else if (token.type === "hr") add([h("hr")]);
    else {
      const joined = join(token.content.replace(/\n$/, ""), token.map[0] + (token.type === "fence" ? 1 : 0), lines);
      add([DRAWN_BLOCKS[token.type](joined, mark, token)]);
    }
  }
  return open[0];
}

function element(token, nodes) {
  const { tag } = token;
  if (/^h\d$/.test(tag)) return h("p", { class: `heading ${tag}`, role: "heading", "aria-level": String(Math.min(6, Number(tag[1]) + 2)) }, nodes);
  if (tag === "table") return h("div", { class: "wide-table" }, h("table", null, nodes));
  return h(tag, null, nodes);
}

const allOf = (joined, mark) => leaf(joined, 0, joined.text.length, mark);

const verbatim = (joined, mark, { info = "" }) => h("figure", { class: "code" }, h("figcaption", null, h("span", null, visible(info.trim().split(/\s/)[0].slice(0, 40))), copyButton(() => joined.text)),
  h("pre", null, h("code", null, allOf(joined, mark))));

const DRAWN_BLOCKS = {
  fence: verbatim,
  code_block: verbatim,
  grid: (joined, mark) => h("pre", { class: "grid-text" }, allOf(joined, mark)),
  deep: (joined, mark) => h("p", null, allOf(joined, mark)),
  math_block: (joined, mark) => {
    const { text } = joined;
    const first = text.length - text.trimStart().length + 2;
    const last = text.lastIndexOf(text[first - 2] === "$" ? "$$" : "\\]");
    return h("div", { class: "formula" }, math(joined, { start: first - 2, first, last, end: last + 2, isDisplay: true }, mark), leaf(joined, last + 2, text.length, mark));
  },
};

// --- text -------------------------------------------------------------------------------------------------------

// A block's text that knows where each of its lines stands: each is what a line of the source ends with.
function join(text, first, lines) {
  let length = 0;
  const starts = text.split("\n").map((piece, i) => {
    const line = lines[first + i] ?? lines.at(-1); // a fence may end the text
    const indent = piece.length - piece.trimStart().length; // a tab may have become spaces
    const start = [length, line.at + line.text.lastIndexOf(piece.slice(indent)) - indent];
    length += piece.length + 1;
    return start;
  });
  return { text, starts };
}

// A table's cell; its "|" are written "\|".
function cell(text, row) {
  const written = text.replaceAll("|", "\\|");
  const at = row.line.text.indexOf(written, row.from);
  row.from = at + written.length;
  let length = 0;
  const starts = text.split("|").map((piece, i) => {
    const start = [length - (i ? 1 : 0), row.line.at + at + length + (i ? i - 1 : 0)];
    length += piece.length + 1;
    return start;
  });
  return { text, starts };
}

// Which of a text's pieces, each begun by one of its `starts`, holds the character `at`.
function pieceOf({ starts }, at) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle][0] <= at) low = middle;
    else high = middle - 1;
  }
  return low;
}

function placeOf(joined, at) {
  const [begins, stands] = joined.starts[pieceOf(joined, at)];
  return stands + at - begins;
}

function leaf(joined, from, to, mark) {
  const found = [];
  for (let piece = pieceOf(joined, from), at = from; at < to; piece++) {
    const [begins, stands] = joined.starts[piece];
    const end = Math.min(to, joined.starts[piece + 1]?.[0] ?? to);
    for (const node of visible(joined.text.slice(at, end), mark)) {
      const isControl = typeof node !== "string" && node.className === "control";
      const length = isControl ? String.fromCodePoint(parseInt(node.title.slice(2), 16)).length : (node.textContent ?? node).length;
      const text = typeof node === "string" ? document.createTextNode(node) : node;
      const start = stands + at - begins;
      sources.set(text.firstChild ?? text, { start, end: start + length, exact: !isControl });
      found.push(text);
      at += length;
    }
  }
  return found;
}

function math(joined, { start, first, last, end, isDisplay }, mark) {
  const written = h("code", { class: "formula" }, leaf(joined, start, end, mark));
  const tex = joined.text.slice(first, last);
  return formulaOr(written, tex, isDisplay, (element) => {
    const place = { start: placeOf(joined, start), end: placeOf(joined, end - 1) + 1, exact: false };
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) sources.set(node, place);
    element.setAttribute("title", spelled(tex));
  });
}

function inline(tokens, joined, mark) {
  const { text } = joined;
  const open = [[]];
  const add = (nodes) => pushAll(open.at(-1), nodes);
  // The address after a label, as it was written.
  const address = (labelEnd, next) => {
    const written = text.slice(labelEnd + 1, next?.start ?? text.length).trimEnd();
    return h("small", null, " (", leaf(joined, labelEnd + 2, labelEnd + written.length, mark), ")");
  };
  let run = [0, 0]; // texts that follow each other become one
  const addRun = (from, to) => {
    if (from === run[1]) return void (run[1] = to);
    add(leaf(joined, ...run, mark));
    run = [from, to];
  };
  tokens.forEach((token, i) => {
    const { type, start, content } = token;
    if (type === "text") return addRun(start, start + content.length);
    if (type === "text_special") return addRun(start + token.markup.length - content.length, start + token.markup.length);
    if (type.endsWith("break")) return addRun(text.indexOf("\n", start), text.indexOf("\n", start) + 1);
    addRun(-1, -1);
    if (token.nesting > 0) open.push([]);
    else if (type === "link_close") {
      const label = open.pop();
      add([h("span", { class: "link" }, label, address(start, tokens[i + 1]))]);
    } else if (token.nesting < 0) {
      const nodes = open.pop();
      if (open.length > MAX_NESTED) add(nodes);
      else add([h(TAGS[token.tag], null, nodes)]);
    } else if (type === "image") {
      const end = start + 2 + content.length;
      add([h("span", { class: "link" }, "image not loaded: ", leaf(joined, start + 2, end, mark), address(end, tokens[i + 1]))]);
    } else if (type === "math") add([math(joined, token, mark)]);
    else {
      const first = start + token.markup.length;
      const from = first + (text[first] === " " && text.startsWith(` ${token.markup}`, first + 1 + content.length) ? 1 : 0);
      add([h("code", null, leaf(joined, from, from + content.length, mark))]);
    }
  });
  addRun(-1, -1);
  return open[0];
}
