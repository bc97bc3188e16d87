// What the canvases share: elements, boxes with their strokes and legend. Stands before each of them.

// [colour, width, dash]; in drawing order, so that of equal boxes each still shows. The rest take the spare ones.
const STROKES = { referent: ["#009E73", 3, ""], unmasked: ["#000000", 1.6, "4 3"], random: ["#7F7F7F", 2, "1.5 3"],
  reply: ["#D55E00", 2.6, "9 5"] };
const SPARE = [["#0072B2", 2.2, "10 3 2 3"], ["#CC79A7", 2.2, "6 3"], ["#E69F00", 2.2, "2 3"],
  ["#56B4E9", 2.2, "12 4"]];
const WIDTH = 420, TALLEST = 560; // px on the page
// On whatever can have the focus: Jupyter would take its arrows, and a, b, x, for commands to the notebook.
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };

// The controls beside a canvas: whichever gets the focus keeps its keys, too (Notebook 7 would take a slider's arrows).
function keepKeys(el) {
  requestAnimationFrame(() => el.closest(".vrh-view")?.addEventListener("focusin", ({ target }) => {
    for (const [name, value] of Object.entries(OWN_KEYS)) target.setAttribute(name, value);
  }));
}

function add(parent, tag, attributes = {}, text) {
  const inSvg = tag === "svg" || parent.namespaceURI.endsWith("svg");
  const made = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

// [box, stroke] in drawing order.
function styled(boxes) {
  const order = Object.keys(STROKES);
  const others = [...new Set(boxes.map((box) => box.name).filter((name) => !(name in STROKES)))];
  const stroke = ({ name }) => STROKES[name] ?? SPARE[others.indexOf(name) % SPARE.length];
  const later = (box) => (box.name in STROKES ? order.indexOf(box.name) : order.length);
  return [...boxes].sort((a, b) => later(a) - later(b)).map((box) => [box, stroke(box)]);
}

function line(parent, tag, geometry, [stroke, width, dash], more = {}) {
  const style = { ...geometry, fill: "none", "vector-effect": "non-scaling-stroke", "stroke-width": width };
  // A white casing, or black were lost on a dark picture; under all others, or it would hide the box that it equals.
  if (stroke === "#000000") parent.prepend(add(parent, tag, { ...style, stroke: "#fff", "stroke-width": width + 2 }));
  add(parent, tag, { ...style, stroke, "stroke-dasharray": dash, ...more });
}

function drawBoxes(layer, legend, boxes) {
  layer.replaceChildren();
  legend.replaceChildren();
  for (const [{ name, label, box }, stroke] of styled(boxes)) {
    const entry = add(legend, "span", { class: "vrh-entry" });
    if (!box) {
      entry.textContent = `no box: ${label ?? name}`;
      continue;
    }
    const [x, y] = [Math.min(box[0], box[2]), Math.min(box[1], box[3])];
    const geometry = { x, y, width: Math.abs(box[2] - box[0]), height: Math.abs(box[3] - box[1]) };
    line(layer, "rect", geometry, stroke, { "data-name": name, "data-box": box.join(",") });
    line(add(entry, "svg", { class: "vrh-sample", width: 30, height: 8 }), "path", { d: "M0 4H30" }, stroke);
    add(entry, "span", {}, label ?? name);
  }
}

