"use strict";
// Draws metrics over steps, with the steps that aliases name marked on them.

function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  probe.hidden = true;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function aliasLines(aliases, ink) {
  return (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = ink;
    ctx.fillStyle = ink;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    const rows = new Map();
    for (const [step, name] of aliases) {
      const x = Math.round(chart.valToPos(step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const row = rows.get(x) ?? 0;
      rows.set(x, row + 1);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const wide = ctx.measureText(name).width;
      const left = x + 4 + wide > bbox.left + bbox.width;
      ctx.textAlign = left ? "right" : "left";
      ctx.fillText(name, x + (left ? -4 : 4), bbox.top + (12 + 13 * row) * devicePixelRatio);
    }
    ctx.restore();
  };
}

// As few digits as tell the marks of an axis apart; of what is very large or small, with an exponent.
function figures(chart, marks) {
  const largest = Math.max(...marks.map(Math.abs));
  if (!(largest > 0)) return marks.map(String);
  const far = largest >= 1e5 || largest < 1e-3;
  const apart = marks.length > 1 ? Math.abs(marks[1] - marks[0]) : largest;
  const exponent = far ? Math.floor(Math.log10(largest)) : 0;
  // A mark such as 0.25 takes a digit more than the distance alone would say.
  const step = apart / 10 ** exponent;
  let digits = 0;
  while (digits < 6 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return marks.map((one) => {
    if (one === 0) return "0";
    const shown = (one / 10 ** exponent).toFixed(digits);
    return far ? `${shown}e${exponent}` : shown;
  });
}

function draw(place, drawn, step) {
  const values = drawn.series[place.dataset.metric];
  if (!values) return null;
  const line = colour("--accent");
  const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const chart = new uPlot({
    width: place.clientWidth,
    height: place.clientHeight,
    legend: { show: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 58, values: figures }],
    series: [{}, { stroke: line, width: 1.75, spanGaps: true, points: { size: 5, stroke: line } }],
    cursor: { drag: { x: true, y: false } },
    hooks: { draw: [aliasLines(drawn.aliases, colour("--ink"))] },
  }, [drawn.steps, values], place);
  chart.over.addEventListener("click", () => {
    const at = chart.cursor.idx;
    if (at !== null && at !== undefined && chart.select.width === 0) location.assign(step + drawn.steps[at]);
  });
  return chart;
}

let charts = [];
let drawn = null;

function drawAll() {
  const section = document.querySelector("[data-curves]");
  charts.forEach((chart) => chart.destroy());
  charts = [];
  if (!section || !drawn) return;
  charts = [...section.querySelectorAll("[data-metric]")].map((place) => draw(place, drawn, section.dataset.step)).filter(Boolean);
}

async function readCurves() {
  const section = document.querySelector("[data-curves]");
  if (!section) return;
  const answer = await fetch(section.dataset.curves);
  if (!answer.ok) return;
  drawn = await answer.json();
  drawAll();
}

document.addEventListener("DOMContentLoaded", () => {
  readCurves();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.addEventListener("cairn:theme", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) {
      width = innerWidth;
      drawAll();
    }
  });
});
document.addEventListener("cairn:renewed", readCurves);
