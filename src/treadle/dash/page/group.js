// One group: its prompt once, its completions side by side, each token in colour.
import { ApiError, ago, element, get, number } from "./api.js";
import { exported } from "./exported.js";

const COLOURS = [
  ["logprob", "the engine's logprob"],
  ["difference", "trainer minus engine"],
  ["advantage", "advantage"],
  ["none", "nothing"],
];
const SCALES = {
  logprob: [["p0", "likely"], ["p1", "-0.1"], ["p2", "-0.5"], ["p3", "-1"], ["p4", "-2"], ["p5", "below -4"]],
  difference: [["w3", "below -0.5"], ["w2", "-0.1"], ["w1", "-0.02"], ["a0", "0"], ["c1", "0.02"], ["c2", "0.1"], ["c3", "above 0.5"]],
  advantage: [["d3", "worse"], ["d2", ""], ["d1", ""], ["a0", "0"], ["u1", ""], ["u2", ""], ["u3", "better"]],
};

export class GroupPane {
  constructor(place, { onClose, onOpen, newer, older }) {
    Object.assign(this, { place, onClose, onOpen, newer, older });
    this.id = null;
    this.view = null;
    this.colour = "logprob";
    this.rollout = 0;
  }

  async open(id) {
    this.id = id;
    this.place.hidden = false;
    this.rollout = 0;
    const { view, problem } = await get(`api/groups/${id}`).then((found) => ({ view: found }), (error) => ({ problem: error }));
    if (this.id !== id) return; // another group was opened meanwhile
    this.view = view ?? null;
    if (view) this.draw();
    else this.place.replaceChildren(this.bar(), element("p", {}, problem instanceof ApiError ? problem.message : "The hub does not answer."));
  }

  close() {
    this.id = null;
    this.view = null;
    this.place.hidden = true;
    this.place.replaceChildren();
  }

  bar() {
    const colour = element("select", { id: "colour", onchange: (event) => { this.colour = event.target.value; this.recolour(); } },
      ...COLOURS.map(([value, text]) => element("option", { value, selected: value === this.colour }, text)));
    this.scale = element("span", { class: "scale", "aria-hidden": "true" });
    return element("div", { class: "tools" },
      element("button", { type: "button", id: "close-group", onclick: () => this.onClose() }, "Back to the list ", element("kbd", {}, "Esc")),
      element("button", { type: "button", onclick: () => this.go(-1) }, exported ? "Previous " : "Newer ", element("kbd", {}, "k")),
      element("button", { type: "button", onclick: () => this.go(1) }, exported ? "Next " : "Older ", element("kbd", {}, "j")),
      element("label", {}, "Colour by", colour), this.scale,
      element("button", { type: "button", id: "copy", onclick: () => this.copy() }, "Copy as JSON ", element("kbd", {}, "c")),
      element("span", { id: "copied", class: "quiet", role: "status" }));
  }

