"use strict";
// What all pages of reports do. What is chosen stands in the address after #, so that a page that
// loads itself again, or a link to it, shows the same; the fields v (view), y (scrolled) and
// d (light or dark) are every page's. `leads` says what else a link to a view
// chooses. reportPage returns what the page's own script builds on.
const $ = (q, e = document) => e.querySelector(q), $$ = (q, e = document) => [...e.querySelectorAll(q)];
function reportPage(own, show, leads = () => ({})) {
const body = document.body, views = $$(".view").map(v => v.id), tip = $("#tip"), live = Number(body.dataset.reload || 0);
const start = {v: "summary", y: "0", d: "", ...own}, state = {...start};
let paused = false;
document.documentElement.classList.add("js");

function read() {
  const text = decodeURI(location.hash.slice(1));
  Object.assign(state, start);
  if (views.includes(text)) { state.v = text; return; }
  for (const [k, v] of new URLSearchParams(location.hash.slice(1))) if (k in start) state[k] = v;
  if (!views.includes(state.v)) state.v = "summary";
}
function write(push) {
  const parts = new URLSearchParams();
  for (const k in start) if (state[k] !== start[k]) parts.set(k, state[k]);
  if (!parts.has("v")) parts.set("v", state.v);
  history[push ? "pushState" : "replaceState"](null, "", "#" + parts);
}
function set(change, push) { Object.assign(state, change); write(push); showAll(); }
function showAll() {
  for (const v of $$(".view")) v.classList.toggle("on", v.id === state.v);
  for (const a of $$("nav a")) a.dataset.view === state.v ? a.setAttribute("aria-current", "page") : a.removeAttribute("aria-current");
  const list = $("nav ul"), now = $("nav a[aria-current]"), left = now.offsetLeft - list.offsetLeft;
  if (left < list.scrollLeft || left + now.offsetWidth > list.scrollLeft + list.clientWidth) list.scrollLeft = left - 40;
  showScheme(); show();
}
function go(view, change = {}) { set({v: view, y: "0", ...change}, true); scrollTo(0, 0); }

// ---------------------------------------------------------------- light and dark
const systemDark = matchMedia("(prefers-color-scheme: dark)");
function showScheme() {
  const root = document.documentElement, dark = state.d ? state.d === "dark" : systemDark.matches;
  state.d ? root.setAttribute("data-scheme", state.d) : root.removeAttribute("data-scheme");
  const button = $("#scheme");
  button.textContent = dark ? "☀ Light" : "☾ Dark"; button.setAttribute("aria-label", `Show it ${dark ? "light" : "dark"}`);
}
$("#scheme").addEventListener("click", () => {
  const dark = state.d ? state.d === "dark" : systemDark.matches, wanted = dark ? "light" : "dark";
  set({d: wanted === (systemDark.matches ? "dark" : "light") ? "" : wanted});
});
systemDark.addEventListener("change", showScheme);

// ---------------------------------------------------------------- hover and keys
function tell(text, x, y) {
  tip.textContent = text; tip.hidden = !text; if (!text) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = Math.max(4, y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
}
const points = g => g.dataset.p.split(";").map(p => p ? p.split(" ").map(Number) : null);
function frameOf(svg) {
  const [low, high] = svg.dataset.x.split(",").map(Number), [left, right, width] = svg.dataset.frame.split(",").map(Number);
  return {low, high, left, right, width, at: step => left + (step - low) / (high - low) * (right - left)};
}
function curveTip(svg, step, x, y) {
  const lines = [], near = [];
  for (const g of $$("g[data-curve]:not(.off)", svg)) {
    let best = null;
    for (const v of points(g)) if (v && (best === null || Math.abs(v[0] - step) < Math.abs(best[0] - step))) best = v;
    if (best) { near.push(best[0]); lines.push(`${g.dataset.name}: ${best[1]}` + (best[2] !== best[3] ? ` (${best[2]} to ${best[3]})` : "")); }
  }
  if (!near.length) return tell("");
  const shown = near.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a);
  const cursor = $(".cursor", svg), at = frameOf(svg).at(shown);
  cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.setAttribute("visibility", "visible");
  svg.dataset.step = shown;
  tell(`step ${shown}\n` + lines.slice(0, 14).join("\n"), x, y);
}
const told = "svg.curves, svg.strip[aria-label]";
document.addEventListener("pointermove", event => {
  const svg = event.target.closest && event.target.closest(told);
  if (!svg) { if (!tip.hidden && !document.activeElement.matches(told)) tell(""); return; }
  if (svg.classList.contains("strip")) return tell(svg.getAttribute("aria-label"), event.clientX, event.clientY);
  const box = svg.getBoundingClientRect(), f = frameOf(svg);
  const share = ((event.clientX - box.left) / box.width * f.width - f.left) / (f.right - f.left);
  curveTip(svg, f.low + Math.min(1, Math.max(0, share)) * (f.high - f.low), event.clientX, event.clientY);
});
document.addEventListener("focusin", event => {
  const svg = event.target;
  if (!svg.matches || !svg.matches(told)) return tell("");
  const box = svg.getBoundingClientRect();
  if (svg.classList.contains("strip")) tell(svg.getAttribute("aria-label"), box.left + box.width / 2, box.bottom - 12);
  else curveTip(svg, Number(svg.dataset.step || svg.dataset.x.split(",")[1]), box.left + box.width / 2, box.top + 20);
});
document.addEventListener("focusout", () => tell(""));
document.addEventListener("keydown", event => {
  const at = event.target;
  if (event.key === "Escape") return tell("");
  if (!at.matches || event.ctrlKey || event.metaKey || event.altKey) return;
  if (at.matches("svg.curves") && ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
    event.preventDefault();
    const steps = [...new Set($$("g[data-curve]:not(.off)", at).flatMap(g => points(g).filter(Boolean).map(p => p[0])))].sort((a, b) => a - b);
    const now = steps.indexOf(Number(at.dataset.step)), box = at.getBoundingClientRect();
    const to = {ArrowLeft: Math.max(0, now - 1), ArrowRight: Math.min(steps.length - 1, now + 1), Home: 0, End: steps.length - 1}[event.key];
    curveTip(at, steps[to], box.left + box.width / 2, box.top + 20);
  } else if (at.matches("nav a[data-view]") && ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
    event.preventDefault();
    const links = $$("nav a[data-view]"), now = links.indexOf(at), last = links.length - 1;
    const to = event.key === "Home" ? 0 : event.key === "End" ? last : /Left|Up/.test(event.key) ? Math.max(0, now - 1) : Math.min(last, now + 1);
    go(links[to].dataset.view); links[to].focus(); links[to].scrollIntoView({block: "nearest", inline: "nearest"});
  }
});

// ---------------------------------------------------------------- links, and from a claim to its evidence
let came = null;
function follow(claim) {
  const example = claim.closest(".example, .prompt"), wanted = claim.dataset.cites.split(" ").map(id => document.getElementById(id)).filter(Boolean);
  for (const e of $$(".here")) e.classList.remove("here");
  if (!wanted.length) return;
  for (const e of [claim, ...wanted]) e.classList.add("here");
  const first = wanted[0], box = first.closest("pre"), folded = first.closest("details");
  if (folded) folded.open = true;
  if (box) box.scrollTop += first.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 4;
  first.scrollIntoView({block: "nearest"});
  first.focus({preventScroll: true});
  came = claim;
  const back = $(".back", example); if (back) back.hidden = false;
}
document.addEventListener("click", event => {
  const at = event.target.closest && event.target.closest("a.claim, .back, a[data-view], a.skip");
  if (!at || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  if (at.matches("a.claim")) follow(at);
  else if (at.matches(".back")) { at.hidden = true; if (came) { came.scrollIntoView({block: "nearest"}); came.focus(); } }
  else { if (at.dataset.view) go(at.dataset.view, leads(at)); $("#main").focus({preventScroll: Boolean(at.dataset.view)}); }
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || !came || !event.target.matches(".source")) return;
  came.focus(); came.scrollIntoView({block: "nearest"});
});

// ---------------------------------------------------------------- the address, paper
addEventListener("hashchange", () => { read(); showAll(); });
addEventListener("popstate", () => { read(); showAll(); });
let scrolled;
addEventListener("scroll", () => { clearTimeout(scrolled); scrolled = setTimeout(() => { state.y = String(Math.round(scrollY)); write(); }, 150); }, {passive: true});
addEventListener("beforeprint", () => { for (const d of $$("main details")) { d.dataset.was = d.open ? "1" : ""; d.open = d.id !== "filter"; } });
addEventListener("afterprint", () => { for (const d of $$("main details")) d.open = d.dataset.was === "1"; });

// ---------------------------------------------------------------- while it runs
function busy() { const e = document.activeElement; return document.hidden || !getSelection().isCollapsed || (e && e.matches("select, input[type=search]")); }
function again() {
  if (paused || busy()) return setTimeout(again, 2000);
  state.y = String(Math.round(scrollY)); write(); location.reload();
}
if (live) {
  setTimeout(again, live * 1000);
  $("#pause").addEventListener("click", e => { paused = !paused; e.target.setAttribute("aria-pressed", String(paused)); e.target.textContent = paused ? "Go on" : "Pause"; });
  const age = () => {
    const s = Math.round((Date.now() - Date.parse(body.dataset.made)) / 1000);
    $("#age").textContent = s > 3 * live + 60 ? ` (${s > 7200 ? Math.round(s / 3600) + " h" : Math.round(s / 60) + " min"} ago: is anybody writing it?)` : "";
  };
  age(); setInterval(age, 5000);
}
function begin() {
  history.scrollRestoration = "manual";
  read(); showAll();
  scrollTo(0, Number(state.y) || 0);
}
return {state, set, write, begin, points};
}
