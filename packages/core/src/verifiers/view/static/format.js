// Format numbers, times and sizes for display; an unknown one is a dash.

const DASH = "–";

export const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 3) {
  if (!isKnown(value)) return DASH;
  if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toExponential(1);
  if (Math.abs(value) >= 10000) return count(value);
  if (Number.isInteger(value)) return String(value);
  return value.toFixed(Math.max(0, digits - Math.max(0, Math.floor(Math.log10(Math.abs(value) || 1)))));
}

// A number with as few digits as possible: 0.2, 1, 0.125.
export const short = (value) => (isKnown(value) ? String(Number(value.toPrecision(4))) : DASH);

export function count(value) {
  if (!isKnown(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size >= 1e5 ? 0 : 1)}k`;
  return Math.round(value).toLocaleString("en");
}

export function duration(ms) {
  if (!isKnown(ms)) return DASH;
  if (ms < 1) return "<1 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`;
  if (ms < 3600000) return `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
  return `${Math.floor(ms / 3600000)} h ${Math.round((ms % 3600000) / 60000)} min`;
}

export function bytes(value) {
  if (!isKnown(value)) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function ago(date) {
  const then = new Date(date);
  if (Number.isNaN(then.getTime())) return DASH;
  const seconds = (Date.now() - then) / 1000;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  if (seconds < 7 * 86400) return `${Math.floor(seconds / 86400)} d ago`;
  return then.toISOString().slice(0, 10);
}

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// A mean with one standard error.
export function interval(mean, stderr) {
  if (!isKnown(mean)) return DASH;
  return isKnown(stderr) && stderr > 1e-9 * Math.max(1, Math.abs(mean)) ? `${number(mean)} ± ${number(stderr)}` : number(mean);
}
