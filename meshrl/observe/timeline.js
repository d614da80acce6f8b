// The timeline by rank: a canvas that shows some seconds of the run, and names what lies at a place.

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
    new Gestures(this);
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

  /** Show what the data are by now: at its end, where that was in view. */
  refresh() {
    const [length, behind] = [this.to - this.from, this.range[1] - this.to];
    this.lanes = this.layOut();
    this.range = this.extent();
    if (behind < length / 1000) this.look(this.range[1] - length, this.range[1]);
    else this.look(this.from, this.to);
  }

  x(at) {
    return this.left + ((at - this.from) / (this.to - this.from)) * (this.width - this.left);
  }

  at(x) {
    return this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from);
  }

  /** Look at these seconds, within the run. */
  look(from, to) {
    const [low, high] = this.range;
    const length = Math.min(high - low, Math.max(to - from, 2e-4));
    this.from = Math.min(Math.max(from, low), high - length);
    this.to = this.from + length;
    this.later();
  }

  /** Show `length` seconds, with the moment `at` at the place `x`. */
  hold(at, x, length) {
    const from = at - ((x - this.left) / (this.width - this.left)) * length;
    this.look(from, from + length);
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
    this.left = this.gutter();
    draw.save();
    draw.beginPath();
    draw.rect(this.left, 0, this.width - this.left, this.height);
    draw.clip();
    this.paintSteps();
    this.paintTimes();
    for (const lane of this.lanes) this.paintLane(lane);
    this.paintSwaps();
    draw.restore();
    this.paintLabels();
  }

  /** The room that labels need; on a narrow page the names of meshes may reach over the lanes. */
  gutter() {
    const draw = this.context;
    draw.font = this.font(12.5);
    const labels = this.lanes.map(({ label }) => draw.measureText(label).width + 22);
    if (this.width < 560) return Math.max(58, ...labels);
    draw.font = this.font(12, "600");
    const groups = this.lanes.map((lane) => Math.min(160, draw.measureText(title(lane)).width + 14));
    return Math.max(100, ...labels, ...groups);
  }

  paintSteps() {
    const draw = this.context;
    const average = data.steps.length
      ? ((this.to - this.from) / (this.range[1] - this.range[0])) * data.steps.length
      : 1;
    const every = Math.max(1, roundStep((46 * average) / (this.width - this.left)));
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
      if (step % every === 0 && left >= this.left - 1 && left + 8 * `${step}`.length < this.width) {
        draw.fillStyle = this.inks.soft;
        draw.fillText(`${step}`, left + 3, TOP - 17);
      }
    }
  }

  paintTimes() {
    const draw = this.context;
    const bottom = this.height - BOTTOM + 6;
    draw.font = this.font(11.5);
    draw.textAlign = "center";
    const step = timeStep((this.to - this.from) / Math.max(1, (this.width - this.left) / 110));
    for (const at of multiples(step, this.from, this.to)) {
      const x = Math.round(this.x(at)) + 0.5;
      draw.strokeStyle = this.inks.line;
      draw.beginPath();
      draw.moveTo(x, TOP - 8);
      draw.lineTo(x, bottom);
      draw.stroke();
      const text = timeText(at, step);
      const half = draw.measureText(text).width / 2;
      draw.fillStyle = this.inks.faint;
      if (x - half > this.left && x + half < this.width) draw.fillText(text, x, bottom + 10);
    }
    const [low, high] = this.range;
    const whole = this.width - this.left;
    if (this.to - this.from < (high - low) * 0.999) {
      draw.fillStyle = this.inks.line;
      draw.fillRect(this.left, this.height - 4, whole, 3);
      draw.fillStyle = this.inks.faint;
      const left = this.left + ((this.from - low) / (high - low)) * whole;
      draw.fillRect(left, this.height - 4, Math.max(6, ((this.to - this.from) / (high - low)) * whole), 3);
    }
  }

  paintLane(lane) {
    const draw = this.context;
    const unit = (this.width - this.left) / (this.to - this.from);
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
      if (left + width < this.left) continue;
      const [top, height] = this.row(lane, lane.row[at]);
      draw.fillStyle = this.colours[lane.name[at]];
      draw.globalAlpha = lane.count[at] > 1 ? 0.5 : 1;
      if (width > 4) {
        draw.beginPath();
        draw.roundRect(left + 0.5, top, width - 1, height, Math.min(3, width / 3, height / 3));
        draw.fill();
      } else draw.fillRect(left, top, width, height);
      draw.globalAlpha = 1;
      const from = Math.max(left, this.left);
      const room = left + width - from - 12;
      if (height > 11 && room > 26) this.write(lane.name[at], from + 6, top + height / 2, room);
    }
  }

  /** A name in a bar, as much of it as there is room for. */
  write(index, x, y, room) {
    const draw = this.context;
    const name = data.names[index];
    const text = [name, name.replace(/^[^.]*\./, "")].find((each) => draw.measureText(each).width <= room);
    if (!text) return;
    draw.fillStyle = inkOn(this.colours[index]);
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
    if (shown.length > (this.width - this.left) / 30) return;
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
      const fits = x > this.left + 14 && x < this.width - 14;
      if (fits && shown.length < this.width / 60) draw.fillText(`v${version}`, x, TOP - 3);
    }
  }

  paintLabels() {
    const draw = this.context;
    draw.textAlign = "right";
    draw.font = this.font(11.5);
    draw.fillStyle = this.inks.faint;
    if (data.steps.length) draw.fillText("step", this.left - 8, TOP - 17);
    draw.fillText("time", this.left - 8, this.height - BOTTOM + 16);
    draw.textAlign = "left";
    for (const lane of this.lanes) {
      if (lane.first) {
        draw.font = this.font(12, "600");
        draw.fillStyle = this.inks.ink;
        draw.fillText(title(lane), 0, lane.top - GROUP / 2 + 3);
      }
      draw.font = this.font(12.5);
      draw.fillStyle = this.inks.soft;
      draw.fillText(lane.label, 10, lane.top + lane.height / 2);
    }
  }

  /** The lane, the bar and the idle moment at a place, or the bar nearest to it within `reach` pixels. */
  under(x, y, reach) {
    const lane = this.lanes.find((each) => y >= each.top - 3 && y <= each.top + each.height + 3);
    if (!lane || x < this.left) return {};
    const now = this.at(x);
    const slack = (reach * (this.to - this.from)) / (this.width - this.left);
    let [nearest, least] = [null, slack];
    for (
      let at = lowest(lane.began, now - lane.longest - slack);
      at < lane.began.length && lane.began[at] <= now + slack;
      at++
    ) {
      const [top, height] = this.row(lane, lane.row[at]);
      const away = Math.max(0, lane.began[at] - now, now - lane.began[at] - lane.lasted[at]);
      if (away <= least && (lane.rows === 1 || (y >= top - 1 && y <= top + height))) [nearest, least] = [at, away];
    }
    const { began, lasted } = lane.idle;
    if (nearest !== null) return { lane, bar: nearest };
    for (let at = lowest(began, now - lane.longestIdle); at < began.length && began[at] <= now; at++) {
      if (began[at] + lasted[at] >= now) return { lane, idle: at };
    }
    return { lane };
  }

  tell(event) {
    const box = this.canvas.getBoundingClientRect();
    const reach = event.pointerType === "touch" ? 9 : 2;
    const { lane, bar, idle } = this.under(event.clientX - box.left, event.clientY - box.top, reach);
    if (bar !== undefined) {
      const [rows, tokens] = lane.batch[bar];
      const many = lane.count[bar] > 1;
      showTip(event, [
        [data.names[lane.name[bar]], this.colours[lane.name[bar]]],
        many
          ? `${lane.count[bar]} within ${seconds(lane.lasted[bar])}`
          : `${seconds(lane.lasted[bar])}, from ${timeText(lane.began[bar], lane.lasted[bar] / 10)}`,
        rows && `${number(rows)} rows in the call`,
        tokens && `${number(tokens)} tokens`,
        data.texts[lane.about[bar]] && `blocked by: ${data.texts[lane.about[bar]]}`,
      ]);
    } else if (idle !== undefined) {
      showTip(event, [`idle ${seconds(lane.idle.lasted[idle])}`, data.texts[lane.idle.why[idle]]]);
    } else hideTip();
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

/** What stands above the first lane of a group. */
function title({ group }) {
  return group === "waits" ? "waits" : `mesh ${group}`;
}
