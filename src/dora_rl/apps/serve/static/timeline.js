// Timeline: one lane for each slot and one for the trainer, sampled by the server to the pixels on the screen.
import { causeName, colour, css, duration, el, get, keys, percent, showTip, ticks } from "./ui.js";

const GUTTER = 74, TOP = 22, TRAINER = 22, FOOT = 22, FLEET = 130;
const LABELS = { decode: "decode, by version", prefill: "prefill", "re-prefill": "re-prefill", load: "load weights", migrate: "migrate", train: "train, by version", publish: "publish" };

export function make(box, run) {
  let data = null, from = null, to = null, follow = true, first = 0, timer = 0, drag = null, asked = 0;
  const canvas = el("canvas", { tabIndex: 0, role: "img", "aria-label": "Timeline of slots and trainer. Arrow keys move, plus and minus zoom, 0 shows the whole run." });
  const legend = el("div"), where = el("output", { class: "dim" }), pager = el("span"), note = el("p", { class: "dim" });
  const button = (text, title, act) => el("button", { type: "button", title, onclick: act }, text);
  const live = button("follow", "Keep the newest time in view (f)", () => { follow = !follow; step(); });
  box.replaceChildren(el("section", { class: "card" },
    el("div", { class: "tools" }, button("whole run", "Show all (0)", whole), button("+", "Zoom in (+)", () => zoom(.5)), button("−", "Zoom out (−)", () => zoom(2)),
      button("‹", "Earlier (left arrow)", () => pan(-.25)), button("›", "Later (right arrow)", () => pan(.25)), live, where, pager),
    canvas, legend, note));

  const width = () => Math.max(50, canvas.clientWidth - GUTTER);
  const rows = () => data.rows.length;
  const rowHeight = () => Math.max(7, Math.min(36, Math.floor(640 / Math.max(1, rows()))));
  const head = () => TOP + TRAINER + 8 + (data.fleet ? FLEET + 10 : 0);
  const x = s => GUTTER + (s - from) / (to - from) * width();
  const time = px => from + (px - GUTTER) / width() * (to - from);

  async function step() {
    const mine = ++asked;
    const range = from === null ? "" : `&from=${follow ? Math.max(0, from) : from}&to=${to}`;
    const answer = await get(`/api/runs/${run}/timeline?width=${Math.round(width())}&first=${first}${range}`);
    if (mine !== asked || !canvas.isConnected) return;
    const [start, end] = answer.whole;
    if (from === null) { from = start; to = end; }
    else if (follow && end > to + 1e-9) {
      const length = to - from, all = data && from <= data.whole[0] + 1e-9;
      from = all ? start : end - length;
      to = end;
      data = answer;
      return step();
    }
    data = answer;
    draw();
  }
  const soon = () => { clearTimeout(timer); timer = setTimeout(() => step().catch(() => {}), 90); if (data) draw(); };
  function look(a, b) {
    const [start, end] = data.whole, least = Math.min(.05, end - start);
    let length = Math.max(least, Math.min(end - start, b - a));
    from = Math.max(start, Math.min(end - length, a));
    to = from + length;
    follow = to >= end - 1e-9;
    soon();
  }
  function zoom(factor, centre = (from + to) / 2) { if (data) look(centre - (centre - from) * factor, centre + (to - centre) * factor); }
  function pan(share) { if (data) { const by = share * (to - from); const [start, end] = data.whole; const d = Math.max(start - from, Math.min(end - to, by)); look(from + d, to + d); } }
  function whole() { if (data) look(...data.whole); }

  function strip(g, runs, y, h) {
    const each = (data.to - data.from) / data.columns;
    let column = 0;
    for (const [n, label, version, cause] of runs) {
      const left = x(data.from + column * each), right = x(data.from + (column + n) * each);
      column += n;
      if (!label || right < GUTTER || left > GUTTER + width()) continue;
      const a = Math.max(GUTTER, Math.floor(left)), b = Math.min(GUTTER + width(), Math.ceil(right));
      g.fillStyle = colour(label, version, cause);
      // Idle time is half as high: it can be told from work without its colour.
      label === "idle" ? g.fillRect(a, y + h / 4, Math.max(1, b - a), h / 2) : g.fillRect(a, y, Math.max(1, b - a), h);
    }
  }
  function fleet(g, y) {
    const columns = data.fleet.columns, each = (data.to - data.from) / columns.length;
    columns.forEach((parts, i) => {
      const left = Math.max(GUTTER, Math.floor(x(data.from + i * each))), right = Math.min(GUTTER + width(), Math.ceil(x(data.from + (i + 1) * each)));
      let bottom = y + FLEET;
      for (const [share, label, version, cause] of parts) {
        g.fillStyle = colour(label, version, cause);
        g.fillRect(left, bottom - share * FLEET, Math.max(0, right - left), share * FLEET + .6);
        bottom -= share * FLEET;
      }
    });
  }
  function draw() {
    const h = rowHeight(), height = head() + h * rows() + FOOT, ratio = devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = canvas.clientWidth * ratio; canvas.height = height * ratio;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle";
    const dim = css("--dim"), foot = height - FOOT;
    strip(g, data.trainer, TOP, TRAINER);
    g.fillStyle = dim; g.fillText("trainer", 0, TOP + TRAINER / 2);
    if (data.fleet) { fleet(g, TOP + TRAINER + 8); g.fillStyle = dim; g.fillText(`${data.lanes} slots`, 0, TOP + TRAINER + 8 + FLEET / 2); }
    data.rows.forEach((row, i) => {
      strip(g, row.runs, head() + i * h, h - (h > 9 ? 2 : 1));
      g.fillStyle = dim;
      if (h >= 11 || i % 4 === 0) g.fillText(row.name, 0, head() + (i + .5) * h);
    });
    g.textAlign = "center";
    const unit = to < 120 ? 1 : to < 7200 ? 60 : 3600; // round numbers of what is written
    for (const s of ticks(from / unit, to / unit, Math.max(3, width() / 130)).map(t => t * unit)) {
      g.fillStyle = dim; g.fillRect(x(s), foot, 1, 4);
      g.fillText(duration(s).replace(/\.?0+ /, " "), Math.max(GUTTER + 16, Math.min(x(s), GUTTER + width() - 22)), foot + 13);
    }
    const inside = marks => { const seen = marks.filter(([s]) => s >= from && s <= to); return seen.length < width() / 6 ? seen : []; };
    const line = (s, dash, paint) => { g.strokeStyle = paint; g.setLineDash(dash); g.beginPath(); g.moveTo(x(s), TOP - 6); g.lineTo(x(s), foot); g.stroke(); g.setLineDash([]); };
    const fresh = inside(data.published);
    let free = -100;
    for (const [s, version] of fresh) {
      line(s, [2, 3], css("--mark"));
      if (x(s) - free > 34) { g.fillStyle = dim; g.fillText(`v${version}`, Math.max(GUTTER + 10, x(s)), TOP - 13); free = x(s); }
    }
    for (const [s] of inside(data.bounds)) line(s, [], css("--mark"));
    const place = Object.fromEntries(data.rows.map((row, i) => [row.name, head() + (i + .5) * h]));
    for (const [s, source, target] of inside(data.moves)) {
      if (!(source in place) || !(target in place)) continue;
      g.strokeStyle = css("--move"); g.beginPath(); g.moveTo(x(s), place[source]); g.lineTo(x(s) + 4, place[target]); g.stroke();
      g.fillStyle = css("--mark"); g.beginPath(); g.arc(x(s) + 4, place[target], Math.min(2.6, h / 4), 0, 7); g.fill();
    }
    for (const [s, who] of data.lost.filter(([s]) => s >= from && s <= to)) {
      const mine = data.rows.findIndex(row => row.name.startsWith(who + "/") || row.name === who), y = mine < 0 ? TOP + TRAINER / 2 : head() + (mine + .5) * h;
      g.strokeStyle = css("--bad"); g.lineWidth = 2; g.beginPath(); g.moveTo(x(s) - 5, y - 5); g.lineTo(x(s) + 5, y + 5); g.moveTo(x(s) + 5, y - 5); g.lineTo(x(s) - 5, y + 5); g.stroke(); g.lineWidth = 1;
    }
    g.textAlign = "start";
    where.textContent = `${duration(from)} to ${duration(to)}`;
    live.setAttribute("aria-pressed", follow);
    note.textContent = `Lanes are slots; colours are policy versions; half as high: idle time, coloured by cause (hover to read it). Dotted lines: published versions; thin lines with a dot: moved requests; crosses: lost processes. Wheel or + and − zoom, drag or arrows move, 0 shows all. A window of half a second records how its time was divided, not in which order.`;
    const last = Math.min(data.lanes, data.first + rows());
    pager.replaceChildren(...(data.fleet ? [`slots ${data.first + 1} to ${last} of ${data.lanes} `, button("previous", "Previous slots (page up)", () => page(-1)), button("next", "Next slots (page down)", () => page(1))] : []));
    drawLegend();
  }
  function page(by) { first = Math.max(0, Math.min(data.lanes - 1, first + by * 64)); step(); }
  function drawLegend() {
    const causes = new Set(), labels = new Set();
    const see = (label, cause) => label === "idle" ? causes.add(causeName(cause)) : label && labels.add(label);
    for (const runs of [data.trainer, ...data.rows.map(row => row.runs)]) for (const [, label, , cause] of runs) see(label, cause);
    for (const parts of data.fleet?.columns ?? []) for (const [, label, , cause] of parts) see(label, cause);
    const many = [0, 1, 2, 3].map(v => `${colour("decode", v)} ${25 * v}% ${25 * v + 25}%`).join(", ");
    legend.replaceChildren(keys([
      ...Object.keys(LABELS).filter(label => labels.has(label)).map(label => [label === "decode" ? `linear-gradient(90deg, ${many})` : colour(label, 0), LABELS[label]]),
      ...[...causes].sort().map(cause => [colour("idle", null, cause), `idle: ${cause}`])]));
  }
  const position = event => { const r = canvas.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  const find = (runs, s) => { let column = (s - data.from) / (data.to - data.from) * data.columns; for (const one of runs) { if (column < one[0]) return one; column -= one[0]; } };
  const saying = ([label, version, cause]) => !label ? "nothing recorded" : label === "idle" ? `idle, cause: ${cause || "unknown"}` : `${label}${version === null ? "" : ` v${version}`}`;
  function describe(px, py) {
    if (!data || px < GUTTER) return "";
    const s = time(px), near = 4 * (to - from) / width(), here = mark => Math.abs(mark[0] - s) < near;
    const marks = [...data.published.filter(here).map(m => `v${m[1]} published`), ...data.bounds.filter(here).map(m => `staleness bound ${m[1]} from here on`),
      ...data.moves.filter(here).slice(0, 4).map(m => `${m[3]} moved from ${m[1]} to ${m[2]}`), ...data.lost.filter(here).map(m => `${m[1]} lost: ${m[2]}`)];
    const below = TOP + TRAINER + 8;
    let what;
    if (py >= TOP && py < TOP + TRAINER) what = `trainer, ${duration(s)}: ${saying((find(data.trainer, s) ?? [0, ""]).slice(1))}`;
    else if (data.fleet && py >= below && py < below + FLEET) {
      const parts = data.fleet.columns[Math.floor((s - data.from) / (data.to - data.from) * data.fleet.columns.length)] ?? [];
      what = `all slots, ${duration(s)}\n` + parts.map(([share, ...cell]) => `${percent(share)} ${saying(cell)}`).reverse().join("\n");
    } else {
      const row = data.rows[Math.floor((py - head()) / rowHeight())];
      if (!row || py < head()) return marks.join("\n");
      what = `${row.name}, ${duration(s)}: ${saying((find(row.runs, s) ?? [0, ""]).slice(1))}`;
    }
    return [what, ...marks].join("\n");
  }
  canvas.addEventListener("pointerdown", event => { if (!data) return; drag = [event.clientX, from, to]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", event => {
    if (drag) { const by = (drag[0] - event.clientX) / width() * (drag[2] - drag[1]); const [start, end] = data.whole, d = Math.max(start - drag[1], Math.min(end - drag[2], by)); look(drag[1] + d, drag[2] + d); showTip(event, ""); }
    else showTip(event, describe(...position(event)));
  });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointerleave", event => { if (!drag) showTip(event, ""); });
  canvas.addEventListener("dblclick", whole);
  canvas.addEventListener("wheel", event => { event.preventDefault(); event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY) ? pan((event.deltaX || event.deltaY) / 1500) : zoom(event.deltaY > 0 ? 1.25 : .8, time(position(event)[0])); }, { passive: false });
  const KEYS = { "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), ArrowLeft: () => pan(-.2), ArrowRight: () => pan(.2), 0: whole, Home: () => data && look(data.whole[0], data.whole[0] + to - from),
    End: () => data && look(data.whole[1] - to + from, data.whole[1]), f: () => live.click(), PageUp: () => data?.fleet && page(-1), PageDown: () => data?.fleet && page(1) };
  const press = event => { if (canvas.isConnected && KEYS[event.key] && !event.ctrlKey && !event.metaKey && !/INPUT|SELECT/.test(event.target.tagName)) { event.preventDefault(); KEYS[event.key](); } };
  const resize = () => { if (canvas.isConnected && data) soon(); };
  addEventListener("keydown", press);
  addEventListener("resize", resize);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", resize);
  return {
    update: () => follow || !data ? step() : Promise.resolve(),
    close() { removeEventListener("keydown", press); removeEventListener("resize", resize); scheme.removeEventListener("change", resize); clearTimeout(timer); },
  };
}
