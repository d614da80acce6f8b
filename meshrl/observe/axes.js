// Axes: round ticks of numbers, of steps and of times, and how they are written.

/** The least of 1, 2 and 5 times a power of ten that is not below `rough`. */
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5].map((each) => each * power).find((each) => each >= rough * (1 - 1e-9)) ?? 10 * power;
}

/** The same for seconds: 1, 2 or 5 times a power of ten, or of minutes and hours if the step is that long. */
function timeStep(rough) {
  if (rough <= 10) return roundStep(rough);
  if (rough > 1800) return 3600 * roundStep(rough / 3600);
  return [20, 30, 60, 120, 300, 600, 1200, 1800].find((each) => each >= rough);
}

/** The multiples of `step` from `low` to `high`. */
function multiples(step, low, high) {
  const found = [];
  // + 0 makes 0 of -0.
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step + 0);
  return found;
}

/** The round step of about `count` ticks that widens `low` to `high` least, and what it widens them to. */
function roundRange(low, high, count, stepOf = roundStep) {
  let best = null;
  for (const parts of [count - 1, count, count + 1, count + 2]) {
    const step = stepOf((high - low) / parts);
    const [from, to] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
    if (!best || to - from < best.to - best.from) best = { step, from, to };
  }
  return best;
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });

/** How ticks that are `step` apart are written, all of them to one digit. */
function tickText(step) {
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (digits > 4) return (value) => (value === 0 ? "0" : `${Number(value.toPrecision(4)).toExponential()}`);
  const plain = new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return (value) => (Math.abs(value) >= 1e5 ? COMPACT.format(value) : value === 0 ? "0" : plain.format(value));
}

/** How lengths of time up to `high` seconds are written, all in one unit. */
function durationText(high) {
  const [unit, name] = [
    [3600, "h"],
    [60, "min"],
    [1, "s"],
    [1e-3, "ms"],
    [1e-6, "µs"],
  ].find(([each]) => high >= (each > 1 ? 2 * each : each)) ?? [1e-6, "µs"];
  return (value) => (value === 0 ? "0" : `${Number((value / unit).toPrecision(4))} ${name}`);
}

/** A moment of the run, with enough digits to tell moments `fine` seconds apart. */
function timeText(at, fine) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(Math.max(fine, 1e-9)) - 1e-9)));
  const whole = Number(at.toFixed(digits));
  if (whole < 60) return `${whole.toFixed(digits)} s`;
  const two = (value, places = 0) => value.toFixed(places).padStart(places ? places + 3 : 2, "0");
  const minutes = Math.floor(whole / 60);
  const rest = two(whole - minutes * 60, digits);
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${rest}`;
}

/** A scale from numbers to places. */
function scale(low, high, from, to) {
  const length = high - low || 1;
  return (value) => from + ((value - low) / length) * (to - from);
}

/** About how wide a character of a label is, in pixels. */
const LETTER = 6.6;

/** Where a plot lies in its frame; the labels of the left axis say how much room they need. */
function plotBox(width, height, texts) {
  const longest = Math.max(...texts.map((text) => text.length));
  return { left: Math.ceil(longest * LETTER) + 10, right: width - 8, top: 8, base: height - 22 };
}

/** The left axis: a line and a label at each value. */
function leftAxis(svg, box, y, values, text) {
  for (const value of values) {
    svg.append(line(box.left, y(value), box.right, y(value), "grid"));
    svg.append(label(box.left - 8, y(value) + 4, "end", text(value)));
  }
}

/** The axis below: its name in the corner, a label at each end, and at those values that have room. */
function lowerAxis(svg, box, name, x, ends, values, text) {
  const taken = [];
  const put = (value, anchor) => {
    const wide = text(value).length * LETTER;
    const from = x(value) - { start: 0, middle: wide / 2, end: wide }[anchor];
    if (taken.some(([low, high]) => from < high + 12 && from + wide > low - 12)) return;
    taken.push([from, from + wide]);
    svg.append(line(x(value), box.base, x(value), box.base + 4, "tick"));
    svg.append(label(x(value), box.base + 18, anchor, text(value)));
  };
  svg.append(label(box.left - 8, box.base + 18, "end", name));
  put(ends[0], text(ends[0]).length < 3 ? "middle" : "start");
  put(ends[1], box.right - x(ends[1]) > 12 ? "middle" : "end");
  for (const value of values) put(value, "middle");
}
