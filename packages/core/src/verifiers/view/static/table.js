// A virtual table that scrolls with the page: only visible rows are in the document.

import { h, NARROW, replace, visible } from "./dom.js";

const MARGIN = 8; // rows drawn beyond the screen
const GAP_REM = 0.5; // as in style.css

// The least width of a row: the columns' widths or their minima, the gaps and the padding of `.row`.
export function leastRem(columns) {
  const least = columns.map((column) => parseFloat(column.width.replace(/^minmax\(/, "")) || 0);
  return least.reduce((sum, width) => sum + width, 0) + GAP_REM * (columns.length - 1) + 1.8;
}

// A long name breaks behind its dots, without any behind underscores.
const broken = (title) => title.split(title.includes(".") ? /(?<=\.)/ : /(?<=_)/).flatMap((part) => [visible(part), h("wbr")]);

export class Table {
  // columns: [{id, title, width, sort, className, cell, narrow}]; cell(row), or draw(row) of the table, gives what is
  // in it; narrow: its width on a phone, which shows only columns that have one. href(row): where a row leads;
  // prepare(rows) may fetch what cells need and returns a promise.
  constructor({ label, columns, height, draw = null, href, prepare = async () => {}, onsort = null }) {
    Object.assign(this, { columns, height, draw, href, prepare, onsort });
    this.order = [];
    this.focused = -1;
    this.drawn = new Map();
    this.head = h("div", { class: "row head", role: "row", "aria-rowindex": 1 });
    this.body = h("div", { class: "body", role: "rowgroup" });
    this.element = h("div", { class: "table", role: "table", "aria-label": label }, h("div", { role: "rowgroup", class: "sticky" }, this.head), this.body);
    this.layout();
    this.onscroll = () => this.schedule();
    addEventListener("scroll", this.onscroll, { passive: true });
    this.onresize = () => (NARROW.matches === this.isNarrow ? (this.fit(), this.schedule()) : (this.layout(this.columns, this.sort), this.redraw()));
    addEventListener("resize", this.onresize);
  }

  close() {
    removeEventListener("scroll", this.onscroll);
    removeEventListener("resize", this.onresize);
  }

  layout(columns = this.columns, sort = "") {
    this.columns = columns;
    this.sort = sort;
    this.isNarrow = NARROW.matches;
    const few = columns.filter((column) => column.narrow);
    this.visible = this.isNarrow && few.length ? few : columns;
    this.element.style.setProperty("--grid", this.visible.map((column) => (this.visible === few ? column.narrow : column.width)).join(" "));
    this.element.style.setProperty("--least", this.visible === few ? "0" : `${leastRem(columns)}rem`);
    this.fit();
    replace(this.head, this.visible.map((column) => {
      const by = sort.replace(/^-/, "") === column.sort ? (sort.startsWith("-") ? "descending" : "ascending") : null;
      const title = column.sort && this.onsort
        ? h("button", { type: "button", class: "sort", title: `sort by ${column.title}`, onclick: () => this.onsort(column.sort) }, broken(column.title),
            h("span", { class: "arrow", "aria-hidden": "true" }, by === "descending" ? "↓" : by ? "↑" : ""))
        : broken(column.title);
      return h("div", { role: "columnheader", class: column.className, "aria-sort": by }, title);
    }));
  }

  // Columns that do not fit beside each other scroll within the table; its head then scrolls away with the page.
  fit() {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const width = this.element.clientWidth;
    this.element.classList.toggle("wide", Boolean(width) && this.visible === this.columns && leastRem(this.columns) * rem > width);
  }

  show(order) {
    this.order = order;
    this.body.style.height = `${order.length * this.height}px`;
    this.element.setAttribute("aria-rowcount", order.length + 1);
    this.redraw();
  }

  redraw() {
    this.drawn.forEach((element) => element.remove());
    this.drawn.clear();
    this.schedule();
  }

  schedule() {
    if (!this.pending) this.pending = requestAnimationFrame(() => ((this.pending = 0), this.paint()));
  }

  range() {
    const top = -this.body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(top / this.height) - MARGIN);
    return [first, Math.min(this.order.length, Math.ceil((top + innerHeight) / this.height) + MARGIN)];
  }

  paint() {
    if (!this.element.isConnected) return;
    this.fit();
    const [first, end] = this.range();
    for (const [at, element] of this.drawn) {
      if (at < first || at >= end) (element.remove(), this.drawn.delete(at));
    }
    for (let at = first; at < end; at++) if (!this.drawn.has(at)) this.place(at);
    const rows = this.order.slice(first, end);
    clearTimeout(this.waiting); // no requests during fast scrolling
    this.waiting = setTimeout(() => this.prepare(rows).then((news) => news && this.refresh(rows)).catch(() => {}), 30);
  }

  refresh(rows) {
    const wanted = new Set(rows);
    const held = this.body.contains(document.activeElement);
    for (const [at, element] of [...this.drawn]) {
      if (wanted.has(this.order[at])) (element.remove(), this.place(at));
    }
    if (held) this.drawn.get(this.focused)?.querySelector("a").focus({ preventScroll: true });
  }

  place(at) {
    const row = this.order[at];
    const drawn = this.draw?.(row);
    const cells = this.visible.map((column) => h("div", { role: "cell", class: column.className }, drawn ? drawn[this.columns.indexOf(column)] : column.cell(row)));
    const [first, ...rest] = cells;
    first.prepend(h("a", { class: "stretch", href: this.href(row), tabindex: at === this.focused ? 0 : -1, "aria-label": `open ${first.textContent}` }));
    const element = h("div", { class: at === this.focused ? "row focused" : "row", role: "row", "aria-rowindex": at + 2 }, first, rest);
    element.style.transform = `translateY(${at * this.height}px)`;
    element.style.height = `${this.height}px`;
    this.body.append(element);
    this.drawn.set(at, element);
  }

  focus(at, scroll = true) {
    if (!this.order.length) return;
    this.focused = Math.max(0, Math.min(this.order.length - 1, at));
    if (scroll) {
      const top = this.body.getBoundingClientRect().top + this.focused * this.height;
      const header = this.head.getBoundingClientRect().bottom;
      if (top < header) scrollBy(0, top - header - 4);
      else if (top + this.height > innerHeight) scrollBy(0, top + this.height - innerHeight + 4);
    }
    this.redraw();
    cancelAnimationFrame(this.pending);
    this.pending = 0;
    this.paint();
    this.drawn.get(this.focused)?.querySelector("a").focus({ preventScroll: true });
  }

  // Handle a key of the list; true when it was handled.
  key(name) {
    const moves = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: 12, PageUp: -12 };
    if (name in moves) this.focus(this.focused < 0 ? this.range()[0] + (this.range()[0] ? MARGIN : 0) : this.focused + moves[name]);
    else if (name === "Home") this.focus(0);
    else if (name === "End") this.focus(this.order.length - 1);
    else if (name === "Enter" && this.focused >= 0) location.hash = this.href(this.order[this.focused]);
    else return false;
    return true;
  }
}
