// The page from top to bottom.

function header() {
  const { summary, efficiency } = data;
  const tone = { finished: "good", running: "good", failed: "bad", silent: "bad" }[data.status] ?? "soft";
  const ran = ["running", "paused"].includes(data.status) ? "so far" : "from start to end";
  const stat = (name, value, unit) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, unit ? make("small", {}, unit) : null));
  const rewards = summary.first_reward ?? summary.last_reward ?? null;
  return make(
    "header",
    {},
    make("div", { class: "eyebrow" }, "meshrl run"),
    make("h1", {}, data.name),
    make("span", { class: "pill", style: `--tone:var(--${tone})` }, data.status),
    make(
      "dl",
      { class: "stats" },
      stat("steps", number(summary.steps), meanStep()),
      typeof summary.wall_s === "number" ? stat("wall time", seconds(summary.wall_s), ran) : null,
      efficiency === null ? null : stat("overlap efficiency", percent(efficiency), ranksBusy()),
      rewards === null
        ? null
        : stat(
            "reward",
            `${short(summary.first_reward)} → ${short(summary.last_reward)}`,
            `${data.units.reward}, first\u00a0→\u00a0last\u00a0step`,
          ),
      ...more(summary).map((each) => stat(...each)),
    ),
    summary.error ? make("p", { class: "error" }, summary.error) : null,
    make("ul", { class: "notes" }, ...data.notes.map((note) => make("li", {}, note))),
  );
}

function meanStep() {
  return data.total && `${seconds(data.total.seconds / (data.steps.length || 1))} each, mean`;
}

/** How many of its ranks each side kept busy: the efficiency counts one busy rank as all. */
function ranksBusy() {
  const found = ["rollout", "training", "scoring"].filter((side) => side in data.busy);
  return found.length ? `ranks busy: ${found.map((side) => `${side} ${percent(data.busy[side])}`).join(", ")}` : null;
}

/** What the script itself put into its summary: X_before and X_after become one. */
function more(summary) {
  const known = new Set(["status", "steps", "wall_s", "tokens", "first_reward", "last_reward", "error"]);
  const found = [];
  for (const [name, value] of Object.entries(summary)) {
    if (known.has(name) || typeof value !== "number" || name.endsWith("_after")) continue;
    const plain = name.replace(/_before$/, "");
    const after = plain === name ? undefined : summary[`${plain}_after`];
    const text = after === undefined ? short(value) : `${short(value)} → ${short(after)}`;
    const when = after === undefined ? "" : "held\u00a0out, before\u00a0→\u00a0after";
    found.push([plain.replaceAll("_", " "), text, [data.units[plain], when].filter(Boolean).join(", ")]);
  }
  return found.slice(0, 4);
}

/** How many steps the timeline shows of a run that has many. */
const VIEW = innerWidth < 600 ? 4 : 10;

function timelineSection() {
  if (!data.lanes.length) return null;
  const canvas = make("canvas", { tabindex: 0, "aria-label": "Timeline by rank" });
  const timeline = new Timeline(canvas);
  onPaint(() => timeline.paint());
  const key = make("div");
  onPaint(() =>
    key.replaceChildren(
      legend(
        ordered()
          .map((at) => [data.names[at], colours()[at]])
          .slice(0, 24),
      ),
    ),
  );
  const button = (text, act) => {
    const made = make("button", { type: "button" }, text);
    made.addEventListener("click", act);
    return made;
  };
  // Where the few steps begin that a button shows, by how many others there are.
  const places = { "first steps": () => 0, middle: (spare) => Math.floor(spare / 2), "last steps": (spare) => spare };
  const spare = () => data.steps.length - VIEW;
  let shown = null;
  const show = (name) => {
    shown = name;
    const at = name in places && spare() > 0 ? places[name](spare()) : null;
    if (at === null) timeline.look(...timeline.range);
    else timeline.look(data.steps[at][1], data.steps[at + VIEW - 1][2]);
  };
  const some = Object.keys(places).map((name) => button(name, () => show(name)));
  const views = make(
    "div",
    { class: "views" },
    button("whole run", () => show("whole run")),
    ...some,
  );
  onPaint(() => some.forEach((each) => (each.hidden = spare() <= 0)));
  // While a run is active (live.js), show the newest steps until somebody looks elsewhere.
  if ("now" in data) show("last steps");
  else if (data.steps.length > 3 * VIEW) show("middle");
  for (const act of ["pointerdown", "wheel", "keydown"]) canvas.addEventListener(act, () => (shown = null));
  const made = section(
    "Timeline by rank",
    "What each rank ran and when. Bands are steps, dashed lines new weights on a sampler. " +
      "A thin bar is idle time: point at it or tap it.",
    make(
      "div",
      { class: "card timeline" },
      key,
      canvas,
      make(
        "div",
        { class: "row" },
        make("p", { class: "hint mouse" }, "Wheel zooms at the pointer, dragging pans, double click shows all."),
        make("p", { class: "hint touch" }, "Two fingers zoom, one pans, a tap shows details, two taps show all."),
        views,
      ),
    ),
  );
  made.refresh = () => {
    timeline.refresh();
    if (["last steps", "whole run"].includes(shown)) show(shown);
  };
  return made;
}

