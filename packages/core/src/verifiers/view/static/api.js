// Requests to the server or, in a copy, to the files beside the page. Responses have the same shape.

export const isCopy = document.querySelector('meta[name="generator"][content="vf-view-copy"]') !== null;

const ROWS_PER_FILE = 20;
const PREVIEWS_PER_FILE = 200;
const loaded = new Map();

if (isCopy) {
  window.vfData = (key, value) => loaded.set(key, value);
}

export async function ask(question, params = {}) {
  if (isCopy) return fromCopy(question, params);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined) query.set(name, value);
  }
  const response = await fetch(`api/${question}?${query}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || response.statusText);
  return answer;
}

// All runs as far as they are known here: `more` asks for the next of them, or for those that changed since.
export class Runs {
  constructor() {
    this.byId = new Map();
    this.seen = 0;
    this.total = 0; // runs that the server found so far
    this.isWhole = false;
    this.folders = [];
    this.generation = null; // of the server: another one counts its changes anew
  }

  get all() {
    return [...this.byId.values()];
  }

  async more() {
    const answer = await ask("runs", { first: this.seen, generation: this.generation });
    if (answer.generation !== this.generation) this.byId.clear();
    this.generation = answer.generation;
    for (const run of answer.runs) this.byId.set(run.id, run);
    for (const id of answer.gone) this.byId.delete(id);
    this.seen = answer.seen;
    this.isWhole = answer.next === null;
    this.total = Math.max(answer.total, this.byId.size);
    this.folders = answer.folders;
    return answer.runs.length + answer.gone.length;
  }
}

// Write a label of a rollout: true, false, or null to take it back.
export async function label(run, row, value) {
  const { token } = await ask("labels", { run });
  const response = await fetch("api/label", { method: "POST", headers: { "content-type": "application/json", "x-vf-view": token }, body: JSON.stringify({ run, row, label: value }) });
  const text = await response.text();
  if (!response.ok) throw new Error(text);
  return JSON.parse(text);
}

async function fromCopy(question, params) {
  if (question === "version") return { version: "copy" };
  const runs = await load("runs");
  if (question === "runs") return runs;
  if (question === "sets") return load("sets");
  if (question === "set") {
    const place = (await load("sets")).sets.findIndex((one) => one.id === params.set);
    if (place < 0) throw new Error(`there is no set of runs ${params.set} in this copy`);
    return load(`set-${place}`);
  }
  if (question === "compare") {
    const places = params.runs.split("\n").map((id) => runs.runs.findIndex((run) => run.id === id));
    return load(`compare-${places.join("-")}`);
  }
  const place = runs.runs.findIndex((run) => run.id === params.run);
  if (place < 0) throw new Error(`there is no run ${params.run} in this copy`);
  const rows = `${place}/${params.step ? `step-${params.step}` : "rows"}`;
  if (question === "run" || question === "metrics" || question === "labels") return load(`${place}/${question}`);
  if (question === "columns") return load(`${rows}/columns`);
  if (question === "rollout") {
    const file = await load(`${rows}/rollouts-${Math.floor(params.row / ROWS_PER_FILE)}`);
    return file.rollouts[params.row];
  }
  if (question === "values") return values(rows, params);
  if (question === "previews") return previews(rows, params.rows);
  return search(rows, params);
}

async function previews(rows, wanted) {
  const found = Object.create(null);
  for (const row of String(wanted).split(",")) {
    const file = await load(`${rows}/previews-${Math.floor(row / PREVIEWS_PER_FILE)}`);
    found[row] = file.previews[row];
  }
  return { previews: found };
}

async function search(rows, params) {
  const total = (await load(`${rows}/columns`)).total;
  const wanted = params.text.toLowerCase();
  const first = Number(params.first || 0);
  const file = await load(`${rows}/rollouts-${Math.floor(first / ROWS_PER_FILE)}`);
  const found = Object.entries(file.rollouts)
    .filter(([row, rollout]) => Number(row) >= first && texts(rollout).join("\n").toLowerCase().includes(wanted))
    .map(([row]) => Number(row));
  const next = (Math.floor(first / ROWS_PER_FILE) + 1) * ROWS_PER_FILE;
  return { rows: found, next: next < total ? next : null };
}

async function values(rows, params) {
  const total = (await load(`${rows}/columns`)).total;
  const first = Number(params.first || 0);
  const number = Math.floor(first / ROWS_PER_FILE);
  const file = await load(`${rows}/rollouts-${number}`);
  const end = Math.min(total, (number + 1) * ROWS_PER_FILE);
  const found = [];
  for (let row = first; row < end; row++) found.push((file.rollouts[row].info || {})[params.name.slice(5)] ?? null);
  return { values: found, next: end < total ? end : null };
}

function texts(value) {
  if (typeof value === "string") return value.startsWith("data:") ? [] : [value];
  return value && typeof value === "object" ? Object.values(value).flatMap(texts) : [];
}

function load(name) {
  if (loaded.has(name)) return Promise.resolve(loaded.get(name));
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${name}.js`;
    script.onload = () => (script.remove(), resolve(loaded.get(name)));
    script.onerror = () => reject(new Error(`data/${name}.js is missing in this copy`));
    document.head.append(script);
  });
}
