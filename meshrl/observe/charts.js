// Charts of SVG: a curve, bars by step, a histogram.

const HEIGHT = 150;
/** So few points of a curve have a dot each. */
const FEW = 12;

/** A chart's frame that draws itself again when its width changes: `inside(svg, width)` fills it. */
function frame(height, inside) {
  const svg = make("svg:svg", { height });
  const paint = () => {
    const width = svg.clientWidth || svg.parentElement?.clientWidth || 400;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    inside(svg, width);
  };
  onPaint(paint);
  return svg;
}

function line(x1, y1, x2, y2, name) {
  return make("svg:line", { x1, y1, x2, y2, class: name });
}

function label(x, y, anchor, text) {
  return make("svg:text", { x, y, "text-anchor": anchor }, text);
}

/** The mean of the points around each, over about a twentieth of the curve. */
function smoothed(values) {
  const reach = Math.floor(values.length / 40);
  return values.map((value, at) => {
    const near = values.slice(Math.max(0, at - reach), at + reach + 1).filter((each) => each !== null);
    return near.length ? near.reduce((sum, each) => sum + each, 0) / near.length : null;
  });
}

function path(xs, ys, x, y, held) {
  let drawn = "";
  let pen = false;
  for (let at = 0; at < xs.length; at++) {
    if (ys[at] === null) {
      pen = false;
      continue;
    }
    const [left, top] = [x(xs[at]).toFixed(1), y(ys[at]).toFixed(1)];
    if (!pen) drawn += `M${left} ${top}`;
    else drawn += held ? `H${left}V${top}` : `L${left} ${top}`;
    pen = true;
  }
  return drawn;
}

/** What is under a chart: how far apart its ticks are, and their text. */
const AXES = {
  step: { apart: (rough) => Math.max(1, roundStep(rough)), text: () => tickText(1) },
  time: { apart: timeStep, text: (apart) => (at) => timeText(at, apart) },
};

/** The axis below, with about `count` ticks. */
function below(svg, box, name, x, ends, count, { apart, text } = AXES[name]) {
  const step = apart((ends[1] - ends[0] || 1) / count);
  lowerAxis(svg, box, name, x, ends, multiples(step, ...ends), text(step));
}

/** A card with the name of what it shows, in which unit, and its last value. */
function card(name, unit, value, plotted) {
  const told = value === null ? [] : [make("span", {}, number(value), make("small", {}, "last"))];
  return make(
    "div",
    { class: "card" },
    make("h3", {}, make("span", {}, name, make("small", {}, unit || "\u00a0")), ...told),
    plotted,
  );
}

/** The lowest and the highest of a curve, with zero where it is near, and something between them. */
function heightOf(values) {
  let [low, high] = values.reduce(
    ([least, most], value) => [Math.min(least, value), Math.max(most, value)],
    [Infinity, -Infinity],
  );
  if (low === high) [low, high] = [Math.min(0, 2 * low), Math.max(0, 2 * high) || (low < 0 ? 0 : 1)];
  return low > 0 && low < high / 3 ? [0, high] : [low, high];
}

/** A curve in a card, over the steps or the seconds of `ends`; a value over seconds holds until the next. */
function curveCard({ name, unit, hue, x: xs, y: ys, band }, axis, ends) {
  const there = ys.filter((value) => value !== null);
  const held = axis === "time";
  const stroke = `var(--${hue})`;
  const plotted = frame(HEIGHT, (svg, width) => {
    if (!there.length) return;
    const { step, from, to } = roundRange(...heightOf(band ? [...band[0], ...band[1]] : there), 4);
    const [values, text] = [multiples(step, from, to), tickText(step)];
    const box = plotBox(width, HEIGHT, [axis, ...values.map(text)]);
    const x = scale(...ends, box.left, box.right);
    const y = scale(from, to, box.base, box.top);
    leftAxis(svg, box, y, values, text);
    below(svg, box, axis, x, ends, width / 60);
    if (band) {
      const up = path(xs, band[1], x, y);
      const down = path([...xs].reverse(), [...band[0]].reverse(), x, y).replace("M", "L");
      svg.append(make("svg:path", { d: `${up}${down}Z`, class: "band", fill: stroke }));
    }
    const smooth = !held && xs.length > 80;
    const end = held && ys[ys.length - 1] !== null ? `H${box.right}` : "";
    const drawn = { d: path(xs, ys, x, y, held && !band) + end, class: "plot", stroke };
    svg.append(make("svg:path", { ...drawn, "stroke-width": smooth ? 1 : 1.6, opacity: smooth ? 0.35 : 1 }));
    if (smooth)
      svg.append(make("svg:path", { d: path(xs, smoothed(ys), x, y), class: "plot", stroke, "stroke-width": 2 }));
    const dot = (at) => make("svg:circle", { cx: x(xs[at]), cy: y(ys[at]), r: 3, fill: stroke });
    if (there.length <= FEW && !held) svg.append(...ys.flatMap((value, at) => (value === null ? [] : [dot(at)])));
    const cross = make("svg:g");
    svg.append(cross);
    svg.tell = (event) => {
      const at = nearest(xs, scale(box.left, box.right, ...ends)(placeIn(svg, event)), held);
      cross.replaceChildren(line(x(xs[at]), box.top, x(xs[at]), box.base, "cross"));
      if (ys[at] !== null) cross.append(dot(at));
      const spread = band ? `from ${number(band[0][at])} to ${number(band[1][at])}` : null;
      const where = held ? `at ${timeText(xs[at], (ends[1] - ends[0]) / 500)}` : `step ${xs[at]}`;
      showTip(event, [`${number(ys[at])} ${unit}`.trim(), `${name}, ${where}`, spread], () => cross.replaceChildren());
    };
  });
  pointing(plotted, (event) => plotted.tell?.(event));
  return card(name, unit, there.at(-1) ?? null, plotted);
}