function boundSection() {
  const { total, bounds } = data;
  if (!total) return null;
  const parts = PARTS.filter(([part]) => total[part] > 0);
  const whole = make("div", { class: "whole" }, ...parts.map((part) => shareBar(part, total)));
  return section(
    "What bounded each step",
    verdict(),
    make(
      "div",
      { class: "card" },
      legend(parts.map(([, text, colour]) => [text, `var(--${colour})`])),
      whole,
      stepBars(bounds),
    ),
  );
}

/** A part of all steps: as wide as its share, which is written where there is room. */
function shareBar([part, text, colour], total) {
  const share = total[part] / total.seconds;
  const bar = make("div", { style: `flex:${share} 0 0;background:var(--${colour})` });
  onPaint(() => {
    bar.style.color = inkOn(ink(colour));
    bar.textContent = bar.clientWidth > 48 ? percent(share) : "";
  });
  pointing(bar, (event) =>
    showTip(event, [`${percent(share)} ${text}`, `${seconds(total[part])} of ${seconds(total.seconds)}`]),
  );
  return bar;
}

function verdict() {
  const { total, bound } = data;
  const steps = data.steps.length || 1;
  const longest = Object.entries(bound).sort((one, other) => other[1] - one[1])[0];
  const words = { sync: "new weights", other: "the script's own work" };
  const sides = ["rollout", "scoring", "training"].filter((side) => total[side] > 0);
  const parts = sides.map((side) => `${seconds(total[side] / steps)} of ${side}`);
  const ideal = seconds(Math.max(...sides.map((side) => total[side])) / steps);
  const turns = seconds(sides.reduce((sum, side) => sum + total[side], 0) / steps);
  const overlapped =
    data.efficiency === null
      ? ". Nothing is drawn ahead here: rollout and training take turns."
      : `; in turns, at these speeds, ${turns} (on shared cores, ahead=0 may be faster). Overlap efficiency: ${percent(data.efficiency)}.`;
  return (
    `${words[longest[0]] ?? longest[0]} bounded ${longest[1]} of ${number(steps)} steps. ` +
    `A step took ${seconds(total.seconds / steps)} on average` +
    (parts.length ? `, with ${parts.join(", ").replace(/, ([^,]*)$/, " and $1")}` : "") +
    (parts.length > 1 ? `; perfectly overlapped it would take ${ideal}${overlapped}` : ".")
  ).replace(/^./, (first) => first.toUpperCase());
}

function idleSection() {
  if (!data.idle.some(({ idle }) => idle > 0)) return null;
  const rows = data.idle.map(({ mesh, rank, busy, idle, reasons }) => {
    const share = busy / (busy + idle || 1);
    const why = reasons
      .slice(0, 6)
      .flatMap(([text, blocked, length]) => [
        make("dt", {}, seconds(length)),
        make("dd", {}, text, blocked ? make("span", {}, ` · such as: ${blocked}`) : null),
      ]);
    return make(
      "tr",
      {},
      make("td", { class: "number" }, make("b", {}, mesh), ` rank ${rank}`),
      make(
        "td",
        { class: "number busy" },
        `${percent(share)} busy`,
        make("div", { class: "meter" }, make("div", { style: `width:${share * 100}%` })),
      ),
      make("td", { class: "number" }, seconds(idle), make("span", { class: "narrow" }, " idle")),
      make("td", { class: "reasons" }, make("dl", { class: "why" }, ...why)),
    );
  });
  const head = [["rank"], ["busy", "busy"], ["idle"], ["why it was idle"]].map(([text, name]) =>
    make("th", name ? { class: name } : {}, text),
  );
  return section(
    "Where idle time went",
    "Each rank's seconds within the steps in which it ran nothing, and what it waited for.",
    make(
      "div",
      { class: "card" },
      make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)),
    ),
  );
}

