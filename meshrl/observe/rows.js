// The rows that a run kept: filters, a list, and of the row that is open its numbers, its group and its tokens.

/** The height of a row in the list. */
const ROW = 52;
/** Characters of a completion beside its answer: its end, which most rewards read. */
const END = 200;
/** Rows of a group that stand side by side at most. */
const BESIDE = 64;
/** Numbers and texts of a row that have a place of their own. */
const PLACED = ["at", "tokens", "prompt", "completion", "answer", "reward", "group", "step", "advantage", "length", "reward_error", "images", "held_out"];

/** The tokens of a row: the page has them, or a live page asks its server. Null without tokens. */
async function tokensOf(row) {
  if (!row.tokens) return null;
  if (row.at in data.tokens) return data.tokens[row.at];
  if (!("now" in data)) return null;
  const answer = await fetch(`/tokens/${row.at}`);
  return answer.ok ? answer.json() : null;
}

/** The marks of a row, each with the filter that asks for it. */
const MARKS = {
  "held out": (row) => row.held_out === true,
  truncated: (row) => Boolean(row.truncated),
  error: (row) => Boolean(row.reward_error) || row.reward === null,
  stale: (row) => row.staleness > 0,
};

const ORDERS = {
  "newest first": (row) => -row.step,
  "oldest first": (row) => row.step,
  "lowest reward": (row) => row.reward ?? Infinity,
  "highest reward": (row) => -(row.reward ?? -Infinity),
  longest: (row) => -(row.length ?? 0),
};

class Rows {
  constructor() {
    this.open = null;
    this.view = null;
    this.list = new Scroller(
      { class: "rows", tabindex: 0, role: "listbox", "aria-label": "Rows" },
      ROW,
      (at) => this.item(this.shown[at], at),
    );
    this.list.node.addEventListener("click", (event) => {
      const found = event.target.closest("[role=option]");
      if (found) this.show(Number(found.dataset.at));
    });
    this.list.node.addEventListener("keydown", (event) => this.key(event));
    this.count = make("span", { role: "status" });
    this.detail = make("div", { class: "row-open" });
    this.filters = this.makeFilters();
    this.node = make(
      "div",
      {},
      this.filters,
      make("div", { class: "explorer" }, make("div", {}, make("div", { class: "count" }, this.count), this.list.node), this.detail),
    );
    this.apply();
    if (this.shown.length) this.show(this.shown[0].at);
  }

  makeFilters() {
    const again = () => this.apply();
    const input = (attributes) => {
      const made = make("input", attributes);
      made.addEventListener("input", again);
      return made;
    };
    this.text = input({ type: "search", placeholder: "search texts", "aria-label": "search texts" });
    this.bounds = {};
    const range = (key, name) => {
      const ends = ["from", "to"].map((end) => input({ type: "number", step: "any", "aria-label": `${name} ${end}` }));
      this.bounds[key] = ends;
      return make("span", { class: "range" }, name, ends[0], "to", ends[1]);
    };
    this.boxes = Object.fromEntries(Object.keys(MARKS).map((name) => [name, input({ type: "checkbox" })]));
    const boxes = Object.entries(this.boxes).map(([name, box]) => make("label", {}, box, name));
    this.order = make("select", { "aria-label": "order" }, ...Object.keys(ORDERS).map((name) => make("option", {}, name)));
    this.order.addEventListener("change", again);
    const ranges = [range("reward", "reward"), range("length", "tokens"), range("step", "step")];
    return make("div", { class: "filters" }, this.text, ...ranges, ...boxes, this.order);
  }

  /** Filter and sort the rows. */
  apply() {
    const wanted = this.text.value.toLowerCase();
    const ranges = Object.entries(this.bounds)
      .map(([key, [from, to]]) => [key, from.value, to.value])
      .filter(([, from, to]) => from || to);
    const marks = Object.keys(MARKS).filter((name) => this.boxes[name].checked);
    const inRange = (row) =>
      ranges.every(([key, from, to]) => typeof row[key] === "number" && (!from || row[key] >= from) && (!to || row[key] <= to));
    const keep = (row) => marks.every((name) => MARKS[name](row)) && inRange(row) && (!wanted || textOf(row).includes(wanted));
    const order = ORDERS[this.order.value];
    this.shown = data.samples.filter(keep).sort((one, other) => order(one) - order(other) || one.at - other.at);
    this.count.textContent = `${number(this.shown.length)} of ${number(data.samples.length)} rows`;
    this.list.fill(this.shown.length);
    this.mark();
  }

