// Charts of SVG: a curve, bars by step, a histogram.

const PLOT = { height: 150, left: 46, right: 6, top: 8, bottom: 22 };

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
  svg.addEventListener("pointerleave", hideTip);
  return svg;
}

function line(x1, y1, x2, y2, name) {
  return make("svg:line", { x1, y1, x2, y2, class: name });
}

function label(x, y, anchor, text) {
  return make("svg:text", { x, y, "text-anchor": anchor }, text);
}

/** A scale from numbers to places. */
function scale(low, high, from, to) {
  const length = high - low || 1;
  return (value) => from + ((value - low) / length) * (to - from);
}

function axes(svg, width, height, x, y, xs, ys, text, held) {
  for (const value of ticks(...ys, 4)) {
    svg.append(line(PLOT.left, y(value), width - PLOT.right, y(value), "grid"));
    svg.append(label(PLOT.left - 8, y(value) + 4, "end", number(value)));
  }
  for (const value of (held ? moments : ticks)(...xs, width / 110))
    svg.append(label(x(value), height - 4, "middle", text(value)));
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

/** A curve in a card. `text` writes an x; `held`: a value holds until the next. */
function curveCard({ name, x: xs, y: ys, band }, colour, text, held = false) {
  const there = ys.filter((value) => value !== null);
  const last = there.length ? there[there.length - 1] : null;
  const plotted = frame(PLOT.height, (svg, width) => {
    if (!there.length) return;
    const all = band ? [...band[0], ...band[1]] : there;
    let [low, high] = all.reduce(
      ([least, most], value) => [Math.min(least, value), Math.max(most, value)],
      [Infinity, -Infinity],
    );
    if (low === high) [low, high] = [Math.min(0, 2 * low), Math.max(0, 2 * high) || (low < 0 ? 0 : 1)];
    if (low > 0 && low < high / 3) low = 0;
    const domain = [xs[0], xs[xs.length - 1] > xs[0] ? xs[xs.length - 1] : xs[0] + 1];
    const x = scale(...domain, PLOT.left, width - PLOT.right);
    const y = scale(low, high, PLOT.height - PLOT.bottom, PLOT.top);
    axes(svg, width, PLOT.height, x, y, domain, [low, high], text, held);
    const smooth = !held && xs.length > 80;
    const stroke = `var(--${colour})`;
    if (band) {
      const up = path(xs, band[1], x, y);
      const down = path([...xs].reverse(), [...band[0]].reverse(), x, y).replace("M", "L");
      svg.append(make("svg:path", { d: `${up}${down}Z`, class: "band", fill: stroke }));
    }
    svg.append(
      make("svg:path", {
        d: path(xs, ys, x, y, held && !band),
        class: "plot",
        stroke,
        "stroke-width": smooth ? 1 : 1.6,
        opacity: smooth ? 0.3 : 1,
      }),
    );
    if (smooth)
      svg.append(make("svg:path", { d: path(xs, smoothed(ys), x, y), class: "plot", stroke, "stroke-width": 2 }));
    const cross = make("svg:g");
    svg.append(cross);
    svg.onpointermove = (event) => {
      const wanted =
        domain[0] +
        ((event.clientX - svg.getBoundingClientRect().left - PLOT.left) / (width - PLOT.left - PLOT.right)) *
          (domain[1] - domain[0]);
      const right = Math.min(xs.length - 1, lowest(xs, wanted));
      const nearer = right > 0 && wanted - xs[right - 1] < xs[right] - wanted;
      const at = held ? Math.max(0, right - (xs[right] > wanted ? 1 : 0)) : nearer ? right - 1 : right;
      cross.replaceChildren(line(x(xs[at]), PLOT.top, x(xs[at]), PLOT.height - PLOT.bottom, "cross"));
      if (ys[at] !== null) cross.append(make("svg:circle", { cx: x(xs[at]), cy: y(ys[at]), r: 3.5, fill: stroke }));
      const spread = band ? `from ${number(band[0][at])} to ${number(band[1][at])}` : null;
      showTip(event, [number(ys[at]), `${name}, ${held ? text(xs[at]) : `step ${xs[at]}`}`, spread]);
    };
    svg.onpointerleave = () => {
      cross.replaceChildren();
      hideTip();
    };
  });
  return make("div", { class: "card" }, make("h3", {}, name, make("span", {}, number(last))), plotted);
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
  return frame(height, (svg, width) => {
    const totals = bounds.first.map((_, at) => PARTS.reduce((sum, [part]) => sum + bounds[part][at], 0));
    const high = Math.max(...totals) || 1;
    const x = scale(0, count, PLOT.left, width - PLOT.right);
    const y = scale(0, high, height - PLOT.bottom, PLOT.top);
    for (const value of ticks(0, high, 4)) {
      svg.append(line(PLOT.left, y(value), width - PLOT.right, y(value), "grid"));
      svg.append(label(PLOT.left - 8, y(value) + 4, "end", seconds(value)));
    }
    const every = Math.max(1, Math.ceil((count * 60) / (width - PLOT.left)));
    const gap = Math.min(3, (x(1) - x(0)) / 4);
    for (let at = 0; at < count; at++) {
      const bar = make("svg:g");
      let top = 0;
      for (const [part, , colour] of PARTS) {
        const size = bounds[part][at];
        if (!(size > 0)) continue;
        const rect = {
          x: x(at) + gap / 2,
          width: Math.min(56, x(1) - x(0) - gap),
          y: y(top + size),
          height: y(top) - y(top + size),
        };
        bar.append(make("svg:rect", { ...rect, fill: `var(--${colour})` }));
        top += size;
      }
      const steps =
        bounds.first[at] === bounds.last[at]
          ? `step ${bounds.first[at]}`
          : `steps ${bounds.first[at]} to ${bounds.last[at]}, mean`;
      bar.addEventListener("pointermove", (event) =>
        showTip(event, [
          `${steps}: ${seconds(totals[at])}`,
          ...PARTS.filter(([part]) => bounds[part][at] > 0).map(([part, text, colour]) => [
            `${seconds(bounds[part][at])} ${text}`,
            `var(--${colour})`,
          ]),
          `overlap efficiency ${percent(bounds.efficiency[at])}`,
        ]),
      );
      svg.append(bar);
      if (at % every === 0)
        svg.append(label(x(at) + Math.min(56, x(1) - x(0)) / 2, height - 4, "middle", `${bounds.first[at]}`));
    }
  });
}

/** Rows by how many versions they were behind. */
function histogramCard(name, counts) {
  const total = counts.reduce((sum, each) => sum + each, 0) || 1;
  const plotted = frame(PLOT.height, (svg, width) => {
    const x = scale(0, counts.length, PLOT.left, width - PLOT.right);
    const y = scale(0, Math.max(...counts) / total, PLOT.height - PLOT.bottom, PLOT.top);
    for (const value of ticks(0, Math.max(...counts) / total, 3)) {
      svg.append(
        line(PLOT.left, y(value), width - PLOT.right, y(value), "grid"),
        label(PLOT.left - 8, y(value) + 4, "end", percent(value)),
      );
    }
    const room = x(1) - x(0);
    const wide = Math.min(64, room * 0.7);
    counts.forEach((each, at) => {
      const middle = x(at) + room / 2;
      const height = y(0) - y(each / total);
      const bar = make("svg:rect", {
        x: middle - wide / 2,
        y: y(each / total),
        width: wide,
        height,
        rx: 2,
        fill: "var(--both)",
      });
      bar.addEventListener("pointermove", (event) =>
        showTip(event, [`${at} versions behind`, `${number(each)} rows, ${percent(each / total)}`]),
      );
      svg.append(bar, label(middle, PLOT.height - 4, "middle", `${at}`));
    });
  });
  return make("div", { class: "card" }, make("h3", {}, name), plotted);
}