function curvesSection() {
  if (!data.curves.length) return null;
  const steps = data.curves.flatMap(({ x }) => [x[0], x[x.length - 1]]);
  const ends = [Math.min(...steps), Math.max(...steps)];
  const card = (curve) => curveCard(curve, "step", ends);
  const front = data.curves.slice(0, data.front).map(card);
  if (data.staleness.length) front.push(histogramCard(data.staleness));
  const rest = data.curves.slice(data.front);
  const others = rest.length ? moreNumbers(rest, card, !front.length) : null;
  const dropped = Object.entries(data.dropped).map(([why, count]) => `${number(count)} ${why}`);
  return section(
    "Learning",
    `By step.${dropped.length ? ` Groups dropped: ${dropped.join(", ")}.` : ""}`,
    front.length ? make("div", { class: "charts" }, ...front) : null,
    others,
  );
}

/** What does not stand in front: curves, and numbers that never change. */
function moreNumbers(curves, card, open) {
  const [flat, moving] = [curves.filter(isConstant), curves.filter((curve) => !isConstant(curve))];
  const counts = [
    moving.length ? `${moving.length} more numbers of each step` : null,
    flat.length ? `${flat.length} that never changed` : null,
  ];
  const made = make(
    "details",
    open ? { open: "" } : {},
    make("summary", {}, counts.filter(Boolean).join(", and ")),
    moving.length ? make("div", { class: "charts" }, ...moving.map(card)) : null,
    flat.length ? constants(flat) : null,
  );
  made.addEventListener("toggle", paintAll);
  return made;
}

function gaugesSection() {
  // What each step has as well stands among its curves.
  const own = data.gauges.filter(({ name }) => !data.curves.some((curve) => curve.name === name));
  if (!own.length) return null;
  const [flat, moving] = [own.filter(isConstant), own.filter((gauge) => !isConstant(gauge))];
  const moments = [...own.map(({ x }) => x[x.length - 1]), ...data.steps.map(([, , ended]) => ended)];
  const ends = [0, Math.max(...moments)];
  return section(
    "Queues and counts",
    "Over the time of the run; a value holds until the next.",
    moving.length ? make("div", { class: "charts" }, ...moving.map((gauge) => curveCard(gauge, "time", ends))) : null,
    flat.length ? constants(flat) : null,
  );
}

function samplesSection() {
  if (!data.samples.length) return null;
  const steps = [...new Set(data.samples.map((sample) => sample.step))];
  const rewards = data.samples.map((sample) => sample.reward).filter((reward) => typeof reward === "number");
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const shown = make("div", { class: "samples" });
  const told = make("span");
  const slider = make("input", {
    type: "range",
    min: 0,
    max: steps.length - 1,
    value: steps.length - 1,
    "aria-label": "step",
  });
  const show = () => {
    const step = steps[slider.value];
    told.textContent = `step ${step}`;
    slider.dataset.step = step;
    shown.replaceChildren(
      ...data.samples.filter((sample) => sample.step === step).map((sample) => sampleCard(sample, low, high)),
    );
  };
  slider.addEventListener("input", show);
  show();
  return section(
    "Samples to read",
    "Completions as they were drawn, with their reward: the stronger the colour, the higher.",
    steps.length > 1 ? make("div", { class: "chooser" }, slider, told) : null,
    shown,
  );
}

function sampleCard({ step, prompt, completion, reward, images, ...rest }, low, high) {
  const part = typeof reward === "number" ? (high > low ? (reward - low) / (high - low) : 0.5) : null;
  const tone = part === null ? "var(--other)" : `color-mix(in oklab, var(--scoring) ${part * 100}%, var(--idle))`;
  const facts = Object.entries(rest).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make(
    "article",
    { class: "card sample", style: `--tone:${tone}` },
    part === null ? null : make("span", { class: "reward" }, make("small", {}, "reward"), number(reward)),
    make("p", { class: "prompt" }, ...(images ?? []).map((src) => make("img", { src, alt: "" })), `${prompt ?? ""}`),
    make("p", {}, `${completion ?? ""}`),
    make(
      "dl",
      {},
      ...facts.flatMap(([name, value]) => [make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, `${value}`)]),
    ),
  );
}

function configSection() {
  if (!data.config) return null;
  const lines = data.config
    .trimEnd()
    .split("\n")
    .flatMap((text) => {
      const [, key, value] = /^(\S+ = )(.*)$/.exec(text) ?? [];
      const parts = /^\[/.test(text) ? [make("b", {}, text)] : key ? [make("i", {}, key), value] : [text];
      return [...parts, "\n"];
    });
  return section(
    "Configuration",
    "With defaults and overrides in place, without the options of other backends. " +
      "`meshrl run config.toml` runs it again.",
    make("div", { class: "card" }, make("pre", {}, ...lines)),
  );
}

/** The page from top to bottom; a section that has nothing to show is null. */
const SECTIONS = [
  header,
  curvesSection,
  timelineSection,
  boundSection,
  idleSection,
  gaugesSection,
  samplesSection,
  configSection,
];
