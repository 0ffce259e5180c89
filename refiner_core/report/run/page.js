// Hides, leads and remembers; all that it shows is in the page.
(() => {
const examples = $$(".example"), form = $("#choose-example");
const {state, set, begin} = reportPage({e: "0", k: "", w: ""}, show);

// ---------------------------------------------------------------- examples
const fits = e => (!state.k || e.dataset.kind === state.k) && (!state.w || e.dataset.why === state.w);
const fitting = () => examples.filter(fits);
function show() {
  if (!form) return;
  const found = fitting(), wanted = examples[Number(state.e)] , at = found.includes(wanted) ? wanted : found[0];
  for (const e of examples) e.classList.toggle("on", e === at);
  form.kind.value = state.k; form.why.value = state.w;
  for (const [i, o] of [...form.example.options].entries()) o.hidden = o.disabled = !fits(examples[i]);
  if (at) form.example.value = String(examples.indexOf(at));
  $("#no-example").hidden = Boolean(at);
  $("#where").textContent = at ? `${found.indexOf(at) + 1} of ${found.length}` : "";
}
function step(by) {
  const found = fitting(); if (!found.length) return;
  const now = found.findIndex(e => e.classList.contains("on")), to = found[(now + by + found.length) % found.length];
  set({e: String(examples.indexOf(to))});
  if (to.getBoundingClientRect().top < 0) to.scrollIntoView();
}
if (form) {
  form.addEventListener("submit", e => e.preventDefault());
  form.addEventListener("change", e => set(e.target.name === "example" ? {e: e.target.value} : {k: form.kind.value, w: form.why.value}));
  $("#prev").addEventListener("click", () => step(-1));
  $("#next").addEventListener("click", () => step(1));
}
document.addEventListener("keydown", event => {
  if (state.v !== "examples" || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.target.matches("select, input, svg, nav a, pre, summary")) return;
  const by = {j: 1, ArrowRight: 1, k: -1, ArrowLeft: -1}[event.key];
  if (by) { event.preventDefault(); step(by); }
});

// ---------------------------------------------------------------- commands
async function copy(button) {
  let done = true;
  try { await navigator.clipboard.writeText(button.dataset.copy); }
  catch { // no clipboard for pages from a disk: the old way
    const range = document.createRange(), found = getSelection();
    range.selectNodeContents(button.previousElementSibling); found.removeAllRanges(); found.addRange(range);
    done = document.execCommand("copy");
    if (done) found.removeAllRanges();
  }
  button.textContent = done ? "Copied" : "Selected: press Ctrl-C";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
for (const button of $$(".copy")) button.addEventListener("click", () => copy(button));
begin();
})();
