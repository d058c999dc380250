// Trajectories: search and filter; one with its conversation, log-probs as shading, and its siblings.
import { card, el, get, number, table } from "./ui.js";

const FIELDS = [["version", "version"], ["staleness", "staleness"], ["least_reward", "reward from"], ["most_reward", "to"], ["least_tokens", "tokens from"], ["most_tokens", "to"], ["group", "group"]];
const reward = one => one.failed ? `failed: ${one.failed}` : one.reward === null ? "no reward yet" : `reward ${number(one.reward)}`;

export function make(box, run) {
  let page = 0, timer = 0;
  const text = el("input", { type: "search", name: "text", placeholder: "text of a sample", "aria-label": "text of a sample" });
  const select = (name, options) => el("select", { name, "aria-label": name }, ...options.map(([value, label]) => el("option", { value }, label)));
  const state = select("state", [["", "any state"], ...["trained", "failed", "without signal", "generating", "scoring", "waiting"].map(one => [one, one])]);
  const order = select("order", ["newest", "oldest", "reward", "worst", "longest"].map(one => [one, { reward: "best reward", worst: "worst reward" }[one] ?? one]));
  const numbers = FIELDS.map(([name, label]) => el("label", {}, `${label} `, el("input", { type: "number", step: "any", name, class: "short" })));
  const form = el("form", { class: "tools card", oninput: () => { page = 0; clearTimeout(timer); timer = setTimeout(update, 250); }, onsubmit: event => event.preventDefault() }, text, state, order, el("label", {}, el("input", { type: "checkbox", name: "recorded", value: "1" }), " with text"), ...numbers);
  const list = el("div"), detail = el("div");
  box.replaceChildren(form, el("div", { class: "split" }, list, detail));
  async function update() {
    const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
    query.set("page", page);
    let data;
    try { data = await get(`/api/runs/${run}/trajectories?${query}`); } catch (error) { list.replaceChildren(el("p", { class: "banner" }, error.message)); return; }
    const last = Math.max(0, Math.ceil(data.total / data.size) - 1);
    const turn = (label, by) => el("button", { type: "button", disabled: data.page + by < 0 || data.page + by > last, onclick: () => { page = data.page + by; update(); } }, label);
    list.replaceChildren(el("section", { class: "card" }, el("div", { class: "tools" }, `${number(data.total)} trajectories`, turn("‹", -1), `page ${data.page + 1} of ${last + 1}`, turn("›", 1)),
      table(["id", "group", "version", "step", "stale", "tokens", "reward", "state", "text"], data.rows.map(one => el("tr", {},
        el("td", {}, el("button", { type: "button", class: "link", onclick: () => open(one.id) }, String(one.id))),
        ...[one.group, `v${one.version}`, one.step ?? "–", one.staleness ?? "–", one.tokens ?? "–", one.reward === null ? "–" : number(one.reward), one.failed ? `failed: ${one.failed}` : one.state, one.text ? "yes" : ""].map(cell => el("td", {}, String(cell))))))));
  }
  async function open(id) {
    const one = await get(`/api/runs/${run}/trajectories/${id}`), sample = one.sample;
    const low = Math.min(-1, ...one.turns.flatMap(turn => turn.tokens.map(token => token[1] ?? 0)));
    const shaded = turn => el("pre", { class: turn.sampled ? "said" : "observed" }, ...turn.tokens.map(([piece, logprob]) => {
      const token = el("span", logprob === null ? {} : { title: `log-prob ${logprob}, probability ${(100 * Math.exp(logprob)).toFixed(1)}%` }, piece);
      if (logprob !== null && logprob < -.01) token.style.background = `color-mix(in srgb, var(--c1) ${Math.round(70 * Math.min(1, logprob / Math.max(low, -8)))}%, transparent)`;
      return token;
    }));
    detail.replaceChildren(
      card(`Trajectory ${one.id}: ${reward(one)}`, el("p", { class: "dim" }, `group ${one.group}, v${one.version}, ${one.tokens ?? "?"} tokens, ${one.state}${one.step === null ? "" : `, step ${one.step}, staleness ${one.staleness}`}, on ${one.instance ?? "no instance"}${one.ended ? `, ended by ${one.ended}` : sample ? `, ended by ${sample.stop}` : ""}`),
        ...(sample ? [el("h3", {}, "prompt"), el("pre", { class: "observed" }, sample.prompt)] : []),
        ...(one.turns.length ? [el("h3", {}, "response; the stronger a token is shaded, the less likely it was"), ...one.turns.map(shaded)] : sample ? [el("h3", {}, "response"), el("pre", { class: "said" }, sample.response)] : [el("p", { class: "dim" }, "Its text was not recorded: some groups of each step are (logging.samples).")]),
        sample && Object.keys(sample.reward_components ?? {}).length ? table(["reward function", "value"], Object.entries(sample.reward_components).map(([name, value]) => [name, number(value)])) : null),
      card("Siblings: the same prompt", el("div", { class: "siblings" }, ...one.siblings.map(other => el("div", { class: other.id === one.id ? "sibling current" : "sibling" },
        el("button", { type: "button", class: "link", onclick: () => open(other.id) }, `${other.id}: ${reward(other)}, ${other.tokens ?? "?"} tokens`), other.response ? el("pre", {}, other.response) : null)))));
  }
  return { update, close() { clearTimeout(timer); } };
}
