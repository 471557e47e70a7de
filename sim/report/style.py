"""The stylesheet of a report: one column, system fonts, colours for light and dark themes."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfbfa; --card: #ffffff; --ink: #1c1f24; --soft: #5c6570; --line: #e3e5e8;
  --main: #2f6bd8; --plain: #a4adb9; --control: #d98a1f; --good: #1d7a46; --bad: #b5472a;
  --edge: #00000026; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --card: #1b1f25; --ink: #e7e9ec; --soft: #9aa4b0; --line: #2e343c;
  --main: #6b9df5; --plain: #66707d; --control: #e3a64a; --good: #5cc48a; --bad: #ee8a6a;
  --edge: #ffffff2e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1.5rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 0 0 1rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .6rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.4rem 1.5rem; margin-top: 1.25rem; }
small { display: block; color: var(--soft); font-size: .8rem; font-weight: 400; }
.eyebrow { margin: 0 0 .25rem; color: var(--soft); font-size: .9rem; }
.headline { margin: 0; font-size: 1.25rem; }
.headline strong { font-size: 3.5rem; line-height: 1; color: var(--main); letter-spacing: -.03em; }
.headline span { display: block; margin-top: .5rem; font-size: 1rem; color: var(--soft); }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.75rem; margin: 1rem 0 0; padding: 0;
  list-style: none; color: var(--soft); font-size: .95rem; }
.facts b { color: var(--ink); }
.note, figcaption { color: var(--soft); font-size: .85rem; }
.note { margin: .9rem 0 0; }
figure { margin: 0; }
figcaption { margin-top: .5rem; }
figcaption b { color: var(--ink); }
.chart { overflow-x: auto; }
.chart, .scroll { background: linear-gradient(to right, var(--card) 40%, transparent) left,
    linear-gradient(to left, var(--card) 40%, transparent) right,
    linear-gradient(to right, var(--edge), transparent) left,
    linear-gradient(to left, var(--edge), transparent) right;
  background-repeat: no-repeat; background-size: 2.5rem 100%, 2.5rem 100%, .8rem 100%, .8rem 100%;
  background-attachment: local, local, scroll, scroll; }
.chart figcaption { position: sticky; left: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.5rem; }
svg { display: block; width: 100%; height: auto; }
section > .chart > svg { max-width: 52rem; min-width: 34rem; }
svg text { font-size: 14px; fill: var(--ink); }
svg .tick { font-size: 12.5px; fill: var(--soft); }
svg .value { font-weight: 600; }
svg .label.main { font-weight: 600; fill: var(--ink); }
svg .label.plain, svg .label.control { fill: var(--ink); }
svg .grid { stroke: var(--line); }
svg rect.main, svg .end { fill: var(--main); }
svg rect.plain { fill: var(--plain); }
svg rect.control { fill: var(--control); }
svg rect.track { fill: var(--line); }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg polyline { fill: none; stroke: var(--main); stroke-linejoin: round; }
svg .raw { stroke-width: 1; opacity: .3; }
svg .smooth { stroke-width: 2; }
svg .line { stroke-width: 2; }
svg .line.plain { stroke: var(--plain); } svg .line.control { stroke: var(--control); }
svg circle.main { fill: var(--main); } svg circle.plain { fill: var(--plain); }
svg circle.control { fill: var(--control); }
svg .recorded { stroke: var(--plain); stroke-width: 2.5; }
svg .predicted { stroke: var(--main); stroke-width: 1.2; }
.findings { margin: 0; padding-left: 1.1rem; } .findings li { margin: .3rem 0; }
.beside { display: grid; grid-template-columns: minmax(0, 17rem) minmax(0, 1fr); gap: 1.5rem;
  margin-top: 1.25rem; align-items: start; }
.beside + .beside, .looks + .beside { border-top: 1px solid var(--line); padding-top: 1.25rem; }
.beside video, .look img { display: block; width: 100%; height: auto; border-radius: 6px; }
.trace { display: grid; grid-template-columns: 7.5rem minmax(0, 1fr); align-items: center;
  border-top: 1px solid var(--line); font-size: .85rem; overflow-wrap: anywhere; }
.looks { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem;
  margin: 1rem 0 1.25rem; }
@media (max-width: 44rem) { .beside { grid-template-columns: minmax(0, 1fr); } }
.scroll { overflow-x: auto; margin-top: 1.25rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .35rem; }
th, td { text-align: left; padding: .4rem 1rem .4rem 0; border-top: 1px solid var(--line);
  vertical-align: top; }
thead th, thead td { border-top: 0; color: var(--soft); font-weight: 500; font-size: .82rem; }
tbody th { font-weight: 500; min-width: 7.5rem; }
td, thead th { white-space: nowrap; }
tr > :last-child { padding-right: 0; }
td svg { width: 7.5rem; margin-top: .25rem; }
.meter { display: block; width: 12rem; max-width: 40vw; height: .55rem; margin-top: .5rem;
  border-radius: 3px; background: var(--line); overflow: hidden; }
.meter span { display: block; height: 100%; background: var(--main); }
.clips { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: 1rem; }
.clip video { display: block; width: 100%; height: auto; border-radius: 6px;
  background: var(--line); }
.clip figcaption { color: var(--ink); line-height: 1.35; }
.clip small { font-size: .74rem; }
.clip span { display: block; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
details { margin-top: 1.25rem; border-top: 1px solid var(--line); padding-top: .8rem; }
summary { cursor: pointer; font-weight: 600; font-size: .9rem; }
pre { overflow-x: auto; font: .8rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
@media print { section { break-inside: avoid; } }
"""
