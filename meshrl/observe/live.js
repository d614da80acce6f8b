// The page of an active run. The server sends patches of `data`, at first the whole. Sections that show a change are made
// again. What somebody reads, opened or holds there stays as it is.

const SPEED = "tokens a second of ";

/** How fast a mesh was in the newest step, and the share of its peak where that is known. */
function meshSpeed({ name, y }) {
  const mesh = name.slice(SPEED.length);
  const use = data.gauges.find((each) => each.name === `FLOPs utilisation of ${mesh}`)?.y.at(-1);
  const told = typeof use === "number" ? `, at ${percent(use)} of its FLOPs` : "";
  return stat(`mesh ${mesh}`, short(y.at(-1)), `tokens a second${told}`);
}

/** What the run does now: how fast it is, what runs, and who waits. */
function nowSection() {
  const { now, pace, ahead } = data;
  if (!now) return null;
  const bound = typeof ahead === "number" ? `publications behind, at most ${ahead} (ahead)` : "publications behind";
  const known = (name) => pace[name] !== undefined;
  const waits = now.waits.map(({ who, what, on, seconds: length }) =>
    told(`${who} waits for ${what}`, on, length, "wait"),
  );
  const calls = now.calls.map(({ where, ranks, seconds: length }) => told(where, ranks, length, sideOf(where)));
  return section(
    "Now",
    `${seconds(now.at)} after its process began. How fast the newest steps were, which calls run, and who waits for whom.`,
    make(
      "div",
      { class: "card now" },
      make(
        "dl",
        { class: "stats" },
        known("steps_per_minute") ? stat("steps a minute", short(pace.steps_per_minute)) : null,
        known("step_s") ? stat("newest step", seconds(pace.step_s)) : null,
        known("tokens_per_second") ? stat("tokens a second", short(pace.tokens_per_second)) : null,
        ...data.gauges.filter(({ name }) => name.startsWith(SPEED)).map(meshSpeed),
        ...data.gauges.filter(({ name }) => name === "KV cache use").map(({ y }) => stat("KV cache", percent(y.at(-1)), "of it, at most")),
        now.memory ? stat("memory", `${short(now.memory / 2 ** 30)} GiB`, "of its processes here") : null,
        known("staleness") ? stat("staleness", short(pace.staleness), bound) : null,
      ),
      list("runs", calls, "no call is under way"),
      list("waits", waits, "nobody waits"),
    ),
  );
}

function list(name, rows, none) {
  const inside = rows.length ? rows : [make("li", { class: "none" }, none)];
  return make("div", {}, make("h3", {}, name), make("ul", {}, ...inside));
}

function told(what, about, length, side) {
  const swatch = make("i", { style: `background:var(--${side})` });
  return make("li", {}, swatch, make("b", {}, what), ` ${seconds(length)}`, make("small", {}, about));
}

/** The side of a call, by its name among those of the timeline. */
function sideOf(where) {
  return data.sides[data.names.indexOf(where)] ?? "other";
}

const RUNNING = ["running", "paused"];
let token = takeToken();

