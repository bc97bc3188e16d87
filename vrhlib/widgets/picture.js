// A picture under boxes, each stroke with its meaning, and with segments to choose from. Geometry in original pixels.

function render({ model, el }) {
  keepKeys(el);
  const root = add(el, "div", { class: "vrh-root vrh-picture" });
  const caption = add(root, "div", { class: "vrh-caption" });
  const frame = add(root, "div", { class: "vrh-frame" });
  const image = add(frame, "img", { class: "vrh-image", draggable: "false" });
  const svg = add(frame, "svg", { class: "vrh-over", preserveAspectRatio: "none" });
  const places = add(svg, "g", { role: "group" });
  const boxes = add(svg, "g", { "pointer-events": "none", class: "vrh-boxes" });
  const said = add(root, "div", { class: "vrh-line" }), legend = add(root, "div", { class: "vrh-legend" });
  let url = null, paths = [], at = 0, hovered = null;

  const active = () => root.getRootNode().activeElement; // of the shadow tree, where there is one

  function place() {
    const png = model.get("image"), [width, height] = model.get("size") ?? [];
    const ready = png?.byteLength > 0 && width > 0 && height > 0;
    if (url) URL.revokeObjectURL(url);
    url = ready ? URL.createObjectURL(new Blob([png], { type: "image/png" })) : null;
    frame.hidden = !ready;
    if (ready) {
      const fit = Math.min(WIDTH / width, TALLEST / height), scale = fit >= 2 ? Math.floor(fit) : fit;
      image.src = url;
      image.classList.toggle("vrh-pixelated", width < WIDTH);
      frame.style.width = `${width * scale}px`;
      frame.style.aspectRatio = `${width} / ${height}`;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    }
    words();
  }

  function words() {
    image.alt = model.get("label") ?? "";
    places.setAttribute("aria-label", "segments of the picture");
    caption.textContent = model.get("caption") ?? "";
    tell();
  }

  function segments() {
    const focused = paths.includes(active());
    places.replaceChildren();
    paths = (model.get("segments") ?? []).map(({ name, path }, i) => add(places, "path", {
      d: path ?? "", class: "vrh-segment", role: "button", "aria-label": name ?? "", "data-segment": i, tabindex: -1,
      "fill-rule": "evenodd", "vector-effect": "non-scaling-stroke", ...OWN_KEYS,
    }));
    at = Math.max(0, Math.min(at, paths.length - 1));
    paths[at]?.setAttribute("tabindex", 0);
    if (focused) paths[at]?.focus();
    hovered = null;
    update();
  }

  function update() {
    paths.forEach((path, i) => {
      path.setAttribute("aria-pressed", i === model.get("chosen"));
      path.setAttribute("aria-disabled", Boolean(model.get("disabled")));
    });
    root.classList.toggle("vrh-disabled", Boolean(model.get("disabled")));
    tell();
  }

  function tell() {
    const focus = paths.indexOf(active()), chosen = paths[model.get("chosen")];
    const here = hovered ?? paths[focus], name = (path) => path.getAttribute("aria-label");
    const ask = paths.length ? `${paths.length} segments to choose from` : "";
    said.textContent = frame.hidden ? "no picture yet" : here ? name(here) : chosen ? `chosen: ${name(chosen)}` : ask;
  }

  function choose(i) {
    if (model.get("disabled")) return;
    model.set("chosen", i === model.get("chosen") ? -1 : i);
    model.save_changes();
  }

  function moveTo(i) {
    paths[at]?.setAttribute("tabindex", -1);
    paths[(at = i)].setAttribute("tabindex", 0);
    if (active() !== paths[i]) paths[i].focus();
  }

  const index = (event) => paths.indexOf(event.target);
  places.addEventListener("click", (event) => choose(index(event)));
  // On the root: Chromium takes an SVG element that listens to focus for a tab stop.
  root.addEventListener("focusin", (event) => {
    if (index(event) >= 0) moveTo(index(event));
    tell();
  });
  root.addEventListener("focusout", () => queueMicrotask(tell));
  places.addEventListener("pointerover", (event) => {
    hovered = event.target;
    tell();
  });
  places.addEventListener("pointerout", () => {
    hovered = null;
    tell();
  });
  places.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const last = paths.length - 1, to = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1,
      Home: 0, End: last }[event.key];
    if (to !== undefined) {
      hovered = null;
      moveTo(Math.max(0, Math.min(last, to)));
    } else if (event.key === "Enter" || event.key === " ") choose(at);
    else if (event.key === "Escape" && model.get("chosen") >= 0) choose(model.get("chosen"));
    else return;
    event.preventDefault();
  });

  const outline = () => drawBoxes(boxes, legend, model.get("boxes") ?? []);
  const heard = { image: place, size: place, boxes: outline, segments, chosen: update, disabled: update, caption: words,
    label: words };
  for (const [name, act] of Object.entries(heard)) model.on(`change:${name}`, act);
  for (const act of [place, outline, segments]) act();
  return () => {
    for (const [name, act] of Object.entries(heard)) model.off(`change:${name}`, act);
    if (url) URL.revokeObjectURL(url);
  };
}

export default { render };
