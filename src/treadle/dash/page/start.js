// The start page: the runs of a folder, the newest first.
import { ago, applyTheme, element, get, modelName, number } from "./api.js";

const REFRESH_MS = 5000;
const picked = new Set(); // names of runs to compare
const by = (id) => document.getElementById(id);

function row(run) {
  const href = run.address ? `${run.address}/dash/` : `runs/${encodeURIComponent(run.name)}/dash/`;
  const steps = run.steps === null ? number(run.steps_taken) : `${number(run.steps_taken)} of ${number(run.steps)}`;
  const started = new Date(run.started_at * 1000).toLocaleString();
  const task = run.task || run.name;
  // A run whose hub is elsewhere leads there only by its address, which is shown.
  const page = run.address ? [task, " at ", element("a", { href, rel: "noreferrer" }, run.address)] : [element("a", { href }, task)];
  const open = (event) => { if (!run.address && event.target.tagName !== "INPUT") location.href = href; };
  const box = element("input", { type: "checkbox", checked: picked.has(run.name), "aria-label": `Compare ${run.name}`, onchange: (event) => pick(run.name, event.target.checked) });
  return element("tr", { class: run.address ? "elsewhere" : "", onclick: open },
    element("td", {}, box, ...page),
    element("td", {}, element("span", { class: `badge ${run.state}`, title: run.error }, run.state)),
    element("td", { "data-label": "Held-out" }, element("span", {}, run.held_out || "–", element("span", { class: "quiet", title: "95 % interval" }, run.interval))),
    element("td", { "data-label": "Steps" }, steps),
    element("td", { "data-label": "Model", title: run.model }, modelName(run.model)),
    element("td", { "data-label": "Started", title: started }, ago(Date.now() / 1000 - run.started_at)),
    element("td", { class: "quiet" }, run.name));
}

function pick(name, isPicked) {
  if (isPicked) picked.add(name); else picked.delete(name);
  const link = by("compare-picked");
  link.hidden = picked.size < 2;
  link.href = `compare.html?${new URLSearchParams({ runs: [...picked].join("/") })}`; // no name of a folder contains it
  link.textContent = `Compare ${number(picked.size)} runs`;
}

async function show() {
  try {
    const { folder, runs, num_left_out: numLeftOut } = await get("api/runs");
    by("folder").textContent = folder;
    by("note").textContent = numLeftOut ? `The newest ${number(runs.length)} runs are shown; ${number(numLeftOut)} older ones are not.` : "";
    if (!by("runs").tBodies[0].contains(document.activeElement)) by("runs").tBodies[0].replaceChildren(...runs.map(row));
  } catch {
    by("note").textContent = "The server of this page has ended: start `treadle dash FOLDER` again.";
  }
  setTimeout(show, REFRESH_MS);
}

applyTheme(by("theme"));
show();
