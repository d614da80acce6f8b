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
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
  return found;
}

/** A colour of the style sheet, as it is now: light or dark. */
function ink(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Endpoints of one side share a hue; the second and later are mixed with the ground, so that they differ.
const MIX = [0, 34, 56, 18, 68, 46];

function colours() {
  const seen = {};
  const ground = ink("card");
  const order = data.names.map((name, index) => index);
  // What trains and generates has the pure hue, whatever ran first.
  const rank = (name) => (/\.(update|generate|load)$/.test(name) ? 0 : 1);
  order.sort((one, other) => rank(data.names[one]) - rank(data.names[other]) || one - other);
  const found = [];
  for (const index of order) {
    const side = data.sides[index];
    const place = (seen[side] = (seen[side] ?? -1) + 1);
    found[index] = mixed(ink(side), ground, MIX[place % MIX.length] / 100);
  }
  return found;
}

function mixed(one, other, part) {
  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const [first, second] = [parse(one), parse(other)];
  return `rgb(${first.map((value, at) => Math.round(value * (1 - part) + second[at] * part)).join(" ")})`;
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
  return make("ul", { class: "legend" }, ...entries.map(([text, colour]) => make("li", {}, make("i", { style: `background:${colour}` }), text)));
}
