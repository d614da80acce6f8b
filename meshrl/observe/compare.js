// The page of a comparison from top to bottom. A group is runs that differ only in their seed; its colour is --group-N.

const GROUP_COLOURS = 6;
/** Dashes tell the lines of groups apart too. */
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

function groupColour(group) {
  return `var(--group-${(group % GROUP_COLOURS) + 1})`;
}

/** A group by its colour and its name, or a run of it by the run's. */
function groupName(group, name = data.groups[group]) {
  const stroke = { stroke: groupColour(group), "stroke-width": 2.5, "stroke-dasharray": DASHES[group % DASHES.length] };
  const mark = make("svg:svg", { width: 26, height: 10, class: "mark", "aria-hidden": "true" });
  mark.append(make("svg:line", { x1: 1, y1: 5, x2: 25, y2: 5, ...stroke }));
  return make("span", { class: "group" }, mark, name);
}

function header() {
  const count = data.runs.length;
  return make(
    "header",
    {},
    make("div", { class: "eyebrow" }, "meshrl comparison"),
    make("h1", {}, data.groups.join(" · ")),
    make(
      "p",
      { class: "lead" },
      data.groups.length < count
        ? `${count} runs in ${data.groups.length} groups: runs that differ only in their seed are one.`
        : `${count} runs.`,
    ),
    make("ul", { class: "notes" }, ...data.notes.map((note) => make("li", {}, note))),
  );
}

/** A table that scrolls sideways where it is too wide: `rows` are lists of texts and elements. */
function tableCard(head, rows) {
  const cells = (tag, row) => row.map((cell) => make(tag, {}, cell ?? make("span", { class: "none" }, "–")));
  return make(
    "div",
    { class: "card compared" },
    make(
      "table",
      {},
      make("thead", {}, make("tr", {}, ...cells("th", head))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row)))),
    ),
  );
}

function settingsSection() {
  const names = data.groups.map((_, group) => groupName(group));
  const rows = Object.entries(data.settings).map(([key, values]) => [
    make("code", {}, key),
    ...values.map((value) => (value === null ? null : make("code", {}, value))),
  ]);
  return section(
    "What is different",
    rows.length
      ? "The settings that differ between groups. – means not set. All others are equal."
      : "Nothing but the seed.",
    rows.length ? tableCard(["setting", ...names], rows) : null,
  );
}

function runsSection() {
  const rows = data.runs.map((run) => [
    groupName(run.group),
    run.name,
    run.seed || null,
    run.status,
    number(run.steps),
    run.step_s === null ? null : seconds(run.step_s),
    run.lineage || null,
  ]);
  return section(
    "Runs",
    "A fork names the run that it comes from, and the step after which it differs.",
    tableCard(["group", "run", "seed", "status", "steps", "a step", "forked from"], rows),
  );
}

/** The mean of a group, and its runs where they are several. */
function measured({ values, runs, name }, group) {
  if (values[group] === null) return null;
  const text = (value) => (name.startsWith("seconds") ? seconds(value) : short(value));
  const each = runs[group].length > 1 ? make("small", {}, runs[group].map(text).join(", ")) : null;
  return make("span", { class: "measure" }, text(values[group]), each);
}

function differenceSection() {
  const head = ["", ...data.groups.map((_, group) => groupName(group))];
  const rows = data.measures.map((each) => [each.name, ...data.groups.map((_, group) => measured(each, group))]);
  const told = data.differences.map((each, at) =>
    make("li", { class: each.low > 0 || each.high < 0 ? "seen" : "" }, data.sentences[at]),
  );
  return section(
    "What it came to",
    "Means of each group. Below, the difference from the first group, with the interval that resampling gives.",
    tableCard(head, rows),
    told.length ? make("ul", { class: "differences" }, ...told) : null,
  );
}

function curvesSection() {
  if (!data.charts.length) return null;
  const every = data.charts.flatMap(({ lines }) => lines.flatMap(({ x }) => [x[0], x[x.length - 1]]));
  const ends = [Math.min(...every), Math.max(...every)];
  const cards = data.charts.map((chart) => linesCard(chart, ends));
  const [front, rest] = [cards.slice(0, data.front), cards.slice(data.front)];
  const more = make(
    "details",
    front.length ? {} : { open: "" },
    make("summary", {}, `${rest.length} more numbers of each step`),
    make("div", { class: "charts" }, ...rest),
  );
  more.addEventListener("toggle", paintAll);
  return section(
    "Curves",
    "By step: the mean of a group, and a band from its lowest run to its highest where it has several seeds.",
    make("div", { class: "groups" }, ...data.groups.map((_, group) => groupName(group))),
    front.length ? make("div", { class: "charts" }, ...front) : null,
    rest.length ? more : null,
  );
}

