// All samples of a run. samples/index.js has the small columns of all, samples/KEY-N.js the texts of a part; they are scripts
// that call refinerSamples, since a page opened as a file cannot fetch. All texts become text nodes.
const HEIGHT = 50, MOST_ROWS = 350000, MOST_SOURCES = 40, OUTCOMES = ["met", "not met", "unusable"], MARKS = ["✓", "✕", "◌"], BY_CHANGE = ["up", "down", "change"];
const waiting = new Map(), packed = new Map(), recent = new Map();
let all, shown = [], key = "", opened = "", report, hunt = 0;

// ---------------------------------------------------------------- files
function refinerSamples(name, text) { typeof name === "string" ? waiting.get(name)(bytesOf(text)) : waiting.get("index")(name); }
function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}
const unpacked = bytes => new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
function load(name) {
  if (!packed.has(name)) packed.set(name, new Promise((done, fail) => {
    const script = document.createElement("script");
    const failed = () => { packed.delete(name); script.remove(); fail(new Error(`samples/${name}.js is missing or damaged: keep the folder "samples" beside this page, or write it again with refiner report`)); };
    waiting.set(name, value => { script.onload = () => script.remove(); done(value); });
    script.onload = script.onerror = failed; script.src = `samples/${name}.js`;
    document.head.append(script);
  }));
  return packed.get(name);
}
async function lines(name) {
  const found = recent.get(name) || (await unpacked(await load(name))).split("\n");
  recent.delete(name); recent.set(name, found);
  if (recent.size > 12) recent.delete(recent.keys().next().value);
  return found;
}

// ---------------------------------------------------------------- columns
function table() {
  const places = new Map(), names = [];
  return {names, place: name => { if (!places.has(name)) { places.set(name, names.length); names.push(name); } return places.get(name); }};
}
async function readIndex() {
  const index = await load("index"), read = async entry => JSON.parse(await unpacked(bytesOf(entry.index)));
  const parts = await Promise.all(index.sources.map(read)), sets = new Map();
  for (const [set, entry] of Object.entries(index.prompts)) {
    const found = await read(entry);
    found.ids.forEach((id, i) => sets.set(`${set}\n${id}`, [found.questions[i], `${set}-${Math.floor(i / found.part)}`, i % found.part]));
  }
  const n = parts.reduce((sum, p) => sum + p.prompt.length, 0), codes = parts.reduce((sum, p) => sum + p.outcomes.reduce((m, o) => m + o.length, 0), 0);
  const made = {...index, n, sets, first: [], prompts: table(), failures: table(), criteria: table(), questions: [], change: null, outcomes: new Uint32Array(codes), at: new Uint32Array(n + 1)};
  for (const [name, type] of [["source", Uint32Array], ["prompt", Uint32Array], ["number", Uint32Array], ["length", Uint32Array], ["failure", Uint32Array], ["score", Float64Array]]) made[name] = new type(n);
  made.failures.place("");
  let i = 0, at = 0;
  parts.forEach((p, s) => {
    const set = index.sources[s].prompts, prompts = p.prompts.map(id => made.prompts.place(`${set}\n${id}`));
    const failures = p.failures.map(made.failures.place), criteria = p.criteria.map(made.criteria.place);
    made.first.push(i);
    for (let j = 0; j < p.prompt.length; j++, i++) {
      made.source[i] = s; made.prompt[i] = prompts[p.prompt[j]]; made.number[i] = p.number[j]; made.length[i] = p.length[j];
      made.failure[i] = failures[p.failure[j]]; made.score[i] = p.score[j] ?? NaN; made.at[i] = at;
      for (const code of p.outcomes[j]) made.outcomes[at++] = 3 * criteria[Math.floor(code / 3)] + code % 3;
    }
  });
  made.at[n] = at; made.first.push(n);
  made.questions = made.prompts.names.map(name => (sets.get(name) || [""])[0] || name.slice(name.indexOf("\n") + 1));
  return made;
}
const idOf = i => { const name = all.prompts.names[all.prompt[i]]; return name.slice(name.indexOf("\n") + 1); };
const nameOf = i => `${all.sources[all.source[i]].name}/${idOf(i)}/${all.number[i]}`;
function placeOf(name) {
  const s = all.sources.findIndex(one => name.startsWith(`${one.name}/`));
  for (let i = all.first[s]; i < all.first[s + 1]; i++) if (nameOf(i) === name) return i;
  return -1;
}
// Mean score of a prompt in the last source of a family that has it, minus that in the first.
function changes() {
  if (all.change) return all.change;
  all.change = new Float64Array(all.n).fill(NaN); all.ends = new Map();
  for (const family of new Set(all.sources.map(s => s.family))) {
    const ends = new Map(), mine = [...all.sources.keys()].filter(s => all.sources[s].family === family);
    const each = act => { for (const s of mine) for (let i = all.first[s]; i < all.first[s + 1]; i++) act(i, s, all.prompt[i]); };
    each((i, s, p) => {
      const score = all.score[i]; if (Number.isNaN(score)) return;
      if (!ends.has(p)) ends.set(p, {first: s, sum: 0, n: 0, last: s, total: 0, m: 0});
      const e = ends.get(p);
      if (s === e.first) { e.sum += score; e.n++; }
      if (s !== e.last) { e.last = s; e.total = e.m = 0; }
      e.total += score; e.m++;
    });
    each((i, s, p) => { const e = ends.get(p); if (e && e.first !== e.last && (s === e.first || s === e.last)) all.change[i] = e.total / e.m - e.sum / e.n; });
  }
  return all.change;
}

