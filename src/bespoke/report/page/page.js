"use strict";
const root = document.documentElement;
let figures = JSON.parse(document.getElementById("figures").textContent);
const places = () => [...document.querySelectorAll(".chart")];
const drawn = new Map(); // place -> the figure that is there
const hidden = new Set();
let theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const faint = (hex) => hex + "33";

function dressed(trace, width) {
  // The colours of the theme that is on: a trace only says which of them is its own.
  const meta = trace.meta || {};
  const own = meta.ink ? colour("--ink") : colour("--c" + meta.colour);
  const dress = { ...trace, visible: !hidden.has(meta.method) };
  if (meta.part === "band") return { ...dress, fillcolor: faint(own), line: { width: 0 } };
  if (trace.line) dress.line = { ...trace.line, color: own };
  if (trace.marker) dress.marker = { ...trace.marker, color: own };
  if (trace.marker?.sizeref) dress.marker.sizeref /= Math.min(1, width / 900) ** 2; // smaller bubbles on a phone
  return dress;
}

function layout(figure, width) {
  const ink = colour("--ink"), line = colour("--line"), paper = colour("--paper");
  const given = figure.layout;
  const axis = (settings) => ({ gridcolor: line, linecolor: line, tickcolor: line, ...settings });
  return {
    margin: { l: 48, r: 20, t: 12, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    hoverlabel: { bgcolor: paper, bordercolor: ink, font: { color: ink }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: ink },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...given,
    ...(width ? { width, autosize: false } : {}),
    // Labels take room below and on the left alone. A highest label that takes room above too can lose its tick by that,
    // and get it back without: plotly then draws again and again, and gives up with a warning.
    xaxis: axis({ automargin: "height", ...given.xaxis }),
    yaxis: axis({ automargin: "width", ...given.yaxis }),
    annotations: (given.annotations || []).map((note) => ({ ...note, bgcolor: paper, borderpad: 1 })),
    shapes: (given.shapes || []).map((shape) => ({ ...shape, line: { color: ink, width: 1, dash: "dot", ...shape.line } })),
  };
}

const config = {
  displaylogo: false,
  responsive: true,
  // These and no others: plotly's own set has a button that uploads the chart, with the clients' names in it.
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
};

function registerOthers() {
  // Points and lines are there at once; plotly's other kinds of charts take longer to set up than all else.
  if (Plotly.others) Plotly.others();
  delete Plotly.others;
}

function draw(place, width) {
  const figure = figures[place.dataset.chart];
  const title = place.closest("figure").querySelector("h3").textContent;
  drawn.set(place, figure);
  if (figure.data.some((trace) => (trace.type || "scatter") !== "scatter")) registerOthers();
  return Plotly.react(
    place,
    figure.data.map((trace) => dressed(trace, width || place.clientWidth)),
    { ...layout(figure, width), uirevision: title }, // a chart that is drawn again stays zoomed as it was
    config,
  );
}

function redraw() {
  for (const place of drawn.keys()) draw(place);
}

function show(wanted) {
  theme = wanted;
  root.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

function toggle(key) {
  const method = Number(key.dataset.method);
  hidden.has(method) ? hidden.delete(method) : hidden.add(method);
  press();
  redraw();
}

function press() {
  for (const key of document.querySelectorAll(".legend button"))
    key.setAttribute("aria-pressed", String(!hidden.has(Number(key.dataset.method))));
}

function order(a, b) {
  // Numbers before texts, and what has no value last.
  const x = a.dataset.value ?? a.textContent, y = b.dataset.value ?? b.textContent;
  const known = (text) => text !== "" && Number.isFinite(Number(text));
  if (known(x) && known(y)) return Number(x) - Number(y);
  if (known(x) !== known(y)) return known(x) ? -1 : 1;
  return x.localeCompare(y, undefined, { numeric: true });
}

function turn(head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  sort(head);
}

function sort(head) {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const way = head.getAttribute("aria-sort") === "descending" ? -1 : 1;
  const missing = (row) => ["", "-"].includes(row.cells[column].textContent);
  const rows = [...body.rows].sort((a, b) => missing(a) - missing(b) || way * order(a.cells[column], b.cells[column]));
  body.append(...rows);
}

document.addEventListener("click", ({ target }) => { // for elements that come later too
  const key = target.closest("button");
  if (!key) return;
  if (key.id === "theme") {
    show(theme === "dark" ? "light" : "dark");
    redraw();
  } else if (key.closest(".legend")) toggle(key);
  else if (key.closest("thead")) turn(key.closest("th"));
});

const PRINTED = 680; // pixels of a printed page's width
const APPENDIX = 5; // runs whose settings are printed: those of many would be most of the print
let before = theme, unfolded = [];
addEventListener("beforeprint", () => {
  before = theme;
  show("light");
  const folded = [...document.querySelectorAll(".folded")];
  unfolded = [...document.querySelectorAll(".warnings"), ...(folded.length > APPENDIX ? [] : folded)].filter((each) => !each.open);
  for (const each of unfolded) each.open = true;
  for (const place of places()) draw(place, PRINTED);
});
addEventListener("afterprint", () => {
  show(before);
  for (const each of unfolded) each.open = false;
  for (const place of places()) draw(place).then(() => Plotly.Plots.resize(place)); // plotly keeps the print's width
});

const near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) if (isIntersecting && !drawn.has(target)) draw(target);
}, { rootMargin: "300px" });
const later = window.requestIdleCallback || ((work) => setTimeout(work, 20));
let begun = 0;
function drawAll() { // the first chart at once, then what the reader comes near to, and the rest when there is time
  const own = ++begun, all = places();
  (function rest() {
    if (own !== begun) return; // there is something newer to draw
    const place = all.find((each) => !drawn.has(each));
    if (!place) root.dataset.drawn = "all";
    else Promise.resolve(draw(place)).then(() => later(rest, { timeout: 500 }));
    for (const each of all) near.observe(each);
  })();
}

show(theme);
drawAll();
