// Overview: the most important first. Is it learning, what limits it, what needs attention; then speed, freshness, time left.
import { bars, card, chart, duration, el, get, number, percent, shareBar, spark } from "./ui.js";

const YES = { yes: "Yes", "no change": "No change", worse: "Getting worse", "too early": "Too early to say" };
const KIND = { yes: "good", "no change": "warn", worse: "bad", "too early": "calm" };
const LIMITS = { trainer: "The trainer", rollout: "Rollout", neither: "Nothing in particular", unknown: "Not known yet" };
const setting = name => name ? el("p", { class: "setting" }, "change ", el("code", {}, name)) : null;
const tile = (title, value, note, extra) => el("section", { class: "card tile" }, el("h2", {}, title), el("p", { class: "big" }, value), el("p", { class: "dim" }, note), extra ?? null);

export async function draw(box, run) {
  const data = await get(`/api/runs/${run}/overview`);
  const { learning, binding, staleness, curves } = data;
  const share = [...curves.reward, ...curves.accuracy].every(p => p[1] >= 0 && p[1] <= 1);
  const done = data.steps_asked ? data.steps / data.steps_asked : null;
  const rest = data.state !== "running" ? data.state : data.left === null ? "starting" : `about ${duration(data.left)}`;
  const bar = el("progress", { max: 1, "aria-label": "steps done" });
  if (done !== null) bar.value = done;
  box.replaceChildren(
    el("p", { class: "dim about" }, data.about),
    el("div", { class: "hero" },
      el("section", { class: `card answer ${KIND[learning.verdict]}` },
        el("h2", {}, "Is it learning?"), el("p", { class: "huge" }, YES[learning.verdict]), el("p", { class: "lead" }, learning.text),
        chart({ share, wide: 640, height: 240, zero: false, label: "reward and held-out accuracy", series: [
          { name: "reward", points: curves.reward, colour: "--c0" },
          { name: "held-out accuracy", points: curves.accuracy, colour: "--c1", dots: true }] })),
      el("section", { class: "card answer calm" },
        el("h2", {}, "What limits its speed?"), el("p", { class: "huge" }, LIMITS[binding.what]), el("p", { class: "lead" }, binding.text), setting(binding.setting),
        shareBar("slots, last steps", data.slots), shareBar("trainer, last steps", data.trainer))),
    card(data.advisories.length ? "Needs attention" : "Nothing needs attention",
      data.advisories.length ? el("ul", { class: "advisories" }, ...data.advisories.map(one =>
        el("li", { class: one.level }, el("strong", {}, one.title), el("span", {}, one.text), one.setting ? el("code", {}, one.setting) : null)))
        : el("p", { class: "dim" }, "No stall, no log-prob gap, no collapse of entropy, few failures.")),
    el("div", { class: "tiles" },
      tile("Speed", `${number(data.tokens_per_second)} tokens/s`, `${duration(data.step_seconds)} per step, occupancy ${percent(data.occupancy)}`, spark(curves.rate, "tokens per second")),
      tile("Freshness", staleness.mean === null ? "–" : `${staleness.mean.toFixed(2)} steps stale`,
        `bound ${staleness.auto === null ? staleness.bound : `${staleness.auto} (auto, at most ${staleness.bound})`}${staleness.floor === null ? "" : `, latency ${staleness.floor.toFixed(2)} steps`}`, spark(curves.staleness, "staleness")),
      tile("Time left", rest, `${data.steps}${data.steps_asked === null ? "" : ` of ${data.steps_asked}`} steps in ${duration(data.elapsed)}`, done === null ? null : bar),
      tile("Trained", `${number(data.tokens)} tokens`, data.best ? `best version v${data.best[0]}: ${percent(data.best[1], 1)}` : "no evaluation yet", spark(curves.length, "response length"))),
    el("div", { class: "cards" },
      card("Response length, mean tokens", chart({ series: [{ name: "tokens", points: curves.length, colour: "--c2" }] })),
      card("Trained groups by staleness", bars(staleness.histogram.map(([age, count]) => [String(age), count]), "staleness, steps")),
      card("Occupancy of slots", chart({ share: true, series: [{ name: "occupancy", points: curves.occupancy, colour: "--c2" }] })),
      card("Seconds per step", chart({ series: [{ name: "seconds", points: curves.seconds, colour: "--c3" }] }))));
}
