// Training: every metric as a small chart; smoothing, log scale, and another run beside this one.
import { card, chart, el, get } from "./ui.js";

const SHOWN = 12;
const smooth = (points, weight) => { let mean = null; return points.map(([x, y]) => [x, mean = mean === null ? y : weight * mean + (1 - weight) * y]); };

export function make(box, run) {
  let data = null, other = null, every = false;
  const slider = el("input", { type: "range", min: 0, max: .98, step: .02, value: 0, "aria-label": "smoothing", oninput: () => draw() });
  const log = el("input", { type: "checkbox", onchange: () => draw() });
  const search = el("input", { type: "search", placeholder: "metric", "aria-label": "metric", oninput: () => draw() });
  const names = [...document.getElementById("run").options].map(option => option.value).filter(name => encodeURIComponent(name) !== run);
  const compare = el("select", { onchange: () => update() }, el("option", { value: "" }, "no other run"), ...names.map(name => el("option", { value: name }, name)));
  const more = el("button", { type: "button", onclick: () => { every = !every; draw(); } }), charts = el("div", { class: "cards" });
  box.replaceChildren(el("div", { class: "tools card" }, search, el("label", {}, "smoothing ", slider), el("label", {}, log, " log scale"), el("label", {}, "compare with ", compare), more), charts);
  function draw() {
    if (!data) return;
    const wanted = search.value.toLowerCase(), weight = +slider.value, found = data.curves.filter(([name]) => name.toLowerCase().includes(wanted));
    const beside = new Map(other?.curves ?? []);
    const lines = (points, colour, name, dash) => weight ? [{ name: name + " raw", points, colour, faint: true }, { name, points: smooth(points, weight), colour, dash }] : [{ name, points, colour, dash }];
    const shown = every || wanted ? found : found.slice(0, SHOWN);
    more.textContent = every ? `first ${SHOWN}` : `all ${found.length} metrics`;
    charts.replaceChildren(...shown.map(([name, points]) => card(name, chart({ log: log.checked, zero: false, height: 180, label: name,
      series: [...lines(points, "--c0", "this run"), ...(beside.has(name) ? lines(beside.get(name), "--c1", compare.value, "5 3") : [])] }))));
    if (!shown.length) charts.replaceChildren(el("p", { class: "dim" }, "No metric yet, or none of this name."));
  }
  async function update() {
    [data, other] = await Promise.all([get(`/api/runs/${run}/training?width=240`), compare.value ? get(`/api/runs/${encodeURIComponent(compare.value)}/training?width=240`) : null]);
    draw();
  }
  return { update, close() {} };
}
