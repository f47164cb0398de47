// A chart: the metrics of a run over its steps, or the queue over time, drawn with uPlot.
import { element, get, number, throttled } from "./api.js";

const HEIGHT = 190;
const TALL = 2.5; // times what 98 % of the steps stay below: an axis for that would hide the others
const STEP_TICKS = [1, 2, 5].flatMap((digit) => Array.from({ length: 9 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b);

export class Card {
  constructor(chart, overview, onClose = null) {
    this.chart = chart;
    this.overview = overview;
    this.isVisible = false;
    this.plot = null;
    this.shape = "";
    this.isAdded = onClose !== null;
    this.place = element("div", { class: "plot", tabindex: "0", role: "img", "aria-label": chart.title });
    this.empty = element("p", { class: "empty", hidden: true }, "not measured in these steps");
    this.explanation = element("p");
    const close = onClose && element("button", { class: "close", type: "button", "aria-label": `Remove ${chart.title}`, onclick: onClose }, "x");
    const about = [chart.note, chart.healthy && `Healthy: ${chart.healthy}.`].filter(Boolean).join(" ");
    this.root = element("article", { class: "chart", "data-title": chart.title, hidden: !this.isAdded },
      element("h3", {}, element("span", {}, chart.title), element("span", { class: "quiet" }, chart.unit, close)),
      element("p", {}, about), this.empty, this.place, this.explanation);
    this.place.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => { if (this.plot) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT }); }).observe(this.place);
  }

  isReady() {
    const { data, others } = this.overview;
    const numPoints = (run) => Math.max(0, ...this.chart.names.map((name) => count(data.get(run)?.values[name] ?? [])));
    const numHeldOut = this.chart.has_held_out ? data.get("")?.held_out.length ?? 0 : 0;
    const numByEnv = this.chart.held_out_envs?.map((env) => data.get("")?.held_out_by_env[env]?.length ?? 0) ?? [];
    return this.isAdded || Math.max(numHeldOut, ...numByEnv, ...["", ...others].map(numPoints)) > 1;
  }

  draw() {
    const made = this.series();
    this.empty.hidden = made.series.length > 0;
    this.place.hidden = made.series.length === 0;
    this.root.dataset.points = made.data.length > 1 ? count(made.data[1]) : 0;
    if (!made.series.length) return;
    this.cutAt = this.overview.range || made.series[0].kind !== "stack" ? null : cutAt(made.data.at(-1));
    if (!this.chart.has_held_out) this.explanation.textContent = this.cutAt === null ? "" : "The highest values are cut off.";
    const shape = JSON.stringify([made.series.map((one) => one.label + one.kind), this.overview.isLog, made.data[0].length < 3]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(made.data, false);
      this.plot.setScale("x", this.span(made.data[0]));
      this.plot.setLegend({ idx: this.plot.cursor.idx ?? null }, false); // without a cursor, the values of the last step
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

  // Joins tables with different steps: own run, other runs, held-out points.
  series() {
    const { data, others, smoothing, isLog } = this.overview;
    const tables = [], series = [];
    const own = data.get("");
    if (!own) return { data: [[]], series };
    const isStacked = this.chart.kind === "stacked" && !isLog;
    const usable = (values) => (isLog ? values.map((value) => (value !== null && value > 0 ? value : null)) : values);
    const columns = [];
    let below = null;
    const drawn = isStacked ? this.named(own) : distinct(this.named(own), own.values);
    drawn.forEach(({ name, label, raw }, place) => {
      const colour = `--s${place % 6}`;
      const measured = usable(own.values[name]), even = usable((own.means ?? own.values)[name]);
      const smooth = smoothing > 0 ? smoothed(even, smoothing) : isStacked ? even : measured;
      if (isStacked) {
        const sum = smooth.map((value, row) => (value ?? 0) + (below ? below[row] : 0));
        columns.push(sum);
        series.push({ label, raw, colour, kind: "stack" });
        below = sum;
      } else {
        if (smoothing > 0) { columns.push(measured); series.push({ label: `${label}, as measured`, raw, colour, kind: "faint" }); }
        columns.push(smooth);
        series.push({ label, raw, colour, kind: "line" });
      }
    });
    if (drawn.length) tables.push([own.steps, ...columns]);
    others.forEach((run, place) => {
      const other = data.get(run), name = this.chart.names[0];
      if (!other || !other.values[name]) return;
      const values = usable((smoothing > 0 && other.means ? other.means : other.values)[name]);
      tables.push([other.steps, smoothing > 0 ? smoothed(values, smoothing) : values]);
      series.push({ label: `${run}: ${this.chart.labels[0]}`, raw: name, colour: `--s${(drawn.length + place) % 6}`, kind: "other" });
    });
    if (this.chart.has_held_out && own.held_out.length) {
      const [first, last] = this.overview.range ?? [null, null];
      const shown = own.held_out.filter((point) => (first === null || point.step >= first) && (last === null || point.step <= last));
      if (shown.length) {
        const scored = shown.filter((point) => point.mean_score !== null);
        const isEqual = scored.length === shown.length && shown.every((point) => point.accuracy === point.mean_score);
        tables.push([shown.map((point) => point.step), shown.map((point) => point.accuracy)]);
        series.push({ label: `held-out accuracy${isEqual ? " = mean score" : ""}`, colour: "--ink", kind: "points" });
        if (scored.length && !isEqual) {
          tables.push([scored.map((point) => point.step), scored.map((point) => point.mean_score)]);
          series.push({ label: "held-out mean score", colour: "--s0", kind: "points" });
        }
      }
    }
    (this.chart.held_out_envs ?? []).forEach((env, place) => {
      const points = own.held_out_by_env[env] ?? [];
      tables.push([points.map((point) => point.step), points.map((point) => point.accuracy)]);
      series.push({ label: env, colour: `--s${place % 6}`, kind: "line" });
    });
    return { data: tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]], series };
  }

  // The metrics that have values, with their plain names.
  named(own) {
    return this.chart.names.map((name, place) => ({ name, label: this.chart.labels[place], raw: name }))
      .filter(({ name }) => own.values[name] && count(own.values[name]) > 0);
  }

  options(made) {
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(name).trim();
    const card = this, isStack = made.series[0]?.kind === "stack";
    const axis = { stroke: ink("--quiet"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    return {
      width: this.place.clientWidth || 400,
      height: HEIGHT,
      scales: { x: { time: false, range: (plot) => { const { min, max } = card.span(plot.data[0]); return [min, max]; } }, y: this.overview.isLog ? { distr: 3 } : { range: (_, low, high) => (isStack ? [0, card.cutAt ?? Math.max(high, 1e-9) * 1.05] : card.reach(low, high)) } },
      axes: [{ ...axis, space: 60, size: 30, incrs: STEP_TICKS }, { ...axis, size: (_, labels) => 14 + 6.5 * Math.max(4, ...(labels ?? []).map((label) => label.length)), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) }],
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => { card.overview.zoom(null, null); } } },
      series: [
        { label: "step", value: (plot, value) => number(value ?? plot.data[0].at(-1)) },
        ...made.series.map((one, place) => {
          const colour = ink(one.colour);
          const value = (plot, shown, column, row) => number(asMeasured(plot, column, row ?? lastRow(plot.data[column]), made.series));
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
        ready: [(plot) => {
          plot.over.addEventListener("click", (event) => { if (event.shiftKey) card.openStep(); });
          plot.root.querySelectorAll(".u-legend .u-series").forEach((row, place) => { row.title = made.series[place - 1]?.raw ?? ""; });
        }],
      },
    };
  }

  // The evaluations of this chart, each with the colour of its interval.
  heldOut() {
    const points = this.chart.has_held_out ? this.overview.data.get("")?.held_out ?? [] : [];
    const scores = points.filter((point) => (point.score_low ?? null) !== null);
    return [
      ...points.map((point) => ({ ...point, colour: "--ink" })),
      ...scores.map((point) => ({ step: point.step, low: point.score_low, high: point.score_high, colour: "--s0" })),
    ];
  }

  // Range of the vertical axis: includes the intervals of the held-out points, and margins around a constant value.
  reach(low, high) {
    const ends = [low, high, ...this.heldOut().flatMap((point) => [point.low, point.high])].filter((value) => value !== null);
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
    context.lineWidth = 1.5 * devicePixelRatio;
    for (const point of this.heldOut()) {
      context.strokeStyle = ink(point.colour);
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

// The queue over time since the start of the hub; hidden until the queue has changed once.
export class QueueCard extends Card {
  constructor(overview) {
    super({ title: "Queue", names: [], labels: [], unit: "groups", note: "Groups that wait for a batch, and groups that the trainer has leased.", kind: "lines", has_held_out: false, band: null, healthy: "" }, overview);
    this.samples = [];
    this.refresh = throttled(async () => {
      this.samples = (await get("api/queue")).samples;
      this.root.hidden = !this.hasPoints();
      if (!this.root.hidden && this.isVisible) this.paint();
    }, 2000);
  }

  isReady() {
    this.refresh();
    return this.hasPoints();
  }

  hasPoints() {
    const own = this.overview.data.get(""), [first] = this.samples;
    const hasChanged = this.samples.some((one) => one.queued !== first.queued || one.leased !== first.leased);
    return hasChanged && (!own?.run || own.num_steps > 1);
  }

  draw() {
    this.refresh();
  }

  paint() {
    const data = [this.samples.map((one) => one.at), this.samples.map((one) => one.queued), this.samples.map((one) => one.leased)];
    this.empty.hidden = true;
    this.root.dataset.points = data[0].length;
    if (this.plot && this.shape) { this.plot.setData(data); return; }
    this.shape = "drawn";
    this.plot?.destroy();
    const made = { data, series: [{ label: "waiting", colour: "--s0", kind: "line" }, { label: "leased", colour: "--s1", kind: "line" }] };
    const options = this.options(made);
    const { incrs: _, ...timeAxis } = options.axes[0];
    options.axes[0] = timeAxis;
    options.scales = { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(1, high) * 1.05] } };
    options.cursor = { drag: { x: true, y: false } };
    options.hooks = {};
    options.series[0] = { label: "at", value: (plot, at) => new Date((at ?? plot.data[0].at(-1)) * 1000).toLocaleTimeString() };
    this.plot = new uPlot(options, data, this.place);
  }

  openStep() {}
}

function count(values) {
  return values.reduce((sum, value) => sum + (value !== null && value !== undefined), 0);
}

// Where a few tall steps of a stack are cut off; null: nowhere.
function cutAt(tops) {
  const sorted = tops.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
  return usual > 0 && sorted.at(-1) > TALL * usual ? 1.1 * usual : null;
}

function lastRow(values) {
  return values.findLastIndex((value) => value !== null && value !== undefined);
}

// Metrics with the same values are one line with both names, because one would cover the other.
function distinct(named, values) {
  const kept = [];
  for (const one of named) {
    const same = kept.find((other) => values[one.name].every((value, row) => value === values[other.name][row]));
    if (same) Object.assign(same, { label: `${same.label} = ${one.label}`, raw: `${same.raw} = ${one.name}` });
    else kept.push(one);
  }
  return kept;
}

// A step without a value (null) is a gap in its line; a single value between two gaps is drawn as a dot.
// A step that only another run has is undefined, which is no gap.
function lonely(values) {
  const rows = values.flatMap((value, row) => (value === undefined ? [] : [row]));
  const isGap = (place) => place < 0 || place >= rows.length || values[rows[place]] === null;
  return rows.filter((_, place) => !isGap(place) && isGap(place - 1) && isGap(place + 1));
}

// The legend shows measured values: the faint column precedes the smoothed one; a part of a stack is the difference to the one below.
function asMeasured(plot, column, row, series) {
  const { kind } = series[column - 1], before = series[column - 2]?.kind;
  const shown = plot.data[column][row], below = plot.data[column - 1][row];
  if (kind === "line" && before === "faint") return below;
  return kind === "stack" && before === "stack" && shown !== null && shown !== undefined ? shown - below : shown;
}

// Exponential moving average with bias correction; missing values are skipped.
export function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