  item(row, place) {
    const flags = Object.keys(MARKS).filter((name) => MARKS[name](row));
    const known = [
      row.reward === undefined ? null : make("b", {}, `reward ${number(row.reward)}`),
      row.step === undefined ? null : make("span", {}, `step ${row.step}`),
      row.length === undefined ? null : make("span", {}, `${number(row.length)} tokens`),
      ...flags.map((flag) => make("i", flag === "held out" ? { class: "held-out" } : {}, flag)),
    ];
    // The end of a prompt tells it from others better than its beginning.
    const prompt = `${row.prompt ?? ""}`;
    const text = `${prompt.length > 24 ? `…${prompt.slice(-23)}` : prompt} → ${row.completion ?? ""}`.slice(0, 300);
    const attributes = { role: "option", id: `row-${row.at}`, "data-at": row.at, "aria-selected": row.at === this.open?.at };
    const size = { "aria-setsize": this.shown.length, "aria-posinset": place + 1, style: `--tone:${toneOf(row)}` };
    return make("div", { ...attributes, ...size }, make("div", {}, ...known), make("p", {}, text));
  }

  /** Open a row. */
  async show(at) {
    const row = data.samples.find((each) => each.at === at);
    if (!row) return;
    this.open = row;
    this.view = null;
    this.mark();
    const inside = make("div", { class: "inside" });
    const isBeside = document.activeElement?.closest(".beside");
    this.detail.replaceChildren(this.head(row), ...this.beside(row), inside);
    if (isBeside) this.detail.querySelector("[aria-pressed=true]")?.focus({ preventScroll: true });
    const columns = await tokensOf(row).catch(() => null);
    if (this.open !== row) return;
    if (columns) {
      this.view = new Tokens(columns);
      inside.append(this.view.node);
      this.view.paint();
    } else inside.append(...textsOf(row));
  }

  head(row) {
    const group = this.groupOf(row);
    const where = [
      row.held_out === true ? `held out, after ${number(row.step)} steps` : `step ${row.step}`,
      row.group === undefined ? null : `group ${row.group}`,
      group.length > 1 ? `row ${group.indexOf(row) + 1} of ${group.length}` : null,
    ];
    const given = Object.entries(row).filter(([name, value]) => !PLACED.includes(name) && value !== null && value !== "");
    const facts = [["reward", row.reward], ["advantage", row.advantage], ["tokens", row.length], ...given];
    return make(
      "div",
      { class: "row-head" },
      make("h3", {}, where.filter(Boolean).join(" · ")),
      imagesOf(row.images),
      this.verdict(row, given),
      listOf(facts.filter(([name]) => !isOfVerdict(name))),
    );
  }

  /** What the model said, what it should say, and what the reward found, next to each other. */
  verdict(row, given) {
    const text = `${row.completion ?? ""}`;
    const said = text.length > END ? `…${text.slice(-END)}` : text;
    const found = [["reward", row.reward], ...given.filter(([name]) => isOfVerdict(name))];
    return make(
      "div",
      { class: "verdict" },
      listOf([["completion", said], ["answer", row.answer ?? undefined]]),
      make("div", {}, listOf(found), row.reward_error ? make("p", { class: "error" }, row.reward_error) : null),
    );
  }

  groupOf(row) {
    if (row.group === undefined) return [row];
    const isNear = (each) => each.group === row.group && each.step === row.step && (each.held_out === true) === (row.held_out === true);
    return data.samples.filter(isNear);
  }

