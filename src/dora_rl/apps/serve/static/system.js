// System: instances, events, settings that differ from their defaults, logs.
import { card, duration, el, get, number, percent, shareBar, table } from "./ui.js";

const show = value => value === null || value === undefined ? "unset" : typeof value === "string" ? value : JSON.stringify(value);

export function make(box, run) {
  const all = el("input", { type: "checkbox", onchange: () => settings() }), list = el("div"), instances = el("div"), log = el("pre", { class: "log" });
  const pick = el("select", { "aria-label": "log", onchange: () => tail() });
  let data = null;
  box.replaceChildren(instances, el("div", { class: "cards wide" }, card("Settings", el("label", { class: "dim" }, all, " also those with their default"), list), card("Log", pick, log)));
  const settings = () => list.replaceChildren(table(["setting", "value", "default"], data.settings.filter(one => all.checked || one.differs).map(one =>
    el("tr", { class: one.differs ? "differs" : "" }, el("td", {}, one.name), el("td", {}, show(one.value)), el("td", { class: "dim" }, one.differs ? show(one.default) : "")))));
  async function tail() {
    if (!pick.value) return;
    const answer = await get(`/api/runs/${run}/log?name=${encodeURIComponent(pick.value)}`);
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    log.textContent = answer.text;
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
  async function update() {
    data = await get(`/api/runs/${run}/system`);
    instances.replaceChildren(card("Instances", table(["instance", "slots", "seen for", "responses", "tokens", "tokens/s", "occupancy", "time"], data.instances.map(one => {
      const bar = shareBar(one.name, one.shares);
      return [one.name, one.slots, duration(one.seconds), number(one.responses), number(one.tokens), number(one.tokens_per_second), percent(one.occupancy), bar.querySelector(".sharebar")];
    }))), data.events.length ? card("Lost and leaving processes", table(["at", "what", "process", "reason"], data.events.map(([at, what, who, reason]) => [duration(at), what, who, reason]))) : "");
    settings();
    const chosen = pick.value || (data.logs.includes("supervisor.log") ? "supervisor.log" : data.logs[0]);
    pick.replaceChildren(...data.logs.map(name => el("option", { value: name }, name)));
    pick.value = chosen ?? "";
    await tail();
  }
  return { update, close() {} };
}
