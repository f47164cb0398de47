// The processes of the run, their logs, the engines over time, and the weight syncs.
import { ago, element, get, number, throttled } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";
const PARTS = [["pause", "pause"], ["transfer", "transfer"], ["verify", "verify"], ["rest", "the rest"]];

const ENGINE_STATES = [["serving", "serves"], ["joining", "joins"], ["silent", "silent"], ["out", "out"]];
const SILENT_S = 10, SHOWN_S = 2;

// The activity that a process reports, or its wait; worded as in the terminal.
function doing({ report, heard_s }) {
  if (heard_s > SILENT_S) return { text: `no report for ${ago(heard_s).replace(" ago", "")}`, isLate: true };
  const wait = report.waits.find((one) => one.of || one.is_late);
  if (report.work && !wait?.is_late) return { text: `${report.work.what}: ${report.work.done} of ${report.work.total}`, isLate: false };
  if (wait && wait.seconds >= SHOWN_S) return { text: `waits ${Math.round(wait.seconds)} s for ${wait.what}${wait.problem ? `: ${wait.problem}` : ""}`, isLate: wait.is_late };
  return { text: report.problem || report.state, isLate: Boolean(report.problem) };
}

export class Processes {
  constructor() {
    this.select = document.getElementById("log-name");
    this.text = document.getElementById("log-text");
    this.select.addEventListener("change", () => this.showLog());
    this.refresh = throttled(() => this.load(), 2000);
    this.now = null;
    this.reports = [];
  }

  // `now` is shared by all views; the rest is requested while this view is open.
  show(now) {
    this.now = now;
    this.drawTable();
    if (this.select.options.length !== now.logs.length) {
      const chosen = this.select.value;
      this.select.replaceChildren(...now.logs.map((name) => element("option", { value: name }, name)));
      this.select.value = now.logs.includes(chosen) ? chosen : now.logs.includes("trainer") ? "trainer" : now.logs[0] ?? "";
      if (!document.getElementById("processes").hidden) this.showLog();
    }
  }

  // A row for each process found on this machine, and for each that reports to the hub from elsewhere.
  drawTable() {
    const { processes, logs } = this.now, reports = [...this.reports];
    const rows = processes.map((one) => {
      const place = reports.findIndex(({ report }) => (one.pid === null ? report.kind === one.name : report.pid === one.pid && one.name.split("-")[0] === report.kind));
      const standing = place < 0 ? null : reports.splice(place, 1)[0];
      return this.row(one, standing, logs.includes(one.name));
    });
    const elsewhere = reports.map((standing) => this.row({ name: standing.report.name, state: "reports", detail: "", version: standing.report.policy_version, heard_s: null, memory_bytes: standing.report.memory_bytes, pid: standing.report.pid }, standing, false));
    document.querySelector("#process-table tbody").replaceChildren(...rows, ...elsewhere);
  }

  row(one, standing, hasLog) {
    const activity = standing === null ? null : doing(standing);
    const heard = standing === null ? one.heard_s : standing.heard_s;
    return element("tr", {},
      element("td", {}, one.name), element("td", { class: `state-${one.state}` }, one.detail ? `${one.state}, ${one.detail}` : one.state),
      element("td", activity?.isLate ? { class: "state-late" } : {}, activity?.text ?? ""), element("td", {}, one.version === null ? "–" : String(one.version)),
      element("td", {}, ago(heard)), element("td", {}, one.memory_bytes === null ? "–" : `${(one.memory_bytes / 1e9).toFixed(2)} GB`), element("td", {}, one.pid === null ? "–" : String(one.pid)),
      element("td", {}, hasLog ? element("button", { type: "button", onclick: () => { this.select.value = one.name; this.showLog(); this.text.scrollIntoView(); } }, "Log") : ""));
  }

  async load() {
    const [status, syncs, reports, engines] = await Promise.all([get("../v1/status"), get("api/syncs"), get("../v1/processes"), get("../v1/engines/history")]);
    this.reports = reports.processes;
    if (this.now) this.drawTable();
    document.querySelector("#env-table tbody").replaceChildren(...status.envs.map((env) => {
      const isHeard = env.connected && env.idle_s <= 10, isComplete = this.now?.standing === "complete";
      const state = isHeard ? "connected" : isComplete ? "finished" : env.connected ? "silent" : "gone";
      return element("tr", {}, ...[env.name, state, ago(env.idle_s), number(env.groups_accepted), env.group_size, env.weight].map((cell, place) => element("td", place === 1 ? { class: `state-${state}` } : {}, String(cell))));
    }));
    this.drawEngines(engines);
    this.drawSyncs(syncs.syncs);
    if (document.getElementById("log-follow").checked) await this.loadLog();
  }

  // Immediately; if the hub does not answer, as soon as it does.
  showLog() {
    this.loadLog().catch(() => this.refresh());
  }

  async loadLog() {
    if (!this.select.value) { this.text.textContent = this.now ? "There are no logs: this hub has no run folder (--run-folder)." : ""; return; }
    const name = this.select.value;
    const { tail } = await get(`api/logs/${encodeURIComponent(name)}`);
    if (name !== this.select.value) return;
    const isAtEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 20;
    this.text.textContent = tail || "(nothing yet)";
    if (isAtEnd || document.getElementById("log-follow").checked) this.text.scrollTop = this.text.scrollHeight;
  }

