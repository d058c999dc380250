// Elements, formats and charts. Text from a run is only ever inserted as text: nothing here parses HTML.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined));
  return node;
}
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
export const percent = (x, digits = 0) => x === null || x === undefined ? "–" : (100 * x).toFixed(digits) + "%";
export const number = x => x === null || x === undefined || !Number.isFinite(x) ? "–" :
  Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : +x.toPrecision(3) + "";
export const duration = s => s === null || s === undefined ? "–" : s < 10 ? s.toFixed(2) + " s" : s < 120 ? s.toFixed(1) + " s" :
  s < 7200 ? (s / 60).toFixed(1) + " min" : s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " d";
export const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export async function get(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const data = await answer.json().catch(() => ({ error: answer.statusText || "no answer" }));
  if (!answer.ok) throw new Error(data.error ?? answer.status);
  return data;
}

const tip = () => document.getElementById("tip");
export function showTip(event, text) {
  const box = tip();
  box.hidden = !text;
  box.textContent = text;
  if (!text) return;
  box.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)) + "px";
  box.style.top = (event.clientY + 18 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 18) + "px";
}

// -- colours: one for each cause and activity on all pages; the server sends them --------------------------------
const colours = { labels: {}, causes: {} };
export const learnColours = data => Object.assign(colours, { labels: data.labels, causes: data.causes });
const hue = version => ((version ?? 0) * 137.5 + 215) % 360; // the golden angle keeps neighbouring versions apart
export const causeName = cause => cause.replace(/ v\d+$/, "");
export function colour(label, version, cause) {
  if (!label) return css("--none");
  if (label === "idle") return colours.causes[causeName(cause)] ?? css("--line");
  return colours.labels[label]?.replace("{hue}", hue(version)) || css("--fg");
}
// The colour of a share of time named "decode", "work" or "idle: cause".
export const shareColour = name => name.startsWith("idle: ") ? colour("idle", null, name.slice(6)) :
  name === "work" ? colour("decode", 0) : colour(name, 0);

export function ticks(from, to, count) {
  const rough = (to - from) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(x => x * power).find(x => x >= rough);
  const found = [];
  for (let x = Math.ceil(from / step) * step; x <= to + step * 1e-6; x += step) found.push(+x.toPrecision(12));
  return found;
}

export const card = (title, ...children) => el("section", { class: "card" }, el("h2", {}, title), ...children);

