// The page as a whole: views, events of the hub, keys.
import { Live, applyTheme, element, get, modelName, number, throttled } from "./api.js";
import { Overview } from "./charts.js";
import { exported } from "./exported.js";
import { Processes } from "./processes.js";
import { showReport } from "./report.js";
import { Rollouts } from "./rollouts.js";

const ALL_VIEWS = ["overview", "rollouts", "processes"];
let VIEWS = exported?.tabs ?? ALL_VIEWS;
const WORDS_MS = 2000;
const by = (id) => document.getElementById(id);
const views = {};

function show(name) {
  for (const view of ALL_VIEWS) {
    const isShown = view === name;
    by(view).hidden = !isShown;
    by(`tab-${view}`).setAttribute("aria-selected", isShown);
    by(`tab-${view}`).tabIndex = isShown ? 0 : -1;
  }
  if (location.hash.slice(1).split("/")[0] !== name) history.replaceState(null, "", `#${name}`);
  if (name === "overview") views.overview?.draw();
  if (name === "rollouts" && views.rollouts && !views.rollouts.groups.length) views.rollouts.load();
  if (name === "processes") views.processes?.refresh();
}

function current() {
  return ALL_VIEWS.find((view) => !by(view).hidden);
}

// The state of the run while the hub answers, of the connection while it does not. The hub of `treadle run` ends with its run.
function showBadge(changes) {
  const badge = by("connection");
  Object.assign(badge.dataset, changes);
  const { connection, standing, trained } = badge.dataset, isLost = connection === "lost";
  const isOver = standing === "complete" || trained === "all";
  const shown = standing === "complete" ? "complete" : isLost && isOver ? "ended" : isLost ? "lost" : standing ?? "";
  badge.textContent = shown === "lost" ? "connection lost, trying again" : shown || "connecting";
  badge.className = `badge ${shown}`;
  by("hub-ended").hidden = !(isLost && isOver);
}

async function showNow() {
  const now = await get("api/now");
  showBadge({ standing: now.standing, trained: now.steps && now.step >= now.steps ? "all" : "some" });
  const words = now.words.join("; ");
  by("words").textContent = `${words.charAt(0).toUpperCase()}${words.slice(1)}.`;
  by("tiles").replaceChildren(...now.tiles.map(tile));
  by("health").replaceChildren(...now.health.map((line) => element("li", {}, line)));
  by("queue-text").textContent = `${number(now.queued.groups)} groups (${number(now.queued.sequences)} rollouts) in the queue`;
  views.overview?.explain(now.sampling_note);
  views.processes?.show(now);
}

function tile({ name, value, note, share, is_bad: isBad }) {
  const bar = share === null ? "" : element("progress", { max: 1, value: share, "aria-label": "Share of the steps that are trained" });
  return element("div", { class: isBad ? "bad" : "" }, element("dt", {}, name), element("dd", {}, value), element("dd", { class: "quiet" }, bar, note));
}

const askNow = throttled(showNow, 1000);

function received(kind, event) {
  if (kind === "accepted") views.rollouts?.arrived(event.data.groups);
  if (["formed", "trained", "dissolved", "dropped", "dead"].includes(kind)) views.rollouts?.changed();
  if (kind === "trained") views.overview?.refresh(); // a step's figures are written before its batch is acknowledged
  if (kind === "reset" || kind === "gap") refreshAll();
  if (current() === "processes") views.processes?.refresh();
  if (kind === "env_disconnected") showNow().catch(() => {}); // at the end of a run, the hub goes next
  askNow();
}

function refreshAll() {
  views.overview?.refresh();
  views.rollouts?.refresh();
  if (current() === "processes") views.processes?.refresh();
  askNow();
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || by("help").open) return;
  const isField = event.target.matches("input, select, textarea") && !["checkbox", "range"].includes(event.target.type);
  if (isField) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.target.role === "tab" && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
    const next = VIEWS[(VIEWS.indexOf(current()) + (event.key === "ArrowRight" ? 1 : VIEWS.length - 1)) % VIEWS.length];
    show(next);
    by(`tab-${next}`).focus();
    return;
  }
  if (VIEWS[Number(event.key) - 1]) show(VIEWS[Number(event.key) - 1]);
  else if (event.key === "?") by("help").showModal();
  else if (event.key === "/" && current() !== "rollouts" && VIEWS.includes("rollouts")) { show("rollouts"); by("filters").elements.text.focus(); }
  else if (!(current() === "rollouts" && views.rollouts?.key(event))) return;
  event.preventDefault();
}

async function begin() {
  applyTheme(by("theme"), () => views.overview?.recolour());
  for (const view of ALL_VIEWS) {
    by(`tab-${view}`).addEventListener("click", () => show(view));
    by(`tab-${view}`).hidden = !VIEWS.includes(view);
  }
  by("help-button").addEventListener("click", () => by("help").showModal());
  document.addEventListener("keydown", keys);

  if (!exported) listen(); // first: an event between this and the first answers is repeated, not lost
  const early = Overview.firstSeries();
  const run = await whenAnswered();
  if (run.is_supervised) { // it has no rollouts
    VIEWS = VIEWS.filter((view) => view !== "rollouts");
    by("tab-rollouts").hidden = true;
  }
  by("task").textContent = run.env || run.name || "Treadle";
  by("run-about").replaceChildren(modelName(run.model), run.env ? element("span", { class: "folder" }, run.name) : "");
  by("run-about").title = run.model;
  by("all-runs").hidden = Boolean(exported) || !/\/runs\/[^/]+\/dash\/$/.test(location.pathname); // served by `treadle dash FOLDER`
  document.title = [run.env || run.name, modelName(run.model), "Treadle"].filter(Boolean).join(" – ");
  views.overview = new Overview(run, { onStep: (step) => { if (VIEWS.includes("rollouts")) { show("rollouts"); views.rollouts.ofStep(step); } } });
  const loaded = views.overview.load(early).then(() => { performance.mark("charts-drawn"); document.documentElement.dataset.drawn = "yes"; }, () => views.overview.refresh());
  views.rollouts = new Rollouts(run);
  if (exported) {
    if (exported.report) showReport(exported.report);
    addEventListener("beforeprint", () => views.overview.drawAll());
  } else {
    views.processes = new Processes();
  }
  if (exported && document.readyState !== "complete") { // else the browser scrolls to the view that is added to the address
    await new Promise((resolve) => addEventListener("load", resolve, { once: true }));
  }
  const [view, id] = location.hash.slice(1).split("/");
  show(VIEWS.includes(view) ? view : VIEWS[0]);
  if (view === "rollouts" && /^\d+$/.test(id ?? "")) views.rollouts.open(Number(id));
  askNow();
  await loaded;
  if (exported) return;
  setInterval(() => {
    if (document.hidden) return;
    askNow();
    if (run.is_supervised) views.overview.refresh(); // its trainer sends no events
    if (current() === "processes") views.processes.refresh();
  }, WORDS_MS);
}

function listen() {
  let wasLost = false;
  window.live = new Live({
    onEvent: received,
    onState: (state) => {
      showBadge({ connection: state });
      if (state === "live" && wasLost) refreshAll();
      wasLost = state === "lost";
    },
  });
}

async function whenAnswered() {
  for (;;) {
    try { return await get("api/run"); } catch { await new Promise((resolve) => setTimeout(resolve, 1000)); }
  }
}

begin();
