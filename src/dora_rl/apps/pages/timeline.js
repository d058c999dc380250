// Timelines of slots and trainer. `timeline(line)` makes one; drag to zoom in, double-click to zoom out.
const $ = (tag, text, name) => {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (name) e.className = name;
  return e;
};
const percent = x => (100 * x).toFixed(0) + "%";
const duration = s => s < 120 ? s.toFixed(s < 10 ? 2 : 1) + " s" : s < 7200 ? (s / 60).toFixed(1) + " min" : (s / 3600).toFixed(2) + " h";
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tip = document.body.appendChild($("div"));
tip.id = "tip";
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 14 + "px";
}
// The golden angle keeps neighbouring versions far apart in hue.
const hue = version => ((version ?? 0) * 137.5 + 215) % 360;
// Colours of activities and idle causes, from the data; the legend shows the causes that occur.
const LABELS = {}, CAUSES = {}, causes = new Set();
function tint(cause) {
  const name = cause.replace(/ v\d+$/, "") || "unknown";
  causes.add(name);
  return CAUSES[name] ?? style("--none");
}
function colour(label, version, cause) {
  if (label === "") return style("--none");
  if (label === "idle") return tint(cause);
  return LABELS[label]?.replace("{hue}", hue(version)) || style("--fg");
}
const redraws = [];
const redrawAll = () => redraws.forEach(redraw => redraw());
addEventListener("resize", redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

// About `count` round numbers between `from` and `to`.
function ticks(from, to, count) {
  const rough = (to - from) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(x => x * power).find(x => x >= rough);
  const found = [];
  for (let x = Math.ceil(from / step) * step; x <= to + step * 1e-6; x += step) found.push(+x.toPrecision(12));
  return found;
}

function timeline(line) {
  Object.assign(CAUSES, line.causes);
  Object.assign(LABELS, line.labels);
  const canvas = $("canvas");
  const rowHeight = Math.max(5, Math.min(26, Math.floor(620 / line.rows.length)));
  const gutter = rowHeight >= 11 ? 10 + 7 * Math.max(7, ...line.rows.map(row => row.name.length)) : 60;
  const top = 30, foot = 20, height = top + rowHeight * line.rows.length + foot;
  let from = 0, to = line.seconds, dragged = null;
  const width = () => canvas.clientWidth - gutter;
  const at = s => gutter + (s - from) / (to - from) * width();
  const time = x => from + (x - gutter) / width() * (to - from);

  function strip(g, runs, y, h) {
    let column = 0;
    for (const [n, label, version, cause] of runs) {
      const left = column / line.columns * line.seconds, right = (column + n) / line.columns * line.seconds;
      column += n;
      if (right < from || left > to) continue;
      const x = Math.max(gutter, Math.floor(at(left))), end = Math.min(gutter + width(), Math.ceil(at(right)));
      g.fillStyle = colour(label, version, cause);
      g.fillRect(x, y, end - x, h);
    }
  }
  function redraw() {
    const ratio = devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = canvas.clientWidth * ratio; canvas.height = height * ratio;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif"; g.textBaseline = "middle";
    strip(g, line.trainer, 0, top - 8);
    g.fillStyle = style("--dim"); g.fillText("trainer", 0, (top - 8) / 2);
    line.rows.forEach((row, i) => {
      strip(g, row.runs, top + i * rowHeight, rowHeight - 1);
      g.fillStyle = style("--dim");
      if (rowHeight >= 11) g.fillText(row.name, 0, top + (i + .5) * rowHeight);
    });
    g.textAlign = "center";
    for (const s of ticks(from + line.begin, to + line.begin, 8)) {
      const x = at(s - line.begin);
      if (x < gutter) continue;
      g.fillRect(x, height - foot, 1, 4);
      g.fillText(duration(s).replace(/\.?0+ /, " "), Math.min(x, gutter + width() - 20), height - foot + 12);
    }
    // Marks that would cover everything are left out until the user zooms in.
    const few = (marks, s) => { const seen = marks.filter(it => s(it) >= from && s(it) <= to); return seen.length < width() / 8 ? seen : []; };
    g.strokeStyle = style("--mark"); g.setLineDash([2, 3]);
    for (const [, when] of few(line.published, it => it[1])) {
      g.beginPath(); g.moveTo(at(when), 0); g.lineTo(at(when), height - foot); g.stroke();
    }
    g.setLineDash([]);
    for (const [, when] of few(line.bounds, it => it[1])) {
      g.beginPath(); g.moveTo(at(when), 0); g.lineTo(at(when), height - foot); g.stroke();
    }
    g.strokeStyle = style("--move");
    for (const [when, source, target] of few(line.moves, it => it[0])) {
      const y = row => top + (row + .5) * rowHeight, x = at(when), end = y(target);
      g.beginPath(); g.moveTo(x, y(source)); g.lineTo(x + 4, end); g.stroke();
      g.fillStyle = style("--mark"); g.beginPath(); g.arc(x + 4, end, Math.min(2.5, rowHeight / 4), 0, 7); g.fill();
    }
    if (dragged) {
      g.fillStyle = "rgba(128, 128, 128, .35)";
      g.fillRect(Math.min(dragged[0], dragged[1]), 0, Math.abs(dragged[1] - dragged[0]), height - foot);
    }
  }
  const find = (runs, s) => {
    let column = s / line.seconds * line.columns;
    for (const run of runs) { if (column < run[0]) return run; column -= run[0]; }
  };
  const position = event => { const r = canvas.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  function describe(event) {
    const [x, y] = position(event);
    const row = line.rows[Math.floor((y - top) / rowHeight)];
    const who = y < top - 8 ? ["trainer", line.trainer] : row && y >= top ? [row.name, row.runs] : null;
    const run = who && x >= gutter && find(who[1], time(x));
    if (!run) return "";
    const [, label, version, cause] = run;
    const near = it => Math.abs(at(it[0]) - x) < 5;
    const activity = label ? `${label}${version === null ? "" : ` v${version}`}${cause ? `, waiting for ${cause}` : ""}` : "not running";
    const moved = line.moves.filter(near).map(it => `\n${it[3]} moved from ${line.rows[it[1]].name} to ${line.rows[it[2]].name}`).slice(0, 4);
    const fresh = line.published.filter(it => Math.abs(at(it[1]) - x) < 3).map(it => `\nv${it[0]} published`);
    const bounds = line.bounds.filter(it => Math.abs(at(it[1]) - x) < 3).map(it => `\nstaleness bound ${it[0]} from here on`);
    return `${who[0]}, ${duration(time(x) + line.begin)}: ${activity}${moved.join("")}${fresh.join("")}${bounds.join("")}`;
  }
  canvas.onmousedown = event => { const [x] = position(event); dragged = [x, x]; };
  canvas.onmousemove = event => {
    if (dragged) { dragged[1] = position(event)[0]; redraw(); }
    showTip(event, describe(event));
  };
  canvas.onmouseup = () => {
    if (!dragged) return;
    const [left, right] = dragged.map(x => Math.max(0, Math.min(line.seconds, time(x)))).sort((a, b) => a - b);
    dragged = null;
    if (right - left > line.seconds / line.columns * 4 && at(right) - at(left) > 6) { from = left; to = right; }
    redraw();
  };
  canvas.look = (start, end) => { from = Math.max(0, start); to = Math.min(line.seconds, end); redraw(); };
  canvas.ondblclick = () => canvas.look(0, line.seconds);
  canvas.onmouseleave = event => { showTip(event, ""); dragged = null; redraw(); };
  redraws.push(redraw);
  // Collect every cause that occurs, for the legend.
  [line.trainer, ...line.rows.map(row => row.runs)].forEach(runs => runs.forEach(run => colour(run[1], run[2], run[3])));
  return canvas;
}

function legend() {
  const box = $("div", undefined, "legend");
  const entry = (paint, text) => { const s = $("span"), i = $("i"); i.style.background = paint; s.append(i, text); box.append(s); };
  const fill = () => {
    box.replaceChildren();
    const some = [0, 1, 2, 3].map(v => `hsl(${hue(v)} 62% 55%) ${25 * v}% ${25 * v + 25}%`).join(", ");
    entry(`linear-gradient(90deg, ${some})`, "decode, by version");
    entry(colour("prefill", 0), "prefill"); entry(colour("re-prefill"), "re-prefill"); entry(colour("load"), "load weights");
    entry(colour("migrate"), "migrate"); entry(colour("train", 0), "train, by version"); entry(colour("publish"), "publish");
    for (const name of causes) entry(tint(name), `idle: ${name}`);
  };
  fill();
  redraws.push(fill);
  return box;
}
