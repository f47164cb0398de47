// The overview: a card for each chart, all over the same steps.
import { element, get, number, throttled } from "./api.js";

const POINTS = 600;
const HEIGHT = 190;
const MAX_OTHERS = 4;
const NAMES = { "perf/rollout_wait_s": "wait", "perf/fwd_bwd_s": "train: forward, backward", "perf/optimizer_s": "train: optimizer", "perf/weight_sync_s": "publish", "rollout/generation_s": "in parallel: generate a group", "rollout/score_s": "in parallel: score a group", "perf/generated_tok_s_wall_clock": "generated", "perf/trained_tok_s_wall_clock": "trained", "perf/forwarded_tok_s_wall_clock": "forwarded" };

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
    const ages = this.cards.findIndex((card) => card.chart.title.startsWith("Age"));
    this.cards.splice(ages < 0 ? this.cards.length : ages, 0, new QueueCard(this));
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
    if (!run.others.length) list.append(element("span", { class: "quiet" }, "There is no other run beside this one."));
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
    const chart = { title: name, names: [name], unit: "", note: this.meanings[name] || "", kind: "lines", has_held_out: false, band: null, healthy: "" };
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

  // At once; where the hub does not answer, when it does.
  show() {
    this.load().catch(() => this.refresh());
  }

  // What the charts show at first, asked for before it is known which they are.
  static firstSeries() {
    return get("api/series", { points: POINTS }).catch(() => null);
  }

  async load(early = null) {
    const names = [...new Set(this.cards.flatMap((card) => card.chart.names))].join(",");
    const [first, last] = this.range ?? [null, null];
    const asked = ["", ...this.others], turn = (this.turn += 1);
    const found = await Promise.all(asked.map(async (run) => (run === "" && (await early)) || get("api/series", { run, names, first, last, points: POINTS })));
    if (turn !== this.turn) return; // other steps or runs were asked for meanwhile
    asked.forEach((run, place) => this.data.set(run, found[place]));
    const own = found[0];
    document.getElementById("overview-note").textContent = own.num_steps
      ? `${number(own.num_steps)} steps${own.steps.length < own.num_steps && !this.range ? ", of each stretch the lowest and the highest value; drag over a chart to zoom in" : ""}`
      : "No step has been trained yet, or this hub knows no run folder (--run-folder).";
    this.offer(own.names);
    this.draw();
  }

  offer(names) {
    const select = document.getElementById("add-chart");
    if (select.options.length - 1 === names.length) return;
    select.replaceChildren(element("option", { value: "" }, "choose a figure"), ...names.map((name) => element("option", { value: name }, name)));
  }

  draw() {
    for (const card of this.cards) if (card.isVisible) card.draw();
      else card.isStale = true;
  }

  recolour() {
    for (const card of this.cards) card.shape = "";
    this.draw();
  }
}