  draw() {
    const { summary, env, rollouts } = this.view;
    const age = summary.step !== null && summary.policy_version !== null && summary.state !== "queued" ? summary.step - 1 - summary.policy_version : null;
    const facts = [
      ["group", summary.id], ["environment", env], ["item", summary.item ?? "–"], ["state", summary.aside_reason ? `${summary.state}: ${summary.aside_reason}` : summary.state],
      ["step", summary.step ?? "–"], ["policy version", summary.policy_version ?? "unknown"], ["staleness", age ?? "–"],
      ["arrived", exported ? "–" : ago(Date.now() / 1000 - summary.received_at)], ["tokens", number(summary.num_tokens)],
    ].filter(([, value]) => !exported || (value !== "–" && value !== ""));
    const about = element("div", { class: "about" }, ...facts.map(([name, value]) => element("span", {}, `${name} `, element("b", {}, String(value)))));
    const metrics = Object.entries(summary.metrics ?? {});
    const parts = element("div", { class: "about quiet" }, ...metrics.map(([name, value]) => element("span", {}, `${name} ${number(value)}`)));
    if (!rollouts) {
      this.place.replaceChildren(this.bar(), about, parts, element("p", {}, "The content of this group is no longer kept (the hub's --keep-trained-bytes is the limit)."));
      return;
    }
    const best = rollouts.reduce((most, one) => Math.max(most, one.score), -Infinity);
    this.cards = rollouts.map((one, place) => this.card(one, place, one.score === best && rollouts.some((other) => other.score < best)));
    const notes = [
      rollouts[0].pieces || !rollouts[0].ids ? "" : "The run's tokenizer was not found, so tokens are shown as numbers.",
      this.view.num_rollouts > rollouts.length ? `The first ${number(rollouts.length)} of ${number(this.view.num_rollouts)} rollouts are shown; Copy as JSON has all.` : "",
    ];
    this.about = element("p", { id: "colour-note", class: "quiet", role: "status" });
    this.place.replaceChildren(this.bar(), about, parts, element("p", { class: "quiet" }, notes.filter(Boolean).join(" ")), this.prompt(), this.about, element("div", { class: "rollouts" }, ...this.cards));
    this.recolour();
  }

  // The tokens that all rollouts share; without a tokenizer also the messages that they share.
  prompt() {
    const { rollouts: [first], prompt_tokens: numPrompt } = this.view;
    const { prompt, answer } = this.view;
    if (!numPrompt && !prompt?.length) return "";
    const text = numPrompt ? pieces(first).slice(0, numPrompt).join("") : "";
    const shown = prompt ?? (first.messages ?? []).slice(0, this.numShared());
    return element("section", { id: "prompt", "aria-label": "Prompt" }, element("h3", {}, `Prompt `, element("span", { class: "quiet" }, numPrompt ? `${number(numPrompt)} tokens` : "")),
      element("div", { class: "text", tabindex: "0" }, text, ...shown.map(message)), answer ? element("p", { class: "quiet" }, `expected: ${answer}`) : "");
  }

  numShared() {
    const turns = this.view.rollouts.map((one) => (one.messages ?? []).map((each) => JSON.stringify(each)));
    const place = turns[0].findIndex((turn, row) => turns.some((others) => others[row] !== turn));
    return place < 0 ? Math.max(0, turns[0].length - 1) : place;
  }

  // Explains the chosen colours.
  colourNote() {
    const { summary, rollouts, has_record: isKept } = this.view;
    if (!["difference", "advantage"].includes(this.colour)) return "";
    if (isKept && rollouts.every((one) => one.trained_advantages.every((value) => value === 0))) return "All advantages are 0: this group had no learning signal.";
    if (isKept) return this.colour === "difference" ? "Blue: the trainer gave the token a higher probability than the engine, before the update of the step. No colour: the token had no loss, or the engine sent no logprob." : "The advantages that the tokens were trained with.";
    const why = summary.state === "trained" ? "The trainer no longer keeps the figures of this step." : "This group has not been trained.";
    return this.colour === "difference" ? `${why} There is nothing to colour by.` : `${why} Shown: the advantage that the environment sent, else the score minus the mean of the group.`;
  }

