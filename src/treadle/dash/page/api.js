// Requests to the hub and its events. All addresses are relative: the token, if any, is in the path.
import { exported, exportedAnswer } from "./exported.js";

const here = new URL(".", location.href);

export class ApiError extends Error {}

export async function get(path, params = {}, signal = undefined) {
  if (exported) {
    const answer = exportedAnswer(path, params);
    if (answer === null) throw new ApiError("this is not in the exported file");
    return answer;
  }
  const url = new URL(path, here);
  for (const [name, value] of Object.entries(params)) {
    if (value !== "" && value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  const response = await fetch(url, { signal, cache: "no-store" });
  const body = await response.json();
  if (!response.ok) throw new ApiError(typeof body.detail === "string" ? body.detail : `the hub answered ${response.status}`);
  return body;
}

// Events, each exactly once and in order, also across a restart of the hub: the browser sends the id of the last event when
// it reconnects by itself; where it has given up, `after` does the same.
export class Live {
  constructor({ onEvent, onState }) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.lastId = null;
    this.numEvents = 0;
    this.open();
  }

  open() {
    const url = new URL("../v1/events", here);
    if (this.lastId !== null) url.searchParams.set("after", this.lastId);
    const source = new EventSource(url);
    source.onopen = () => this.onState("live");
    source.onerror = () => {
      this.onState("lost");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.open(), 2000);
    };
    const receive = (message) => {
      if (message.lastEventId) this.lastId = message.lastEventId;
      this.numEvents += 1;
      this.onEvent(message.type, message.data ? JSON.parse(message.data) : {});
    };
    for (const kind of KINDS) source.addEventListener(kind, receive);
    this.source = source;
  }
}

const KINDS = [
  "accepted", "formed", "leased", "trained", "returned", "dissolved", "dropped", "dead", "minimum_waived",
  "trainer_registered", "env_registered", "env_disconnected", "reset", "gap",
];

// Runs `act` soon, at most once in `everyMs`; a call in between is deferred, not lost.
export function throttled(act, everyMs) {
  let last = -Infinity, timer = null, isRunning = false, isAsked = false;
  const run = async () => {
    timer = null;
    isRunning = true;
    isAsked = false;
    try { await act(); } catch (error) { if (!(error instanceof TypeError) && error.name !== "AbortError") console.warn(error.message); }
    last = performance.now();
    isRunning = false;
    if (isAsked) ask();
  };
  const ask = () => {
    isAsked = true;
    if (timer === null && !isRunning) timer = setTimeout(run, Math.max(0, last + everyMs - performance.now()));
  };
  return ask;
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

// The last part of a model's path; a name or an id is unchanged.
export function modelName(model) {
  return /^[.~/]|\/.*\//.test(model) ? model.replace(/\/+$/, "").split("/").pop() : model;
}

// Light or dark: as chosen with the button, else as the system has it. Paper is light.
export function applyTheme(button, changed = () => {}) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const storage = openStorage();
  const set = (theme) => {
    document.documentElement.dataset.theme = theme;
    changed();
  };
  const apply = () => set(storage?.getItem("theme") ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", apply);
  button.addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    storage?.setItem("theme", theme);
    set(theme);
  });
  addEventListener("beforeprint", () => set("light"));
  addEventListener("afterprint", apply);
  apply();
}

// A browser that blocks cookies refuses the storage too.
function openStorage() {
  try { return localStorage; } catch { return null; }
}
