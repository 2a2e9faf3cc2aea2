// Training curves, drawn again when the file has grown or the color scheme has changed.

const place = document.querySelector("#curves");
const POLL_MS = 2000;
const COLORS = ["--accent", "--hot", "--good", "--violet", "--warn"];
let shown = "";
let plots = [];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(data) {
  for (const plot of plots) plot.destroy();
  place.replaceChildren();
  plots = data.panels.map(({ title, series }) => {
    const panel = document.createElement("section");
    panel.className = "pane curve";
    const heading = document.createElement("h2");
    heading.textContent = title;
    panel.append(heading);
    place.append(panel);
    const names = Object.keys(series);
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 44 };
    const short = (value) => (value == null ? "–" : Math.abs(value) >= 1e4 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toFixed(4))));
    const options = {
      width: panel.clientWidth - 32, height: 190, cursor: { sync: { key: "steps" }, y: false }, scales: { x: { time: false } },
      axes: [{ ...axis, size: 28 }, { ...axis, values: (_, splits) => splits.map(short), size: (_, values) => 20 + 7 * Math.max(3, ...(values ?? []).map((text) => text.length)) }],
      series: [{ label: "step" }, ...names.map((name, n) => ({ label: name, stroke: css(COLORS[n % COLORS.length]), width: 1.75, dash: n < COLORS.length ? undefined : [6, 4], spanGaps: true, points: { show: data.steps.length < 40, size: 5 }, value: (_, value) => short(value) }))],
    };
    return new uPlot(options, [data.steps, ...names.map((name) => series[name])], panel);
  });
  const steps = document.querySelector("#steps");
  if (steps && data.steps.length) steps.textContent = Math.max(...data.steps).toLocaleString();
  place.dataset.drawn = plots.length;
}

let last = null;
async function look() {
  if (document.hidden && last) return;
  try {
    const text = await (await fetch(`/data/curves?n=${place.dataset.n}`)).text();
    if (text === shown) return;
    shown = text;
    last = JSON.parse(text);
    draw(last);
  } catch {
    // The server has ended: what is drawn stays.
  }
}
if (place) {
  look();
  setInterval(look, POLL_MS);
  document.addEventListener("theme", () => last && draw(last));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && draw(last));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width && last) draw(last);
    width = innerWidth;
  });
}
