"use strict";
// What all parts of the page share: elements, numbers as text, colours, the tip at the pointer.

const data = JSON.parse(document.getElementById("data").textContent);

/** An element (of SVG where `tag` begins with "svg:") with attributes and children; a text becomes a text node. */
function make(tag, attributes = {}, ...children) {
  const [, vector, name] = /^(svg:)?(.+)$/.exec(tag);
  const node = vector ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function section(title, lead, ...inside) {
  return make("section", {}, make("h2", {}, title), make("p", { class: "lead" }, lead), ...inside);
}

const DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** The small images of a prompt. */
function imagesOf(images) {
  if (!images?.length) return null;
  return make("div", { class: "images" }, ...images.map((src) => make("img", { src, alt: "an image of the prompt" })));
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(2);
  return (size >= 1e4 ? WHOLE : DIGITS).format(value);
}

/** Three digits, for what stands in large letters. */
function short(value) {
  return number(typeof value === "number" && Math.abs(value) < 1e3 ? Number(value.toPrecision(3)) : value);
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 3600) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  if (size >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (size >= 1) return `${Number(value.toPrecision(3))} s`;
  if (size >= 1e-3) return `${Number((value * 1e3).toPrecision(3))} ms`;
  return size === 0 ? "0 s" : `${Math.round(value * 1e6)} µs`;
}

function percent(part) {
  return part > 0 && part < 0.001 ? "< 0.1%" : `${Number((part * 100).toPrecision(3))}%`;
}

/** A colour of the style sheet, as it is now: light or dark. */
function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// How many colours the style sheet has for each side: --training, --training-2, ...
const SHADES = { rollout: 2, training: 6, scoring: 2, sync: 2, wait: 3 };
const FIRST = [/[Pp]olicy\.update$/, /\.update$/, /\.generate$/, /\.load$/, /^trainer waits/, /[Pp]olicy\./];

/** The names of the legend, a side after the other; what trains and generates first, whatever ran first. */
function ordered() {
  const rank = (index) => {
    const found = FIRST.findIndex((pattern) => pattern.test(data.names[index]));
    return Object.keys(SHADES).indexOf(data.sides[index]) * 100 + (found < 0 ? FIRST.length : found);
  };
  return data.names.map((_, index) => index).sort((one, other) => rank(one) - rank(other) || one - other);
}

/** The colour of each name. Names of one side share a family of colours. */
function colours() {
  const seen = {};
  const found = [];
  for (const index of ordered()) {
    const side = data.sides[index];
    const place = (seen[side] = (seen[side] ?? -1) + 1) % SHADES[side];
    found[index] = ink(place ? `${side}-${place + 1}` : side);
  }
  return found;
}

/** The ink of a text on a colour "#rrggbb": dark or white, whichever is read better. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 ? "#16181c" : "#ffffff";
}

const tip = document.getElementById("tip");
let tipGone = null;

/** Show lines at the pointer: the first is bold; [text, colour] has a swatch. `gone` is called when they go. */
function showTip(event, lines, gone = null) {
  tip.replaceChildren(
    ...lines.filter(Boolean).map((line, at) => {
      const [text, colour] = Array.isArray(line) ? line : [line];
      const swatch = colour ? make("i", { style: `background:${colour}` }) : null;
      return at === 0 ? make("b", {}, swatch, text) : make("div", {}, swatch, make("span", {}, text));
    }),
  );
  tip.hidden = false;
  tipGone = gone;
  const { width, height } = tip.getBoundingClientRect();
  const { clientX: x, clientY: y } = event;
  const page = document.documentElement.clientWidth;
  // A finger hides what is below it.
  const above = event.pointerType === "touch" || y + 16 + height > innerHeight;
  const left = event.pointerType === "touch" ? x - width / 2 : x + 16 + width > page ? x - 16 - width : x + 16;
  tip.style.left = `${Math.max(4, Math.min(left, page - width - 4))}px`;
  tip.style.top = `${Math.max(4, above ? y - 22 - height : y + 16)}px`;
}

function hideTip() {
  tip.hidden = true;
  tipGone?.();
  tipGone = null;
}

/** Tell of what a mouse points at, or a finger taps or is drawn over. */
function pointing(node, tell) {
  node.addEventListener("pointerdown", tell);
  node.addEventListener("pointermove", tell);
  node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hideTip());
}

// A tip that a tap left goes with the next one, or when the page is scrolled.
addEventListener("pointerdown", hideTip, true);
addEventListener("scroll", hideTip, { capture: true, passive: true });

// What must be drawn again when the window's width or the colour scheme changes.
const painters = [];

function onPaint(paint) {
  painters.push(paint);
}

function paintAll() {
  for (const paint of painters) paint();
}

let pending = null;
addEventListener("resize", () => {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(paintAll);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);

function legend(entries) {
  return make(
    "ul",
    { class: "legend" },
    ...entries.map(([text, colour]) => make("li", {}, make("i", { style: `background:${colour}` }), text)),
  );
}
