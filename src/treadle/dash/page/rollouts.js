// The list of groups: filters, pages, and a text search that shows its progress.
import { ApiError, element, get, number, throttled } from "./api.js";
import { exported, scoreRange } from "./exported.js";
import { GroupPane } from "./group.js";

export class Rollouts {
  constructor(run) {
    this.form = document.getElementById("filters");
    this.list = document.getElementById("list");
    this.body = this.list.tBodies[0];
    this.found = document.getElementById("found");
    this.finder = document.getElementById("finder");
    this.stopButton = document.getElementById("stop-search");
    this.envs = Object.fromEntries(run.envs.map((env) => [env.env_id, env.name]));
    this.groups = [];
    this.before = null; // where the shown page begins; null: at the newest
    this.goOn = null;
    this.numNew = 0;
    this.searching = null;
    this.turn = 0; // of the last request: later answers to earlier requests are ignored
    this.pane = new GroupPane(document.getElementById("group"), {
      onClose: () => this.close(),
      onOpen: (id) => this.open(id),
      newer: (id) => this.neighbour(id, -1),
      older: (id) => this.neighbour(id, 1),
    });
    this.offerEnvs(run.envs);
    this.form.elements.state.append(...run.states.map((state) => element("option", { value: state }, state)));
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.find(); });
    this.form.addEventListener("reset", () => setTimeout(() => this.find()));
    document.getElementById("newest").addEventListener("click", () => this.find());
    document.getElementById("older").addEventListener("click", () => { if (this.goOn !== null) { this.before = this.goOn; this.load(); } });
    document.getElementById("show-new").addEventListener("click", () => this.find());
    this.stopButton.addEventListener("click", () => this.searching?.abort());
    this.refresh = throttled(() => this.load(), 2000);
    for (const label of exported ? this.form.querySelectorAll("label[hidden]") : []) {
      label.hidden = label.firstElementChild.disabled = false;
    }
    if (exported) {
      this.form.addEventListener("input", () => this.find());
      document.getElementById("newest").textContent = "First";
      document.getElementById("older").textContent = "More";
    }
  }

  offerEnvs(envs) {
    const select = this.form.elements.env, chosen = select.value;
    if (select.options.length - 1 === envs.length) return;
    select.replaceChildren(element("option", { value: "" }, "any"), ...envs.map((env) => element("option", { value: env.env_id }, env.name)));
    select.value = chosen;
  }

  filters() {
    return Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value !== ""));
  }

  async find() {
    this.before = null;
    this.numNew = 0;
    this.showNew();
    await this.load();
  }

  ofStep(step) {
    this.form.reset(); // triggers find() after this function, with the step
    this.form.elements.step.value = step;
    this.close();
  }

  async load() {
    this.searching?.abort();
    const turn = (this.turn += 1);
    const { text, ...filters } = this.filters();
    this.list.setAttribute("aria-busy", "true");
    try {
      if (text) await this.search(text, filters);
      else await this.page(filters, turn);
    } catch (error) {
      if (error.name === "AbortError" || turn !== this.turn) return;
      this.found.textContent = error instanceof ApiError ? error.message : "The hub does not answer; trying again when it does.";
    } finally {
      if (turn === this.turn) this.list.setAttribute("aria-busy", "false");
    }
  }

  async page(filters, turn) {
    const answer = await get("api/groups", { ...filters, before: this.before });
    if (turn !== this.turn) return;
    Object.assign(this.envs, answer.envs);
    this.offerEnvs(Object.entries(answer.envs).map(([env_id, name]) => ({ env_id, name })));
    this.goOn = answer.go_on_before;
    this.show(answer.groups);
    const known = answer.num_known < answer.num_groups ? `; scores and lengths are known of ${number(answer.num_known)} so far` : "";
    const matching = answer.num_found === undefined || answer.num_found === answer.num_groups ? "" : `; ${number(answer.num_found)} match the filters`;
    this.found.textContent = `${number(answer.groups.length)} shown of ${number(answer.num_groups)} groups${known}${matching}`;
    document.getElementById("older").disabled = this.goOn === null;
    if (answer.num_known < answer.num_groups) this.refresh();
  }

  // Searches for a second at a time, until a page is full, all is searched, or the user stops it.
  async search(text, filters) {
    const searching = (this.searching = new AbortController());
    this.stopButton.hidden = false;
    const hits = [];
    let before = this.before, numSearched = 0, numSilent = 0;
    const progress = (end) => `${number(hits.length)} found among ${number(numSearched)} groups searched${numSilent ? ` (${number(numSilent)} of them without text)` : ""}${end}`;
    try {
      this.show([]);
      for (;;) {
        const answer = await get("api/search", { ...filters, text, before }, searching.signal);
        hits.push(...answer.hits);
        numSearched += answer.num_searched;
        numSilent += answer.num_without_text;
        before = answer.go_on_before;
        this.show(hits.map((hit) => ({ ...hit.group, prompt: `… ${hit.excerpt} …` })));
        this.found.textContent = progress(before === null ? ": all of them" : "; still searching");
        if (before === null || hits.length >= 50) break;
      }
      this.found.textContent = progress(before === null ? ": all of them" : `; ${exported ? "More" : "Older"} continues the search`);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      this.found.textContent = progress("; stopped");
    } finally {
      this.goOn = before;
      document.getElementById("older").disabled = before === null;
      if (this.searching === searching) { this.searching = null; this.stopButton.hidden = true; }
    }
  }

  show(groups) {
    const focused = document.activeElement?.closest?.("#list tr")?.dataset.id;
    this.groups = groups;
    this.body.replaceChildren(...groups.map((group) => this.row(group)));
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  row(group) {
    const range = (low, high) => (low === null ? "–" : low === high ? number(low) : `${number(low)} to ${number(high)}`);
    const isEven = group.score_low === group.score_high;
    const score = group.score === null ? "–" : isEven ? number(group.score) : `${number(group.score)} (${range(group.score_low, group.score_high)})`;
    const cells = [group.id, group.step ?? "–", this.envs[group.env_id] ?? "–", group.state, group.policy_version ?? "–", score, range(group.shortest, group.longest)];
    return element("tr", { tabindex: "0", "data-id": group.id, onclick: () => this.open(group.id), onkeydown: (event) => { if (event.key === "Enter") this.open(group.id); } },
      ...cells.map((cell, place) => element("td", place === 3 ? { class: `state-${group.state}` } : {}, place === 5 && group.scores ? bars(group) : "", String(cell))),
      element("td", { class: "text" }, group.prompt ?? (group.num_bytes ? "" : "no longer kept")));
  }

  async open(id) {
    this.finder.hidden = true;
    history.replaceState(null, "", `#rollouts/${id}`);
    await this.pane.open(id);
  }

  close() {
    const id = this.pane.id;
    this.pane.close();
    this.finder.hidden = false;
    history.replaceState(null, "", "#rollouts");
    if (id !== null) this.body.querySelector(`tr[data-id="${id}"]`)?.focus();
  }

  // In the order of the list if the group is in it, else in the order of arrival.
  neighbour(id, move) {
    const place = this.groups.findIndex((group) => group.id === id);
    if (place >= 0 && this.groups[place + move]) return this.groups[place + move].id;
    return move > 0 ? this.pane.view?.older : this.pane.view?.newer;
  }

  arrived(numGroups) {
    this.numNew += numGroups;
    if (this.isAtRest()) {
      this.numNew = 0;
      this.refresh();
    }
    this.showNew();
  }

  changed() {
    if (this.isAtRest()) this.refresh();
  }

  // Whether the list may be updated: at the newest groups, with no group open, no search and no row focused.
  isAtRest() {
    const isPlain = this.before === null && this.pane.id === null && !this.form.elements.text.value;
    return isPlain && !document.getElementById("rollouts").hidden && !this.body.contains(document.activeElement);
  }

  showNew() {
    const button = document.getElementById("show-new");
    button.hidden = this.numNew === 0;
    button.textContent = `${number(this.numNew)} new: show the newest`;
  }

  key(event) {
    if (this.pane.id !== null) return this.pane.key(event);
    const rows = [...this.body.rows], place = rows.indexOf(document.activeElement);
    if (event.key === "j" || event.key === "ArrowDown") rows[Math.min(rows.length - 1, place + 1)]?.focus();
    else if (event.key === "k" || event.key === "ArrowUp") rows[Math.max(0, place - 1)]?.focus();
    else if (event.key === "/") this.form.elements.text.focus();
    else return false;
    return true;
  }
}

// The score of each rollout as a bar, from 0 or the lowest score in the file up to the highest.
function bars({ scores, is_right: isRight }) {
  const { low, high } = scoreRange();
  return element("span", { class: "bars", "aria-hidden": "true" }, ...scores.map((score, place) => {
    const bar = element("i", { class: score === null ? "unscored" : isRight[place] ? "right" : "wrong" });
    bar.style.height = `${score === null ? 100 : Math.max(8, (100 * (score - low)) / (high - low))}%`;
    return bar;
  }));
}
