// Hides, sorts and remembers; all that it shows is in the page. What is chosen stands in the
// address after #, so that a page that loads itself again, or a link to it, shows the same.
(() => {
const body = document.body, cmps = $$(".cmp"), plots = $$(".plot-of"), prompts = $$(".prompt");
const form = id => $("#" + id);
const start = {c: body.dataset.primary, o: "", m: "0", p: "0", l: "0", r: "1", s: "", q: "", f: "", x: "", t: "", h: "", a: ""};
const firstSeed = form("choose-answer") ? form("choose-answer").seed.value : "";
start.s = firstSeed;
if (form("choose-answer") && form("choose-answer").attempt) start.a = form("choose-answer").attempt.value;
const {state, set, write, begin, points} = reportPage(start, show, a => a.dataset.goto ? {p: a.dataset.goto, l: "0", r: a.dataset.right} : {});
if (cmps.reduce((n, c) => n + $$("tbody tr", c).length, 0) > 400) document.documentElement.classList.add("many");

// ---------------------------------------------------------------- which arms
const arms = $$("#arm-index li").map(li => ({i: li.dataset.i, name: li.textContent, levels: li.dataset.levels.split(",")}));
function visibleArms() {
  const unwanted = state.f.split(";").filter(Boolean).map(x => x.split("."));
  const wanted = state.q.toLowerCase();
  return new Set(arms.filter(a => a.i === "0" || ((!wanted || a.name.toLowerCase().includes(wanted)) &&
    !unwanted.some(([factor, level]) => a.levels[factor] === level))).map(a => a.i));
}
let armsKey = null;
function showArms() {
  const key = state.q + "|" + state.f;
  if (key === armsKey || !arms.length) return;
  armsKey = key;
  const seen = visibleArms();
  for (const e of $$("main [data-arm]")) e.classList.toggle("off", !seen.has(e.dataset.arm) && e.dataset.arm !== "-1");
  $("#shown-count").textContent = seen.size === arms.length ? `all ${arms.length}` : `${seen.size} of ${arms.length}`;
  $("#q").value = state.q;
  const unwanted = new Set(state.f.split(";"));
  for (const box of $$("fieldset input")) box.checked = !unwanted.has(box.closest("fieldset").dataset.factor + "." + box.dataset.level);
}

// ---------------------------------------------------------------- views
function show() {
  showArms(); showComparison(); showCurve(); showAnswers(); sortTables();
}
function pick(list, at) { const i = Math.min(Math.max(0, Number(at) || 0), list.length - 1); list.forEach((e, j) => e.classList.toggle("on", i === j)); return i; }
function showComparison() {
  const f = form("choose"); if (!f) return;
  const now = cmps[pick(cmps, state.c)];
  for (const name of ["model", "protocol", "decoding", "metric"]) {
    const values = [...new Set(cmps.map(c => c.dataset[name]))];
    if (!f[name].options.length) for (const v of values) f[name].add(new Option(v || "—", v));
    f[name].value = now.dataset[name];
    f[name].closest("label").classList.toggle("off", values.length < 2);
  }
  f.order.value = state.o;
}
function chooseComparison(name, value) {
  const f = form("choose"), names = ["model", "protocol", "decoding", "metric"];
  let best = 0, most = -1;
  cmps.forEach((c, i) => {
    if (c.dataset[name] !== value) return;
    const same = names.filter(n => n !== name && c.dataset[n] === f[n].value).length;
    if (same > most) { most = same; best = i; }
  });
  set({c: String(best)});
}
function showCurve() {
  const f = form("choose-curve"); if (!f) return;
  const at = pick(plots, state.m); f.curve.value = String(at);
  const chosen = state.x ? new Map(state.x.split(",").map(x => [x.slice(1), x[0] === "+"])) : new Map();
  const seen = arms.length ? visibleArms() : null;
  for (const g of $$("g[data-curve]", plots[at])) {
    const box = $(`input[data-line="${g.dataset.curve}"]`, plots[at]);
    const on = chosen.has(g.dataset.curve) ? chosen.get(g.dataset.curve) : box.defaultChecked;
    box.checked = on;
    g.classList.toggle("off", !on || (seen !== null && !seen.has(g.dataset.curve)));
  }
  redraw($("svg.curves", plots[at]));
}
function redraw(svg) { // one arm that has run away must not flatten all others
  const shown = $$("g[data-curve]:not(.off)", svg).map(g => [g, points(g)]);
  const all = shown.flatMap(([, ps]) => ps.filter(Boolean));
  if (!all.length) return;
  let low = Math.min(...all.map(p => p[2])), high = Math.max(...all.map(p => p[3]));
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const pad = Math.abs(high) / 10 || 0.5; low -= pad; high += pad; }
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find(m => rough <= m * power) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), [from, to] = svg.dataset.x.split(",").map(Number);
  const x = v => (64 + (v - from) / (to - from) * 780).toFixed(0), y = v => (300 - (v - low) / (high - low) * 288).toFixed(1);
  const make = (name, attributes, text) => { const e = document.createElementNS("http://www.w3.org/2000/svg", name); for (const k in attributes) e.setAttribute(k, attributes[k]); if (text) e.textContent = text; return e; };
  const grid = $(".ys", svg); grid.replaceChildren();
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) {
    const at = y(i * step);
    grid.append(make("line", {class: "g", x1: 64, x2: 844, y1: at, y2: at}), make("text", {class: "y", x: 56, y: Number(at) + 4}, (i * step).toFixed(digits).replace("-", "\u2212")));
  }
  for (const [g, ps] of shown) {
    let line = "", band = "", part = [];
    const close = () => { if (part.length > 1) band += "M" + part.map(p => `${x(p[0])} ${y(p[3])}`).join(" ") + " " + part.reverse().map(p => `${x(p[0])} ${y(p[2])}`).join(" ") + "Z"; part = []; };
    for (const p of ps) { if (!p) { close(); continue; } line += `${part.length ? "L" : "M"}${x(p[0])} ${y(p[1])}${part.length ? "" : "h0"}`; part.push(p); }
    close();
    $(".b", g).setAttribute("d", all.some(p => p[2] !== p[3]) ? band : ""); $(".l", g).setAttribute("d", line);
    const last = ps.filter(Boolean).at(-1);
    if (last) $(".e", g).setAttribute("transform", `translate(${x(last[0])} ${y(last[1])})`);
  }
}
function showAnswers() {
  const f = form("choose-answer"); if (!f) return;
  const at = pick(prompts, state.p);
  f.prompt.value = String(at); f.left.value = state.l; f.right.value = state.r; f.seed.value = state.s;
  if (f.attempt) f.attempt.value = state.a;
  if (f.right.selectedIndex < 0) f.right.value = "";
  const every = f.left.value === "" || f.right.value === "", sides = [f.left.value, f.right.value];
  let any = false;
  for (const card of $$(".answer-card", prompts[at])) {
    const on = (every || sides.includes(card.dataset.arm)) && (!f.seed.value || card.dataset.seed === f.seed.value) &&
      (!f.attempt || !f.attempt.value || card.dataset.attempt === f.attempt.value);
    card.hidden = !on; any = any || (on && !card.classList.contains("off"));
  }
  if (!every) for (const arm of [...sides].reverse()) // left is left
    for (const card of $$(`.answer-card[data-arm="${CSS.escape(arm)}"]`, prompts[at]).reverse()) card.parentNode.prepend(card);
  $(".nothing", prompts[at]).hidden = any;
}