// ---------------------------------------------------------------- filters
function wantedCriteria(state) {
  if (!state.c.trim() && !state.o) return null;
  const word = state.c.trim().toLowerCase(), names = all.criteria.names, exact = names.some(name => name.toLowerCase() === word);
  const wanted = new Uint8Array(3 * names.length);
  names.forEach((name, i) => { const low = name.toLowerCase(); if (exact ? low === word : low.includes(word)) for (let o = 0; o < 3; o++) if (!state.o || Number(state.o) === o) wanted[3 * i + o] = 1; });
  return wanted;
}
function matching(state) {
  const within = k => { const [low, high] = [0, 1].map(i => state[k + i].trim() === "" ? NaN : Number(state[k + i])); return Number.isNaN(low) && Number.isNaN(high) ? null : v => !(v < low) && !(v > high) && !Number.isNaN(v); };
  const [step, score, length] = ["t", "r", "l"].map(within), wanted = wantedCriteria(state), changed = BY_CHANGE.includes(state.ord) ? changes() : null;
  const failure = state.f.startsWith("=") ? all.failures.names.indexOf(state.f.slice(1)) : -1, found = [];
  all.sources.forEach((source, s) => {
    if (state.src && state.src !== `s:${source.stage}` && state.src !== `f:${source.family}`) return;
    if (step && !(/^\d+$/.test(source.label) && step(Number(source.label)))) return;
    for (let i = all.first[s]; i < all.first[s + 1]; i++) {
      const failed = all.failure[i];
      if (score && !score(all.score[i]) || length && !length(all.length[i]) || changed && Number.isNaN(changed[i])) continue;
      if (state.f && (failure >= 0 ? failed !== failure : (state.f === "any") !== (failed > 0))) continue;
      if (wanted) { let met = false; for (let a = all.at[i]; a < all.at[i + 1] && !met; a++) met = wanted[all.outcomes[a]]; if (!met) continue; }
      found.push(i);
    }
  });
  return ordered(found, state.ord);
}
function ordered(found, by) {
  const value = {best: i => -all.score[i], worst: i => all.score[i], long: i => -all.length[i], up: i => -changes()[i], down: i => changes()[i], change: i => -Math.abs(changes()[i])}[by];
  if (!value) return found;
  const values = new Float64Array(all.n), last = v => Number.isNaN(v) ? Infinity : v;
  for (const i of found) values[i] = last(value(i));
  // Of equal changes, answers to one prompt are side by side.
  return found.sort((a, b) => values[a] - values[b] || (BY_CHANGE.includes(by) ? all.prompt[a] - all.prompt[b] : 0) || a - b);
}
const partOf = i => { const s = all.source[i]; return `${all.sources[s].key}-${Math.floor((i - all.first[s]) / all.part)}`; };
const lineOf = i => (i - all.first[all.source[i]]) % all.part;
function* stringsOf(value) {
  if (typeof value === "string") yield value; else if (value && typeof value === "object") for (const v of Object.values(value)) yield* stringsOf(v);
}
const wordsOf = text => text.toLowerCase().split(/\s+/).filter(Boolean);
function says(line, question, words) {
  const low = question.toLowerCase(), left = words.filter(w => !low.includes(w));
  if (!left.length) return true;
  const raw = line.toLowerCase();  // quick: most lines do not have it, and need not be parsed
  if (!left.every(w => raw.includes(JSON.stringify(w).slice(1, -1)))) return false;
  const text = [...stringsOf(JSON.parse(line))].join("\n").toLowerCase();
  return left.every(w => text.includes(w));
}
async function search(found, words) {
  const mine = hunt, groups = new Map(), hit = new Uint8Array(all.n);
  for (const i of found) { const part = partOf(i); if (!groups.has(part)) groups.set(part, []); groups.get(part).push(i); }
  const jobs = [...groups]; let next = 0, done = 0, drawn = performance.now();
  const now = () => list(found.filter(i => hit[i]), done < jobs.length ? `; searched ${done} of ${jobs.length} parts` : "");
  const work = async () => {
    while (next < jobs.length && mine === hunt) {
      const [part, samples] = jobs[next++], text = await lines(part);
      for (const i of samples) if (says(text[lineOf(i)], all.questions[all.prompt[i]], words)) hit[i] = 1;
      done++;
      if (mine === hunt && performance.now() - drawn > 200) { now(); drawn = performance.now(); }
    }
  };
  await Promise.all([1, 2, 3, 4].map(work));
  if (mine === hunt) now();
}

