// Small charts as SVG. They contain no text that a model generated.
const number = x => Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : +x.toPrecision(3) + "";
function chart(title, { series, x = "version", share = false, floor = 0, format = share ? percent : number, names = true }) {
  const W = 600, H = 250, left = 52, right = 12, top = 10, bottom = 34;
  const drawn = series.filter(one => one.points.length);
  const points = drawn.flatMap(one => one.points);
  const box = card(title, names && drawn.length > 1 ? drawn : []);
  if (!points.length) { box.append($("p", "nothing recorded")); return box; }
  const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  const x0 = Math.min(...xs), x1 = Math.max(x0 + 1e-9, ...xs);
  const y0 = Math.min(floor, ...ys), y1 = share ? 1 : Math.max(y0 + 1e-9, ...ys) * (Math.max(...ys) > 0 ? 1.05 : 1);
  const px = v => left + (v - x0) / (x1 - x0) * (W - left - right), py = v => H - bottom - (v - y0) / (y1 - y0) * (H - top - bottom);
  let svg = ticks(y0, y1, 5).map(v => `<line class="grid" x1="${left}" x2="${W - right}" y1="${py(v)}" y2="${py(v)}"/><text x="${left - 6}" y="${py(v) + 4}" text-anchor="end">${format(v)}</text>`).join("");
  svg += ticks(x0, x1, 7).map(v => `<text x="${px(v)}" y="${H - bottom + 16}" text-anchor="middle">${number(v)}</text>`).join("");
  svg += `<text x="${(left + W - right) / 2}" y="${H - 3}" text-anchor="middle">${x}</text>`;
  for (const one of drawn) {
    const path = one.points.map(p => `${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join(" ");
    svg += `<polyline points="${path}" style="stroke: var(${one.colour})"/>`;
    if (one.dots || one.points.length < 3) svg += one.points.map(p => `<circle cx="${px(p[0])}" cy="${py(p[1])}" r="3.5" style="fill: var(${one.colour})"/>`).join("");
  }
  svg += `<line class="cross" x1="0" x2="0" y1="${top}" y2="${H - bottom}" visibility="hidden"/>`;
  const picture = frame(W, H, svg);
  const cross = picture.querySelector(".cross");
  picture.onmousemove = event => {
    const r = picture.getBoundingClientRect(), mouse = (event.clientX - r.left) / r.width * W;
    const nearest = one => one.points.reduce((a, b) => Math.abs(px(b[0]) - mouse) < Math.abs(px(a[0]) - mouse) ? b : a);
    const here = nearest({ points })[0];
    cross.setAttribute("x1", px(here)); cross.setAttribute("x2", px(here)); cross.setAttribute("visibility", "visible");
    const values = drawn.map(one => [one, nearest(one)]).filter(([, p]) => p[0] === here).map(([one, p]) => `${one.name} ${share ? (100 * p[1]).toFixed(1) + "%" : number(p[1])}`);
    showTip(event, `${x} ${number(here)}\n${values.join("\n")}`);
  };
  picture.onmouseleave = event => { cross.setAttribute("visibility", "hidden"); showTip(event, ""); };
  box.append(picture);
  return box;
}
// Bars from rows of [label, count, tooltip].
function bars(title, rows, x) {
  const W = 600, H = 250, left = 52, right = 12, top = 10, bottom = 34;
  const box = card(title, []);
  if (!rows.length) { box.append($("p", "nothing recorded")); return box; }
  const most = Math.max(...rows.map(row => row[1])) * 1.05, whole = rows.reduce((sum, row) => sum + row[1], 0);
  const wide = (W - left - right) / rows.length, py = v => H - bottom - v / most * (H - top - bottom);
  let svg = ticks(0, most, 5).map(v => `<line class="grid" x1="${left}" x2="${W - right}" y1="${py(v)}" y2="${py(v)}"/><text x="${left - 6}" y="${py(v) + 4}" text-anchor="end">${number(v)}</text>`).join("");
  const every = Math.ceil(rows.length / 12);
  rows.forEach(([label, count], i) => {
    svg += `<rect data-row="${i}" x="${left + i * wide + 1}" width="${Math.max(1, Math.min(wide - 2, 90))}" y="${py(count)}" height="${H - bottom - py(count)}"/>`;
    if (i % every === 0) svg += `<text x="${left + i * wide + 1 + Math.min(wide - 2, 90) / 2}" y="${H - bottom + 16}" text-anchor="middle">${label}</text>`;
  });
  svg += `<text x="${(left + W - right) / 2}" y="${H - 3}" text-anchor="middle">${x}</text>`;
  const picture = frame(W, H, svg);
  picture.onmousemove = event => {
    const row = rows[event.target.dataset?.row];
    showTip(event, row ? `${row[2] ?? row[0]}: ${number(row[1])}, ${(100 * row[1] / whole).toFixed(1)}%` : "");
  };
  picture.onmouseleave = event => showTip(event, "");
  box.append(picture);
  return box;
}
// Bars beside each other: one for each series at each label; the shares are those of the series.
function groupedBars(title, labels, series, x) {
  const W = 600, H = 250, left = 52, right = 12, top = 10, bottom = 34;
  const box = card(title, []);
  if (!labels.length) { box.append($("p", "nothing recorded")); return box; }
  const room = (W - left - right) / labels.length, wide = Math.min(room * .8 / series.length, 60), py = v => H - bottom - v * (H - top - bottom);
  let svg = ticks(0, 1, 5).map(v => `<line class="grid" x1="${left}" x2="${W - right}" y1="${py(v)}" y2="${py(v)}"/><text x="${left - 6}" y="${py(v) + 4}" text-anchor="end">${percent(v)}</text>`).join("");
  labels.forEach((label, i) => {
    const start = left + (i + .5) * room - wide * series.length / 2;
    series.forEach((one, k) => { svg += `<rect data-at="${i},${k}" x="${start + k * wide + .5}" width="${Math.max(1, wide - 1)}" y="${py(one.shares[i])}" height="${H - bottom - py(one.shares[i])}" style="fill: var(${one.colour})"/>`; });
    svg += `<text x="${left + (i + .5) * room}" y="${H - bottom + 16}" text-anchor="middle">${number(label)}</text>`;
  });
  svg += `<text x="${(left + W - right) / 2}" y="${H - 3}" text-anchor="middle">${x}</text>`;
  const picture = frame(W, H, svg);
  picture.onmousemove = event => {
    const [i, k] = (event.target.dataset?.at ?? "").split(",");
    showTip(event, k === undefined ? "" : `${series[k].name}\n${x} ${labels[i]}: ${(100 * series[k].shares[i]).toFixed(1)}%`);
  };
  picture.onmouseleave = event => showTip(event, "");
  box.append(picture);
  return box;
}
function card(title, series) {
  const box = $("div", undefined, "card");
  const names = $("div", undefined, "names");
  for (const one of series) { const s = $("span"), i = $("i"); i.style.background = `var(${one.colour})`; s.append(i, one.name); names.append(s); }
  const head = $("div", undefined, "head");
  head.append($("h3", title), names);
  box.append(head);
  return box;
}
function frame(W, H, inside) {
  const holder = $("div");
  holder.innerHTML = `<svg viewBox="0 0 ${W} ${H}" role="img">${inside}</svg>`;
  return holder.firstChild;
}
