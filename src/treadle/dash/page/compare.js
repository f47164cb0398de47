// Several runs side by side: figures, settings and answers that differ, and curves with a band over seeds.
import { applyTheme, element, get } from "./api.js";
import { Card, smoothed } from "./card.js";
import { exported } from "./exported.js";
import { paragraph, section, table } from "./report.js";

const COLOURS = 6; // of style.css: --s0 to --s5

// The first metric of a chart, or the held-out accuracy, of each group.
class ComparisonCard extends Card {
  lines() {
    const [name] = this.chart.names;
    return this.overview.curves.flatMap((curve, place) => {
      const common = { label: curve.name, colour: `--s${place % COLOURS}` };
      if (this.chart.has_held_out) {
        const points = curve.held_out;
        return points.length ? [{ ...common, steps: points.map((point) => point.step), values: points.map((point) => point.accuracy), points }] : [];
      }
      return curve.values[name] ? [{ ...common, steps: curve.steps[name], values: curve.values[name], low: curve.low[name], high: curve.high[name] }] : [];
    });
  }

  isReady() {
    return this.lines().some((line) => line.values.length > 1);
  }

  series() {
    const { smoothing, isLog } = this.overview, weight = this.chart.has_held_out ? 0 : smoothing;
    const usable = (values) => (isLog ? values.map((value) => (value !== null && value > 0 ? value : null)) : values);
    const drawn = (values) => (weight > 0 ? smoothed(usable(values), weight) : usable(values));
    const tables = [], series = [];
    for (const { label, colour, steps, values, low, high } of this.lines()) {
      const columns = [];
      const add = (column, kind) => { columns.push(column); series.push({ label, raw: this.chart.names[0] ?? "", colour, kind }); };
      if (low) { add(drawn(high), "edge"); add(drawn(low), "edge"); } else if (weight > 0) add(usable(values), "faint");
      add(drawn(values), "line");
      tables.push([steps, ...columns]);
    }
    return { data: tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]], series };
  }

  // Of the two edges of a band only the area between them is drawn.
  options(made) {
    const options = super.options(made), style = getComputedStyle(document.documentElement);
    made.series.forEach((one, place) => {
      if (one.kind !== "edge") return;
      Object.assign(options.series[place + 1], { width: 0, points: { show: false } });
      if (made.series[place - 1]?.kind === "edge" && made.series[place - 1].label === one.label) {
        options.bands.push({ series: [place, place + 1], fill: style.getPropertyValue(one.colour).trim() + "33" });
      }
    });
    return options;
  }

  heldOut() {
    return this.chart.has_held_out ? this.lines().flatMap((line) => line.points.map((point) => ({ ...point, colour: line.colour }))) : [];
  }

  openStep() {}
}

class Comparison {
  constructor({ charts, curves }) {
    this.curves = curves;
    this.data = new Map();
    this.others = [];
    this.range = null;
    this.smoothing = 0.6;
    this.isLog = false;
    this.cards = charts.map((chart) => new ComparisonCard(chart, this)).filter((card) => card.isReady());
    document.getElementById("charts").replaceChildren(...this.cards.map((card) => card.root));
    document.getElementById("smoothing").addEventListener("input", (event) => { this.smoothing = Number(event.target.value); this.draw(); });
    document.getElementById("log").addEventListener("change", (event) => { this.isLog = event.target.checked; this.draw(); });
    document.getElementById("zoom-out").addEventListener("click", () => this.zoom(null, null));
    this.draw();
  }

  zoom(first, last) {
    this.range = first === null && last === null ? null : [first, last];
    this.draw();
  }

  draw() {
    for (const card of this.cards) {
      card.root.hidden = false;
      card.draw();
    }
  }

  recolour() {
    for (const card of this.cards) card.shape = "";
    this.draw();
  }
}

function answerCards({ words, comparison }) {
  const side = (number, isRight, text) => element("div", {},
    element("p", {}, `run ${number}: `, element("b", { class: isRight ? "right" : "wrong" }, isRight ? "right" : "wrong")),
    element("pre", { tabindex: "0" }, text || "(nothing)"));
  const card = (answer) => element("article", { class: "example" },
    element("pre", { tabindex: "0" }, answer.prompt), element("p", { class: "quiet" }, `expected: ${answer.gold}`),
    element("div", { class: "sides" }, side(comparison.first, answer.is_first_right, answer.first), side(comparison.second, !answer.is_first_right, answer.second)));
  const examples = comparison.examples.length ? element("details", {}, element("summary", {}, "Examples"), ...comparison.examples.map(card)) : "";
  return [paragraph(`${words.charAt(0).toUpperCase()}${words.slice(1)}.`), examples];
}

async function compareRuns() {
  let page = null;
  applyTheme(document.getElementById("theme"), () => page?.recolour());
  document.getElementById("all-runs").hidden = Boolean(exported);
  if (!exported) document.title = "Comparison – Treadle";
  let found;
  try {
    found = await get("api/comparison", { runs: new URLSearchParams(location.search).get("runs") });
  } catch (error) {
    document.getElementById("words").textContent = error.message;
    return;
  }
  const [heads, ...rows] = found.table, [settingHeads, ...settings] = found.settings;
  document.getElementById("words").textContent = found.words.join(" ");
  document.getElementById("figures").append(
    table(heads, rows), paragraph(found.note),
    ...(settings.length ? section("Settings that differ", table(settingHeads, settings)) : []));
  document.getElementById("answers").append(
    ...section("Held-out answers that differ", ...found.answers.flatMap(answerCards), paragraph(found.answers_note)));
  page = new Comparison(found);
  document.documentElement.dataset.drawn = "yes";
}

compareRuns();
