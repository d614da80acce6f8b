// The tokens of a row: its turns, each token with the colour of a number, and its numbers where one points.

/** A box that scrolls over lines of one height. It holds the elements of the lines in view, and a few around. */
class Scroller {
  constructor(attributes, height, draw) {
    Object.assign(this, { height, draw, count: 0, drawn: new Map() });
    this.inside = make("div");
    this.node = make("div", attributes, this.inside);
    this.node.addEventListener("scroll", () => this.paint(), { passive: true });
  }

  /** Show another number of lines, all drawn anew. */
  fill(count) {
    this.count = count;
    this.inside.style.height = `${count * this.height}px`;
    this.inside.replaceChildren();
    this.drawn.clear();
    this.paint();
  }

  paint() {
    const { scrollTop: top, clientHeight: size } = this.node;
    const first = Math.max(0, Math.floor(top / this.height) - 4);
    const end = Math.min(this.count, Math.ceil((top + size) / this.height) + 4);
    for (const [at, node] of this.drawn) {
      if (at >= first && at < end) continue;
      node.remove();
      this.drawn.delete(at);
    }
    // From the last to the first, so that each finds the one that follows.
    for (let at = end - 1; at >= first; at--) {
      if (this.drawn.has(at)) continue;
      const node = this.draw(at);
      node.style.top = `${at * this.height}px`;
      this.inside.insertBefore(node, this.drawn.get(at + 1) ?? null);
      this.drawn.set(at, node);
    }
  }

  /** How many lines are in view. */
  get page() {
    return Math.max(1, Math.floor(this.node.clientHeight / this.height) - 1);
  }

  /** Scroll as little as needed to have a line in view. */
  show(at) {
    const [low, high] = [(at + 1) * this.height - this.node.clientHeight, at * this.height];
    this.node.scrollTop = Math.min(high, Math.max(low, this.node.scrollTop));
    this.paint();
  }
}

/** Names and meanings of the columns that have other ones than in the file. */
const QUANTITIES = {
  sampler_logprobs: ["log-prob, sampler", "nats"],
  logprobs: ["log-prob, trainer", "nats"],
  reference_logprobs: ["log-prob, reference", "nats"],
  difference: ["trainer \u2212 sampler", "nats"],
  advantages: ["advantage", ""],
  entropy: ["entropy", "nats"],
  versions: ["version", ""],
  behind: ["versions behind", ""],
  loss_mask: ["learned", ""],
  turn: ["turn", ""],
};
const nameOf = (key) => QUANTITIES[key]?.[0] ?? key.replaceAll("_", " ");

/** The numbers of a row's tokens by name, with those that follow from others. */
function quantitiesOf({ texts, tokens, ...columns }) {
  const { sampler_logprobs: sampler, logprobs: trainer, versions } = columns;
  const found = { ...columns };
  if (sampler && trainer) found.difference = trainer.map((value, at) => gap(value, sampler[at]));
  if (versions) {
    const newest = versions.reduce((most, each) => Math.max(most, each), 0);
    found.behind = versions.map((each) => (each < 0 ? null : newest - each));
  }
  const order = (key) => (Object.keys(QUANTITIES).indexOf(key) + 1 || 99);
  return Object.fromEntries(Object.entries(found).sort(([one], [other]) => order(one) - order(other)));
}

function gap(one, other) {
  return one === null || other === null ? null : Number((one - other).toFixed(5));
}

/** A colour for a part of a scale from -1 to 1, faint enough to read a text on it. */
function tint(part) {
  const share = Math.round(Math.min(1, Math.abs(part)) * 12) * 5;
  return share ? `color-mix(in oklab, var(--${part < 0 ? "training" : "rollout"}) ${share}%, transparent)` : "";
}

/** The number that has the full colour: all but two in a hundred are nearer to 0. */
function fullColour(values) {
  const sizes = Float64Array.from(values, Math.abs).sort();
  return sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] || sizes.at(-1) || 1;
}

const LINE = 24;
const ruler = document.createElement("canvas").getContext("2d");

