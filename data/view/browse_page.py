"""Stylesheet and script of the page of a whole dataset. Only rows in view are created, so that ten
thousand episodes scroll like ten. Images come in sheets, each fetched when one of its rows is near.
The page's address holds what is shown and flagged; the browser's storage also keeps the flags.
"""

STYLE = """
:root { --row: 88px; --strip: 384px; }
.bar { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: .5rem .7rem;
  align-items: center; padding: .7rem 0; background: var(--paper); font-size: .9rem;
  border-bottom: 1px solid var(--line); }
.bar input { font: inherit; color: var(--ink); background: var(--card); padding: .25rem .5rem;
  border: 1px solid var(--line); border-radius: 6px; }
#task { flex: 1; min-width: 8rem; } .bar input[type=number] { width: 5rem; }
#count { color: var(--soft); margin: .6rem 0; font-variant-numeric: tabular-nums; }
.flags a { color: var(--main); } .flags { display: grid; gap: .4rem; margin-top: 1rem; }
.flags[hidden] { display: none; }
.flags code { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .35rem .6rem; font-size: .85rem; overflow: auto; max-height: 6rem; user-select: all;
  overflow-wrap: anywhere; }
#rows { position: relative; }
.row { position: absolute; left: 0; right: 0; height: var(--row); display: grid; gap: 0 1rem;
  grid-template-columns: 5.2rem var(--strip) minmax(0, 1fr); align-items: center;
  border-bottom: 1px solid var(--line); }
.row.flagged { background: color-mix(in srgb, var(--other) 14%, transparent); }
.row label { display: flex; gap: .5rem; align-items: center; cursor: pointer;
  font-variant-numeric: tabular-nums; padding-left: .4rem; }
.strip { aspect-ratio: 384 / 72; width: 100%; border-radius: 4px; background-color: var(--line);
  background-repeat: no-repeat; }
.said { min-width: 0; } .said > div { overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.numbers { color: var(--soft); font-size: .8rem; font-variant-numeric: tabular-nums; }
.marks b { font-size: .72rem; font-weight: 600; color: var(--other); margin-right: .7rem; }
.length { height: 3px; background: var(--main); border-radius: 2px; margin: .2rem 0; }
@media (max-width: 56rem) { :root { --row: 158px; } .bar { position: static; }
  .row { grid-template-columns: 4.6rem minmax(0, 1fr); grid-template-rows: auto 1fr;
    align-content: center; }
  .strip { max-width: var(--strip); } .said { grid-column: 1 / -1; padding-left: .4rem; } }
"""

