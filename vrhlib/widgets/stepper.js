// Where sets of heads look while a reply is written, token by token, over the picture.

const MAGMA = ("000004 0a0822 1d1147 36106b 51127c 6a1c81 832681 9c2e7f b73779 d0416f e75263 f56b5c fc8961 fea772 " +
  "fec488 fde2a3 fcfdbf").split(" ").map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));

function colour(byte) {
  const at = (byte / 255) * (MAGMA.length - 1), low = Math.min(Math.floor(at), MAGMA.length - 2);
  return MAGMA[low].map((from, i) => Math.round(from + (at - low) * (MAGMA[low + 1][i] - from)));
}

// SVG path data of the outline of a set of cells: those of their sides that have no cell of the set beyond.
function around(cells) {
  const known = new Set(cells.map(String)), free = (row, col) => !known.has(`${row},${col}`);
  return cells.map(([r, c]) => [free(r - 1, c) && `M${c} ${r}h1`, free(r + 1, c) && `M${c} ${r + 1}h1`,
    free(r, c - 1) && `M${c} ${r}v1`, free(r, c + 1) && `M${c + 1} ${r}v1`].filter(Boolean).join("")).join("");
}

function render({ model, el }) {
  keepKeys(el);
  const root = add(el, "div", { class: "vrh-root vrh-stepper", tabindex: -1, ...OWN_KEYS });
  const frame = add(root, "div", { class: "vrh-frame" });
  const image = add(frame, "img", { class: "vrh-image", draggable: "false" });
  const heat = add(frame, "canvas", { class: "vrh-heat" }), over = { class: "vrh-over", preserveAspectRatio: "none" };
  const cells = add(frame, "svg", over), boxes = add(frame, "svg", { ...over, class: "vrh-over vrh-boxes" });
  const scale = add(root, "div", { class: "vrh-legend vrh-scale" });
  add(scale, "span", {}, "0");
  add(scale, "span", { class: "vrh-bar" }).style.background =
    `linear-gradient(to right, ${MAGMA.map((c) => `rgb(${c})`)})`;
  const peak = add(scale, "span"), legend = add(root, "div", { class: "vrh-legend" });
  const said = add(root, "div", { class: "vrh-line", "aria-live": "polite" });
  const tokens = add(root, "div", { class: "vrh-tokens", role: "group", "aria-label": "tokens of the reply" });
  const controls = add(root, "div", { class: "vrh-controls" });
  const control = (words, tag, more) => add(add(controls, "label", {}, words), tag, { ...more, ...OWN_KEYS });
  const slider = control("token", "input", { type: "range", class: "vrh-step", min: 0, step: 1 });
  const sets = control("attention of", "select", { class: "vrh-shown" });
  const opacity = control("opacity", "input", { type: "range", class: "vrh-opacity", min: 0, max: 1, step: 0.05 });
  let url = null, buttons = [];

  const active = () => root.getRootNode().activeElement; // of the shadow tree, where there is one
  const list = (name) => model.get(name) ?? [];
  const step = () => Math.max(0, Math.min(Math.round(model.get("step") || 0), list("tokens").length - 1));
  const shown = () => Math.max(0, list("sets").indexOf(model.get("shown")));
  const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const save = (name, value) => {
    model.set(name, value);
    model.save_changes();
  };

  function place() {
    const png = model.get("image"), [width, height] = list("size");
    const ready = png?.byteLength > 0 && width > 0 && height > 0;
    if (url) URL.revokeObjectURL(url);
    url = ready ? URL.createObjectURL(new Blob([png], { type: "image/png" })) : null;
    frame.hidden = scale.hidden = !ready;
    if (ready) {
      const fit = Math.min(WIDTH / width, TALLEST / height), zoom = fit >= 2 ? Math.floor(fit) : fit;
      image.src = url;
      image.classList.toggle("vrh-pixelated", width < WIDTH);
      frame.style.width = `${width * zoom}px`;
      frame.style.aspectRatio = `${width} / ${height}`;
      boxes.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
    draw();
  }

  function outline() {
    const [rows, cols] = list("grid"), evidence = rows > 0 && cols > 0 ? list("evidence") : [];
    drawBoxes(boxes, legend, list("boxes"));
    cells.replaceChildren();
    cells.setAttribute("viewBox", `0 0 ${cols || 1} ${rows || 1}`);
    if (evidence.length) {
      const d = around(evidence), entry = add(legend, "span", { class: "vrh-entry" });
      cased(cells, d);
      cased(add(entry, "svg", { class: "vrh-sample", width: 12, height: 12 }), "M1 1H11V11H1Z");
      add(entry, "span", {}, "image tokens of the referent");
    }
    draw();
  }

  function cased(parent, d) {
    line(parent, "path", { d }, ["#fff", 4, ""]);
    line(parent, "path", { d }, ["#009E73", 2, ""]);
  }

  function words() {
    const focused = tokens.contains(active());
    tokens.replaceChildren();
    buttons = list("tokens").map((token, i) => {
      const more = { type: "button", class: "vrh-token", "data-token": i, ...OWN_KEYS };
      const button = add(tokens, "button", more, visible(token));
      button.setAttribute("aria-label", `token ${i + 1}: ${visible(token)}`);
      return button;
    });
    slider.max = Math.max(0, buttons.length - 1);
    slider.disabled = buttons.length < 2;
    draw();
    if (focused) buttons[step()]?.focus();
  }

  function choices() {
    sets.replaceChildren();
    for (const name of list("sets")) add(sets, "option", { value: name }, name);
    draw();
  }

  function draw() {
    const now = step(), set = shown(), [rows = 0, cols = 0] = list("grid"), name = list("sets")[set];
    paint(rows, cols, (set * list("tokens").length + now) * rows * cols);
    image.alt = model.get("label") ?? "";
    heat.style.opacity = opacity.value = model.get("opacity") ?? 0.65;
    slider.value = now;
    sets.value = name ?? "";
    const top = list("peaks")[set];
    peak.textContent = `${Number.isFinite(top) ? top.toPrecision(2) : "peak"} attention on one image token`;
    buttons.forEach((button, i) => {
      button.tabIndex = i === now ? 0 : -1;
      if (i === now) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    });
    say(now, name, list("mass")[set]?.[now]);
    const button = buttons[now], [top_, room] = [button?.offsetTop ?? 0, tokens.clientHeight];
    if (button && (top_ < tokens.scrollTop || top_ + button.offsetHeight > tokens.scrollTop + room))
      tokens.scrollTop = top_ - room / 2; // not scrollIntoView, which would scroll the page too
  }

  function say(now, name, mass) {
    const token = list("tokens")[now], many = list("tokens").length;
    const where = "attention on the referent's image tokens";
    const of = /^L\d+H\d+$/.test(name) ? "of" : "summed over the heads of";
    const looks = name !== undefined && Number.isFinite(mass) ? ` · ${where}: ${mass.toFixed(2)}, ${of} ${name}` : "";
    said.textContent = many ? `token ${now + 1} of ${many} "${visible(token)}"${looks}` : "no reply yet";
  }

  // One canvas pixel an image token, magnified by the style sheet.
  function paint(rows, cols, from) {
    const maps = model.get("maps"), size = rows * cols;
    const known = maps && size > 0 && list("tokens").length && from + size <= maps.byteLength;
    heat.hidden = !known;
    if (!known) return;
    heat.width = cols;
    heat.height = rows;
    const context = heat.getContext("2d"), pixels = context.createImageData(cols, rows);
    for (let i = 0; i < size; i++) pixels.data.set([...colour(maps.getUint8(from + i)), 255], 4 * i);
    context.putImageData(pixels, 0, 0);
  }

  function go(to) {
    const inside = Math.max(0, Math.min(list("tokens").length - 1, to));
    if (list("tokens").length && inside !== model.get("step")) save("step", inside);
  }

  slider.addEventListener("input", () => go(Number(slider.value)));
  opacity.addEventListener("input", () => save("opacity", Number(opacity.value)));
  sets.addEventListener("change", () => save("shown", sets.value));
  tokens.addEventListener("click", (event) => buttons.includes(event.target) && go(buttons.indexOf(event.target)));
  root.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: step() - 1, ArrowRight: step() + 1, Home: 0, End: list("tokens").length - 1 }[event.key];
    if (to === undefined || event.target === opacity || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(to);
    if (buttons.includes(active())) buttons[step()].focus({ preventScroll: true });
  });

  const heard = { image: place, size: place, boxes: outline, evidence: outline, tokens: words, sets: choices,
    grid: outline, shown: draw, maps: draw, peaks: draw, mass: draw, step: draw, opacity: draw, label: draw };
  for (const [name, act] of Object.entries(heard)) model.on(`change:${name}`, act);
  for (const act of [place, outline, words, choices]) act();
  return () => {
    for (const [name, act] of Object.entries(heard)) model.off(`change:${name}`, act);
    if (url) URL.revokeObjectURL(url);
  };
}

export default { render };
