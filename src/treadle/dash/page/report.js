// What an exported run says below its charts: health, examples, memory, settings, versions.
import { element, number } from "./api.js";

export function showReport(report) {
  const verdict = document.getElementById("verdict"), place = document.getElementById("report");
  verdict.textContent = report.words.join(" ");
  verdict.hidden = place.hidden = false;
  place.append(
    ...section("Health", report.health.length ? lines(report.health) : paragraph("No warnings.")),
    ...(report.alarms.length ? section("Waits that took too long", lines(report.alarms)) : []),
    ...section("Examples, before and after", ...examples(report)),
    ...section("Memory", ...memory(report)),
    ...section("Configuration", paragraph("Settings that differ from the defaults: first those that the user gave, then those that the launcher chose."),
      table(["setting", "value", "default", "set by"], report.changed),
      element("details", {}, element("summary", {}, `All ${number(report.settings.length)} settings`), table([], report.settings))),
    ...section("Versions and files", table([], [...report.versions, ...report.files])));
}

export function section(title, ...content) {
  return [element("h2", {}, title), ...content];
}

export function paragraph(text) {
  return element("p", {}, text);
}

function lines(texts) {
  return element("ul", {}, ...texts.map((text) => element("li", {}, text)));
}

export function table(heads, rows) {
  const head = heads.length ? element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", {}, text)))) : "";
  const row = (cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
  return element("div", { class: "scroll" }, element("table", {}, head, element("tbody", {}, ...rows.map(row))));
}

function examples({ examples: shown, counts, cut_off: cutOff }) {
  if (!shown.length) return [paragraph("None: no prompt was evaluated both before and after.")];
  const summary = counts.map(([label, count]) => `${number(count)} ${label}`).join(", ");
  const side = (example, when) => {
    const isRight = example[`${when}_is_right`], kind = isRight ? "right" : "wrong";
    return element("div", {},
      element("p", {}, `${when}: `, element("b", { class: kind }, kind), example[`${when}_ended`] ? "" : ` (${cutOff[when]})`),
      element("pre", { tabindex: "0" }, String(example[when] || "(nothing)")));
  };
  const card = (example) => element("article", { class: "example" },
    element("h3", {}, example.kind), element("pre", { tabindex: "0" }, String(example.prompt)),
    example.gold === null ? "" : element("p", { class: "quiet" }, `expected: ${example.gold}`),
    element("div", { class: "sides" }, side(example, "before"), side(example, "after")));
  return [paragraph(`Held-out prompts that were answered both times: ${summary}. Some of each kind:`), ...shown.map(card)];
}

function memory({ peak_memory: peak, memory: processes }) {
  if (!processes.length) return [paragraph("Not measured yet: it is written at the end of a run.")];
  const rows = processes.map(([name, size, share]) => [name, size, element("progress", { max: 1, value: share, "aria-hidden": "true" })]);
  return [paragraph(`${peak} over all processes at once. The peak of each process:`), table([], rows)];
}