// ---------------------------------------------------------------- order
const compare = (a, b) => {
  if (a === "" || b === "") return a === b ? 0 : a === "" ? 1 : -1;
  const x = Number(a), y = Number(b);
  return Number.isNaN(x) || Number.isNaN(y) ? (a < b ? -1 : a > b ? 1 : 0) : x - y;
};
function sortTable(table, order) {
  const [name, way] = order.split("-"), heads = $$("thead th", table), at = heads.findIndex(h => h.dataset.sort === name);
  const tbody = table.tBodies[0], rows = [...tbody.rows];
  rows.forEach((r, i) => { r.dataset.at = r.dataset.at || String(i); });
  for (const h of heads) if (h.dataset.sort) h.removeAttribute("aria-sort");
  const key = r => at < 0 ? r.dataset.at : (r.cells[at].dataset.v ?? "");
  rows.sort((a, b) => {
    const x = key(a), y = key(b), c = compare(x, y);
    return (x === "" || y === "" ? c : way === "d" ? -c : c) || Number(a.dataset.at) - Number(b.dataset.at);
  });
  tbody.append(...rows);
  if (at >= 0) heads[at].setAttribute("aria-sort", way === "d" ? "descending" : "ascending");
}
const sorted = new Map();
function sortTables() {
  const tables = Object.fromEntries(state.t.split(";").filter(Boolean).map(x => x.split(":")));
  for (const table of $$(".sortable")) {
    const inView = table.closest(".view").classList.contains("on") && (!table.closest(".cmp") || table.closest(".cmp").classList.contains("on"));
    if (!inView) continue;
    const order = table.closest("#arms") ? state.o : tables[table.dataset.table] || "";
    if ((sorted.get(table) || "") !== order) { sorted.set(table, order); sortTable(table, order); }
  }
}
for (const head of $$(".sortable th[data-sort]")) {
  const button = document.createElement("button");
  button.type = "button"; button.append(...head.childNodes); head.append(button);
  button.addEventListener("click", () => {
    const table = head.closest("table"), name = head.dataset.sort, down = head.getAttribute("aria-sort") === "ascending";
    const up = head.getAttribute("aria-sort") === "descending", order = up ? "" : `${name}-${down ? "d" : "a"}`;
    if (table.closest("#arms")) return set({o: order});
    const others = state.t.split(";").filter(x => x && !x.startsWith(table.dataset.table + ":"));
    set({t: [...others, ...(order ? [`${table.dataset.table}:${order}`] : [])].join(";")});
  });
}

