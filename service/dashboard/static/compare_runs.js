"use strict";
// Draws one metric of several runs over each other. The server smooths the curves and chooses the
// points; what it left out is said beside each run's name.

const compared = document.querySelector("[data-compared]");
const curveForm = document.querySelector("form[data-curve-form]");
const COLOURS = 10;
let overlaid = null;
let curves = [];
let round = 0;

function chosen() {
  const { metric, smoothing, x, log } = curveForm.elements;
  return { metric: metric.value, smoothing: Number(smoothing.value), x: x.value, log: log.checked };
}

function duration(seconds) {
  const [unit, name] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([one]) => Math.abs(seconds) >= one) ?? [1, "s"];
  return `${Number((seconds / unit).toPrecision(3))} ${name}`;
}

// The value nearest to the pointer: runs save at different steps.
function nearest(chart, series, at) {
  const values = chart.data[series];
  const xs = chart.data[0];
  if (series === 0 || values[at] !== null && values[at] !== undefined) return at;
  const shown = (one) => values[one] !== null && values[one] !== undefined;
  let left = at;
  let right = at;
  while (left >= 0 && !shown(left)) left -= 1;
  while (right < xs.length && !shown(right)) right += 1;
  if (left < 0 && right >= xs.length) return null;
  if (left < 0) return null; // before its first point
  if (right >= xs.length) return null; // after its last point
  return xs[at] - xs[left] <= xs[right] - xs[at] ? left : right;
}

function shownValue(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

function overlay() {
  overlaid?.destroy();
  overlaid = null;
  const { x, log } = chosen();
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const tables = curves.map(({ steps, seconds, smoothed }) => [
    x === "time" ? seconds : steps,
    log ? smoothed.map((one) => (one > 0 ? one : null)) : smoothed,
  ]);
  const drawn = tables.map(([at], number) => number).filter((number) => tables[number][0].length > 0);
  if (drawn.length === 0) return;
  const joined = uPlot.join(drawn.map((number) => tables[number]));
  const several = drawn.map((number) => {
    const stroke = colour(`--curve-${number % COLOURS}`);
    const few = tables[number][0].length <= 60;
    return {
      label: curves[number].name,
      stroke,
      width: 1.75,
      dash: number >= COLOURS ? [6, 4] : undefined,
      spanGaps: true,
      points: { show: few, size: 4, stroke, fill: stroke },
      value: (_, value) => shownValue(value),
    };
  });
  overlaid = new uPlot({
    width: compared.clientWidth,
    height: 340,
    scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
    axes: [
      { ...axis, size: 28, values: x === "time" ? (_, marks) => marks.map(duration) : undefined },
      { ...axis, size: 64, values: log ? (_, marks) => marks.map((one) => (one === null ? "" : shownValue(one))) : figures },
    ],
    series: [{ label: x === "time" ? "Time" : "Step", value: (_, value) => (value === null ? "–" : x === "time" ? duration(value) : String(value)) }, ...several],
    cursor: { dataIdx: nearest, drag: { x: true, y: false } },
    legend: { live: true },
  }, joined, compared);
}

function note({ count, steps, smoothed, not_finite: lost, is_cut: cut }, log) {
  const parts = [];
  if (count === 0) parts.push("no values");
  if (cut) parts.push("only the first 200,000 steps are read");
  if (steps.length < count) parts.push(`showing ${steps.length.toLocaleString("en")} of ${count.toLocaleString("en")} points`);
  if (lost) parts.push(`${lost.toLocaleString("en")} NaN or inf not drawn`);
  const negative = log ? smoothed.filter((one) => !(one > 0)).length : 0;
  if (negative) parts.push(`${negative.toLocaleString("en")} values of 0 or less not drawn`);
  return parts.join("; ");
}

function tellNotes() {
  const { log } = chosen();
  for (const { place, ...curve } of curves) place.querySelector("span").textContent = curve.problem ?? note(curve, log);
}

async function readCompared() {
  const own = (round += 1);
  const { metric, smoothing } = chosen();
  const places = [...document.querySelectorAll(".curve-notes [data-run]")];
  const query = new URLSearchParams({ metric, smoothing });
  const empty = { steps: [], seconds: [], values: [], smoothed: [], count: 0, not_finite: 0, is_cut: false };
  const read = await Promise.all(places.map(async (place) => {
    try {
      const answer = await fetch(`${place.dataset.run}/curve?${query}`);
      if (!answer.ok) throw new Error(String(answer.status));
      return { name: place.dataset.name, place, ...await answer.json() };
    } catch {
      return { name: place.dataset.name, place, ...empty, problem: "could not be read" };
    }
  }));
  if (own !== round) return;
  curves = read;
  document.getElementById("curves-title").textContent = metric;
  tellNotes();
  overlay();
}

function remember() {
  const query = new URLSearchParams(new FormData(curveForm));
  if (query.get("smoothing") === "0") query.delete("smoothing");
  if (query.get("x") === "step") query.delete("x");
  history.replaceState(null, "", `${location.pathname}?${query}`);
  const link = document.querySelector("a[data-equal]");
  if (query.has("equal")) query.delete("equal");
  else query.set("equal", "true");
  link.href = `${location.pathname}?${query}`;
}

if (compared && curveForm) {
  let timer = 0;
  curveForm.addEventListener("input", ({ target }) => {
    if (target.name === "smoothing") curveForm.querySelector("output").textContent = Number(target.value).toFixed(2);
    clearTimeout(timer);
    timer = setTimeout(() => {
      remember();
      if (target.name === "metric" || target.name === "smoothing") readCompared();
      else {
        tellNotes();
        overlay();
      }
    }, 150);
  });
  curveForm.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("DOMContentLoaded", readCompared);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", overlay);
  document.addEventListener("cairn:theme", overlay);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      overlay();
    }
  });
}