class Card {
  constructor(chart, overview, onClose = null) {
    this.chart = chart;
    this.overview = overview;
    this.isVisible = false;
    this.plot = null;
    this.shape = "";
    this.place = element("div", { class: "plot", tabindex: "0", role: "img", "aria-label": chart.title });
    this.empty = element("p", { class: "empty" }, "nothing measured yet");
    const close = onClose && element("button", { class: "close", type: "button", "aria-label": `Remove ${chart.title}`, onclick: onClose }, "x");
    const healthy = chart.healthy ? `healthy: ${chart.healthy}` : "";
    this.root = element("article", { class: "chart", "data-title": chart.title },
      element("h3", {}, element("span", {}, chart.title), element("span", { class: "quiet" }, healthy, close)),
      element("p", {}, [chart.note, chart.unit && `(${chart.unit})`].filter(Boolean).join(" ")), this.empty, this.place);
    this.place.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => { if (this.plot) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT }); }).observe(this.place);
  }

  draw() {
    const made = this.series();
    this.empty.hidden = made.series.length > 0;
    this.place.hidden = made.series.length === 0;
    this.root.dataset.points = made.data.length > 1 ? made.data[1].filter((value) => value !== null && value !== undefined).length : 0;
    if (!made.series.length) return;
    const shape = JSON.stringify([made.series.map((one) => one.label + one.kind), this.overview.isLog]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(made.data, false);
      this.plot.setScale("x", this.span(made.data[0]));
    } else {
      this.shape = shape;
      if (this.plot) this.plot.destroy();
      this.plot = new uPlot(this.options(made), made.data, this.place);
    }
  }

  span(steps) {
    const [first, last] = this.overview.range ?? [null, null];
    const min = first ?? steps[0] ?? 0, max = last ?? steps[steps.length - 1] ?? 1;
    return { min, max: max > min ? max : min + 1 };
  }

  // Tables of different steps (own run, other runs, held-out points) are laid over each other.
  series() {
    const { data, others, smoothing, isLog } = this.overview;
    const tables = [], series = [];
    const own = data.get("");
    if (!own) return { data: [[]], series };
    const names = this.chart.names.filter((name) => own.values[name]);
    const isStacked = this.chart.kind === "stacked" && !isLog;
    const usable = (values) => (isLog ? values.map((value) => (value !== null && value > 0 ? value : null)) : values);
    const columns = [];
    let below = null;
    names.forEach((name, place) => {
      const label = NAMES[name] ?? name, colour = `--s${place % 6}`;
      const measured = usable(own.values[name]), even = usable((own.means ?? own.values)[name]);
      const smooth = smoothing > 0 ? smoothed(even, smoothing) : isStacked ? even : measured;
      if (isStacked) {
        const sum = smooth.map((value, row) => (value ?? 0) + (below ? below[row] : 0));
        columns.push(sum);
        series.push({ label, colour, kind: "stack" });
        below = sum;
      } else {
        if (smoothing > 0) { columns.push(measured); series.push({ label: `${label}, as measured`, colour, kind: "faint" }); }
        columns.push(smooth);
        series.push({ label, colour, kind: "line" });
      }
    });
    if (names.length) tables.push([own.steps, ...columns]);
    others.forEach((run, place) => {
      const other = data.get(run), name = this.chart.names[0];
      if (!other || !other.values[name]) return;
      const values = usable((smoothing > 0 && other.means ? other.means : other.values)[name]);
      tables.push([other.steps, smoothing > 0 ? smoothed(values, smoothing) : values]);
      series.push({ label: `${run}: ${name}`, colour: `--s${(names.length + place) % 6}`, kind: "other" });
    });
    if (this.chart.has_held_out && own.held_out.length) {
      const [first, last] = this.overview.range ?? [null, null];
      const shown = own.held_out.filter((point) => (first === null || point.step >= first) && (last === null || point.step <= last));
      if (shown.length) {
        tables.push([shown.map((point) => point.step), shown.map((point) => point.accuracy)]);
        series.push({ label: "held-out accuracy", colour: "--ink", kind: "points" });
        const scored = shown.filter((point) => point.mean_score !== null);
        if (scored.length) {
          tables.push([scored.map((point) => point.step), scored.map((point) => point.mean_score)]);
          series.push({ label: "held-out mean score", colour: "--s0", kind: "points" });
        }
      }
    }
    return { data: tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]], series };
  }

  options(made) {
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    const card = this, isStack = made.series[0]?.kind === "stack";
    const axis = { stroke: ink("--quiet"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    return {
      width: this.place.clientWidth || 400,
      height: HEIGHT,
      scales: { x: { time: false, range: (plot) => { const { min, max } = card.span(plot.data[0]); return [min, max]; } }, y: this.overview.isLog ? { distr: 3 } : { range: (_, low, high) => (isStack ? [0, Math.max(high, 1e-9) * 1.05] : card.reach(low, high)) } },
      axes: [{ ...axis, space: 60, size: 30 }, { ...axis, size: (_, labels) => 14 + 6.5 * Math.max(4, ...(labels ?? []).map((label) => label.length)), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { card.overview.zoom(null, null); } } },
      series: [
        { label: "step", value: (_, value) => number(value) },
        ...made.series.map((one, place) => {
          const colour = ink(one.colour);
          const value = (plot, shown, column, row) => number(row === null ? null : asMeasured(plot, shown, column, row, made.series));
          if (one.kind === "points") return { label: one.label, value, stroke: colour, paths: () => null, points: { show: true, size: 8, fill: colour } };
          const width = one.kind === "faint" ? 1 : 2;
          return { label: one.label, value, class: one.kind, stroke: one.kind === "faint" ? colour + "55" : colour, width,
            points: { show: made.data[0].length < 3, filter: (plot, column, areShown) => (areShown ? null : lonely(plot.data[column])) }, dash: one.kind === "other" ? [5, 3] : undefined, fill: one.kind === "stack" && place === 0 ? colour + "44" : undefined };
        }),
      ],
      bands: made.series.flatMap((one, place) => (one.kind === "stack" && place > 0 ? [{ series: [place + 1, place], fill: ink(one.colour) + "44" }] : [])),
      legend: { live: true },
      hooks: {
        drawClear: [(plot) => card.drawBand(plot, ink)],
        draw: [(plot) => card.drawIntervals(plot, ink)],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const first = Math.round(plot.posToVal(plot.select.left, "x"));
          const last = Math.round(plot.posToVal(plot.select.left + plot.select.width, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          if (last > first) card.overview.zoom(first, last);
        }],
        ready: [(plot) => plot.over.addEventListener("click", (event) => { if (event.shiftKey) card.openStep(); })],
      },
    };
  }

  // Of the vertical axis: with the intervals of the held-out points, and with room around a figure that never changes.
  reach(low, high) {
    const points = this.chart.has_held_out ? this.overview.data.get("")?.held_out ?? [] : [];
    const ends = [low, high, ...points.flatMap((point) => [point.low, point.high])].filter((value) => value !== null);
    if (!ends.length) return [0, 1];
    const least = Math.min(...ends), most = Math.max(...ends);
    if (least === most) return most === 0 ? [0, 1] : [least - Math.abs(least) / 10, most + Math.abs(most) / 10];
    return uPlot.rangeNum(least, most, 0.1, true);
  }

  drawBand(plot, ink) {
    const band = this.chart.band;
    const { min, max } = plot.scales.y;
    if (!band || min === null || max === null) return;
    const { left, top, width, height } = plot.bbox;
    const at = (value) => Math.min(top + height, Math.max(top, plot.valToPos(value, "y", true)));
    const isLog = this.overview.isLog;
    const context = plot.ctx;
    context.save();
    context.fillStyle = ink("--healthy");
    const upper = band.high === undefined || band.high === null ? top : at(band.high);
    const hasFloor = band.low !== undefined && band.low !== null && !(isLog && band.low <= 0);
    const lower = hasFloor ? at(band.low) : top + height;
    context.fillRect(left, upper, width, Math.max(0, lower - upper));
    if (band.alarm !== undefined && band.alarm !== null && band.alarm > min && band.alarm < max) {
      context.strokeStyle = ink("--alarm");
      context.setLineDash([6, 4]);
      context.beginPath();
      context.moveTo(left, at(band.alarm));
      context.lineTo(left + width, at(band.alarm));
      context.stroke();
    }
    context.restore();
  }

  drawIntervals(plot, ink) {
    if (!this.chart.has_held_out) return;
    const { left, top, width, height } = plot.bbox, context = plot.ctx;
    const inside = (value, low, size) => Math.min(low + size, Math.max(low, value));
    context.save();
    context.strokeStyle = ink("--ink");
    context.lineWidth = 1.5 * devicePixelRatio;
    for (const point of this.overview.data.get("")?.held_out ?? []) {
      const x = plot.valToPos(point.step, "x", true);
      if (x < left - 1 || x > left + width + 1) continue;
      context.beginPath();
      for (const value of [point.low, point.high]) {
        const y = this.overview.isLog && value <= 0 ? top + height : inside(plot.valToPos(value, "y", true), top, height);
        if (value === point.low) context.moveTo(x, y);
        else context.lineTo(x, y);
      }
      context.stroke();
    }
    context.restore();
  }

  key(event) {
    if (!this.plot || !["ArrowLeft", "ArrowRight", "Enter"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Enter") { this.openStep(); return; }
    const steps = this.plot.data[0];
    const move = (event.key === "ArrowRight" ? 1 : -1) * (event.shiftKey ? 20 : 1);
    const row = Math.min(steps.length - 1, Math.max(0, (this.plot.cursor.idx ?? (move > 0 ? -1 : steps.length)) + move));
    this.plot.setCursor({ left: this.plot.valToPos(steps[row], "x"), top: HEIGHT / 3 });
  }

  openStep() {
    const row = this.plot?.cursor.idx;
    if (row !== null && row !== undefined) this.overview.onStep(this.plot.data[0][row]);
  }
}

// The queue has no steps: its course is over the time that the hub has been up.
class QueueCard extends Card {
  constructor(overview) {
    super({ title: "Queue", names: [], unit: "groups", note: "Groups that wait, and groups in batches that were given out, since the hub was started.", kind: "lines", has_held_out: false, band: null, healthy: "" }, overview);
    this.place.hidden = true;
    this.refresh = throttled(async () => {
      const { samples } = await get("api/queue");
      this.samples = samples;
      this.paint();
    }, 2000);
  }

  draw() {
    this.refresh();
  }

  paint() {
    const data = [this.samples.map((one) => one.at), this.samples.map((one) => one.queued), this.samples.map((one) => one.leased)];
    this.empty.hidden = true;
    this.place.hidden = false;
    this.root.dataset.points = data[0].length;
    if (this.plot && this.shape) { this.plot.setData(data); return; }
    this.shape = "drawn";
    this.plot?.destroy();
    const made = { data, series: [{ label: "waiting", colour: "--s0", kind: "line" }, { label: "given out", colour: "--s1", kind: "line" }] };
    const options = this.options(made);
    options.scales = { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(1, high) * 1.05] } };
    options.cursor = { drag: { x: true, y: false } };
    options.hooks = {};
    options.series[0] = { label: "at", value: (_, at) => (at === null ? "–" : new Date(at * 1000).toLocaleTimeString()) };
    this.plot = new uPlot(options, data, this.place);
  }

  openStep() {}
}

// A step without a value (null) is a gap in its line; what stands alone between two of them is no line, so it is a dot.
// A step that only another run has is undefined, and no gap.
function lonely(values) {
  const rows = values.flatMap((value, row) => (value === undefined ? [] : [row]));
  const isGap = (place) => place < 0 || place >= rows.length || values[rows[place]] === null;
  return rows.filter((_, place) => !isGap(place) && isGap(place - 1) && isGap(place + 1));
}

// Hovering tells what was measured: the faint column stands before the smoothed one; a stack's part is what it adds.
function asMeasured(plot, shown, column, row, series) {
  if (column === 0) return shown;
  const before = series[column - 2]?.kind;
  if (series[column - 1].kind === "line" && before === "faint") return plot.data[column - 1][row];
  if (series[column - 1].kind === "stack" && before === "stack" && shown !== null && shown !== undefined) return shown - plot.data[column - 1][row];
  return shown;
}

// An exponential mean, corrected for its start; what was not measured is left out of it.
export function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