/** The index of the point that is meant by a place: the nearest, or the one that holds there. */
function nearest(xs, wanted, held) {
  const right = Math.min(xs.length - 1, lowest(xs, wanted));
  if (held) return Math.max(0, right - (xs[right] > wanted ? 1 : 0));
  return right > 0 && wanted - xs[right - 1] < xs[right] - wanted ? right - 1 : right;
}

/** How far from the left of an element the pointer is. */
function placeIn(element, event) {
  return event.clientX - element.getBoundingClientRect().left;
}

/** Numbers that never change, as a list: there is nothing to draw. */
function constants(curves) {
  const told = curves.map(({ name, unit, y }) => {
    const value = y.find((each) => each !== null);
    return make("li", {}, name, make("b", {}, number(value)), unit ? make("small", {}, unit) : null);
  });
  return make("div", { class: "constants" }, make("h3", {}, "never changed"), make("ul", {}, ...told));
}

/** Whether a curve has one value only. */
function isConstant({ y, band }) {
  return !band && new Set(y.filter((value) => value !== null)).size < 2;
}

const PARTS = [
  ["both", "both at once", "both"],
  ["rollout_alone", "rollout alone: the trainer waited for a batch", "rollout"],
  ["training_alone", "training alone: no sampler was generating", "training"],
  ["scoring_alone", "scoring: the trainer waited for rewards", "scoring"],
  ["sync", "new weights", "sync"],
  ["other", "other: the script's own work", "other"],
];

/** The bars of steps, each divided into what ran in it. */
function stepBars(bounds) {
  const height = 210;
  const count = bounds.first.length;
  const totals = bounds.first.map((_, at) => PARTS.reduce((sum, [part]) => sum + bounds[part][at], 0));
  const plotted = frame(height, (svg, width) => {
    const { step, to } = roundRange(0, Math.max(...totals) || 1, 4, timeStep);
    const [values, text] = [multiples(step, 0, to), durationText(to)];
    const box = plotBox(width, height, ["step", ...values.map(text)]);
    const x = scale(0, count, box.left, box.right);
    const y = scale(0, to, box.base, box.top);
    leftAxis(svg, box, y, values, text);
    const room = x(1) - x(0);
    const wide = Math.min(72, room - (room < 4 ? 0 : Math.min(3, room / 4)));
    const middle = (at) => x(at) + room / 2;
    for (let at = 0; at < count; at++) {
      let top = 0;
      for (const [part, , colour] of PARTS) {
        const size = bounds[part][at];
        if (!(size > 0)) continue;
        const place = { x: middle(at) - wide / 2, width: wide, y: y(top + size), height: y(top) - y(top + size) };
        svg.append(make("svg:rect", { ...place, fill: `var(--${colour})` }));
        top += size;
      }
    }
    const ends = [bounds.first[0], bounds.last[count - 1]];
    const bar = (value) => middle(Math.max(0, bounds.last.findIndex((last) => last >= value)));
    below(svg, box, "step", bar, ends, width / 60);
    svg.tell = (event) => {
      const at = Math.floor(scale(box.left, box.right, 0, count)(placeIn(svg, event)));
      if (at >= 0 && at < count) tellStep(event, bounds, at, totals[at]);
      else hideTip();
    };
  });
  pointing(plotted, (event) => plotted.tell(event));
  return plotted;
}

function tellStep(event, bounds, at, total) {
  const { first, last } = bounds;
  const steps = first[at] === last[at] ? `step ${first[at]}` : `steps ${first[at]} to ${last[at]}, mean`;
  showTip(event, [
    `${steps}: ${seconds(total)}`,
    ...PARTS.filter(([part]) => bounds[part][at] > 0).map(([part, text, colour]) => [
      `${seconds(bounds[part][at])} ${text}`,
      `var(--${colour})`,
    ]),
    data.efficiency === null ? null : `overlap efficiency ${percent(bounds.efficiency[at])}`,
  ]);
}

/** Rows by how many publications they were behind. */
function histogramCard(counts) {
  const total = counts.reduce((sum, each) => sum + each, 0) || 1;
  const plotted = frame(HEIGHT, (svg, width) => {
    const { step, to } = roundRange(0, (100 * Math.max(...counts)) / total, 4);
    const [values, text] = [multiples(step, 0, to), (value) => `${tickText(step)(value)}%`];
    const box = plotBox(width, HEIGHT, ["behind", ...values.map(text)]);
    const x = scale(0, counts.length, box.left, box.right);
    const y = scale(0, to, box.base, box.top);
    leftAxis(svg, box, y, values, text);
    const room = x(1) - x(0);
    const wide = Math.min(64, room * 0.7);
    counts.forEach((each, at) => {
      const top = y((100 * each) / total);
      const place = { x: x(at) + (room - wide) / 2, width: wide, y: top, height: box.base - top, rx: 2 };
      svg.append(make("svg:rect", { ...place, fill: "var(--sync)" }));
    });
    const middle = (value) => x(value) + room / 2;
    const ends = [0, counts.length - 1];
    below(svg, box, "behind", middle, ends, width / 40, AXES.step);
    svg.tell = (event) => {
      const at = Math.floor(scale(box.left, box.right, 0, counts.length)(placeIn(svg, event)));
      if (!(at in counts)) return hideTip();
      showTip(event, [`${at} publications behind`, `${number(counts[at])} rows, ${percent(counts[at] / total)}`]);
    };
  });
  pointing(plotted, (event) => plotted.tell(event));
  return card("rows by publications behind", "share of rows", null, plotted);
}
