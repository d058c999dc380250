// Versions: what became of every group, which versions still have some, and when those are due.
import { bars, card, chart, el, get, number, table } from "./ui.js";

export async function draw(box, run) {
  const data = await get(`/api/runs/${run}/versions`), all = data.conservation;
  const sum = all.trained + all.failed + all.without_signal + all.running, holds = sum === all.admitted;
  box.replaceChildren(
    el("section", { class: `card answer ${holds ? "good" : "bad"}` }, el("h2", {}, "Nothing is lost"),
      el("p", { class: "huge" }, `${number(all.admitted)} ${holds ? "=" : "≠"} ${number(all.trained)} + ${number(all.failed)} + ${number(all.without_signal)} + ${number(all.running)}`),
      el("p", { class: "lead" }, "admitted groups = trained + failed + without signal + running")),
    el("div", { class: "cards wide" },
      card("Versions with unfinished groups", data.live.length ? table(["version", "groups", "trajectories", "generating", "being scored", "failed"],
        data.live.map(one => [`v${one.version}${one.version === data.newest ? " (newest)" : ""}`, number(one.groups), number(one.requests), number(one.generating), number(one.scoring), number(one.failed)]))
        : el("p", { class: "dim" }, "No group is unfinished.")),
      card("Deadline ladder: unfinished groups due by each step, and the line that the steps until then can take",
        data.ladder.length ? bars(data.ladder.map(([step, due, room]) => [String(step), due, room]), "due by step") : el("p", { class: "dim" }, "No group is unfinished."))),
    el("div", { class: "cards" },
      card(`Trained groups by staleness${data.mean === null ? "" : `, mean ${data.mean.toFixed(2)}`}${data.floor === null ? "" : `; floor ${data.floor.toFixed(2)} (latency in steps)`}`,
        bars(data.staleness.map(([age, count]) => [String(age), count]), `staleness, steps (bound ${data.bound})`, { mark: data.floor === null ? null : [data.floor, "floor"] })),
      card("Live versions", chart({ series: [{ name: "versions", points: data.most_live, colour: "--c0" }] })),
      card("Mean staleness of a step", chart({ series: [{ name: "staleness", points: data.mean_staleness, colour: "--c1" }] }))));
}
