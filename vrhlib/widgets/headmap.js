// Heads on their grid, layers x heads: brighter for higher scores, knocked out by a click.

const CIVIDIS = ("00224e 00285b 002e6a 053371 1a386f 273e6e 32436d 3b496c 434e6c 4b546c 535a6d 5a5f6e " +
  "61656f 686a71 6f7073 767676 7d7c78 848279 8c8878 938e78 9b9476 a39a74 aba072 b4a76f " +
  "bcae6c c4b468 cdbb63 d5c25e dec958 e7d150 f0d846 f9e03a fee838")
  .split(" ").map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
const WIDEST = 520, LEFT = 40, BELOW = 34; // px: the whole map, its layer labels, its head labels

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1), low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return `rgb(${CIVIDIS[low].map((from, i) => Math.round(from + (at - low) * (CIVIDIS[low + 1][i] - from)))})`;
}

const number = (score) => (score === 0 || Math.abs(score) >= 0.01 ? score.toFixed(3) : score.toPrecision(2));

function render({ model, el }) {
  keepKeys(el);
  const root = add(el, "div", { class: "vrh-root vrh-headmap" });
  const svg = add(root, "svg", { class: "vrh-grid", role: "group" });
  const line = add(root, "div", { class: "vrh-line" });
  const legend = add(root, "div", { class: "vrh-legend" });
  const sample = add(add(legend, "span", {}), "svg", { class: "vrh-sample", width: 16, height: 16 });
  mark(sample, 1, 1, 14);
  const meaning = add(legend, "span");
  const low = add(legend, "span", { class: "vrh-push" }), bar = add(legend, "span", { class: "vrh-bar" });
  const high = add(legend, "span");
  bar.style.background = `linear-gradient(to right, ${CIVIDIS.map((rgb) => `rgb(${rgb})`)})`;
  let cells = [], heads = 0, layers = 0, size = 0, at = 0, hovered = null, marks, cursor;

  const word = () => model.get("word") || "knocked out";
  const active = () => root.getRootNode().activeElement; // of the shadow tree, where there is one
  const list = (name) => model.get(name) ?? [];
  const nameOf = (i) => `L${Math.floor(i / heads)}H${i % heads}`;
  const cellAt = (event) => cells.indexOf(event.target.closest("[data-head]"));
  const corner = (i) => {
    const layer = Math.floor(i / heads);
    return [LEFT + (i % heads) * size, 2 + (layers - 1 - layer) * size];
  };

  // A frame in vermillion around a white cross cased in black: legible on either end of the scale, and without colour.
  function mark(parent, x, y, side) {
    const frame = `M${x} ${y}h${side}v${side}h${-side}z`, pad = side * 0.28, arm = side - 2 * pad;
    const cross = `M${x + pad} ${y + pad}l${arm} ${arm}m0 ${-arm}l${-arm} ${arm}`;
    const group = add(parent, "g", { class: "vrh-mark" }), thin = Math.max(1.2, Math.min(2.4, side / 11));
    for (const [d, stroke, width] of [[frame, "#000", thin * 2.6], [frame, "#D55E00", thin * 1.8],
      [cross, "#000", thin * 2.4], [cross, "#fff", thin]]) add(group, "path", { d, stroke, "stroke-width": width });
    return group;
  }

  function build() {
    [layers, heads] = list("grid").length === 2 ? list("grid") : [0, 0];
    const focused = svg.contains(active());
    svg.replaceChildren();
    hovered = null;
    size = Math.max(5, Math.min(34, Math.floor((WIDEST - LEFT - 2) / Math.max(heads, 1))));
    const width = LEFT + heads * size + 2, height = layers * size + BELOW + 2;
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height }))
      svg.setAttribute(name, value);
    svg.style.display = layers * heads ? "" : "none";
    root.style.maxWidth = `${Math.max(width, 460)}px`;
    const board = add(svg, "g"), side = size - (size > 9 ? 1 : 0);
    cells = Array.from({ length: layers * heads }, (_, i) => {
      const [x, y] = corner(i), place = { x, y, width: side, height: side, class: "vrh-cell" };
      return add(board, "rect", { ...place, role: "button", "data-head": nameOf(i), tabindex: -1, ...OWN_KEYS });
    });
    const words = (x, y, text, more = {}) => add(svg, "text", { x, y, class: "vrh-tick", ...more }, text);
    for (let h = 0; h < heads; h += Math.max(1, Math.ceil(20 / size)))
      words(corner(h)[0] + size / 2, height - BELOW + 14, h, { "text-anchor": "middle" });
    for (let l = 0; l < layers; l += Math.max(1, Math.ceil(14 / size)))
      words(LEFT - 5, corner(l * heads)[1] + size / 2 + 4, l, { "text-anchor": "end" });
    const middle = (layers * size) / 2;
    words(LEFT + (heads * size) / 2, height - 4, "head", { "text-anchor": "middle" });
    words(12, middle, "layer", { "text-anchor": "middle", transform: `rotate(-90 12 ${middle})` });
    marks = add(svg, "g", { "pointer-events": "none" });
    cursor = add(svg, "g", { "pointer-events": "none" });
    for (const [stroke, width] of [["#000", 4], ["#fff", 1.8]])
      add(cursor, "rect", { width: side, height: side, fill: "none", stroke, "stroke-width": width });
    at = Math.max(0, Math.min(at, cells.length - 1));
    cells[at]?.setAttribute("tabindex", 0);
    colourIn();
    if (focused) cells[at]?.focus();
  }

  function colourIn() {
    svg.setAttribute("aria-label", model.get("label") ?? "");
    const scores = list("scores"), published = model.get("published") ?? {}, known = (i) => Number.isFinite(scores[i]);
    const order = cells.map((_, i) => i).filter(known).sort((a, b) => scores[b] - scores[a] || a - b);
    const least = order.length ? Math.min(0, scores[order.at(-1)]) : 0, most = order.length ? scores[order[0]] : 0;
    const rank = new Map(order.map((i, place) => [i, place + 1]));
    cells.forEach((cell, i) => {
      const score = known(i) ? `score ${number(scores[i])}, rank ${rank.get(i)} of ${order.length}` : "no score";
      let words = `${nameOf(i)}: ${score}`;
      if (nameOf(i) in published) words += `, published rank ${published[nameOf(i)]}`;
      else if (Object.keys(published).length) words += ", not on the published list";
      cell.setAttribute("fill", known(i) ? colour((scores[i] - least) / (most - least || 1)) : "#999");
      cell.setAttribute("aria-label", words);
    });
    low.textContent = `score ${least ? number(least) : 0}`;
    high.textContent = number(most);
    update();
  }

  const outs = () => [...new Set(list("chosen").filter(([l, h]) => l >= 0 && l < layers && h >= 0 && h < heads)
    .map(([l, h]) => l * heads + h))];

  function update() {
    const out = outs(), disabled = Boolean(model.get("disabled")), side = size - (size > 9 ? 2 : 1);
    root.classList.toggle("vrh-disabled", disabled);
    meaning.textContent = word();
    cells.forEach((cell, i) => {
      cell.setAttribute("aria-pressed", out.includes(i));
      cell.setAttribute("aria-disabled", disabled);
    });
    marks.replaceChildren();
    for (const i of out) mark(marks, corner(i)[0] + 0.5, corner(i)[1] + 0.5, side);
    tell();
  }

  function tell() {
    const focus = cells.indexOf(active()), here = hovered ?? (focus < 0 ? null : focus);
    cursor.setAttribute("visibility", here === null ? "hidden" : "visible");
    if (here !== null) cursor.setAttribute("transform", `translate(${corner(here)})`);
    const names = outs().map(nameOf), more = names.length > 6 ? ` and ${names.length - 6} more` : "";
    const summary = names.length ? `${word()}: ${names.slice(0, 6).join(", ")}${more}` : `no head ${word()}`;
    line.textContent = here !== null ? cells[here].getAttribute("aria-label") : cells.length ? summary : "no heads yet";
  }

  function choose(chosen) {
    if (model.get("disabled")) return;
    model.set("chosen", chosen);
    model.save_changes();
  }

  function toggle(i) {
    const pair = [Math.floor(i / heads), i % heads];
    const rest = list("chosen").filter(([l, h]) => l !== pair[0] || h !== pair[1]);
    choose(rest.length < list("chosen").length ? rest : [...rest, pair]);
  }

  function moveTo(i) {
    cells[at]?.setAttribute("tabindex", -1);
    cells[(at = i)].setAttribute("tabindex", 0);
    if (active() !== cells[i]) cells[i].focus();
  }

  svg.addEventListener("click", (event) => cellAt(event) >= 0 && toggle(cellAt(event)));
  // On the root: Chromium takes an SVG element that listens to focus for a tab stop.
  root.addEventListener("focusin", (event) => {
    if (cellAt(event) >= 0) moveTo(cellAt(event));
    tell();
  });
  root.addEventListener("focusout", () => queueMicrotask(tell));
  svg.addEventListener("pointerover", (event) => {
    hovered = cellAt(event) < 0 ? null : cellAt(event);
    tell();
  });
  svg.addEventListener("pointerleave", () => {
    hovered = null;
    tell();
  });
  svg.addEventListener("keydown", (event) => {
    if (cellAt(event) < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const [layer, head] = [Math.floor(at / heads), at % heads]; // layer 0 lies at the bottom, as in the printed maps
    const go = { ArrowLeft: [layer, head - 1], ArrowRight: [layer, head + 1], ArrowUp: [layer + 1, head],
      ArrowDown: [layer - 1, head], Home: [layer, 0], End: [layer, heads - 1] }[event.key];
    const inside = (index, count) => Math.max(0, Math.min(count - 1, index));
    if (go) {
      hovered = null;
      moveTo(inside(go[0], layers) * heads + inside(go[1], heads));
    } else if (event.key === "Enter" || event.key === " ") toggle(at);
    else if (event.key === "Escape") choose([]);
    else return;
    event.preventDefault();
  });

  const heard = { grid: build, scores: colourIn, published: colourIn, label: colourIn, chosen: update, word: update,
    disabled: update };
  for (const [name, act] of Object.entries(heard)) model.on(`change:${name}`, act);
  build();
  return () => { for (const [name, act] of Object.entries(heard)) model.off(`change:${name}`, act); };
}

export default { render };
