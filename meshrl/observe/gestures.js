// How a mouse, fingers and keys move the timeline. All pointers go one way: those that are held keep the moments under
// them, two of them also set how much is in view, and one that is held still, or not held, names what lies under it.

/** How many pixels a finger that taps may move. */
const STILL = 7;
/** Within how many milliseconds two taps are a double one. */
const DOUBLE = 350;

class Gestures {
  constructor(timeline) {
    this.timeline = timeline;
    this.held = new Map();
    this.tapped = null;
    const acts = {
      pointerdown: this.press,
      pointermove: this.move,
      pointerup: this.release,
      pointercancel: this.release,
      pointerleave: (event) => event.pointerType === "mouse" && hideTip(),
      keydown: this.key,
    };
    for (const [name, act] of Object.entries(acts)) timeline.canvas.addEventListener(name, act.bind(this));
    timeline.canvas.addEventListener("wheel", this.wheel.bind(this), { passive: false });
  }

  place(event) {
    const box = this.timeline.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  press(event) {
    if (event.button > 0 || this.held.size === 2) return;
    this.timeline.canvas.setPointerCapture(event.pointerId);
    this.pressed = this.place(event);
    this.held.set(event.pointerId, this.pressed);
    this.still = this.held.size === 1;
    this.grip();
  }

  /** The middle of what is held, and how far apart it is. */
  spread() {
    const [one, other = one] = this.held.values();
    return { x: (one.x + other.x) / 2, apart: Math.max(20, Math.hypot(one.x - other.x, one.y - other.y)) };
  }

  /** Take hold: the moment in the middle stays there while the pointers move. */
  grip() {
    if (!this.held.size) return;
    const { x, apart } = this.spread();
    this.gripped = { at: this.timeline.at(x), apart, length: this.timeline.to - this.timeline.from };
  }

  move(event) {
    const before = this.held.get(event.pointerId);
    if (!before) return this.timeline.tell(event);
    const now = this.place(event);
    // A finger that goes up or down is about to scroll the page.
    if (this.still && Math.abs(now.x - before.x) < STILL) return;
    this.still = false;
    hideTip();
    this.timeline.canvas.classList.add("dragged");
    this.held.set(event.pointerId, now);
    const { x, apart } = this.spread();
    this.timeline.hold(this.gripped.at, x, (this.gripped.length * this.gripped.apart) / apart);
  }

  release(event) {
    if (!this.held.delete(event.pointerId)) return;
    const moved = Math.abs(this.place(event).y - this.pressed.y) > STILL;
    if (this.still && !moved && event.type === "pointerup") this.tap(event);
    this.still = false;
    this.grip();
    if (!this.held.size) this.timeline.canvas.classList.remove("dragged");
  }

  tap(event) {
    const { timeStamp: now, clientX: x } = event;
    const twice = this.tapped && now - this.tapped.now < DOUBLE && Math.abs(x - this.tapped.x) < 4 * STILL;
    this.tapped = twice ? null : { now, x };
    if (!twice) return this.timeline.tell(event);
    hideTip();
    this.timeline.look(...this.timeline.range);
  }

  wheel(event) {
    event.preventDefault();
    const { timeline } = this;
    const { x } = this.place(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      const by = ((event.deltaX || event.deltaY) * (timeline.to - timeline.from)) / timeline.width;
      timeline.look(timeline.from + by, timeline.to + by);
    } else timeline.zoom(timeline.at(Math.max(timeline.left, x)), Math.exp(event.deltaY * 0.0018));
  }

  key(event) {
    const { timeline } = this;
    const { from, to } = timeline;
    const part = (to - from) / 8;
    const act = {
      ArrowLeft: () => timeline.look(from - part, to - part),
      ArrowRight: () => timeline.look(from + part, to + part),
      "+": () => timeline.zoom((from + to) / 2, 0.7),
      "-": () => timeline.zoom((from + to) / 2, 1 / 0.7),
      0: () => timeline.look(...timeline.range),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}
