// Accuracy against the number k of ablated heads, where on it we are, and what the replies become there.

const W = 520, PLOT = { left: 44, right: 508, top: 10, bottom: 210 }, BAR = { top: 282, height: 22 }, H = 308;
// In the order and colours of the printed figures; hatches as SVG path data on a tile of 8 x 8. `wrong point` of other
// tasks looks like `wrong box`, `no answer` like `no box`.
const HATCH = { "//": "M-2 2L2 -2M0 8L8 0M6 10L10 6", "\\\\": "M-2 6L2 10M0 0L8 8M6 -2L10 2",
  "..": "M2 2h.1M6 6h.1", xx: "M0 8L8 0M0 0L8 8", "--": "M0 4H8", "": "" };
const OUTCOMES = { correct: ["#009E73", ""], wrong: ["#E69F00", "//"], degenerate: ["#56B4E9", "\\\\"],
  malformed: ["#CC79A7", ".."], "cut off": ["#8F8400", "xx"], no: ["#E4E4E4", "--"] };
const OTHER = ["#0072B2", ".."];

const kind = (outcome) => (outcome in OUTCOMES ? outcome : outcome.split(" ")[0]);
const order = (outcome) => [...Object.keys(OUTCOMES), kind(outcome)].indexOf(kind(outcome)); // unknown ones last
const ink = (colour) => (!colour || /^(#000|#000000|black)$/.test(colour) ? "currentColor" : colour);
const known = (value) => typeof value === "number" && Number.isFinite(value);
const short = (k) => String(Math.round(k * 100) / 100);

function render({ model, el }) {
  keepKeys(el);
  const root = add(el, "div", { class: "vrh-root vrh-curve" }), title = add(root, "div", { class: "vrh-caption" });
  const legend = add(root, "div", { class: "vrh-legend" });
  const svg = add(root, "svg", { class: "vrh-plot", role: "img", viewBox: `0 0 ${W} ${H}`, width: W, height: H });
  const tiles = add(svg, "defs"), axes = add(svg, "g"), lines = add(svg, "g"), now = add(svg, "g"), bar = add(svg, "g");
  const parts = add(root, "div", { class: "vrh-legend" }), note = add(root, "div", { class: "vrh-note" });
  const own = `vrh-${Math.random().toString(36).slice(2)}`; // ids of hatches, which all views of a page share
  let most = 1;

  const series = () => model.get("series") ?? [];
  const band = () => (model.get("band")?.points?.length ? model.get("band") : null);
  const x = (k) => PLOT.left + 8 + (PLOT.right - PLOT.left - 20) * Math.sqrt(Math.max(0, k) / most);
  const y = (accuracy) => PLOT.bottom - ((PLOT.bottom - PLOT.top) * accuracy) / 100;
  const text = (parent, at, words, anchor = "middle", more = {}) =>
    add(parent, "text", { x: at[0], y: at[1], "text-anchor": anchor, class: "vrh-tick", ...more }, words);
  const track = (points) => points.map(([k, accuracy], i) => `${i ? "L" : "M"}${x(k)} ${y(accuracy)}`).join("");

  function entry(words, draw) {
    const made = add(legend, "span", { class: "vrh-entry" });
    draw(add(made, "svg", { class: "vrh-sample", width: 30, height: 12 }));
    add(made, "span", {}, words);
  }

  function drawLines() {
    title.textContent = model.get("title") ?? "";
    note.textContent = model.get("note") ?? "";
    svg.setAttribute("aria-label", model.get("label") ?? "");
    const points = series().map((one) => (one.points ?? []).filter((p) => known(p[0]) && known(p[1])));
    const ks = [...new Set([0, ...points.flat().map((p) => p[0]), ...(band()?.points ?? []).map((p) => p[0])])];
    most = Math.max(1, ...ks, model.get("at") ?? 0);
    for (const group of [axes, lines, legend]) group.replaceChildren();
    drawAxes(ks.sort((a, b) => b - a));
    if (band()) drawBand(band());
    series().forEach((one, i) => drawSeries(one, points[i]));
    drawNow();
  }

  function drawAxes(ks) {
    for (const percent of [0, 25, 50, 75, 100]) {
      add(axes, "path", { d: `M${PLOT.left} ${y(percent)}H${PLOT.right}`, class: "vrh-rule" });
      text(axes, [PLOT.left - 6, y(percent) + 4], percent, "end");
    }
    let last = Infinity;
    for (const k of ks.filter((k) => x(k) + 22 <= last && (last = x(k)) !== null)) {
      add(axes, "path", { d: `M${x(k)} ${PLOT.bottom}v4`, class: "vrh-axis" });
      text(axes, [x(k), PLOT.bottom + 16], short(k));
    }
    add(axes, "path", { d: `M${PLOT.left} ${PLOT.top}V${PLOT.bottom}H${PLOT.right}`, class: "vrh-axis" });
    text(axes, [(PLOT.left + PLOT.right) / 2, PLOT.bottom + 32], "ablated heads k (square-root scale)");
    const middle = (PLOT.top + PLOT.bottom) / 2;
    text(axes, [12, middle], "accuracy (%)", "middle", { transform: `rotate(-90 12 ${middle})` });
  }

  // A bar and a square at each k, joined by nothing: between these k nothing was measured. A little to the left, beside
  // the point of a line.
  function drawBand({ label, points }) {
    const bar = { fill: "none", stroke: "#7F7F7F", "stroke-width": 1.6 };
    for (const [k, low, mean, high] of points) {
      const at = x(k) - 5, d = `M${at} ${y(low)}V${y(high)}m-3 0h6M${at - 3} ${y(low)}h6`;
      add(lines, "path", { ...bar, d, class: "vrh-band", "data-k": k });
      add(lines, "rect", { x: at - 3, y: y(mean) - 3, width: 6, height: 6, fill: "#7F7F7F" });
    }
    entry(label ?? "", (sample) => {
      add(sample, "path", { ...bar, d: "M15 1V11m-3 0h6M12 1h6" });
      add(sample, "rect", { x: 12, y: 3, width: 6, height: 6, fill: "#7F7F7F" });
    });
  }

  function drawSeries({ name, label, colour, dash }, points) {
    const stroke = ink(colour), line = { fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": dash ?? "" };
    if (points.length > 1) add(lines, "path", { d: track(points), ...line });
    for (const [k, accuracy, low, high] of points) {
      const ends = known(low) && known(high), span = ends ? ` [${low.toFixed(1)}, ${high.toFixed(1)}]` : "";
      const bars = `M${x(k)} ${y(low)}V${y(high)}m-3 0h6M${x(k) - 3} ${y(low)}h6`;
      if (ends) add(lines, "path", { d: bars, class: "vrh-interval", fill: "none", stroke, "stroke-width": 1.4 });
      const facts = { "data-series": name, "data-k": k, "data-accuracy": accuracy };
      const dot = add(lines, "circle", { cx: x(k), cy: y(accuracy), r: 3.5, fill: stroke, ...facts });
      add(dot, "title", {}, `${label ?? name}, k=${short(k)}: ${accuracy.toFixed(1)} %${span}`);
    }
    entry(label ?? name, (sample) => {
      add(sample, "path", { d: "M0 6H30", ...line });
      add(sample, "circle", { cx: 15, cy: 6, r: 3.5, fill: stroke });
    });
  }

  function drawNow() {
    const at = model.get("at"), value = model.get("value");
    if (known(at) && at > most) return drawLines();
    now.replaceChildren();
    svg.setAttribute("data-at", known(at) ? at : "");
    svg.setAttribute("data-value", known(value) ? value : "");
    if (known(at)) add(now, "path", { d: `M${x(at)} ${PLOT.top}V${PLOT.bottom}`, class: "vrh-axis vrh-at" });
    if (known(at) && known(value)) add(now, "circle", { cx: x(at), cy: y(value), r: 8, class: "vrh-axis vrh-ring" });
    const right = known(value) ? `: ${value.toFixed(1)} % right` : "";
    text(now, [PLOT.left, BAR.top - 8], known(at) ? `at k=${short(at)}${right}` : "", "start",
      { "font-weight": "bold" });
  }

  function drawOutcomes() {
    for (const group of [tiles, bar, parts]) group.replaceChildren();
    const shares = Object.entries(model.get("outcomes") ?? {}).filter(([, percent]) => known(percent));
    const full = Math.max(100, shares.reduce((sum, [, percent]) => sum + percent, 0)), width = PLOT.right - PLOT.left;
    let from = PLOT.left;
    shares.sort(([a], [b]) => order(a) - order(b)).forEach(([outcome, percent], i) => {
      const [colour, hatch] = OUTCOMES[kind(outcome)] ?? OTHER, id = `${own}-${i}`, share = (width * percent) / full;
      const tile = add(tiles, "pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
      add(tile, "rect", { width: 8, height: 8, fill: colour });
      const look = hatch === ".." ? { "stroke-width": 2.4, "stroke-linecap": "round" } : { "stroke-width": 1 };
      add(tile, "path", { d: HATCH[hatch], stroke: "#222", ...look });
      const part = { fill: `url(#${id})`, stroke: "#777", "stroke-width": 0.5 };
      const box = { x: from, y: BAR.top, width: share, height: BAR.height, "data-outcome": outcome, ...part };
      add(add(bar, "rect", box), "title", {}, `${outcome}: ${percent.toFixed(1)} %`);
      const middle = [from + share / 2, BAR.top + 15];
      if (share > 30) text(bar, middle, Math.round(percent), "middle", { class: "vrh-share" });
      const made = add(parts, "span", { class: "vrh-entry" });
      add(add(made, "svg", { class: "vrh-sample", width: 22, height: 12 }), "rect", { width: 22, height: 12, ...part });
      add(made, "span", {}, `${outcome} ${percent.toFixed(1)} %`);
      from += share;
    });
  }

  const heard = { series: drawLines, band: drawLines, title: drawLines, note: drawLines, label: drawLines, at: drawNow,
    value: drawNow, outcomes: drawOutcomes };
  for (const [name, act] of Object.entries(heard)) model.on(`change:${name}`, act);
  drawLines();
  drawOutcomes();
  return () => { for (const [name, act] of Object.entries(heard)) model.off(`change:${name}`, act); };
}

export default { render };
