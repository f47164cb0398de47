// The answers of a page that was exported into one file (dash/export.py): no hub is asked.

const embeddedAnswers = document.getElementById("exported");
export const exported = embeddedAnswers && JSON.parse(embeddedAnswers.textContent);
if (exported) document.documentElement.dataset.exported = exported.kind;

const PAGE_SIZE = 200, EXCERPT = 40;
const SCORES = {
  differ: (scores) => new Set(scores.filter((score) => score !== null)).size > 1,
  equal: (scores) => new Set(scores.filter((score) => score !== null)).size === 1,
  unscored: (scores) => scores.includes(null),
};

// null: there is no such answer in the file.
export function exportedAnswer(path, params) {
  const [, name, id] = path.split("/");
  if (name === "groups") return id ? exported.views[id] ?? null : listGroups(params);
  if (name === "search") return searchGroups(params);
  return name === "queue" ? { samples: [] } : exported[name] ?? null;
}

function listGroups(params) {
  const found = findGroups(params), first = params.before ?? 0, end = first + PAGE_SIZE;
  return {
    groups: found.slice(first, end), go_on_before: end < found.length ? end : null,
    num_groups: exported.groups.length, num_known: exported.groups.length, num_found: found.length,
    envs: Object.fromEntries(exported.run.envs.map((env) => [env.env_id, env.name])),
  };
}

// Groups in which every word of the text occurs.
function searchGroups({ text, before, ...params }) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const hits = findGroups(params).flatMap((group) => {
    const content = textOf(group), places = words.map((word) => content.toLowerCase().indexOf(word));
    if (places.includes(-1)) return [];
    const excerpt = content.slice(Math.max(0, places[0] - EXCERPT), places[0] + words[0].length + EXCERPT);
    return [{ group, excerpt: excerpt.split(/\s+/).join(" ").trim() }];
  });
  const first = before ?? 0, end = first + PAGE_SIZE;
  return { hits: hits.slice(first, end), num_searched: first ? 0 : exported.groups.length, num_without_text: 0, go_on_before: end < hits.length ? end : null };
}

function findGroups({ step, env, state, version, score_from: low, score_to: high, length_from: shortest, length_to: longest, scores, order }) {
  const isEqual = (value, wanted) => wanted === undefined || String(value) === wanted;
  const isWithin = (value, from, to) => (from === undefined || (value !== null && value >= Number(from))) && (to === undefined || (value !== null && value <= Number(to)));
  const found = exported.groups.filter((group) => isEqual(group.step, step) && isEqual(group.env_id, env) && isEqual(group.state, state)
    && isEqual(group.policy_version, version) && isWithin(group.score, low, high) && isWithin(group.longest, shortest, longest)
    && (!scores || SCORES[scores](group.scores)));
  const worth = (group) => group.score ?? -Infinity;
  if (order) found.sort((a, b) => (order === "lowest" ? 1 : -1) * (worth(a) - worth(b)));
  return found;
}

let knownRange = null;

export function scoreRange() {
  if (knownRange) return knownRange;
  const known = exported.groups.flatMap((group) => group.scores).filter((score) => score !== null);
  const low = known.reduce((a, b) => Math.min(a, b), 0);
  return (knownRange = { low, high: known.reduce((a, b) => Math.max(a, b), low + 1e-9) });
}

function textOf(group) {
  const { rollouts, prompt, answer } = exported.views[group.id];
  const text = (messages) => (messages ?? []).map((one) => (typeof one.content === "string" ? one.content : JSON.stringify(one.content)));
  return [...text(prompt), answer, ...(rollouts ?? []).flatMap((one) => (one.pieces ? one.pieces.join("") : text(one.messages)))].join("\n");
}
