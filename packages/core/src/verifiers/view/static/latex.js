// LaTeX formulas as MathML elements, for the part of LaTeX that models write. What is not known gives null, and the
// formula is then shown as it was written. Nothing is parsed as markup; depth and size are bounded.

import { mathml, spelled } from "./dom.js";

const m = mathml;
const MAX_CHARS = 2000;
const MAX_DEPTH = 30;

const LETTERS = table(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
  lambda λ mu μ nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ partial ∂
  nabla ∇ infty ∞ emptyset ∅ varnothing ∅ prime ′ dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱ angle ∠ triangle △ circ ∘ degree °
  top ⊤ bot ⊥ square □ blacksquare ■ checkmark ✓`);
const OPERATORS = table(`times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ bullet • oplus ⊕ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨
  neg ¬ lnot ¬ cap ∩ cup ∪ setminus ∖ le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥ lt < gt > ne ≠ neq ≠ equiv ≡ approx ≈ sim ∼ simeq ≃
  cong ≅ propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ forall ∀ exists ∃ nexists ∄ to →
  rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ iff ⟺ mapsto ↦ longrightarrow ⟶
  uparrow ↑ downarrow ↓ mid ∣ nmid ∤ parallel ∥ perp ⊥ therefore ∴ because ∵ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉
  lbrace { rbrace } lvert | rvert | vert | Vert ‖ backslash ∖ colon : prec ≺ succ ≻ vdash ⊢ models ⊨ oint ∮`);
const LARGE = table("sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂");
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg gcd arg hom Pr".split(" "));
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));
const ACCENTS = table("hat ^ widehat ^ bar ¯ overline ¯ vec → dot ˙ ddot ¨ tilde ~ widetilde ~ overrightarrow → underline _");
const FONTS = { mathbf: "bold", boldsymbol: "bold", bm: "bold", mathrm: "normal", mathit: "italic", mathsf: "sans-serif", mathtt: "monospace", mathbb: "double-struck", mathcal: "script", mathscr: "script", mathfrak: "fraktur" };
const TEXTS = new Set(["text", "textbf", "textit", "textrm", "mbox", "operatorname", "texttt"]);
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.3em", "!": "-0.17em", quad: "1em", qquad: "2em" };
const IGNORED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "hline", "nonumber"]);
const FENCES = { pmatrix: ["(", ")"], bmatrix: ["[", "]"], vmatrix: ["|", "|"], Bmatrix: ["{", "}"], matrix: ["", ""], smallmatrix: ["", ""], cases: ["{", ""],
  aligned: ["", ""], align: ["", ""], "align*": ["", ""], gathered: ["", ""], equation: ["", ""], "equation*": ["", ""], split: ["", ""], array: ["", ""] };
// Code points of the first capital, small letter and digit of each style, and where Unicode put a letter elsewhere.
const STYLES = { bold: [0x1d400, 0x1d41a, 0x1d7ce], "double-struck": [0x1d538, 0x1d552, 0x1d7d8], script: [0x1d49c, 0x1d4b6], fraktur: [0x1d504, 0x1d51e], "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2], monospace: [0x1d670, 0x1d68a, 0x1d7f6] };
const PLACED = { "double-struck": table("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ"), script: table("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ"), fraktur: table("C ℭ H ℌ I ℑ R ℜ Z ℨ") };

function table(text) {
  const found = new Map();
  const words = text.trim().split(/\s+/);
  for (let i = 0; i < words.length; i += 2) found.set(words[i], words[i + 1]);
  return found;
}

// A <math> element, or null for a formula that is too long or holds what is not known here.
export function formula(text, isDisplay) {
  if (text.length > MAX_CHARS || !text.trim()) return null;
  const parser = new Parser(text);
  try {
    const row = parser.row(() => false, 0);
    return parser.at < parser.tokens.length ? null : m("math", isDisplay ? { display: "block" } : null, row);
  } catch {
    return null;
  }
}

class Unknown extends Error {}

class Parser {
  constructor(text) {
    this.tokens = text.match(/\\[A-Za-z]+\*?|\\[^A-Za-z]|\d+(?:[.,]\d+)*|\s+|[^]/gu) || [];
    this.at = 0;
    this.font = "";
  }

  peek() {
    while (this.at < this.tokens.length && /^\s+$/.test(this.tokens[this.at])) this.at++;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new Unknown();
    this.at++;
    return token;
  }

  expect(wanted) {
    if (this.next() !== wanted) throw new Unknown();
  }

  row(isEnd, depth) {
    if (depth > MAX_DEPTH) throw new Unknown();
    const items = [];
    for (let token = this.peek(); token !== undefined && !isEnd(token); token = this.peek()) items.push(this.scripted(depth));
    return items.length === 1 ? items[0] : m("mrow", null, items);
  }

  group(depth) {
    if (this.peek() !== "{") return this.atom(depth + 1).node;
    this.next();
    const row = this.row((token) => token === "}", depth + 1);
    this.expect("}");
    return row;
  }

  // The characters between braces, for names and texts.
  verbatim() {
    this.expect("{");
    let [depth, text] = [1, ""];
    while (this.at < this.tokens.length) {
      const token = this.tokens[this.at++];
      if (token === "{") depth++;
      else if (token === "}" && --depth === 0) return text;
      text += token.replace(/^\\(?=[^A-Za-z])/, "");
    }
    throw new Unknown();
  }

  scripted(depth) {
    const { node, under } = this.atom(depth);
    let [low, high] = [null, null];
    for (let token = this.peek(); token === "_" || token === "^" || token === "'"; token = this.peek()) {
      this.next();
      if (token === "'") high = high ? m("mrow", null, high, m("mo", null, "′")) : m("mo", null, "′");
      else if (token === "_" && !low) low = this.group(depth);
      else if (token === "^" && !high) high = this.group(depth);
      else throw new Unknown();
    }
    if (!low && !high) return node;
    const [both, one, other] = under ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    return low && high ? m(both, null, node, low, high) : low ? m(one, null, node, low) : m(other, null, node, high);
  }

  atom(depth) {
    if (depth > MAX_DEPTH) throw new Unknown();
    const token = this.peek();
    if (token === "{") return { node: this.group(depth) };
    this.next();
    if (/^\d/.test(token)) return { node: m("mn", null, styled(token, this.font)) };
    if (/^\p{L}$/u.test(token)) return { node: this.font === "normal" ? m("mi", { mathvariant: "normal" }, token) : m("mi", null, styled(token, this.font)) };
    if (token[0] === "\\") return this.command(token.slice(1), depth);
    if ("}_^&#%$".includes(token)) throw new Unknown();
    if (token === "~") return { node: m("mspace", { width: "0.3em" }) };
    return { node: m("mo", null, token === "-" ? "−" : token === "*" ? "∗" : spelled(token)) };
  }

  command(name, depth) {
    if (LETTERS.has(name)) return { node: m("mi", null, LETTERS.get(name)) };
    if (OPERATORS.has(name)) return { node: m("mo", { stretchy: "false" }, OPERATORS.get(name)) };
    if (LARGE.has(name)) return { node: m("mo", { largeop: "true" }, LARGE.get(name)), under: !name.includes("int") };
    if (FUNCTIONS.has(name)) return { node: m("mrow", null, m("mi", null, name), m("mspace", { width: "0.1em" })) };
    if (LIMITS.has(name)) return { node: m("mo", { movablelimits: "true" }, name), under: true };
    if (Object.hasOwn(SPACES, name)) return { node: m("mspace", { width: SPACES[name] }) };
    if (IGNORED.has(name)) return { node: m("mrow") };
    if ("{}%$#&_|".includes(name)) return { node: m("mo", { stretchy: "false" }, name === "|" ? "‖" : name) };
    if (["frac", "dfrac", "tfrac", "cfrac"].includes(name)) return { node: m("mfrac", null, this.group(depth), this.group(depth)) };
    if (name === "binom") return { node: m("mrow", null, m("mo", null, "("), m("mfrac", { linethickness: "0" }, this.group(depth), this.group(depth)), m("mo", null, ")")) };
    if (name === "sqrt") return { node: this.root(depth) };
    if (name === "not") return { node: m("mo", null, `${this.atom(depth + 1).node.textContent}\u0338`) };
    if (name === "boxed" || name === "fbox") return { node: m("mrow", { class: "boxed" }, this.group(depth)) };
    if (name === "overset" || name === "stackrel") return { node: swapped(m("mover"), this.group(depth), this.group(depth)) };
    if (name === "underset") return { node: swapped(m("munder"), this.group(depth), this.group(depth)) };
    if (name === "underbrace" || name === "overbrace") {
      const [kind, brace] = name === "underbrace" ? ["munder", "⏟"] : ["mover", "⏞"];
      return { node: m(kind, null, this.group(depth), m("mo", { stretchy: "true" }, brace)), under: true };
    }
    if (ACCENTS.has(name)) {
      const mark = m("mo", { stretchy: String(/over|wide|under/.test(name)) }, ACCENTS.get(name));
      return { node: name === "underline" ? m("munder", null, this.group(depth), mark) : m("mover", { accent: "true" }, this.group(depth), mark) };
    }
    if (TEXTS.has(name)) return { node: m(name === "operatorname" ? "mi" : "mtext", null, spelled(this.verbatim())) };
    if (Object.hasOwn(FONTS, name)) return { node: this.inFont(FONTS[name], depth) };
    if (name === "pmod") return { node: m("mrow", null, m("mspace", { width: "0.5em" }), m("mo", null, "("), m("mi", null, "mod"), m("mspace", { width: "0.3em" }), this.group(depth), m("mo", null, ")")) };
    if (name === "bmod" || name === "mod") return { node: m("mrow", null, m("mspace", { width: "0.3em" }), m("mi", null, "mod"), m("mspace", { width: "0.3em" })) };
    if (name === "left") return { node: this.fenced(depth) };
    if (name === "begin") return { node: this.environment(depth) };
    throw new Unknown();
  }

  root(depth) {
    if (this.peek() !== "[") return m("msqrt", null, this.group(depth));
    this.next();
    const order = this.row((token) => token === "]", depth + 1);
    this.expect("]");
    return m("mroot", null, this.group(depth), order);
  }

  inFont(font, depth) {
    const before = this.font;
    this.font = font;
    const node = this.group(depth);
    this.font = before;
    return node;
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return "";
    if (token[0] !== "\\") return token;
    const name = token.slice(1);
    return "{}".includes(name) ? name : name === "|" ? "‖" : OPERATORS.get(name) ?? (() => { throw new Unknown(); })();
  }

  fenced(depth) {
    const open = this.delimiter();
    const inside = this.row((token) => token === "\\right", depth + 1);
    this.expect("\\right");
    return m("mrow", null, fence(open), inside, fence(this.delimiter()));
  }

  environment(depth) {
    const name = this.verbatim();
    if (!Object.hasOwn(FENCES, name)) throw new Unknown();
    if (name === "array") this.verbatim();
    const [open, close] = FENCES[name];
    const rows = [[]];
    for (;;) {
      rows[rows.length - 1].push(m("mtd", null, this.row((token) => ["&", "\\\\", "\\end"].includes(token), depth + 1)));
      const token = this.next();
      if (token === "\\\\") rows.push([]);
      else if (token === "\\end") break;
    }
    if (this.verbatim() !== name) throw new Unknown();
    const body = m("mtable", { class: name === "cases" ? "cases" : name.startsWith("align") || name === "split" ? "aligned" : null }, rows.map((cells) => m("mtr", null, cells)));
    return m("mrow", null, fence(open), body, fence(close));
  }
}

const fence = (text) => (text ? m("mo", { fence: "true", stretchy: "true" }, spelled(text)) : null);

function swapped(element, above, base) {
  element.append(base, above);
  return element;
}

function styled(text, font) {
  if (!Object.hasOwn(STYLES, font)) return text;
  const [capital, small, digit] = STYLES[font];
  return [...text].map((char) => {
    const first = /[A-Z]/.test(char) ? [capital, 65] : /[a-z]/.test(char) ? [small, 97] : /\d/.test(char) && digit ? [digit, 48] : null;
    return PLACED[font]?.get(char) ?? (first ? String.fromCodePoint(first[0] + char.charCodeAt(0) - first[1]) : char);
  }).join("");
}