  /** The group of a row side by side. */
  beside(row) {
    const group = this.groupOf(row);
    if (group.length < 2) return [];
    const cards = group.slice(0, BESIDE).map((each) => {
      const made = make(
        "button",
        { type: "button", "aria-pressed": each === row, style: `--tone:${toneOf(each)}` },
        make("b", {}, `reward ${number(each.reward)}`),
        each.advantage === undefined ? null : make("span", {}, `advantage ${number(each.advantage)}`),
        make("p", {}, `${each.completion ?? ""}`.slice(0, 400)),
      );
      made.addEventListener("click", () => this.show(each.at));
      return made;
    });
    const more = group.length > BESIDE ? [make("p", { class: "hint" }, `${group.length - BESIDE} more are in the list.`)] : [];
    return [make("div", { class: "beside", role: "group", "aria-label": "rows of the same prompt" }, ...cards), ...more];
  }

  /** Show in the list which row is open. */
  mark() {
    for (const each of this.list.inside.children) each.setAttribute("aria-selected", Number(each.dataset.at) === this.open?.at);
    if (this.open) this.list.node.setAttribute("aria-activedescendant", `row-${this.open.at}`);
  }

  key(event) {
    const at = this.shown.findIndex((row) => row.at === this.open?.at);
    const last = this.shown.length - 1;
    const places = {
      ArrowUp: at < 0 ? 0 : at - 1,
      ArrowDown: at + 1,
      PageUp: at - this.list.page,
      PageDown: at + this.list.page,
      Home: 0,
      End: last,
    };
    if (!(event.key in places) || last < 0) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(last, places[event.key]));
    this.list.show(place);
    this.show(this.shown[place].at);
  }

  /** Show rows that have come, and keep what is open. */
  refresh() {
    const at = this.open?.at;
    this.apply();
    const again = data.samples.find((row) => row.at === at);
    if (again) this.open = again;
    else if (this.shown.length) this.show(this.shown[0].at);
  }

  paint() {
    this.list.paint();
    this.view?.paint();
  }
}

const texts = new WeakMap();

/** What a search looks through. */
function textOf(row) {
  if (!texts.has(row)) {
    const parts = [row.prompt, row.completion, row.answer, row.reward_error];
    texts.set(row, parts.filter(Boolean).join("\n").toLowerCase());
  }
  return texts.get(row);
}

/** Whether a number or a text of a row is the reward's. */
const isOfVerdict = (name) => name === "reward" || name.startsWith("reward_");

/** Names with their values, but those that are not known. */
function listOf(facts) {
  const told = facts.filter(([, value]) => value !== undefined);
  return make("dl", {}, ...told.map(([name, value]) => make("div", {}, make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, valueText(value)))));
}

function valueText(value) {
  return typeof value === "number" || value === null ? number(value) : typeof value === "boolean" ? (value ? "yes" : "no") : `${value}`;
}

/** The stronger the colour, the higher the reward among all rows. */
function toneOf(row) {
  if (typeof row.reward !== "number") return "var(--other)";
  const [low, high] = rewardRange();
  const part = high > low ? (row.reward - low) / (high - low) : 0.5;
  return `color-mix(in oklab, var(--scoring) ${Math.round(part * 100)}%, var(--idle))`;
}

let ranged = { of: null, ends: [0, 0] };
function rewardRange() {
  if (ranged.of !== data.samples) {
    const rewards = data.samples.map((row) => row.reward).filter((reward) => typeof reward === "number");
    const ends = rewards.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);
    ranged = { of: data.samples, ends };
  }
  return ranged.ends;
}

/** The turns of a row whose tokens are not here. */
function textsOf(row) {
  const turn = (who, text) => make("div", { class: "said" }, make("small", {}, who), make("p", {}, `${text ?? ""}`));
  const why = row.tokens
    ? "The page has no room for the tokens of this row, or its server did not answer: meshrl watch shows them."
    : "The run did not keep the tokens of this row (run.samples_tokens).";
  return [turn("prompt", row.prompt), turn("model", row.completion), make("p", { class: "hint" }, why)];
}

function rowsSection() {
  if (!data.samples.length) return null;
  const rows = new Rows();
  onPaint(() => rows.paint());
  const made = section(
    "Rows",
    "Rows as they were drawn and judged. Choose one to see its group and its tokens. Arrow keys move in the list and along tokens.",
    rows.node,
  );
  made.refresh = () => {
    if (data.samples.length) rows.refresh();
    return data.samples.length > 0;
  };
  return made;
}