class Tokens {
  /** `columns`: the lists of a row, as samples.jsonl has them. */
  constructor(columns) {
    const { tokens, texts } = columns;
    this.ids = tokens;
    this.texts = texts ?? tokens.map((id) => `${id} `);
    this.quantities = quantitiesOf(columns);
    const { versions, loss_mask: mask } = columns;
    this.drawnByModel = tokens.map((_, at) => (versions ? versions[at] >= 0 : mask ? Boolean(mask[at]) : true));
    this.widths = new Map();
    this.chosen = null;
    this.width = 0;
    this.box = new Scroller(
      { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens. Arrow keys move, the numbers are below." },
      LINE,
      (at) => this.line(at),
    );
    this.told = make("dl", { class: "told", role: "status" });
    this.scale = make("span", { class: "scale" });
    const choose = make(
      "select",
      { "aria-label": "colour of tokens" },
      ...Object.keys(this.quantities).map((key) => make("option", { value: key }, nameOf(key))),
      make("option", { value: "" }, "none"),
    );
    choose.value = Tokens.colour in this.quantities ? Tokens.colour : (Object.keys(this.quantities)[0] ?? "");
    choose.addEventListener("change", () => this.paintBy((Tokens.colour = choose.value)));
    this.node = make("div", {}, make("div", { class: "by" }, make("label", {}, "colour ", choose), this.scale), this.box.node, this.told);
    this.paintBy(choose.value);
    this.tell();
    pointing(this.box.node, (event) => this.point(event));
    this.box.node.addEventListener("click", (event) => this.choose(placeOf(event.target)));
    this.box.node.addEventListener("keydown", (event) => this.key(event));
  }

  /** Colour tokens by one of their numbers. */
  paintBy(key) {
    const values = this.quantities[key] ?? [];
    const drawn = values.filter((value, at) => this.drawnByModel[at] && value !== null);
    this.full = drawn.length ? fullColour(drawn) : 1;
    this.by = values;
    // What is behind is drawn as what is below 0.
    this.sign = key === "behind" ? -1 : 1;
    const ends = drawn.length ? [drawn.some((value) => value * this.sign < 0), drawn.some((value) => value * this.sign > 0)] : [];
    const edge = (part) => make("span", {}, make("i", { style: `background:${tint(part)}` }), number(part * this.full * this.sign));
    this.scale.replaceChildren(...(ends[0] ? [edge(-1)] : []), make("span", {}, "0"), ...(ends[1] ? [edge(1)] : []));
    if (this.width) this.box.fill(this.lines.length);
  }

  /** Break the tokens into lines, if the width has changed. */
  paint() {
    const style = getComputedStyle(this.box.node);
    const width = this.box.node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    if (width <= 0) return;
    if (width === this.width) return this.box.paint();
    this.width = width;
    ruler.font = style.font;
    this.widths.clear();
    this.breakLines();
    this.box.fill(this.lines.length);
    if (this.chosen !== null) this.box.show(this.lineOf[this.chosen]);
  }

  measure(text) {
    if (!this.widths.has(text)) this.widths.set(text, ruler.measureText(text).width);
    return this.widths.get(text);
  }

  breakLines() {
    const lines = (this.lines = []);
    const lineOf = (this.lineOf = new Int32Array(this.ids.length));
    let parts, left;
    const begin = () => {
      lines.push((parts = []));
      left = 0;
    };
    const put = (at, text) => {
      if (!text && parts.length) return;
      parts.push([at, text, left]);
      left += this.measure(text);
    };
    for (let at = 0; at < this.ids.length; at++) {
      if (at === 0 || this.drawnByModel[at] !== this.drawnByModel[at - 1]) {
        // The end of a line that ends a turn needs no empty line below it.
        if (parts?.every(([, text]) => !text) && lineOf[at - 1] < lines.length - 1) lines.pop();
        lines.push(this.turnAt(at));
        begin();
      }
      const pieces = visible(this.texts[at]).split("\n");
      if (left && left + this.measure(pieces[0]) > this.width) begin();
      lineOf[at] = lines.length - 1;
      pieces.forEach((piece, number) => {
        if (number) begin();
        for (const part of this.fitting(piece)) {
          if (left && left + this.measure(part) > this.width) begin();
          put(at, part);
        }
      });
    }
  }

  /** A text in parts that fit into a line. */
  fitting(text) {
    if (this.measure(text) <= this.width) return [text];
    const letters = [...text];
    const most = Math.max(1, Math.floor((letters.length * this.width) / this.measure(text)) - 1);
    const count = Math.ceil(letters.length / most);
    return Array.from({ length: count }, (_, part) => letters.slice(part * most, (part + 1) * most).join(""));
  }

  turnAt(at) {
    const by = this.drawnByModel[at];
    let end = at;
    while (end < this.ids.length && this.drawnByModel[end] === by) end++;
    const who = by ? "model" : at === 0 ? "prompt" : "environment";
    return `${who} · ${number(end - at)} ${end - at === 1 ? "token" : "tokens"}`;
  }

  line(index) {
    const parts = this.lines[index];
    if (typeof parts === "string") return make("div", { class: "turn" }, parts);
    return make("div", {}, ...parts.map(([at, text]) => this.token(at, text)));
  }

  token(at, text) {
    const value = this.drawnByModel[at] ? this.by[at] : null;
    const colour = typeof value === "number" ? tint((value * this.sign) / this.full) : "";
    const look = [this.drawnByModel[at] ? "" : "given", at === this.chosen ? "at" : ""].filter(Boolean).join(" ");
    return make("span", { "data-at": at, ...(colour ? { style: `background:${colour}` } : {}), ...(look ? { class: look } : {}) }, text);
  }

  /** The numbers of a token, each with its name. */
  facts(at) {
    // A token that was given has no log-prob of the sampler and no version: the file has 0 and -1 there.
    const known = ([key, values]) => values[at] !== null && (this.drawnByModel[at] || key === "loss_mask");
    const numbers = Object.entries(this.quantities).filter(known);
    return [["id", `${this.ids[at]}`], ...numbers.map(([key, values]) => [nameOf(key), `${number(values[at])} ${QUANTITIES[key]?.[1] ?? ""}`.trim()])];
  }

  title(at) {
    return `${JSON.stringify(this.texts[at])}, token ${at + 1} of ${number(this.ids.length)}`;
  }

  point(event) {
    const at = placeOf(event.target);
    if (at === null) return hideTip();
    showTip(event, [this.title(at), ...this.facts(at).map(([name, value]) => `${name}  ${value}`)]);
  }

  choose(at) {
    if (at === null) return;
    const before = this.chosen;
    this.chosen = at;
    this.box.show(this.lineOf[at]);
    for (const each of this.box.inside.querySelectorAll(`[data-at="${before}"]`)) each.classList.remove("at");
    for (const each of this.box.inside.querySelectorAll(`[data-at="${at}"]`)) each.classList.add("at");
    this.tell();
  }

  tell() {
    const at = this.chosen;
    const facts = at === null ? [] : this.facts(at).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    const title = at === null ? "Point at a token, or choose one: arrow keys move along them." : this.title(at);
    this.told.replaceChildren(make("div", { class: "title" }, make("dt", {}, title)), ...facts);
  }

  key(event) {
    const last = this.ids.length - 1;
    const at = this.chosen ?? -1;
    const to = {
      ArrowLeft: () => at - 1,
      ArrowRight: () => at + 1,
      ArrowUp: () => this.nearby(-1),
      ArrowDown: () => this.nearby(1),
      PageUp: () => this.nearby(-this.box.page),
      PageDown: () => this.nearby(this.box.page),
      Home: () => 0,
      End: () => last,
    }[event.key];
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    hideTip();
    this.choose(Math.max(0, Math.min(last, to())));
  }

  /** The token that stands so many lines below, nearest to the chosen one's place. */
  nearby(lines) {
    if (this.chosen === null) return 0;
    const from = this.lineOf[this.chosen];
    const left = this.lines[from].find(([at]) => at === this.chosen)?.[2] ?? 0;
    let to = Math.max(0, Math.min(this.lines.length - 1, from + lines));
    const way = Math.sign(lines);
    const isHead = () => typeof this.lines[to] === "string";
    while (isHead()) to += way;
    // Above the first line, which is the head of a turn and has no token, the search turns round.
    if (!this.lines[to]) do to -= way; while (isHead());
    const parts = this.lines[to];
    return parts.reduce((best, each) => (Math.abs(each[2] - left) < Math.abs(best[2] - left) ? each : best))[0];
  }
}

/** The number by which tokens are coloured, which stays from row to row. */
Tokens.colour = "difference";

/** The token that an element shows. */
function placeOf(node) {
  const found = node.closest?.("[data-at]");
  return found ? Number(found.dataset.at) : null;
}

/** A text with signs for what has no letter. */
function visible(text) {
  return text.replaceAll("\r", "\u240d").replaceAll("\t", "\u21e5").replaceAll("\n", "\u21b5\n");
}
