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

const DIGITS = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

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

/** Round numbers from `low` to `high`, about `count` of them. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  // + 0 makes 0 of -0.
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step + 0);
  return found;
}

const MINUTES = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];

/** Round moments: like numbers below a minute, whole minutes and hours above. */
function moments(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (rough < 8) return ticks(low, high, count);
  const step = [10, 15, 30, ...MINUTES].find((each) => each >= rough) ?? 86400 * Math.ceil(rough / 86400);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step + 0);
  return found;
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

const tip = document.getElementById("tip");

/** Show lines at the pointer: the first is bold; [text, colour] has a swatch. */
function showTip(event, lines) {
  tip.replaceChildren(
    ...lines.filter(Boolean).map((line, at) => {
      const [text, colour] = Array.isArray(line) ? line : [line];
      const swatch = colour ? make("i", { style: `background:${colour}` }) : null;
      return at === 0 ? make("b", {}, swatch, text) : make("div", {}, swatch, make("span", {}, text));
    }),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  const top = event.clientY + 16 + height > innerHeight ? event.clientY - 12 - height : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

// What must be drawn again when the window's width or the colour scheme changes.
const painters = [];

function onPaint(paint) {
  painters.push(paint);
}

function paintAll() {
  for (const paint of painters) paint();
}

function legend(entries) {
  return make(
    "ul",
    { class: "legend" },
    ...entries.map(([text, colour]) => make("li", {}, make("i", { style: `background:${colour}` }), text)),
  );
}