SCRIPT = """
const page = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const episodes = page.lengths.length, key = `chiliad flags ${page.digest}`;
const list = by("rows"), longest = Math.max(1, ...new Set(page.lengths));
let flags = new Set(), shown = [], drawn = new Map();

const share = (value, i) => (page.lengths[i] ? value / page.lengths[i] : 0);
const values = {
  number: (i) => i, length: (i) => page.lengths[i], still: (i) => share(page.still[i], i),
  doubled: (i) => share(page.doubled[i], i), outside: (i) => share(page.outside[i], i),
  jerk: (i) => page.jerk[i] ?? -1,
};

function parse(text) {
  const found = new Set();
  for (const part of text.split(",")) {
    const [first, last] = part.split("-").map(Number);
    if (!part.trim() || !Number.isInteger(first)) continue;
    for (let i = first; i <= (last ?? first) && i < episodes; i++) found.add(i);
  }
  return found;
}

function ranges(chosen) {
  const sorted = [...chosen].sort((a, b) => a - b), parts = [];
  for (let k = 0; k < sorted.length; k++) {
    const first = sorted[k];
    while (sorted[k + 1] === sorted[k] + 1) k++;
    parts.push(first === sorted[k] ? `${first}` : `${first}-${sorted[k]}`);
  }
  return parts.join(",");
}

function element(kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function row(i) {
  const made = element("div", "row"), label = element("label"), box = element("input");
  box.type = "checkbox";
  box.checked = flags.has(i);
  box.onchange = () => { box.checked ? flags.add(i) : flags.delete(i); flagged(); };
  label.append(box, `${i}`);
  const strip = element("div", "strip"), camera = Number(by("camera").value || -1);
  if (camera >= 0 && page.seen[camera][i]) {
    const sheet = Math.floor(i / page.per_sheet), first = sheet * page.per_sheet;
    const rows = Math.min(page.per_sheet, episodes - first), at = i - first;
    strip.style.backgroundImage = `url("${page.sheets[camera][sheet]}")`;
    strip.style.backgroundSize = `100% ${rows * 100}%`;
    strip.style.backgroundPosition = `0 ${rows > 1 ? (at / (rows - 1)) * 100 : 0}%`;
  }
  const said = element("div", "said"), task = element("div", "", page.tasks[page.task[i]] ?? "");
  task.title = task.textContent;
  const length = element("div", "length"), marks = element("div", "marks");
  length.style.width = `${(100 * page.lengths[i]) / longest}%`;
  const percent = (value) => `${(100 * share(value, i)).toFixed(0)} %`;
  const jerk = page.jerk[i] === null ? "–" : `${page.jerk[i]}`;
  const numbers = element("div", "numbers",
    `${(page.lengths[i] / page.fps).toFixed(1)} s · ${percent(page.still[i])} still · ` +
    `${percent(page.doubled[i])} doubled · jerk ${jerk} · ${page.outside[i]} out of range`);
  page.marks.forEach((mark, m) => {
    if (page.marked[i] & (1 << m)) marks.append(element("b", "", mark));
  });
  if (page.unreadable[i]) marks.append(element("b", "", page.unreadable[i]));
  marks.title = marks.textContent;
  said.append(task, length, numbers, marks);
  made.append(label, strip, said);
  return made;
}

function draw() {
  const height = parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--row"));
  list.style.height = `${height * shown.length}px`;
  const top = -list.getBoundingClientRect().top, margin = 6;
  const first = Math.max(0, Math.floor(top / height) - margin);
  const last = Math.min(shown.length, Math.ceil((top + innerHeight) / height) + margin);
  const wanted = new Map();
  for (let k = first; k < last; k++) {
    const made = drawn.get(shown[k]) ?? row(shown[k]);
    made.style.top = `${k * height}px`;
    made.classList.toggle("flagged", flags.has(shown[k]));
    if (!made.isConnected) list.append(made);
    wanted.set(shown[k], made);
  }
  for (const [i, made] of drawn) if (wanted.get(i) !== made) made.remove();
  drawn = wanted;
}

function chosen() {
  const asked = by("task").value.toLowerCase(), mark = by("mark").value;
  const [least, most] = [by("least").value, by("most").value].map((v) => (v ? Number(v) : null));
  const fits = page.tasks.map((text) => text.toLowerCase().includes(asked));
  const bit = mark === "any" ? -1 : 1 << page.marks.indexOf(mark);
  const found = [];
  for (let i = 0; i < episodes; i++) {
    const seconds = page.lengths[i] / page.fps;
    if (asked && !fits[page.task[i]]) continue;
    if (least !== null && seconds < least) continue;
    if (most !== null && seconds > most) continue;
    if (mark === "flagged" ? !flags.has(i) : mark && !(page.marked[i] & bit)) continue;
    found.push(i);
  }
  const value = values[by("sort").value] ?? values.number, way = by("down").checked ? -1 : 1;
  return found.sort((a, b) => way * (value(a) - value(b)) || a - b);
}

function remember() {
  const state = new URLSearchParams();
  for (const id of ["task", "least", "most", "mark", "sort", "camera"])
    if (by(id).value && by(id).selectedIndex !== 0) state.set(id, by(id).value);
  if (by("down").checked) state.set("down", "1");
  if (flags.size) state.set("flag", ranges(flags));
  history.replaceState(null, "", `#${state}`);
  try { localStorage.setItem(key, ranges(flags)); } catch { /* a browser that stores nothing */ }
}

function flagged() {
  const text = ranges(flags);
  by("count").textContent = `${shown.length.toLocaleString("en")} of ` +
    `${episodes.toLocaleString("en")} episodes shown, ${flags.size.toLocaleString("en")} flagged`;
  by("saved").hidden = !flags.size;
  by("command").textContent =
    `python -m tools.data edit ${page.path} --delete ${text.length < 200 ? text : "flagged.txt"} ` +
    "--out NEW";
  by("save").href = `data:text/plain,${encodeURIComponent(text + "\\n")}`;
  remember();
  draw();
}

function filter() { shown = chosen(); drawn.forEach((made) => made.remove()); drawn.clear();
  flagged(); }

function fromLink() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const id of ["task", "least", "most", "mark", "sort", "camera"])
    if (state.has(id)) by(id).value = state.get(id);
  by("down").checked = state.has("down");
  let stored = "";
  try { stored = localStorage.getItem(key) ?? ""; } catch { /* as above */ }
  flags = parse(state.get("flag") ?? stored);
  filter();
}

for (const id of ["task", "least", "most", "mark", "sort", "camera", "down"])
  by(id).oninput = filter;
by("all").onclick = () => { for (const i of shown) flags.add(i); filter(); };
by("none").onclick = () => { for (const i of shown) flags.delete(i); filter(); };
addEventListener("scroll", draw, { passive: true });
addEventListener("resize", draw);
for (const part of document.querySelectorAll("details")) part.ontoggle = draw;
window.onhashchange = fromLink;
fromLink();
"""