// ---------------------------------------------------------------- list
function el(kind, ...inside) {
  const [tag, ...classes] = kind.split("."), made = document.createElement(tag);
  made.className = classes.join(" "); made.append(...inside.filter(x => x !== null && x !== ""));
  return made;
}
const number = (v, digits = 2) => v === null || v === undefined || Number.isNaN(v) ? "—" : (Math.abs(v) >= 100 ? v.toFixed(0) : v.toFixed(digits)).replace("-", "−");
const signed = v => (v > 0 ? "+" : "") + number(v);
const whereOf = s => /^\d+$/.test(s.label) ? `${s.stage}, step ${s.label}` : s.label === s.stage ? s.stage : `${s.stage}, ${s.label}`;
function addressOf(name, alone) {
  const hash = new URLSearchParams(alone ? "" : location.hash.slice(1)); hash.set("s", name);
  return `#${hash}`;
}
function row(i, at) {
  const made = el("a.row", el("b.num", number(all.score[i])), el("bdi", all.questions[all.prompt[i]]), el("span.small", [
    whereOf(all.sources[all.source[i]]), `#${all.number[i]}`, `${all.length[i]} tokens`, all.change && report.state.ord && !Number.isNaN(all.change[i]) ? `change ${signed(all.change[i])}` : "",
  ].filter(Boolean).join(" · "), all.failure[i] ? el("b.failed", ` ${all.failures.names[all.failure[i]]}`) : ""));
  made.href = addressOf(nameOf(i)); made.style.top = `${at * HEIGHT}px`;
  if (nameOf(i) === report.state.s) made.setAttribute("aria-current", "true");
  return made;
}
function paint() {
  const box = $(".rows"), from = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - 5), rows = Math.min(shown.length, MOST_ROWS);
  $(".tall").style.height = `${rows * HEIGHT}px`;
  $(".tall").replaceChildren(...shown.slice(from, Math.min(rows, from + Math.ceil(box.clientHeight / HEIGHT) + 10)).map((i, at) => row(i, from + at)));
}
function list(found, more = "") {
  shown = found;
  const cut = found.length > MOST_ROWS ? `; the first ${MOST_ROWS} are listed` : "", none = !found.length && !report.state.q.trim() && BY_CHANGE.includes(report.state.ord) ? "; no prompt of these was sampled at two places" : "", steps = all.left_out ? `; ${all.left_out} steps of training are left out` : "";
  $("#count").textContent = `${found.length} of ${all.n} samples${cut}${none}${more}${steps}.`;
  paint();
}
function fail(error) { $("#count").textContent = String(error.message); }
function refresh() {
  if (!all) return;
  const state = report.state, now = JSON.stringify(Object.entries(state).filter(([k]) => !["s", "y", "d", "v"].includes(k)));
  if (now !== key) {
    if (key) $(".rows").scrollTop = 0;
    key = now; hunt++;
    const found = matching(state), words = wordsOf(state.q);
    if (words.length) search(found, words).catch(fail); else list(found);
  } else paint();
  if (state.s !== opened) { opened = state.s; open(state.s).catch(fail); }
}
function move(by) {
  const at = shown.findIndex(i => nameOf(i) === report.state.s), to = Math.min(Math.max(0, at < 0 ? 0 : at + by), Math.min(shown.length, MOST_ROWS) - 1);
  if (to < 0) return;
  const box = $(".rows"), top = to * HEIGHT;
  if (top < box.scrollTop || top + HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 3;
  report.set({s: nameOf(shown[to])});
}

// ---------------------------------------------------------------- one sample
function marked(text, words) {
  const pattern = new RegExp([...words.map(w => w.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")), "<[^<>]{1,300}>"].join("|"), "gi"), parts = [];
  let at = 0;
  for (const m of String(text).matchAll(pattern)) { parts.push(text.slice(at, m.index), words.includes(m[0].toLowerCase()) ? el("mark", m[0]) : el("span.tag", m[0])); at = m.index + m[0].length; }
  return [...parts, text.slice(at)];
}
function pre(text, words, kind = "pre") { const made = el(kind, ...marked(text, words)); made.dir = "auto"; return made; }
function judged(j, words) {
  const said = [j.about && j.about !== j.name ? j.about : "", ...j.words].filter(Boolean).map(w => el("span.small", ...marked(w, words)));
  const mark = j.outcome === null ? el("span.mark-of") : el(`span.mark-of.o${j.outcome}`, el("b", `${MARKS[j.outcome]} ${j.negative ? ["absent", "present", "unusable"][j.outcome] : OUTCOMES[j.outcome]}`));
  return el("li.judged", mark,
    el("span", el("bdi", ...marked(j.name, words)), " ", el("span.pill", j.score === null ? "no score" : `score ${number(j.score)}`), " ", j.negative ? el("span.pill", "a fault") : "",
      " ", j.weight === null ? "" : el("span.pill", `weight ${number(j.weight, 1)}`), ...said));
}
function turns(talk, words) {
  const word = {passed: "✓ passed", failed: "✕ failed", error: "◌ counts as none"}[talk.verdict];
  const checks = talk.checks.map(c => el(`li.${c.passed ? "passed" : "missing"}`, `${c.passed ? "✓" : "✕"} `, el("span.kind", c.kind), " ", el("bdi", c.name), c.detail ? el("span.small", c.detail) : ""));
  const said = talk.said.map(t => el(`li.${["user", "agent", "call"].includes(t.who) ? t.who : "tool"}`, el("span.who", t.label, " ", t.trouble ? el("span.pill.trouble", t.trouble) : ""), pre(t.text, words), t.again ? el("details", el("summary", "the other sample of this turn"), pre(t.again, words)) : ""));
  return [el(`p.outcome.${talk.verdict}`, el("b", word), " ", el("bdi", talk.why)), checks.length ? el("ul.checks", ...checks) : "", el("ol.said", ...said), talk.left_out ? el("p.hint", `${talk.left_out} messages more are in the record.`) : ""];
}
function others(i) {
  const by = new Map(), p = all.prompt[i];
  for (let k = 0; k < all.n; k++) if (all.prompt[k] === p) { if (!by.has(all.source[k])) by.set(all.source[k], []); by.get(all.source[k]).push(k); }
  const rows = [...by].slice(0, MOST_SOURCES).map(([s, found]) => {
    const scores = found.map(k => all.score[k]).filter(v => !Number.isNaN(v)), mean = scores.length ? scores.reduce((a, b) => a + b) / scores.length : NaN;
    const links = found.slice(0, 64).flatMap(k => { const a = el("a", number(all.score[k])); a.href = addressOf(nameOf(k)); if (k === i) a.setAttribute("aria-current", "true"); return [a, " "]; });
    return el("tr", el("th", whereOf(all.sources[s])), el("td.num", number(mean)), el("td", ...links));
  });
  const head = el("thead", el("tr", ...["Stage", "Mean", "Each"].map(t => el("th", t))));
  return el("details", el("summary", `All answers to this prompt: ${by.size} ${by.size === 1 ? "place" : "places"}${by.size > MOST_SOURCES ? `, the first ${MOST_SOURCES} shown` : ""}`), el("div.scroll", el("table", head, el("tbody", ...rows))));
}
async function open(name) {
  const box = $(".sample"), i = name ? placeOf(name) : -1;
  if (i < 0) { box.replaceChildren(el("p.empty", name ? `No sample ${name} is on this page.` : "Choose a sample.")); return; }
  const source = all.sources[all.source[i]], said = JSON.parse((await lines(partOf(i)))[lineOf(i)]), words = wordsOf(report.state.q);
  const prompt = all.sets.get(all.prompts.names[all.prompt[i]]), asked = prompt && JSON.parse((await lines(prompt[1]))[prompt[2]]);
  if (opened !== name) return;
  const failure = all.failures.names[all.failure[i]], link = el("a", "permalink"), change = changes()[i];
  link.href = addressOf(name, true);
  const pills = [`score ${number(all.score[i])}`, `${all.length[i]} tokens`, [failure, "scored"].includes(said.status) ? "" : said.status, Number.isNaN(change) ? "" : `this prompt changed by ${signed(change)}`].filter(Boolean).flatMap(t => [el("span.pill", t), " "]);
  const metrics = Object.entries(said.metrics).map(([k, v]) => el("li", `${k.replaceAll("_", " ")} `, el("b", number(v))));
  const parts = said.parts.map(([k, v, w, share]) => el("tr", el("th", k), el("td.num", number(v) + (w === null ? "" : ` × ${number(w)}`)), el("td.num", el("b", share === null ? "—" : number(share)))));
  const evidence = asked ? el("details.evidence", el("summary", "The prompt"), pre(asked[1], words)) : el("p.hint", "Its prompt is not stored any more.");
  if (matchMedia("(min-width: 1500px)").matches && asked && !said.talk) evidence.open = true;
  box.replaceChildren(
    el("h3", el("bdi", ...marked(asked ? asked[0] : idOf(i), words))),
    el("p.sub", `${whereOf(source)} · `, el("bdi", idOf(i)), ` #${all.number[i]} · `, link),
    el("p", ...pills, failure ? el("span.pill.trouble", failure) : ""), said.failed && said.failed !== failure ? el("p.outcome.failed", el("bdi", said.failed)) : "",
    ...(said.talk ? turns(said.talk, words) : [said.text ? pre(said.text, words, "pre.answer-text") : el("p.empty", "Empty answer.")]),
    said.judgements.length ? el("div", el("h4", "What the judge said"), el("ul.judgements", ...said.judgements.map(j => judged(j, words)))) : "",
    parts.length ? el("div", el("h4", "Where the reward comes from"), el("div.scroll", el("table.parts", el("tbody", ...parts)))) : "",
    metrics.length ? el("ul.scores", ...metrics) : "", others(i), evidence);
  box.scrollTop = 0;
}

// ---------------------------------------------------------------- start
function option(select, value, text) { const o = el("option", text); o.value = value; $(`select[data-state=${select}]`).append(o); }
report = reportPage({s: ""}, refresh);
report.begin();
addEventListener("keydown", event => {
  const by = {j: 1, k: -1}[event.key];
  if (!by || !all || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  event.preventDefault(); move(by);
});
$(".rows").addEventListener("scroll", () => requestAnimationFrame(paint), {passive: true});
readIndex().then(made => {
  all = made;
  const stages = [...new Set(all.sources.map(s => s.stage))];
  for (const stage of stages) option("src", `s:${stage}`, stage);
  for (const family of new Set(all.sources.map(s => s.family))) if (new Set(all.sources.filter(s => s.family === family).map(s => s.stage)).size > 1) option("src", `f:${family}`, `all ${family} evaluations`);
  for (const name of all.failures.names) if (name) option("f", `=${name}`, name);
  $("#criteria").append(...all.criteria.names.slice(0, 1000).map(name => { const o = el("option"); o.value = name; return o; }));
  report.begin();
  const at = shown.findIndex(i => nameOf(i) === report.state.s);
  if (at > 0) { $(".rows").scrollTop = at * HEIGHT - 100; paint(); }
}).catch(fail);
