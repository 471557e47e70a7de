"""Stylesheet and script of an episode's page; they load nothing from elsewhere.

Videos, slider and cursor follow one clock. A link that ends in #frame=40 opens at that frame.
"""

STYLE = """
:root { --label: 9.5rem; --value: 5rem; --cursor: var(--ink); }
body { max-width: 110rem; }
.facts { margin: 0; }
main { display: grid; grid-template-columns: minmax(0, 3fr) minmax(0, 2fr); gap: 1.25rem;
  margin-top: 1.5rem; align-items: start; }
.seen { position: sticky; top: 1.25rem; display: grid; gap: 1rem;
  max-height: calc(100vh - 2.5rem); overflow: auto; }
.alone { grid-template-columns: minmax(0, 1fr); }
.player { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.15rem; }
main section { margin: 0; } main h2 { margin: 0; }
.plots { display: grid; gap: 1.25rem; min-width: 0; }
.cameras { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: .75rem; }
.range { color: var(--soft); font-size: .72rem; line-height: 1.25; display: block;
  white-space: nowrap; }
.note { margin: 0; font-size: .8rem; }
.controls { display: flex; align-items: center; gap: .6rem; margin-top: .9rem; }
button, select { font: inherit; font-size: .9rem; color: var(--ink); background: var(--paper);
  border: 1px solid var(--line); border-radius: 6px; padding: .25rem .6rem; cursor: pointer; }
#play { min-width: 4.4rem; }
#scrub { flex: 1; min-width: 3rem; margin: 0; accent-color: var(--main); }
#now { margin: .6rem 0 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
.head { display: flex; justify-content: space-between; align-items: baseline; gap: 1rem;
  margin-bottom: .5rem; }
.lines { position: relative; touch-action: none; cursor: ew-resize; }
.dim { display: grid; grid-template-columns: var(--label) minmax(0, 1fr) var(--value);
  align-items: center; border-top: 1px solid var(--line); }
.dim > div { padding: .2rem .6rem .2rem 0; min-width: 0; }
.name { display: block; font-size: .85rem; font-weight: 500; line-height: 1.25;
  overflow-wrap: anywhere; }
.dim output { text-align: right; font-size: .85rem; font-variant-numeric: tabular-nums; }
.dim svg { display: block; width: 100%; height: 2.9rem; }
.dim path { fill: none; stroke: var(--main); stroke-width: 1.5; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.action path { stroke: var(--other); }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--cursor);
  opacity: .65; pointer-events: none; left: calc(var(--label) +
  (100% - var(--label) - var(--value)) * var(--at, 0)); }
@media (max-width: 56rem) { main { grid-template-columns: minmax(0, 1fr); }
  .seen { position: static; max-height: none; } :root { --label: 7rem; --value: 4.2rem; } }
@media print { .controls { display: none; } }
"""

SCRIPT = """
const { fps, length, columns, tasks } = JSON.parse(document.getElementById("data").textContent);
const videos = [...document.querySelectorAll("video")];
const by = (id) => document.getElementById(id);
const last = length - 1;
let frame = 0, began = null;

function show(next) {
  frame = Math.min(last, Math.max(0, next));
  by("scrub").value = frame;
  by("now").innerHTML = `frame <b>${frame}</b> of ${length} · ${(frame / fps).toFixed(2)} s`;
  document.body.style.setProperty("--at", last ? frame / last : 0);
  for (const output of document.querySelectorAll("output"))
    output.textContent = columns[output.dataset.column][output.dataset.dim][frame] ?? "–";
  const task = tasks.filter((t) => t.first <= frame).pop();
  if (task && by("task").textContent !== task.text) by("task").textContent = task.text;
}

function seek(next) {
  show(next);
  for (const video of videos) video.currentTime = (frame + 0.5) / fps;
  if (began) began = { at: performance.now(), from: frame };
}

function play() {
  if (frame === last) seek(0);
  began = { at: performance.now(), from: frame };
  const rate = Number(by("rate").value);
  for (const video of videos) {
    video.currentTime = (frame + 0.5) / fps;
    video.playbackRate = rate;
    video.play();
  }
  by("play").textContent = "Pause";
  requestAnimationFrame(tick);
}

function pause() {
  began = null;
  for (const video of videos) video.pause();
  by("play").textContent = "Play";
  seek(frame);
}

function tick() {
  if (!began) return;
  const passed = ((performance.now() - began.at) / 1000) * Number(by("rate").value);
  const next = began.from + Math.floor(passed * fps);
  if (next >= last) { show(last); pause(); return; }
  if (next !== frame) show(next);
  requestAnimationFrame(tick);
}

function fromPointer(event) {
  const plot = event.currentTarget.querySelector("svg").getBoundingClientRect();
  const part = (event.clientX - plot.left) / plot.width;
  seek(Math.round(Math.min(1, Math.max(0, part)) * last));
}

for (const video of videos) video.ondblclick = () => video.requestFullscreen();
by("play").onclick = () => (began ? pause() : play());
by("rate").onchange = () => { if (began) { pause(); play(); } };
by("scrub").oninput = (event) => seek(Number(event.target.value));
for (const lines of document.querySelectorAll(".lines")) {
  lines.onpointerdown = (event) => {
    lines.setPointerCapture(event.pointerId);
    fromPointer(event);
  };
  lines.onpointermove = (event) => { if (event.buttons) fromPointer(event); };
}
document.onkeydown = (event) => {
  if (event.target.tagName === "SELECT") return;
  const by_key = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
  if (event.key === " ") { event.preventDefault(); began ? pause() : play(); }
  else if (event.key in by_key) { event.preventDefault(); seek(frame + by_key[event.key]); }
};
for (const video of videos) video.onseeked = () => { video.dataset.shown = video.currentTime; };
const fromLink = () => {
  const asked = /frame=(\\d+)/.exec(location.hash);
  seek(asked ? Number(asked[1]) : 0);
};
window.onhashchange = fromLink;
fromLink();
"""
