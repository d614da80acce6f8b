// The timeline by rank: a canvas that zooms at the pointer, pans by dragging, and tells what lies under the pointer.

const LEFT = 112;
const TOP = 26;
const BOTTOM = 30;
const GROUP = 26;
const BAR = 22;
const WAIT = 14;
const THIN = 8;
const FEW_ROWS = 3;
const MOST_ROWS = 8;

class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.lanes = this.layOut();
    this.range = this.extent();
    [this.from, this.to] = this.range;
    this.listen();
  }

  /** Each lane with its place from the top, and the longest of its bars, for the search of what is in view. */
  layOut() {
    let top = TOP;
    let group = null;
    const lanes = data.lanes.map((lane) => {
      if (lane.group !== group) top += GROUP;
      const rows = Math.min(lane.rows, MOST_ROWS);
      const bar = lane.group === "waits" ? WAIT : BAR;
      const height = rows === 1 ? bar : rows * (rows <= FEW_ROWS ? WAIT : THIN);
      const placed = { ...lane, first: lane.group !== group, top, height, rows };
      placed.longest = lane.lasted.reduce((most, each) => Math.max(most, each), 0);
      placed.longestIdle = lane.idle.lasted.reduce((most, each) => Math.max(most, each), 0);
      group = lane.group;
      top += height + 6;
      return placed;
    });
    this.height = top + BOTTOM;
    return lanes;
  }

  extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const { began, lasted } of data.lanes) {
      for (let at = 0; at < began.length; at++) {
        low = Math.min(low, began[at]);
        high = Math.max(high, began[at] + lasted[at]);
      }
    }
    for (const [, began, ended] of data.steps) [low, high] = [Math.min(low, began), Math.max(high, ended)];
    return [low, high > low ? high : low + 1];
  }

  x(at) {
    return LEFT + ((at - this.from) / (this.to - this.from)) * (this.width - LEFT);
  }

  at(x) {
    return this.from + ((x - LEFT) / (this.width - LEFT)) * (this.to - this.from);
  }

  /** Look at these seconds, within the run. */
  look(from, to) {
    const [low, high] = this.range;
    const length = Math.min(high - low, Math.max(to - from, 2e-4));
    this.from = Math.min(Math.max(from, low), high - length);
    this.to = this.from + length;
    this.later();
  }

  zoom(at, factor) {
    this.look(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.paint();
    });
  }

  paint() {
    const scale = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    const draw = this.context;
    draw.setTransform(scale, 0, 0, scale, 0, 0);
    this.colours = colours();
    this.inks = Object.fromEntries(
      ["card", "ink", "soft", "faint", "line", "band", "idle", "sync"].map((name) => [name, ink(name)]),
    );
    this.font = (size, weight = "") => `${weight} ${size}px ${getComputedStyle(document.body).fontFamily}`;
    draw.textBaseline = "middle";
    draw.save();
    draw.beginPath();
    draw.rect(LEFT, 0, this.width - LEFT, this.height);
    draw.clip();
    this.paintSteps();
    this.paintTimes();
    for (const lane of this.lanes) this.paintLane(lane);
    this.paintSwaps();
    draw.restore();
    this.paintLabels();
  }

  paintSteps() {
    const draw = this.context;
    const average = data.steps.length
      ? ((this.to - this.from) / (this.range[1] - this.range[0])) * data.steps.length
      : 1;
    const apart = 46 / ((this.width - LEFT) / Math.max(1, average));
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((each) => each >= apart) ?? 10000;
    const named = every === 1 && apart < 0.7;
    draw.font = this.font(11.5);
    draw.textAlign = "left";
    for (const [step, began, ended] of data.steps) {
      if (ended < this.from || began > this.to) continue;
      const left = this.x(began);
      const index = Math.floor(step / every);
      if (index % 2 === 0) {
        draw.fillStyle = this.inks.band;
        draw.fillRect(left, TOP - 8, this.x(ended) - left, this.height - TOP - BOTTOM + 12);
      }
      if (step % every === 0 && left >= LEFT - 1) {
        draw.fillStyle = this.inks.soft;
        draw.fillText(named ? `step ${step}` : `${step}`, left + 3, TOP - 17);
      }
    }
  }

  paintTimes() {
    const draw = this.context;
    const bottom = this.height - BOTTOM + 6;
    draw.font = this.font(11.5);
    draw.textAlign = "center";
    for (const at of moments(this.from, this.to, this.width / 130)) {
      const x = Math.round(this.x(at)) + 0.5;
      draw.strokeStyle = this.inks.line;
      draw.beginPath();
      draw.moveTo(x, TOP - 8);
      draw.lineTo(x, bottom);
      draw.stroke();
      draw.fillStyle = this.inks.faint;
      draw.fillText(timeOf(at, this.to - this.from), x, bottom + 10);
    }
    const [low, high] = this.range;
    const whole = this.width - LEFT;
    if (this.to - this.from < (high - low) * 0.999) {
      draw.fillStyle = this.inks.line;
      draw.fillRect(LEFT, this.height - 4, whole, 3);
      draw.fillStyle = this.inks.faint;
      const left = LEFT + ((this.from - low) / (high - low)) * whole;
      draw.fillRect(left, this.height - 4, Math.max(6, ((this.to - this.from) / (high - low)) * whole), 3);
    }
  }

  paintLane(lane) {
    const draw = this.context;
    const unit = (this.width - LEFT) / (this.to - this.from);
    const { began, lasted } = lane.idle;
    draw.fillStyle = this.inks.idle;
    for (let at = lowest(began, this.from - lane.longestIdle); at < began.length && began[at] < this.to; at++) {
      const width = lasted[at] * unit;
      if (width > 1.5) draw.fillRect(this.x(began[at]) + 0.5, lane.top + lane.height / 2 - 2, width - 1, 4);
    }
    draw.font = this.font(11.5, "500");
    draw.textAlign = "left";
    for (
      let at = lowest(lane.began, this.from - lane.longest);
      at < lane.began.length && lane.began[at] < this.to;
      at++
    ) {
      const left = this.x(lane.began[at]);
      const width = Math.max(0.7, lane.lasted[at] * unit);
      if (left + width < LEFT) continue;
      const [top, height] = this.row(lane, lane.row[at]);
      draw.fillStyle = this.colours[lane.name[at]];
      draw.globalAlpha = lane.count[at] > 1 ? 0.5 : 1;
      if (width > 4) {
        draw.beginPath();
        draw.roundRect(left + 0.5, top, width - 1, height, Math.min(3, width / 3, height / 3));
        draw.fill();
      } else draw.fillRect(left, top, width, height);
      draw.globalAlpha = 1;
      const from = Math.max(left, LEFT);
      const room = left + width - from - 12;
      if (height > 11 && room > 26) this.write(data.names[lane.name[at]], from + 6, top + height / 2, room);
    }
  }

  /** A name in a bar, as much of it as there is room for. */
  write(name, x, y, room) {
    const draw = this.context;
    const short = name.replace(/^[^.]*\./, "");
    const text = [name, short].find((each) => draw.measureText(each).width <= room);
    if (!text) return;
    draw.fillStyle = "#fff";
    draw.fillText(text, x, y + 0.5);
  }

  row(lane, row) {
    if (lane.rows === 1) return [lane.top, lane.height];
    const each = lane.height / lane.rows;
    return [lane.top + (row % lane.rows) * each, each - 1];
  }

  paintSwaps() {
    const draw = this.context;
    const shown = data.swaps.filter(([at]) => at >= this.from && at <= this.to);
    if (shown.length > (this.width - LEFT) / 30) return;
    draw.strokeStyle = this.inks.sync;
    draw.fillStyle = this.inks.sync;
    draw.font = this.font(10.5);
    draw.textAlign = "center";
    for (const [at, version] of shown) {
      const x = Math.round(this.x(at)) + 0.5;
      draw.setLineDash([2, 3]);
      draw.beginPath();
      draw.moveTo(x, TOP);
      draw.lineTo(x, this.height - BOTTOM);
      draw.stroke();
      draw.setLineDash([]);
      if (shown.length < this.width / 60) draw.fillText(`v${version}`, x, TOP - 3);
    }
  }

  paintLabels() {
    const draw = this.context;
    draw.textAlign = "left";
    for (const lane of this.lanes) {
      if (lane.first) {
        draw.font = this.font(12, "600");
        draw.fillStyle = this.inks.ink;
        draw.fillText(
          clipped(draw, lane.group === "waits" ? "waits" : `mesh ${lane.group}`, LEFT - 8),
          0,
          lane.top - GROUP / 2 + 3,
        );
      }
      draw.font = this.font(12.5);
      draw.fillStyle = this.inks.soft;
      draw.fillText(lane.label, 10, lane.top + lane.height / 2);
    }
  }

  /** The lane, the bar and the idle moment under the pointer, where there are any. */
  under(x, y) {
    const lane = this.lanes.find((each) => y >= each.top - 2 && y <= each.top + each.height + 2);
    if (!lane || x < LEFT) return {};
    const now = this.at(x);
    const slack = (2 * (this.to - this.from)) / this.width;
    for (
      let at = lowest(lane.began, now - lane.longest - slack);
      at < lane.began.length && lane.began[at] <= now + slack;
      at++
    ) {
      const [top, height] = this.row(lane, lane.row[at]);
      if (y >= top - 1 && y <= top + height && lane.began[at] + lane.lasted[at] >= now - slack)
        return { lane, bar: at };
    }
    const { began, lasted } = lane.idle;
    for (let at = lowest(began, now - lane.longestIdle); at < began.length && began[at] <= now; at++) {
      if (began[at] + lasted[at] >= now) return { lane, idle: at };
    }
    return { lane };
  }

  tell(event) {
    const box = this.canvas.getBoundingClientRect();
    const { lane, bar, idle } = this.under(event.clientX - box.left, event.clientY - box.top);
    if (bar !== undefined) {
      const [rows, tokens] = lane.batch[bar];
      const many = lane.count[bar] > 1;
      showTip(event, [
        [data.names[lane.name[bar]], this.colours[lane.name[bar]]],
        many
          ? `${lane.count[bar]} within ${seconds(lane.lasted[bar])}`
          : `${seconds(lane.lasted[bar])}, from ${timeOf(lane.began[bar], lane.lasted[bar])}`,
        rows && `${number(rows)} rows in the call`,
        tokens && `${number(tokens)} tokens`,
        data.texts[lane.about[bar]] && `blocked by: ${data.texts[lane.about[bar]]}`,
      ]);
    } else if (idle !== undefined) {
      showTip(event, [`idle ${seconds(lane.idle.lasted[idle])}`, data.texts[lane.idle.why[idle]]]);
    } else hideTip();
  }

  listen() {
    const { canvas } = this;
    const place = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
        if (sideways) {
          const by = ((event.deltaX || event.deltaY) * (this.to - this.from)) / this.width;
          this.look(this.from + by, this.to + by);
        } else this.zoom(this.at(Math.max(LEFT, place(event))), Math.exp(event.deltaY * 0.0018));
      },
      { passive: false },
    );
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      held = { x: place(event), from: this.from, to: this.to };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragged");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!held) return this.tell(event);
      hideTip();
      const by = ((held.x - place(event)) / (this.width - LEFT)) * (held.to - held.from);
      return this.look(held.from + by, held.to + by);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, () => {
        held = null;
        canvas.classList.remove("dragged");
      });
    }
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => this.look(...this.range));
    canvas.addEventListener("keydown", (event) => {
      const part = (this.to - this.from) / 8;
      const middle = (this.from + this.to) / 2;
      const act = {
        ArrowLeft: () => this.look(this.from - part, this.to - part),
        ArrowRight: () => this.look(this.from + part, this.to + part),
        "+": () => this.zoom(middle, 0.7),
        "-": () => this.zoom(middle, 1 / 0.7),
        0: () => this.look(...this.range),
      }[event.key];
      if (act) {
        event.preventDefault();
        act();
      }
    });
  }
}

/** The first index of a sorted list whose value is not below. */
function lowest(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** A moment of the run, as finely as `length` seconds in view need it. */
function timeOf(at, length) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(Math.max(length, 1e-9) / 10))));
  if (at < 60) return `${at.toFixed(digits)} s`;
  const minutes = Math.floor(at / 60);
  return `${minutes}:${(at - minutes * 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0")}`;
}

function clipped(draw, text, room) {
  let shown = text;
  while (shown && draw.measureText(shown).width > room) shown = shown.slice(0, -1);
  return shown === text ? text : `${shown.slice(0, -1)}…`;
}
