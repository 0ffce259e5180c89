// Hides and sorts; the page contains everything that it shows.
(() => {
const arms = $$("#arm-index li").map(li => [li.dataset.i, li.textContent.toLowerCase()]), compare = new Intl.Collator("en", {numeric: true}).compare;
const {state, set, begin} = reportPage({x: "", t: ""}, show, a => a.dataset.goto ? {p: a.dataset.goto, l: "0", r: a.dataset.right} : {});
if ($$(".cmp tbody tr").length > 400) document.documentElement.classList.add("many");

function show() {
  const seen = new Set(arms.filter(([i, name]) => i === "0" || name.includes((state.q || "").toLowerCase())).map(([i]) => i));
  for (const e of $$("main [data-arm]")) e.classList.toggle("off", arms.length > 0 && !seen.has(e.dataset.arm) && e.dataset.arm !== "-1");
  if (arms.length) $("#shown-count").textContent = seen.size === arms.length ? `all ${arms.length}` : `${seen.size} of ${arms.length}`;
  showLines(); showAnswers();
  for (const table of $$(".sortable")) sortTable(table);
}

// ---------------------------------------------------------------- curves
const toggled = () => new Set(state.x.split(".").filter(Boolean));
function showLines() {
  for (const box of $$("input[data-line]")) box.checked = box.defaultChecked !== toggled().has(box.dataset.line);
  if (window.Bokeh) for (const chart of $$(".chart")) linesOf(chart);
}
for (const box of $$("input[data-line]")) box.addEventListener("change", () => {
  const now = toggled(); if (!now.delete(box.dataset.line)) now.add(box.dataset.line);
  set({x: [...now].join(".")});
});

// ---------------------------------------------------------------- answers
function showAnswers() {
  const prompt = $(".prompt.on"); if (!prompt) return;
  const every = state.l === "" || state.r === "", fits = (wanted, value) => !wanted || wanted === value;
  for (const card of $$(".answer-card", prompt)) {
    card.hidden = !((every || [state.l, state.r].includes(card.dataset.arm)) && fits(state.s, card.dataset.seed) && fits(state.a, card.dataset.attempt));
    card.style.order = card.dataset.arm === state.l ? 0 : 1; // left is left
  }
  $(".nothing", prompt).hidden = $$(".answer-card:not([hidden]):not(.off)", prompt).length > 0;
}

// ---------------------------------------------------------------- order: t is "table:column-direction" of one table
function sortTable(table) {
  const [name, order = ""] = state.t.split(":"), [column, way] = name === table.dataset.table ? order.split("-") : [];
  const heads = $$("thead th", table), at = heads.findIndex(h => column && h.dataset.sort === column), key = r => r.cells[at].dataset.v ?? "";
  for (const h of heads) h.removeAttribute("aria-sort");
  const rows = [...table.tBodies[0].rows]; rows.forEach((r, i) => { r.dataset.at ??= i; });
  if (at < 0 && table.dataset.sorted !== "1") return;
  rows.sort((a, b) => {
    if (at < 0) return a.dataset.at - b.dataset.at;
    if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
    const x = Number(key(a)), y = Number(key(b)), c = Number.isNaN(x - y) ? compare(key(a), key(b)) : x - y;
    return (way === "d" ? -c : c) || a.dataset.at - b.dataset.at;
  });
  table.tBodies[0].append(...rows); table.dataset.sorted = at < 0 ? "" : "1";
  if (at >= 0) heads[at].setAttribute("aria-sort", way === "d" ? "descending" : "ascending");
}
for (const head of $$(".sortable th[data-sort]")) {
  const button = document.createElement("button");
  button.type = "button"; button.append(...head.childNodes); head.append(button);
  button.addEventListener("click", () => {
    const way = {ascending: "-d", descending: ""}[head.getAttribute("aria-sort")] ?? "-a";
    set({t: way ? `${head.closest("table").dataset.table}:${head.dataset.sort}${way}` : ""});
  });
}
begin();
})();
