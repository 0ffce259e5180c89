"use strict";
// Shared behaviour of all pages. The selection is in the address after #, so that a reloaded page, or a
// link to it, shows the same: v (view), y (scroll position), d (light or dark), `own` fields of a page, and
// the value of every control with data-state. Of the elements with data-pick=k, the one with index state[k]
// is shown. `leads` lists further selections of a link to a view.
const $ = (q, e = document) => e.querySelector(q), $$ = (q, e = document) => [...e.querySelectorAll(q)];
function reportPage(own = {}, show = () => {}, leads = () => ({})) {
const body = document.body, views = $$(".view").map(v => v.id), tip = $("#tip"), live = Number(body.dataset.reload || 0);
const controls = $$("[data-state]"), value = c => c.type === "checkbox" ? (c.checked ? "1" : "") : c.value;
const start = {v: "summary", y: "0", d: "", ...Object.fromEntries(controls.map(c => [c.dataset.state, value(c)])), ...own}, state = {...start};
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
  for (const c of controls) {
    if (c.type === "checkbox") c.checked = Boolean(state[c.dataset.state]); else c.value = state[c.dataset.state];
    if (c.value === "" && c.options && c.options.length) c.selectedIndex = Math.max(0, [...c.options].findIndex(o => o.value === ""));
  }
  for (const k of new Set($$("[data-pick]").map(e => e.dataset.pick))) picked(k).forEach((e, i, all) => e.classList.toggle("on", i === place(k, all)));
  const dark = showScheme(); if (window.Bokeh) showCharts(state, dark);
  show();
}
const picked = k => $$(`[data-pick="${k}"]`), place = (k, all) => Math.min(Math.max(0, Number(state[k]) || 0), all.length - 1);
function go(view, change = {}) { set({v: view, y: "0", ...change}, true); scrollTo(0, 0); }
function step(k, by) { const all = picked(k); set({[k]: String((place(k, all) + by + all.length) % all.length)}); }
for (const c of controls) {
  c.addEventListener(c.type === "search" ? "input" : "change", () => set({[c.dataset.state]: value(c)}));
  if (c.form) c.form.onsubmit = () => false;
}
for (const b of $$("[data-step]")) b.addEventListener("click", () => step(b.dataset.of, Number(b.dataset.step)));

// ---------------------------------------------------------------- light and dark
const systemDark = matchMedia("(prefers-color-scheme: dark)");
function showScheme() {
  const root = document.documentElement, dark = state.d ? state.d === "dark" : systemDark.matches, button = $("#scheme");
  state.d ? root.setAttribute("data-scheme", state.d) : root.removeAttribute("data-scheme");
  button.textContent = dark ? "☀ Light" : "☾ Dark"; button.setAttribute("aria-label", `Show it ${dark ? "light" : "dark"}`);
  return dark;
}
$("#scheme").addEventListener("click", () => {
  const dark = state.d ? state.d === "dark" : systemDark.matches;
  set({d: dark === systemDark.matches ? (dark ? "light" : "dark") : ""});
});
systemDark.addEventListener("change", showAll);

// ---------------------------------------------------------------- hover and keys
function tell(strip) {
  tip.hidden = !strip; if (!strip) return;
  tip.textContent = strip.getAttribute("aria-label");
  const at = strip.getBoundingClientRect(), box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(at.left + at.width / 2, innerWidth - box.width - 6)) + "px";
  tip.style.top = Math.max(4, at.bottom + box.height > innerHeight ? at.top - box.height : at.bottom) + "px";
}
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, e => tell(e.target.closest && e.target.closest("svg.strip[aria-label]")));
document.addEventListener("keydown", event => {
  const at = event.target, by = {j: 1, ArrowRight: 1, ArrowDown: 1, k: -1, ArrowLeft: -1, ArrowUp: -1}[event.key];
  if (event.key === "Escape") tell(null);
  if (event.key === "Escape" && came && at.matches(".source")) { came.focus(); came.scrollIntoView({block: "nearest"}); }
  if (!by || !at.matches || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  const steps = $(".view.on [data-step]");
  if (at.matches("nav a[data-view]")) {
    const links = $$("nav a[data-view]"), to = Math.min(Math.max(0, links.indexOf(at) + by), links.length - 1);
    go(links[to].dataset.view); links[to].focus(); links[to].scrollIntoView({block: "nearest", inline: "nearest"});
  } else if (steps && !/Up|Down/.test(event.key) && !at.matches("select, input, svg, pre, summary")) step(steps.dataset.of, by);
  else return;
  event.preventDefault();
});

// ---------------------------------------------------------------- links, also from a claim to its evidence
let came = null;
function follow(claim) {
  const wanted = claim.dataset.cites.split(" ").map(id => document.getElementById(id)).filter(Boolean);
  for (const e of $$(".here")) e.classList.remove("here");
  if (!wanted.length) return;
  for (const e of [claim, ...wanted]) e.classList.add("here");
  const first = wanted[0], box = first.closest("pre"), folded = first.closest("details");
  if (folded) folded.open = true;
  if (box) box.scrollTop += first.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 4;
  first.scrollIntoView({block: "nearest"});
  first.focus({preventScroll: true});
  came = claim;
  $(".back", claim.closest("[data-pick]")).hidden = false;
}
document.addEventListener("click", event => {
  const at = event.target.closest && event.target.closest("a.claim, .back, a[data-view], a.skip");
  if (!at || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  if (at.matches("a.claim")) follow(at);
  else if (at.matches(".back")) { at.hidden = true; if (came) { came.scrollIntoView({block: "nearest"}); came.focus(); } }
  else { if (at.dataset.view) go(at.dataset.view, leads(at)); $("#main").focus({preventScroll: Boolean(at.dataset.view)}); }
});

// ---------------------------------------------------------------- address and print
for (const kind of ["hashchange", "popstate"]) addEventListener(kind, () => { read(); showAll(); });
let scrolled;
addEventListener("scroll", () => { clearTimeout(scrolled); scrolled = setTimeout(() => { state.y = String(Math.round(scrollY)); write(); }, 150); }, {passive: true});
addEventListener("beforeprint", () => { for (const d of $$("main details")) { d.dataset.was = d.open ? "1" : ""; d.open = true; } });
addEventListener("afterprint", () => { for (const d of $$("main details")) d.open = d.dataset.was === "1"; });

// ---------------------------------------------------------------- reload of a running report
function busy() { const e = document.activeElement; return document.hidden || !getSelection().isCollapsed || (e && e.matches("select, input")); }
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
return {state, set, begin};
}