  // A line for each engine of a run with several: its states from left to right, until now.
  drawEngines({ now, changes }) {
    document.getElementById("fleet").hidden = !changes.length;
    if (!changes.length) return;
    const place = document.getElementById("fleet-timeline"), names = [...new Set(changes.map((one) => one.name))].sort();
    const begin = changes[0].at, left = 150, scale = Math.max(place.clientWidth - left - 12, 200) / Math.max(now - begin, 1);
    const lasts = names.map((name) => changes.findLast((one) => one.name === name));
    document.getElementById("fleet-note").replaceChildren(
      `${lasts.filter((one) => one.state === "serving").length} of ${lasts.filter((one) => one.state !== "gone").length} engines serve; ${number(now - begin)} s are shown. `,
      ...ENGINE_STATES.flatMap(([state, text]) => [element("span", { class: `legend-engine-${state}` }, "■ "), `${text} `]));
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", left + (now - begin) * scale + 12);
    svg.setAttribute("height", names.length * 22 + 8);
    names.forEach((name, row) => {
      const label = document.createElementNS(SVG, "text");
      label.setAttribute("x", 8);
      label.setAttribute("y", row * 22 + 19);
      label.textContent = name;
      svg.append(label);
      const own = changes.filter((one) => one.name === name);
      own.forEach((one, index) => {
        if (one.state === "gone") return;
        const box = document.createElementNS(SVG, "rect"), title = document.createElementNS(SVG, "title");
        const width = Math.max(((own[index + 1]?.at ?? now) - one.at) * scale, 1);
        for (const [key, value] of Object.entries({ x: left + (one.at - begin) * scale, y: row * 22 + 6, width, height: 16, class: `engine-${one.state}` })) box.setAttribute(key, value);
        title.textContent = `${name}: ${one.state}${one.reason ? `, ${one.reason}` : ""}`;
        box.append(title);
        svg.append(box);
      });
    });
    place.replaceChildren(svg);
  }

  // A block for each weight sync: its length is the duration, its place the time on the trainer's clock.
  drawSyncs(syncs) {
    const place = document.getElementById("sync-timeline"), note = document.getElementById("sync-note");
    if (!syncs.length) { note.textContent = "No weights have been published yet."; place.replaceChildren(); return; }
    const last = syncs[syncs.length - 1];
    const ended = (sync, row) => sync.ended_s ?? row;
    const begin = ended(syncs[0], 0) - syncs[0].seconds, end = ended(last, syncs.length - 1);
    const width = Math.max(place.clientWidth - 2, syncs.length * 40), scale = (width - 40) / Math.max(end - begin, 1e-9);
    const mean = syncs.reduce((sum, one) => sum + one.seconds, 0) / syncs.length;
    note.replaceChildren(`Version ${last.version ?? last.step} took ${number(last.seconds)} s; the last ${syncs.length} took ${number(mean)} s on average. `,
      ...PARTS.flatMap(([part, text]) => [element("span", { class: `legend-${part}` }, "■ "), `${text} `]));
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("width", width);
    svg.setAttribute("height", 84);
    let labelled = -1e9;
    syncs.forEach((sync, row) => {
      const start = ended(sync, row) - sync.seconds;
      let x = 10 + (start - begin) * scale;
      const rest = Math.max(0, sync.seconds - (sync.pause ?? 0) - (sync.transfer ?? 0) - (sync.verify ?? 0));
      const block = document.createElementNS(SVG, "g");
      const title = document.createElementNS(SVG, "title");
      title.textContent = `version ${sync.version ?? sync.step}: ${number(sync.seconds)} s (pause ${number(sync.pause)}, transfer ${number(sync.transfer)}, verify ${number(sync.verify)})${sync.bytes ? `, ${(sync.bytes / 1e6).toFixed(1)} MB` : ""}`;
      block.append(title);
      for (const [part] of PARTS) {
        const seconds = part === "rest" ? rest : sync[part] ?? 0;
        if (seconds <= 0) continue;
        const box = document.createElementNS(SVG, "rect");
        const wide = (seconds / sync.seconds) * Math.max(sync.seconds * scale, 12);
        for (const [name, value] of Object.entries({ x, y: 14, width: wide, height: 34, class: `part-${part}` })) box.setAttribute(name, value);
        block.append(box);
        x += wide;
      }
      svg.append(block);
      const at = 10 + (start - begin) * scale;
      if (at - labelled > 44) {
        const label = document.createElementNS(SVG, "text");
        label.setAttribute("x", at);
        label.setAttribute("y", 64);
        label.textContent = `v${sync.version ?? sync.step}`;
        svg.append(label);
        labelled = at;
      }
    });
    const axis = document.createElementNS(SVG, "text");
    axis.setAttribute("x", 10);
    axis.setAttribute("y", 79);
    axis.textContent = `${number(begin)} s to ${number(end)} s of training`;
    svg.append(axis);
    const isAtEnd = place.scrollLeft + place.clientWidth >= place.scrollWidth - 10;
    place.replaceChildren(svg);
    if (isAtEnd) place.scrollLeft = place.scrollWidth;
  }
}
