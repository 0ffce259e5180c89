// Table of runs: only the rows in sight are elements. All texts are data.
const found = $("#data") && JSON.parse($("#data").textContent), HEIGHT = 34, COLUMNS = ["run", "started", "recipe", "state", "metric", "cost", "text"];
let rows = found.rows, shown = [], chosen = new Set(), key = "", report;
const number = v => v === null || v === undefined ? "" : Math.abs(v) >= 100 ? v.toFixed(0) : v.toFixed(3);
const metricOf = r => (r.metrics || {})[report.state.m];
function cells(r) {
  const m = metricOf(r);
  return {
    run: r.short, started: r.started.slice(0, 16).replace("T", " "), recipe: r.recipe, state: r.state,
    metric: m ? number(m[0]) + (m[1] === null ? "" : ` [${number(m[1])}, ${number(m[2])}]`) : "", cost: r.cost, text: r.text,
  };
}
function choose(wanted) {
  const words = (report.state.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  return wanted.filter(r => (!report.state.st || r.state === report.state.st) && (!report.state.rc || r.recipe === report.state.rc)
    && words.every(w => r.words.includes(w)));
}
function ordered(wanted) {
  const by = {m: r => (metricOf(r) || [null])[0], c: r => r.cost_value}[report.state.s];
  if (!by) return wanted;
  return [...wanted].sort((a, b) => (by(b) ?? -Infinity) - (by(a) ?? -Infinity));
}
function element(r, at) {
  const row = document.createElement("div"), box = document.createElement("input"), c = cells(r);
  row.className = `row ${/^[a-z]+$/.test(r.state) ? r.state : ""}`; row.style.top = `${at * HEIGHT}px`;
  box.type = "checkbox"; box.checked = chosen.has(r.run); box.setAttribute("aria-label", `Choose ${r.run}`);
  box.addEventListener("change", () => { box.checked ? chosen.add(r.run) : chosen.delete(r.run); showChosen(); });
  const first = document.createElement("span"); first.append(box); row.append(first);
  for (const name of COLUMNS) {
    const cell = document.createElement("span");
    cell.title = name === "run" ? r.run : c[name];
    if (name === "metric" || name === "cost") cell.className = "num";
    if (name === "state") cell.className = "state";
    if (name === "run" && r.link) { const a = document.createElement("a"); a.href = r.link; a.textContent = c.run; cell.append(a); } else cell.textContent = c[name];
    row.append(cell);
  }
  return row;
}
function paint() {
  const list = $(".rows"), tall = $(".tall");
  tall.style.height = `${shown.length * HEIGHT}px`;
  const from = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 10);
  const to = Math.min(shown.length, from + Math.ceil(list.clientHeight / HEIGHT) + 20);
  tall.replaceChildren(...shown.slice(from, to).map((r, i) => element(r, from + i)));
}
function refresh() {
  if (!found.rows.length) return;
  const now = JSON.stringify([report.state.q, report.state.st, report.state.rc, report.state.m, report.state.s, rows.length]);
  if (now === key) return;
  if (key) $(".rows").scrollTop = 0;
  key = now; shown = ordered(choose(rows));
  $("#metric").textContent = report.state.m || "metric";
  $("#count").textContent = `${shown.length} of ${found.rows.length} runs`;
  paint();
}
function showChosen() {
  const names = [...chosen]; $(".chosen").hidden = !names.length;
  const lines = [`refiner report ${names.join(" ")} ${found.where}`], compare = $("#compare");
  compare.hidden = !found.live || names.length < 2; compare.href = `runs/${names.join(",")}`;
  if (names.length === 2) lines.push(`refiner diff ${names.join(" ")} ${found.where}`);
  $("#commands").textContent = lines.join("\n");
  const linked = rows.filter(r => chosen.has(r.run) && r.samples).slice(0, 12);
  $("#samples").replaceChildren(...linked.flatMap(r => { const a = document.createElement("a"); a.href = r.samples; a.textContent = `all samples of ${r.short}`; return [a, " "]; }));
  if (found.live) curves();
}
async function ask(path) {
  const answer = await fetch(path), text = await answer.text();
  if (!answer.ok) throw new Error(text.slice(0, 600));
  return JSON.parse(text);
}
async function curves() {
  const place = $("#curves"), pick = $("#curve"), asked = new URLSearchParams([...chosen].slice(0, 12).map(r => ["run", r]));
  if (pick.value) asked.set("metric", pick.value);
  let got;
  try { got = await ask(`curves.json?${asked}`); } catch (error) { place.textContent = String(error.message); return; }
  const was = pick.value || got.metric;
  pick.replaceChildren(...got.metrics.map(n => { const o = document.createElement("option"); o.textContent = n; return o; }));
  pick.value = was;
  place.replaceChildren();
  if (!got.chart.lines.length) { place.textContent = "These runs have logged nothing."; return; }
  const legend = document.createElement("ul"); legend.className = "legend";
  for (const l of got.chart.lines) { const item = document.createElement("li"), mark = document.createElement("b"); mark.style.color = `var(${l.colour})`; mark.textContent = "━ "; item.append(mark, l.name); legend.append(item); }
  const chart = document.createElement("div"); chart.className = "chart wide"; chart.dataset.chart = JSON.stringify(got.chart);
  place.append(legend, chart); chartState = {...report.state}; chart.drawn = null; Bokeh.logger.set_level("error"); inSight.observe(chart);
}
async function live() {
  const where = $("#where").value.trim();
  if (document.hidden) return;
  try {
    const got = await ask(`rows.json?${new URLSearchParams(where ? {where} : {})}`);
    rows = got.rows; for (const r of rows) r.words = [r.run, r.recipe, r.state, r.text].join(" ").toLowerCase(); if (!where) found.rows = rows;
    const list = $(".rows"), at = list.scrollTop; key = ""; refresh(); list.scrollTop = at; paint();
  } catch (error) { $("#count").textContent = String(error.message); }
}
for (const r of rows) r.words = [r.run, r.recipe, r.state, r.text].join(" ").toLowerCase();
report = reportPage({}, () => refresh());
if (found.rows.length) {
  for (const [name, of] of [["st", "state"], ["rc", "recipe"]]) for (const v of [...new Set(rows.map(r => r[of]))].sort()) {
    const o = document.createElement("option"); o.textContent = v; $(`select[data-state=${name}]`).append(o);
  }
  $(".rows").addEventListener("scroll", () => requestAnimationFrame(paint), {passive: true});
  if (found.live) {
    $("#where").form.addEventListener("submit", event => { event.preventDefault(); live(); });
    $("#where").addEventListener("change", live); $("#curve").addEventListener("change", curves);
    setInterval(() => { if (!$("#where").value.trim()) live(); }, 5000);
  }
}
report.begin();