/** A number of all groups in a card, over the steps of `ends`. */
function linesCard({ name, unit, lines }, ends) {
  const forks = [...new Set(data.runs.map((run) => run.forked_at).filter((step) => step !== null))];
  const plotted = frame(HEIGHT, (svg, width) => {
    const values = lines.flatMap(({ mean, low, high }) => [...mean, ...(low ?? []), ...(high ?? [])]);
    const { step, from, to } = roundRange(...heightOf(values), 4);
    const [ticks, text] = [multiples(step, from, to), tickText(step)];
    const box = plotBox(width, HEIGHT, ["step", ...ticks.map(text)]);
    const x = scale(...ends, box.left, box.right);
    const y = scale(from, to, box.base, box.top);
    leftAxis(svg, box, y, ticks, text);
    below(svg, box, "step", x, ends, width / 60);
    for (const at of forks) svg.append(line(x(at), box.top, x(at), box.base, "cross"));
    for (const each of lines) drawLine(svg, each, x, y);
    const cross = make("svg:g");
    svg.append(cross);
    svg.tell = (event) => {
      const wanted = scale(box.left, box.right, ...ends)(placeIn(svg, event));
      const points = lines.map((each) => [each, nearest(each.x, wanted, false)]);
      const [shown, place] = points[0];
      const at = shown.x[place];
      cross.replaceChildren(line(x(at), box.top, x(at), box.base, "cross"));
      showTip(event, [`${name}, step ${at}`, ...points.map((each) => toldPoint(...each))], () => cross.replaceChildren());
    };
  });
  pointing(plotted, (event) => plotted.tell?.(event));
  return card(name, unit, null, plotted);
}

function toldPoint({ group, mean, low, high }, at) {
  const spread = low ? `, from ${number(low[at])} to ${number(high[at])}` : "";
  return [`${number(mean[at])} ${data.groups[group]}${spread}`, groupColour(group)];
}

function drawLine(svg, { group, x: xs, mean, low, high }, x, y) {
  const stroke = groupColour(group);
  if (low) {
    const down = path([...xs].reverse(), [...low].reverse(), x, y).replace("M", "L");
    svg.append(make("svg:path", { d: `${path(xs, high, x, y)}${down}Z`, class: "band", fill: stroke }));
  }
  const dashes = DASHES[group % DASHES.length];
  svg.append(
    make("svg:path", { d: path(xs, mean, x, y), class: "plot", stroke, "stroke-width": 1.8, "stroke-dasharray": dashes }),
  );
  if (xs.length <= FEW)
    svg.append(...xs.map((at, index) => make("svg:circle", { cx: x(at), cy: y(mean[index]), r: 3, fill: stroke })));
}

function splitSection() {
  const runs = data.runs.filter((run) => run.split);
  if (!runs.length) return null;
  const longest = Math.max(...runs.map((run) => run.split.seconds)) || 1;
  const parts = PARTS.filter(([part]) => runs.some((run) => run.split[part] > 0));
  const rows = runs.map((run) =>
    make(
      "div",
      { class: "split" },
      groupName(run.group, run.name),
      splitBar(run, parts, longest),
      make("b", {}, seconds(run.split.seconds)),
    ),
  );
  return section(
    "Where a step's time goes",
    "Mean seconds of a step, by what ran in it. For a resumed run, steps since it resumed.",
    make(
      "div",
      { class: "card" },
      legend(parts.map(([, text, colour]) => [text, `var(--${colour})`])),
      ...rows,
    ),
  );
}

function splitBar({ split }, parts, longest) {
  const bars = parts
    .filter(([part]) => split[part] > 0)
    .map(([part, text, colour]) => {
      const bar = make("div", { style: `width:${(100 * split[part]) / longest}%;background:var(--${colour})` });
      pointing(bar, (event) => showTip(event, [`${seconds(split[part])} ${text}`, percent(split[part] / split.seconds)]));
      return bar;
    });
  return make("div", { class: "whole" }, ...bars);
}

function samplesSection() {
  const rows = data.samples.map(({ prompt, held_out: isHeldOut, completions, images }) =>
    make(
      "article",
      { class: "card side" },
      make("p", { class: "prompt" }, make("small", {}, isHeldOut ? "held out" : "trained"), prompt),
      imagesOf(images),
      make(
        "div",
        { class: "completions" },
        ...completions.map((each, group) => (each ? completionOf(each, group) : null)),
      ),
    ),
  );
  return section(
    "The same prompts",
    rows.length
      ? "The newest completion of each group; of a held-out prompt the greedy one of the end. What was judged otherwise is first."
      : "No prompt was kept by more than one group: runs of one seed sample the same ones, and all keep held-out ones.",
    ...rows,
  );
}

function completionOf({ text, reward, step, tokens }, group) {
  const facts = [reward === null ? null : `reward ${number(reward)}`, step === null ? null : `step ${step}`];
  return make(
    "div",
    { class: "completion", style: `--tone:${groupColour(group)}` },
    make("div", { class: "facts" }, groupName(group), make("small", {}, facts.filter(Boolean).join(" · "))),
    make("p", {}, text),
    tokens ? tokensBelow(tokens) : null,
  );
}

/** The tokens of a completion, drawn once they are opened. */
function tokensBelow(columns) {
  const made = make("details", {}, make("summary", {}, `${number(columns.tokens.length)} tokens`));
  let view = null;
  made.addEventListener("toggle", () => {
    if (!view) made.append((view = new Tokens(columns)).node);
    view.paint();
  });
  onPaint(() => made.open && view?.paint());
  return made;
}

/** The page from top to bottom; a section that has nothing to show is null. */
const SECTIONS = [
  header,
  settingsSection,
  differenceSection,
  runsSection,
  curvesSection,
  splitSection,
  samplesSection,
];