  card(rollout, place, isBest) {
    const details = rollout.details, summary = this.view.summary;
    const outcome = details.outcome ?? (details.finish_reason === "length" ? "cut off at the length limit" : "");
    const under = element("div", { class: "under" });
    const version = Array.isArray(details.policy_versions) ? `versions ${details.policy_versions.join(", ")}` : summary.policy_version === null ? "policy version unknown" : `policy version ${summary.policy_version}`;
    const resting = [version, summary.step !== null ? `step ${summary.step}` : "", details.temperature ? `temperature ${details.temperature}` : ""].filter(Boolean).join(", ");
    under.textContent = resting;
    const tokens = element("div", { class: "tokens", tabindex: "0", "aria-label": `Tokens of rollout ${place + 1}` });
    const spans = document.createDocumentFragment();
    pieces(rollout).forEach((piece, row) => {
      if (row < this.view.prompt_tokens) return;
      const span = document.createElement("span");
      span.textContent = piece === "" ? "·" : piece;
      span.dataset.row = row;
      spans.append(span);
    });
    tokens.append(spans);
    if (!rollout.pieces && rollout.messages) tokens.append(...rollout.messages.slice(this.numShared()).map(message));
    if (rollout.ids && rollout.num_tokens > rollout.ids.length) tokens.append(element("p", { class: "quiet" }, `${number(rollout.num_tokens - rollout.ids.length)} more tokens: Copy as JSON has all`));
    tokens.addEventListener("pointerover", (event) => {
      const row = event.target.dataset?.row;
      under.textContent = row === undefined ? resting : this.describe(rollout, Number(row), version);
    });
    tokens.addEventListener("pointerleave", () => { under.textContent = resting; });
    tokens.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      event.stopPropagation();
      const shown = [...tokens.querySelectorAll("span[data-row]")].filter((span) => span.offsetParent !== null);
      const before = tokens.querySelector(".here"), place = shown.indexOf(before) + (event.key === "ArrowRight" ? 1 : -1);
      const here = shown[Math.min(shown.length - 1, Math.max(0, place))];
      before?.classList.remove("here");
      here?.classList.add("here");
      here?.scrollIntoView({ block: "nearest", inline: "nearest" });
      if (here) under.textContent = this.describe(rollout, Number(here.dataset.row), version);
    });
    const parts = Object.entries(details.parts ?? {}).map(([name, worth]) => `${name} ${plain(worth)}`).join(", ");
    const isScored = rollout.score !== null, verdict = details.is_right === undefined || !isScored ? "" : details.is_right ? "right" : "wrong";
    return element("article", { class: `rollout${isBest ? " best" : ""}`, tabindex: "-1" },
      element("h3", {}, element("span", {}, `${(details.rollout ?? place) + 1}`), element("span", {}, isScored ? `score ${number(rollout.score)}` : "not scored"),
        verdict && element("span", { class: verdict }, verdict), isScored ? element("span", {}, this.advantageInShort(rollout)) : "",
        element("span", { class: "quiet" }, `${number(rollout.num_trained)} tokens`)),
      element("p", { class: "quiet" }, [outcome && `outcome: ${plain(outcome)}`, details.error && plain(details.error), parts && `parts: ${parts}`].filter(Boolean).join("; ")),
      tokens, under);
  }

  describe(rollout, row, version) {
    const logprob = rollout.logprobs?.[row], difference = rollout.differences?.[row];
    const advantage = rollout.is_trained[row] ? this.advantage(rollout, row) : null;
    return [
      rollout.ids ? `token ${rollout.ids[row]}` : "",
      logprob === null || logprob === undefined ? "no logprob" : `logprob ${number(logprob)} (${number(100 * Math.exp(logprob))} %)`,
      difference === null || difference === undefined ? "" : `trainer minus engine ${number(difference)}`,
      advantage === null ? "not trained" : `advantage ${number(advantage)}`,
      version,
    ].filter(Boolean).join(", ");
  }

  advantageInShort(rollout) {
    const signed = (value) => `${value > 0 ? "+" : ""}${number(value)}`;
    if (!rollout.trained_advantages) return `score minus mean ${signed(rollout.advantage)}`;
    const values = rollout.trained_advantages.filter((_, row) => rollout.is_trained[row]);
    const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    return values.length === 0 ? "nothing trained" : low === high ? `advantage ${signed(low)}` : `advantage ${signed(low)} to ${signed(high)}`;
  }

  // The advantage that a token was trained with; if not kept, the one that the environment sent or the score implies.
  advantage(rollout, row) {
    return rollout.trained_advantages?.[row] ?? rollout.advantages?.[row] ?? rollout.advantage;
  }

  recolour() {
    const { rollouts, prompt_tokens: numPrompt } = this.view;
    if (!rollouts) return;
    this.about.textContent = this.colourNote();
    this.scale.replaceChildren(...(SCALES[this.colour] ?? []).map(([kind, text]) => element("span", { class: kind }, text || " ")));
    let largest = 1e-9;
    for (const one of rollouts) one.is_trained.forEach((_, row) => { if (one.is_trained[row]) largest = Math.max(largest, Math.abs(this.advantage(one, row))); });
    rollouts.forEach((rollout, place) => {
      const tokens = this.cards[place].querySelector(".tokens");
      for (let row = numPrompt; row < rollout.is_trained.length; row += 1) {
        tokens.children[row - numPrompt].className = rollout.is_trained[row] ? this.kind(rollout, row, largest) : "read";
      }
    });
  }

  kind(rollout, row, largest) {
    if (this.colour === "logprob") {
      const logprob = rollout.logprobs?.[row];
      return logprob === null || logprob === undefined ? "" : `p${[0.1, 0.5, 1, 2, 4].filter((limit) => -logprob > limit).length}`;
    }
    if (this.colour === "difference") {
      const difference = rollout.differences?.[row];
      if (difference === null || difference === undefined) return "";
      const strength = [0.02, 0.1, 0.5].filter((limit) => Math.abs(difference) > limit).length;
      return strength === 0 ? "a0" : `${difference > 0 ? "c" : "w"}${strength}`;
    }
    if (this.colour === "advantage") {
      const share = this.advantage(rollout, row) / largest;
      const strength = [0.02, 0.4, 0.75].filter((limit) => Math.abs(share) > limit).length;
      return strength === 0 ? "a0" : `${share > 0 ? "u" : "d"}${strength}`;
    }
    return "";
  }

  go(move) {
    const id = move > 0 ? this.older(this.id) : this.newer(this.id);
    if (id !== null && id !== undefined) this.onOpen(id);
  }

  async copy() {
    const place = document.getElementById("copied");
    try {
      const text = JSON.stringify(await get(`api/groups/${this.id}`, { form: "whole" }), null, 1);
      await copyText(text);
      place.textContent = `copied ${number(text.length)} characters`;
    } catch (error) {
      place.textContent = error instanceof ApiError ? error.message : "could not be copied";
    }
  }

  key(event) {
    const act = {
      Escape: () => this.onClose(), j: () => this.go(1), ArrowDown: () => this.go(1), k: () => this.go(-1), ArrowUp: () => this.go(-1),
      l: () => this.move(1), ArrowRight: () => this.move(1), h: () => this.move(-1), ArrowLeft: () => this.move(-1), c: () => this.copy(), t: () => this.nextColour(),
    }[event.key];
    if (!act || (event.target.classList?.contains("tokens") && event.key.startsWith("Arrow"))) return false;
    act();
    return true;
  }

  move(by) {
    if (!this.cards?.length) return;
    this.rollout = Math.min(this.cards.length - 1, Math.max(0, this.rollout + by));
    this.cards[this.rollout].focus();
    this.cards[this.rollout].scrollIntoView({ inline: "nearest", block: "nearest" });
  }

  nextColour() {
    if (!this.view?.rollouts) return;
    const usable = COLOURS.map(([value]) => value);
    this.colour = usable[(usable.indexOf(this.colour) + 1) % usable.length];
    document.getElementById("colour").value = this.colour;
    this.recolour();
  }
}

// The text of each token; without a tokenizer its id.
function pieces(rollout) {
  return rollout.pieces ?? (rollout.ids ?? []).map((id) => `${id} `);
}

function message({ role, content }) {
  return element("p", { class: "messages" }, element("b", {}, `${plain(role)}: `), plain(content));
}

// Values from an environment may have any type.
function plain(value) {
  if (typeof value === "number") return number(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

// The clipboard API needs a secure context (this machine, or TLS); elsewhere execCommand still works.
async function copyText(text) {
  if (navigator.clipboard) { await navigator.clipboard.writeText(text); return; }
  const field = element("textarea", {});
  field.value = text;
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  if (!isDone) throw new Error("the browser refused");
}
