// Joins the canvases of the page: what a click asks for is looked up, nothing is computed.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const byId = (id) => document.getElementById(id);
const data = read("data"), sources = read("modules");

// What a canvas needs of a kernel: values that can be set, and a word when they change.
function standIn(values) {
  const heard = {};
  return {
    get: (name) => values[name],
    set(name, value) {
      if (JSON.stringify(values[name]) === JSON.stringify(value) && !(value instanceof DataView)) return;
      values[name] = value;
      for (const f of [...(heard[`change:${name}`] ?? []), ...(heard.change ?? [])]) f();
    },
    on: (names, f) => names.split(" ").forEach((name) => (heard[name] ??= []).push(f)),
    off: (names, f) => (names ?? "").split(" ").forEach((name) => {
      if (heard[name]) heard[name] = heard[name].filter((g) => f && g !== f);
    }),
    save_changes() {},
  };
}

function bytes(value) {
  if (!value || value.$bytes === undefined) return value;
  const raw = atob(value.$bytes), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return new DataView(out.buffer);
}

async function canvas(name, values, el) {
  const url = URL.createObjectURL(new Blob([sources[name]], { type: "text/javascript" }));
  const { default: module } = await import(url);
  URL.revokeObjectURL(url);
  const model = standIn(values);
  await module.render({ model, el });
  return model;
}

const named = ([layer, head]) => `L${layer}H${head}`;
// As `page._named`: in order of layer, then head.
const key = (heads) => [...heads].sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(named).join(",");

const empty = { image: undefined, size: [], boxes: [], segments: [], chosen: -1, caption: "", disabled: true, label: "" };
const map = await canvas("headmap", { grid: [], scores: [], published: {}, chosen: [], disabled: false, label: "" }, byId("map"));
const picture = await canvas("picture", { ...empty }, byId("shown"));
const steps = await canvas("stepper", { tokens: [], sets: [], shown: "", peaks: [], mass: [], grid: [], evidence: [],
  boxes: [], step: 0, opacity: 0.65, label: "", size: [] }, byId("steps"));
let draws = 0;

const model = () => data.models[byId("model").value];
const shot = () => model().pictures[byId("picture").value];

function fill(select, words) {
  const at = Math.max(0, select.selectedIndex);
  select.replaceChildren(...words.map((word, i) => new Option(word, i)));
  select.selectedIndex = Math.min(at, words.length - 1);
}

function answer() {
  const { text, size, referent, cuts, look } = shot(), chosen = map.get("chosen"), reply = cuts[key(chosen)];
  const count = `${chosen.length} head${chosen.length === 1 ? "" : "s"}`;
  const boxes = [{ name: "referent", label: "referent", box: referent }, { name: "unmasked", label: "reply, unmasked", box: cuts[""].box }];
  if (chosen.length && reply) boxes.push({ name: "reply", label: `reply without ${count}`, box: reply.box });
  picture.set("size", size);
  picture.set("image", bytes(look.image));
  picture.set("caption", text);
  picture.set("boxes", boxes);
  const said = reply ? `IoU ${reply.iou.toFixed(2)}, ${reply.outcome}` : "";
  picture.set("label", `picture for “${text}”; ${said || "this set of heads was not computed"}`);
  const out = byId("answer"), code = document.createElement("code");
  code.textContent = reply?.text ?? "";
  out.replaceChildren(`without ${chosen.map(named).join(", ") || "no head"}: `, code, document.createElement("br"),
    said || "Not computed for this page: it knows single heads, the top k and the random draws. The notebook 08_play computes any.");
}

function another() {
  const { look } = shot();
  for (const [name, value] of Object.entries(look)) steps.set(name, bytes(value));
  answer();
}

function begin() {
  const { grid, scores, published, pictures, top, k, name } = model();
  fill(byId("picture"), pictures.map(({ text }) => text));
  for (const [trait, value] of Object.entries({ grid, scores, published, label: `${name}: score of every head` })) map.set(trait, value);
  byId("k").max = top.length;
  byId("k").value = k;
  byId("k-now").textContent = k;
  map.set("chosen", top.slice(0, k));
  another();
}

map.on("change:chosen", answer);
byId("model").addEventListener("change", begin);
byId("picture").addEventListener("change", another);
byId("k").addEventListener("input", () => {
  byId("k-now").textContent = byId("k").value;
  map.set("chosen", model().top.slice(0, byId("k").value));
});
byId("top").addEventListener("click", () => map.set("chosen", model().top.slice(0, byId("k").value)));
byId("none").addEventListener("click", () => map.set("chosen", []));
byId("random").addEventListener("click", () => {
  const seeds = Object.keys(model().random), seed = seeds[draws++ % seeds.length];
  map.set("chosen", model().random[seed].slice(0, byId("k").value));
});
fill(byId("model"), data.models.map(({ name, n, scoring }) => `${name} (${scoring}, n=${n})`));
begin();
