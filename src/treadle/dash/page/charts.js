// The overview: a card for each chart, all with the same range of steps.
import { element, get, number, throttled } from "./api.js";
import { Card, QueueCard } from "./card.js";
import { exported } from "./exported.js";

const POINTS = 600;
const MAX_OTHERS = 4;
export class Overview {
  constructor(run, { onStep }) {
    this.onStep = onStep;
    this.range = null;
    this.turn = 0;
    this.others = [];
    this.smoothing = 0.6;
    this.isLog = false;
    this.data = new Map(); // run's name ("" is the own one) -> its series
    this.cards = run.charts.map((chart) => new Card(chart, this));
    this.cards.push(new QueueCard(this));
    this.meanings = run.meanings;
    this.place = document.getElementById("charts");
    this.place.replaceChildren(...this.cards.map((card) => card.root));
    this.refresh = throttled(() => this.load(), 2000);
    this.watch = new IntersectionObserver((seen) => {
      for (const entry of seen) {
        const card = this.cards.find((one) => one.root === entry.target);
        if (!card) continue;
        card.isVisible = entry.isIntersecting;
        if (card.isVisible) card.draw();
      }
    }, { rootMargin: "200px" });
    for (const card of this.cards) this.watch.observe(card.root);
    this.tools(run);
  }

  tools(run) {
    const first = document.getElementById("first"), last = document.getElementById("last");
    const zoomed = () => this.zoom(first.value === "" ? null : Number(first.value), last.value === "" ? null : Number(last.value));
    first.addEventListener("change", zoomed);
    last.addEventListener("change", zoomed);
    document.getElementById("zoom-out").addEventListener("click", () => this.zoom(null, null));
    document.getElementById("smoothing").addEventListener("input", (event) => { this.smoothing = Number(event.target.value); this.draw(); });
    document.getElementById("log").addEventListener("change", (event) => { this.isLog = event.target.checked; this.draw(); });
    document.getElementById("chart-tools").addEventListener("submit", (event) => event.preventDefault());
    document.getElementById("add-chart").addEventListener("change", (event) => { this.add(event.target.value); event.target.value = ""; });
    const list = document.getElementById("compare-list");
    if (!run.others.length) list.append(element("span", { class: "quiet" }, "There is no other run in this folder."));
    for (const name of run.others) {
      const box = element("input", { type: "checkbox", value: name, onchange: () => this.compare(name, box) });
      list.append(element("label", {}, box, name));
    }
  }

  compare(name, box) {
    if (box.checked && this.others.length >= MAX_OTHERS) { box.checked = false; return; }
    this.others = box.checked ? [...this.others, name] : this.others.filter((one) => one !== name);
    if (!box.checked) this.data.delete(name);
    this.show();
  }

  add(name) {
    if (!name) return;
    const chart = { title: name, names: [name], labels: [name], unit: "", note: this.meanings[name] || "", kind: "lines", has_held_out: false, band: null, healthy: "" };
    const card = new Card(chart, this, () => {
      this.cards = this.cards.filter((one) => one !== card);
      this.watch.unobserve(card.root);
      card.root.remove();
    });
    this.cards.push(card);
    this.place.append(card.root);
    this.watch.observe(card.root);
    card.root.scrollIntoView({ block: "nearest" });
    this.show();
  }

  zoom(first, last) {
    this.range = first === null && last === null ? null : [first, last];
    document.getElementById("first").value = first ?? "";
    document.getElementById("last").value = last ?? "";
    this.show();
  }

  // Immediately; if the hub does not answer, as soon as it does.
  show() {
    this.load().catch(() => this.refresh());
  }

  // The first series, requested before the list of charts is known.
  static firstSeries() {
    return get("api/series", { points: POINTS }).catch(() => null);
  }

  async load(early = null) {
    const names = [...new Set(this.cards.flatMap((card) => card.chart.names))].join(",");
    const [first, last] = this.range ?? [null, null];
    const asked = ["", ...this.others], turn = (this.turn += 1);
    const found = await Promise.all(asked.map(async (run) => (run === "" && (await early)) || get("api/series", { run, names, first, last, points: POINTS })));
    if (turn !== this.turn) return; // superseded by a newer request
    asked.forEach((run, place) => this.data.set(run, found[place]));
    const own = found[0];
    const isThinned = own.steps.length < own.num_steps && !this.range;
    document.getElementById("options").hidden = own.num_steps < 2;
    document.getElementById("overview-note").textContent = !own.run
      ? "There are no metrics: this hub has no run folder (--run-folder)."
      : own.num_steps < 2 ? (exported ? "Charts need two steps." : "Charts appear after the second step.")
      : isThinned ? `${number(own.num_steps)} steps: each point shows the lowest and the highest value of several${exported ? "" : "; drag over a chart to zoom in"}.` : "";
    this.offer(own.names);
    this.draw();
  }

  offer(names) {
    const select = document.getElementById("add-chart");
    if (select.options.length - 1 === names.length) return;
    select.replaceChildren(element("option", { value: "" }, "choose a metric"), ...names.map((name) => element("option", { value: name }, name)));
  }

  // A chart with fewer than two points stays hidden; a visible card stays while the user zooms.
  draw() {
    for (const card of this.cards) {
      if (!this.range) card.root.hidden = !card.isReady();
      if (card.isVisible) card.draw();
    }
  }

  // For paper: also the charts that are not in view.
  drawAll() {
    for (const card of this.cards) if (!card.root.hidden) card.draw();
  }

  explain(note) {
    const card = this.cards.find((one) => one.chart.has_held_out);
    if (card) card.explanation.textContent = note;
  }

  recolour() {
    for (const card of this.cards) card.shape = "";
    this.draw();
  }
}
