// The page: which run and view are shown, and the connection that says when there is something new.
import { el, get, learnColours } from "./ui.js";
import * as overview from "./overview.js";
import { make as makeTimeline } from "./timeline.js";
import * as versions from "./versions.js";
import { make as makeTraining } from "./training.js";
import { make as makeTrajectories } from "./trajectories.js";
import { make as makeSystem } from "./system.js";

// A view draws itself again when one of its files has grown, at most once in `every` milliseconds.
const simple = module => (box, run) => ({ update: () => module.draw(box, run), close() {} });
const VIEWS = {
  overview: { make: simple(overview), files: ["metrics", "ledger", "activity", "running"], every: 1000 },
  timeline: { make: makeTimeline, files: ["activity"], every: 1000 },
  versions: { make: simple(versions), files: ["ledger", "metrics"], every: 1000 },
  training: { make: makeTraining, files: ["metrics"], every: 3000 },
  trajectories: { make: makeTrajectories, files: ["ledger"], every: 3000 },
  system: { make: makeSystem, files: ["activity"], every: 3000 },
};
const byId = id => document.getElementById(id);
let shown = null, source = null, current = "";

function route() {
  const [name, run] = location.hash.slice(2).split("/");
  return { view: VIEWS[name] ? name : "overview", run: run ? decodeURIComponent(run) : null };
}
const link = (view, run) => `#/${view}/${encodeURIComponent(run)}`;
const path = encodeURIComponent;

let states = {};
async function list() {
  const answer = await get("/api/runs"), select = byId("run");
  learnColours(answer);
  states = Object.fromEntries(answer.runs.map(one => [one.id, one.state]));
  select.replaceChildren(...answer.runs.map(one => el("option", { value: one.id }, `${one.id} (${one.state})`)));
  if (current) { select.value = current; state(current); }
  return answer.runs;
}
function state(run) {
  const badge = byId("state");
  badge.textContent = states[run] ?? "";
  badge.className = `badge ${states[run] === "running" ? "good" : "calm"}`;
}
async function start() {
  const runs = await list(), select = byId("run");
  select.onchange = () => { location.hash = link(route().view, select.value); };
  if (!runs.length) { byId("view").replaceChildren(el("p", { class: "dim" }, "There is no run in this folder yet.")); setTimeout(start, 3000); return; }
  addEventListener("hashchange", show);
  addEventListener("keydown", event => {
    const name = Object.keys(VIEWS)[Number(event.key) - 1];
    if (name && event.key !== "0" && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && !event.ctrlKey && !event.metaKey && !event.altKey) location.hash = link(name, current);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown?.refresh());
  show();
}

function show() {
  const { view, run } = route(), select = byId("run");
  const known = [...select.options].map(option => option.value);
  const chosen = known.includes(run) ? run : known[0];
  select.value = chosen;
  document.title = `${chosen} · ${view} · dora-rl`;
  byId("views").replaceChildren(...Object.keys(VIEWS).map((name, i) => el("a", { href: link(name, chosen), title: `${name} (${i + 1})`, "aria-current": name === view ? "page" : "false" }, name)));
  shown?.close();
  byId("tip").hidden = true;
  shown = open(view, chosen);
  if (chosen !== current || !source) { current = chosen; state(chosen); connect(chosen); }
}

function open(name, run) {
  const { make, files, every } = VIEWS[name], box = el("div", {}, el("p", { class: "dim" }, "loading"));
  byId("view").replaceChildren(box); // an answer that comes late draws into a box that is no longer shown
  const view = make(box, path(run));
  let due = 0, timer = 0, busy = false, again = false;
  async function refresh() {
    if (busy) { again = true; return; }
    busy = true;
    due = Date.now() + every;
    try { await view.update(); box.querySelector(".failed")?.remove(); }
    catch (error) {
      box.querySelector(".failed")?.remove();
      box.prepend(el("p", { class: "banner failed" }, error instanceof TypeError ? "The server does not answer." : error.message));
    }
    busy = false;
    if (again) { again = false; later(); }
  }
  const later = () => { clearTimeout(timer); timer = setTimeout(refresh, Math.max(0, due - Date.now())); };
  refresh();
  return { refresh, changed: list => { if (list.some(one => files.includes(one))) later(); }, close() { clearTimeout(timer); view.close(); } };
}

function connect(run) {
  source?.close();
  const badge = byId("link"), lost = byId("lost");
  const say = (text, kind) => { badge.textContent = text; badge.className = `badge ${kind}`; };
  let failing = false;
  source = new EventSource(`/api/runs/${path(run)}/stream`);
  source.onopen = () => {
    lost.hidden = true;
    say("connected", "good");
    if (failing) shown?.refresh(); // what has changed in the meantime also comes as an event
    failing = false;
  };
  source.addEventListener("change", event => {
    const { changed } = JSON.parse(event.data);
    if (changed.includes("running")) list().catch(() => {});
    shown?.changed(changed);
  });
  source.onerror = () => {
    failing = true;
    say("connection lost", "bad");
    lost.hidden = false;
    lost.textContent = "The connection to the server is lost: what you see may be old. It is tried again every second.";
    if (source.readyState === EventSource.CLOSED) setTimeout(() => connect(run), 2000);
  };
}

start().catch(error => byId("view").replaceChildren(el("p", { class: "banner" }, error.message)));