// series: [{name, points, colour, dots, band, faint}]
export function chart({ series, x = "version", share = false, log = false, zero = true, height = 200, wide = 380, format = share ? percent : number, label = "" }) {
  const W = wide, H = height, left = 50, right = 12, top = 10, bottom = 32;
  const usable = p => !log || p[1] > 0;
  const drawn = series.map(one => ({ ...one, points: one.points.filter(usable) })).filter(one => one.points.length);
  const all = drawn.flatMap(one => one.points);
  if (!all.length) return el("p", { class: "dim" }, "nothing recorded yet");
  const scale = log ? Math.log10 : v => v;
  let x0 = Infinity, x1 = -Infinity, y0 = zero && !log ? 0 : Infinity, y1 = -Infinity;
  for (const [a, b] of all) { x0 = Math.min(x0, a); x1 = Math.max(x1, a); y0 = Math.min(y0, scale(b)); y1 = Math.max(y1, scale(b)); }
  if (share) { y0 = Math.min(0, y0); y1 = Math.max(1, y1); }
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0) y1 = y0 + (Math.abs(y0) || 1) * .1;
  if (!share) y1 += (y1 - y0) * .05;
  const px = v => left + (v - x0) / (x1 - x0) * (W - left - right), py = v => H - bottom - (scale(v) - y0) / (y1 - y0) * (H - top - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label || drawn.map(one => one.name).join(", ") });
  const text = (a, b, anchor, value) => picture.append(svg("text", { x: a, y: b, "text-anchor": anchor }, value));
  const unscale = log ? v => 10 ** v : v => v;
  for (const v of ticks(y0, y1, 4)) {
    const y = py(unscale(v));
    picture.append(svg("line", { class: "grid", x1: left, x2: W - right, y1: y, y2: y }));
    text(left - 6, y + 4, "end", format(unscale(v)));
  }
  for (const v of ticks(x0, x1, W / 90)) text(px(v), H - bottom + 16, "middle", number(v));
  text((left + W - right) / 2, H - 2, "middle", x);
  for (const one of drawn) {
    const path = one.points.map(p => `${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join(" ");
    picture.append(svg("polyline", { points: path, class: one.faint ? "faint" : "", stroke: `var(${one.colour})`, "stroke-dasharray": one.dash ?? "none" }));
    if (one.dots || one.points.length < 3) for (const p of one.points)
      picture.append(svg("circle", { cx: px(p[0]), cy: py(p[1]), r: 3.5, fill: `var(${one.colour})` }));
  }
  const cross = picture.appendChild(svg("line", { class: "cross", y1: top, y2: H - bottom, visibility: "hidden" }));
  picture.addEventListener("mousemove", event => {
    const r = picture.getBoundingClientRect(), mouse = (event.clientX - r.left) / r.width * W;
    const nearest = points => points.reduce((a, b) => Math.abs(px(b[0]) - mouse) < Math.abs(px(a[0]) - mouse) ? b : a);
    const here = nearest(all)[0];
    for (const side of ["x1", "x2"]) cross.setAttribute(side, px(here));
    cross.setAttribute("visibility", "visible");
    const lines = drawn.filter(one => !one.faint).map(one => [one, nearest(one.points)]).map(([one, p]) => `${one.name} ${share ? percent(p[1], 1) : number(p[1])}${p[0] === here ? "" : ` (at ${number(p[0])})`}`);
    showTip(event, `${x} ${number(here)}\n${lines.join("\n")}`);
  });
  picture.addEventListener("mouseleave", event => { cross.setAttribute("visibility", "hidden"); showTip(event, ""); });
  const names = drawn.filter(one => !one.faint);
  return el("div", { class: "chart" }, names.length > 1 ? keys(names.map(one => [`var(${one.colour})`, one.name])) : null, picture);
}
export const keys = entries => el("div", { class: "keys" }, ...entries.map(([paint, name]) => {
  const mark = el("i");
  mark.style.background = paint;
  return el("span", {}, mark, name);
}));

export function spark(points, name) {
  if (points.length < 2) return el("span");
  const W = 160, H = 34, ys = points.map(p => p[1]), low = Math.min(...ys), high = Math.max(...ys, low + 1e-12);
  const path = points.map((p, i) => `${(i / (points.length - 1) * W).toFixed(1)},${(H - 3 - (p[1] - low) / (high - low) * (H - 6)).toFixed(1)}`).join(" ");
  return svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "spark", role: "img", "aria-label": name, preserveAspectRatio: "none" },
    svg("polyline", { points: path, stroke: "var(--c0)", "vector-effect": "non-scaling-stroke" }));
}

// Shares of time as one bar with a legend.
export function shareBar(name, shares) {
  const seen = shares.filter(([, share]) => share >= .005);
  const bar = el("div", { class: "sharebar", role: "img", "aria-label": seen.map(([what, share]) => `${what} ${percent(share)}`).join(", ") });
  for (const [what, share] of seen) {
    const part = el("span", { onmousemove: event => showTip(event, `${name}: ${what} ${percent(share, 1)}`), onmouseleave: event => showTip(event, "") });
    part.style.flexGrow = share;
    part.style.background = shareColour(what);
    bar.append(part);
  }
  return el("div", { class: "shares" }, el("h3", {}, name), bar, keys(seen.slice(0, 6).map(([what, share]) => [shareColour(what), `${what} ${percent(share)}`])));
}

// Bars from rows of [label, count].
export function bars(rows, x, { mark = null, height = 200, wide: W = 380 } = {}) {
  const H = height, left = 50, right = 12, top = 10, bottom = 32;
  if (!rows.length) return el("p", { class: "dim" }, "nothing recorded yet");
  const most = Math.max(...rows.map(row => Math.max(row[1], row[2] ?? 0)), 1) * 1.08, wide = Math.min(90, (W - left - right) / rows.length);
  const py = v => H - bottom - v / most * (H - top - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": rows.map(row => `${row[0]}: ${row[1]}`).join(", ") });
  for (const v of ticks(0, most, 4)) {
    picture.append(svg("line", { class: "grid", x1: left, x2: W - right, y1: py(v), y2: py(v) }), svg("text", { x: left - 6, y: py(v) + 4, "text-anchor": "end" }, number(v)));
  }
  rows.forEach(([label, count, limit], i) => {
    const at = left + i * wide + 2, w = Math.max(1, wide - 4);
    const rect = svg("rect", { x: at, width: w, y: py(count), height: Math.max(0, H - bottom - py(count)), fill: limit !== undefined && count > limit ? "var(--bad)" : "var(--c0)" });
    rect.addEventListener("mousemove", event => showTip(event, `${x} ${label}: ${number(count)}${limit === undefined ? "" : ` of at most ${number(limit)}`}`));
    rect.addEventListener("mouseleave", event => showTip(event, ""));
    picture.append(rect);
    if (limit !== undefined) picture.append(svg("line", { class: "limit", x1: at - 2, x2: at + w + 2, y1: py(limit), y2: py(limit) }));
    if (i % Math.ceil(rows.length / 14) === 0) picture.append(svg("text", { x: at + w / 2, y: H - bottom + 16, "text-anchor": "middle" }, label));
  });
  if (mark) picture.append(svg("line", { class: "limit", x1: left + (mark[0] + .5) * wide, x2: left + (mark[0] + .5) * wide, y1: top, y2: H - bottom }),
    svg("text", { x: left + (mark[0] + .5) * wide + 5, y: top + 10 }, mark[1]));
  picture.append(svg("text", { x: (left + W - right) / 2, y: H - 2, "text-anchor": "middle" }, x));
  return el("div", { class: "chart" }, picture);
}

export function table(head, rows, attributes = {}) {
  return el("div", { class: "scroll" }, el("table", attributes, el("thead", {}, el("tr", {}, ...head.map(h => el("th", {}, h)))),
    el("tbody", {}, ...rows.map(row => row instanceof Node ? row : el("tr", {}, ...row.map(cell => el("td", {}, cell ?? "–")))))));
}