// ---------------------------------------------------------------- choices
const on = (id, what) => { const e = form(id); if (e) { e.addEventListener("change", what); e.addEventListener("submit", x => x.preventDefault()); } };
on("choose", e => e.target.name === "order" ? set({o: e.target.value}) : chooseComparison(e.target.name, e.target.value));
on("choose-curve", e => set({m: e.target.value}));
on("choose-answer", e => set({p: form("choose-answer").prompt.value, l: form("choose-answer").left.value, r: form("choose-answer").right.value, s: form("choose-answer").seed.value, ...(form("choose-answer").attempt ? {a: form("choose-answer").attempt.value} : {})}));
for (const [id, by] of [["prev", -1], ["next", 1]]) if (form(id)) form(id).addEventListener("click", () => set({p: String((Number(state.p) + by + prompts.length) % prompts.length)}));
document.addEventListener("change", event => {
  const line = event.target.dataset && event.target.dataset.line;
  if (line !== undefined) {
    const chosen = new Map(state.x ? state.x.split(",").map(x => [x.slice(1), x[0]]) : []);
    chosen.set(line, event.target.checked ? "+" : "-");
    set({x: [...chosen].map(([k, v]) => v + k).join(",")});
  }
});
if (arms.length) {
  $("#q").addEventListener("input", e => set({q: e.target.value}));
  for (const box of $$("fieldset input")) box.addEventListener("change", () => set({f: $$("fieldset input").filter(b => !b.checked).map(b => b.closest("fieldset").dataset.factor + "." + b.dataset.level).join(";")}));
  $("#all-arms").addEventListener("click", () => set({q: "", f: ""}));
  $("#filter").addEventListener("toggle", () => { state.h = $("#filter").open ? "1" : ""; write(); });
}
begin();
if (arms.length && state.h) $("#filter").open = true;
})();