/** The token that stands behind the # of the address; it is kept for this tab, and goes from the address. */
function takeToken() {
  if (location.hash.length > 1) {
    sessionStorage.setItem("token", location.hash.slice(1));
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

/** What may be asked of the run, for who has the token. */
function controlSection() {
  if (!token || !RUNNING.includes(data.status)) return null;
  const { asked, keeps } = data;
  const answer = make("p", { role: "status", class: "hint" }, asked.map((each) => `${each}: asked for. `).join(""));
  const button = (text, command, sure = null) => {
    const made = make("button", { type: "button" }, text);
    made.addEventListener("click", async () => {
      if (sure && !confirm(sure)) return;
      answer.textContent = await ask(command);
      if (!token) for (const each of answer.parentNode.querySelectorAll("button")) each.remove();
    });
    return made;
  };
  const keep = button("Checkpoint now", "checkpoint");
  if (!keeps) {
    keep.disabled = true;
    keep.title = "run.checkpoint_every is not set";
  }
  const ends = keeps ? "It writes a checkpoint, and can resume from there." : "It keeps no checkpoint to resume from.";
  return make(
    "section",
    { class: "control", "aria-label": "Control" },
    asked.includes("pause") ? button("Resume", "resume") : button("Pause", "pause"),
    keep,
    button("Stop", "stop", `Stop the run after this step? ${ends}`),
    answer,
  );
}

async function ask(command) {
  try {
    const headers = { Authorization: `Bearer ${token}` };
    const answer = await fetch("/control", { method: "POST", headers, body: command });
    if (answer.status === 401 || answer.status === 403) {
      token = null; // of a server that has ended; the one in its place has another, or none
      sessionStorage.removeItem("token");
    }
    return await answer.text();
  } catch {
    return "the server cannot be reached";
  }
}

/** Each section with the keys of `data` that it shows. */
const SHOWS = new Map([
  [header, ["name", "status", "notes", "alarms", "summary", "units", "total", "efficiency", "busy", "steps"]],
  [controlSection, ["status", "asked", "keeps"]],
  [nowSection, ["now", "pace", "ahead", "gauges"]],
  [curvesSection, ["curves", "front", "staleness", "dropped"]],
  [timelineSection, ["lanes", "steps", "swaps", "names", "sides", "texts"]],
  [boundSection, ["total", "bounds", "bound", "efficiency", "steps"]],
  [idleSection, ["idle"]],
  [gaugesSection, ["gauges", "curves", "steps"]],
  [rowsSection, ["samples"]],
  [configSection, ["config"]],
]);

const page = document.getElementById("page");
/** Of each section that is there: its element, and what paints it. */
const shown = new Map();
const stale = new Set();

function changed(keys) {
  for (const [part, own] of SHOWS) if (own.some((key) => keys.includes(key))) stale.add(part);
  later();
}

let drawing = null;
function later() {
  drawing ??= requestAnimationFrame(() => {
    drawing = null;
    draw();
  });
}

function draw() {
  for (const part of SHOWS.keys()) {
    if (!stale.has(part) || isHeld(shown.get(part)?.node)) continue;
    stale.delete(part);
    build(part);
  }
  painters.splice(0, painters.length, ...[...shown.values()].flatMap(({ own }) => own));
  document.title = `${data.name} · step ${number(data.summary.steps)} · ${data.status}`;
}

/** Replace a section by a new one, or have it show the news. */
function build(part) {
  const old = shown.get(part);
  if (old?.node.refresh?.()) {
    for (const paint of old.own) paint();
    return;
  }
  painters.length = 0;
  const node = part();
  const own = painters.splice(0);
  shown.delete(part);
  if (!node) {
    old?.node.remove();
    return;
  }
  shown.set(part, { node, own });
  if (old) replace(old.node, node);
  else page.insertBefore(node, following(part));
  for (const paint of own) paint();
}

/** The element of the next section that is there. */
function following(part) {
  const parts = [...SHOWS.keys()];
  return (
    parts
      .slice(parts.indexOf(part) + 1)
      .map((each) => shown.get(each)?.node)
      .find(Boolean) ?? null
  );
}

const FOCUSED = "button, summary, canvas";

/** Replace a section; what was open, chosen and focused in the old one is so in the new one. */
function replace(old, node) {
  const pairs = (selector) => {
    const others = node.querySelectorAll(selector);
    return [...old.querySelectorAll(selector)].map((each, at) => [each, others[at]]).filter(([, other]) => other);
  };
  for (const [one, other] of pairs("details")) other.open = one.open;
  const focused = pairs(FOCUSED).find(([one]) => one === document.activeElement);
  old.replaceWith(node);
  focused?.[1].focus({ preventScroll: true });
}

/** A value with a patch of meshrl/observe/server.py. */
function applied(value, patch) {
  if (!Array.isArray(patch)) {
    for (const [key, inner] of Object.entries(patch)) value[key] = applied(value[key], inner);
    return value;
  }
  if (patch.length === 1) return patch[0];
  const [drop, keep, more] = patch;
  return [...value.slice(drop, drop + keep), ...more];
}

/** Whether somebody reads a value, or marks a text, in a section. */
function isHeld(node) {
  const marked = getSelection();
  return node && ((!tip.hidden && node.matches(":hover")) || (!marked.isCollapsed && node.contains(marked.anchorNode)));
}

for (const act of ["pointermove", "pointerup", "keyup"]) addEventListener(act, () => stale.size && later());

const link = make("p", { class: "link", role: "status", hidden: "" }, "The server cannot be reached: trying again.");
document.body.append(link);

const events = new EventSource("/events");
events.addEventListener("open", () => (link.hidden = true));
events.addEventListener("error", () => {
  link.hidden = false;
  if (events.readyState === EventSource.CLOSED)
    link.textContent = "The server refuses to send the run. If many pages show it, close one, then reload this page.";
});
events.addEventListener("message", (event) => {
  const patch = JSON.parse(event.data);
  applied(data, patch);
  page.querySelector("noscript")?.remove();
  changed(Object.keys(patch));
});
