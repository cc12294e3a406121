// Filters such as `correct_answer < 1 and turns > 3`: parsed here into a test of one row. Nothing is evaluated as a script.

const TOKEN = /\s*(?:(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|("[^"]*"|'[^']*')|`([^`]*)`|([\p{L}_][\p{L}\p{N}_.]*)|(<=|>=|==|!=|[<>=~()+\-*/]))/uy;
const COMPARISONS = new Set(["<", "<=", ">", ">=", "=", "==", "!=", "~"]);
const WORDS = new Set(["and", "or", "not", "unknown", "true", "false"]);

// The test of a filter and the columns that it reads; `names`: the known columns. Throws a sentence for a wrong filter.
export function compile(text, names) {
  const tokens = tokenized(text);
  const known = new Set(names);
  const used = new Set();
  let at = 0;
  const peek = () => tokens[at];
  const isWord = (word) => peek()?.kind === "name" && peek().text === word;
  const isSign = (...signs) => peek()?.kind === "sign" && signs.includes(peek().text);
  const before = () => tokens.slice(0, at).map((token) => token.shown).join(" ");

  function either() {
    let left = both();
    while (isWord("or")) {
      at += 1;
      const [a, b] = [left, both()];
      left = (row) => truth(a(row)) || truth(b(row));
    }
    return left;
  }

  function both() {
    let left = inverted();
    while (isWord("and")) {
      at += 1;
      const [a, b] = [left, inverted()];
      left = (row) => truth(a(row)) && truth(b(row));
    }
    return left;
  }

  function inverted() {
    if (!isWord("not")) return compared();
    at += 1;
    const inner = inverted();
    return (row) => !truth(inner(row));
  }

  function compared() {
    const parts = [sum()];
    const signs = [];
    while (peek()?.kind === "sign" && COMPARISONS.has(peek().text)) {
      signs.push(tokens[at++].text);
      parts.push(sum());
    }
    if (!signs.length) return parts[0];
    return (row) => {
      const values = parts.map((part) => part(row));
      return signs.every((sign, i) => holds(sign, values[i], values[i + 1]));
    };
  }

  function sum() {
    return chain(product, { "+": (a, b) => a + b, "-": (a, b) => a - b });
  }

  function product() {
    return chain(single, { "*": (a, b) => a * b, "/": (a, b) => a / b });
  }

  function chain(part, operations) {
    let left = part();
    while (isSign(...Object.keys(operations))) {
      const apply = operations[tokens[at++].text];
      const [a, b] = [left, part()];
      left = (row) => {
        const [x, y] = [a(row), b(row)];
        return typeof x === "number" && typeof y === "number" ? apply(x, y) : null;
      };
    }
    return left;
  }

  function single() {
    const token = peek();
    if (!token) throw new Error(at ? `The filter ends after “${before()}”; a number, a text or a column is missing.` : "The filter is empty.");
    at += 1;
    if (token.kind === "value") return () => token.value;
    if (token.text === "-" && token.kind === "sign") {
      const inner = single();
      return (row) => (typeof inner(row) === "number" ? -inner(row) : null);
    }
    if (token.text === "(" && token.kind === "sign") {
      const inner = either();
      if (!isSign(")")) throw new Error(`The filter lacks a closing parenthesis after “${before()}”.`);
      at += 1;
      return inner;
    }
    if (token.kind === "sign" || ["and", "or", "not"].includes(token.text)) {
      at -= 1;
      throw new Error(`The filter has “${token.shown}” where a number, a text or a column belongs${at ? `, after “${before()}”` : ""}.`);
    }
    if (!token.quoted && WORDS.has(token.text)) return () => ({ true: 1, false: 0, unknown: null })[token.text];
    if (!known.has(token.text) && !token.text.startsWith("info.")) throw new Error(missing(token.text, [...known]));
    used.add(token.text);
    return (row) => row(token.text) ?? null;
  }

  const test = either();
  if (at < tokens.length) throw new Error(`The filter has “${peek().shown}” after “${before()}”; join two conditions with and, or.`);
  return { test: (row) => truth(test(row)), used: [...used] };
}

function tokenized(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (text.slice(TOKEN.lastIndex).trim()) {
    const start = TOKEN.lastIndex;
    const match = TOKEN.exec(text);
    if (!match) {
      const rest = text.slice(start).trim();
      const hint = rest.startsWith("&&") ? "write and" : rest.startsWith("||") ? "write or" : rest.startsWith("!") ? "write not, or !=" : /^["'`]/.test(rest) ? "the quotation is not closed" : "it has < <= > >= = != ~ + - * / ( ) and or not";
      throw new Error(`The filter cannot be read at “${rest.slice(0, 12)}”: ${hint}.`);
    }
    const [, number, quoted, column, name, sign] = match;
    const shown = match[0].trim();
    if (number !== undefined) tokens.push({ kind: "value", value: Number(number), shown });
    else if (quoted !== undefined) tokens.push({ kind: "value", value: quoted.slice(1, -1), shown });
    else if (column !== undefined) tokens.push({ kind: "name", text: column, quoted: true, shown });
    else tokens.push({ kind: name !== undefined ? "name" : "sign", text: name ?? sign, shown });
  }
  return tokens;
}

const truth = (value) => Boolean(value) && !Number.isNaN(value);
const isUnknown = (value) => value === null || value === undefined || Number.isNaN(value);

function holds(sign, left, right) {
  if (sign === "=" || sign === "==") return same(left, right);
  if (sign === "!=") return !same(left, right);
  if (isUnknown(left) || isUnknown(right)) return false;
  if (sign === "~") return String(left).toLowerCase().includes(String(right).toLowerCase());
  if (typeof left !== typeof right) return false;
  return sign === "<" ? left < right : sign === "<=" ? left <= right : sign === ">" ? left > right : left >= right;
}

function same(left, right) {
  if (isUnknown(left) || isUnknown(right)) return isUnknown(left) && isUnknown(right);
  if (typeof left === "boolean") return same(Number(left), right);
  return typeof left === typeof right ? left === right : String(left) === String(right);
}

function missing(name, names) {
  const near = names.map((other) => [distance(name.toLowerCase(), other.toLowerCase()), other]).sort((a, b) => a[0] - b[0])[0];
  const guess = near && near[0] <= Math.max(2, name.length / 3) ? `did you mean ${near[1]}?` : `there are ${names.slice(0, 12).join(", ")}.`;
  return `There is no column “${name}”; ${guess}`;
}

// Edits from one word to the other (Levenshtein).
function distance(a, b) {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) next.push(Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] === b[j - 1] ? 0 : 1)));
    row = next;
  }
  return row[b.length];
}

// A column as it is written in a filter.
export const columnName = (name) => (/^[\p{L}_][\p{L}\p{N}_.]*$/u.test(name) && !WORDS.has(name) ? name : `\`${name}\``);
