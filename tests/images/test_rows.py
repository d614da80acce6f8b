"""Images in rows: where they come from, what is refused, and how they travel."""

import base64
import json
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast
from zlib import crc32

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from meshrl import Batch, Task, TaskConfig
from meshrl.data import IMAGES, Images, mark_of, name_of, opened, prompt_text
from meshrl.errors import DataError
from meshrl.hub import dataset_rows
from meshrl.run import find_mistakes, load_job, shipped_configs
from meshrl.run.check_rows import find_row_mistakes
from meshrl.tasks.fetching import fetched
from tests.images.families import folder_of, picture


def file(image: Image.Image, form: str = "PNG", **how: Any) -> bytes:
    made = BytesIO()
    image.save(made, form, **how)
    return made.getvalue()


def pool(batch: Batch) -> Mapping[str, bytes]:
    return cast("Images", batch[IMAGES]).pool


def test_a_file_travels_once_however_often_its_row_is_repeated() -> None:
    one, other = picture(1, 200, 200), picture(2, 200, 200)
    batch = Batch.of(images=Images.of([[one], [other, one], []]), groups=np.arange(3))
    group = batch.repeat(64)
    sent = sum(part.nbytes for part in group.to_wire()[1])
    assert len(one) + len(other) <= sent <= len(one) + len(other) + 64 * 3 * 100
    assert Batch.from_wire(*group.to_wire()) == group
    parts = group.split(5)
    assert Batch.join(parts) == group
    assert pool(Batch.join(parts)) == {name_of(one): one, name_of(other): other}
    assert pool(group.select([0])) == {name_of(one): one}
    with pytest.raises(DataError, match=r"Images\.of"):
        Batch.of(images=["a.png"])


def test_a_task_reads_paths_bytes_and_data_urls(tmp_path: Path) -> None:
    one, other = picture(1), picture(2)
    (tmp_path / "one.png").write_bytes(one)
    url = f"data:image/png;base64,{base64.b64encode(other).decode()}"
    parts = [{"type": "text", "text": "Compare "}, {"type": "image"}, {"type": "image_url", "image_url": {"url": url}}]
    rows = [
        {"image": "one.png", "question": "What?", "answer": "1", "messages": [{"role": "user", "content": parts}]},
        {
            "image": [url, "one.png"],
            "question": "Which?",
            "answer": "2",
            "messages": [{"role": "user", "content": "x"}],
        },
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    both, names = {name_of(one): one, name_of(other): other}, [mark_of(name_of(each)) for each in (one, other)]

    def task(prompt: str, source: str = "rows.jsonl") -> Batch:
        return Task.load(TaskConfig(source=str(tmp_path / source), prompt=prompt, images=("image",), held_out=0)).train

    for prompt, wanted in {
        "{question}": [names[0] + "What?", names[1] + names[0] + "Which?"],
        "{question} In {image}.": [f"What? In {names[0]}.", f"Which? In {names[1]}{names[0]}."],
    }.items():
        read = task(prompt)
        assert list(read.objects("prompt")) == wanted
        assert pool(read) == both
    found = task("{question} In {image}.")
    said = task("{messages}").objects("prompt")
    assert [each[0]["content"] for each in said] == [f"Compare {names[0]}{names[1]}", f"{names[1]}{names[0]}x"]  # type: ignore[index]
    assert prompt_text(found.objects("prompt")[0]) == f"What? In [image {name_of(one)[:8]}]."

    table = pa.Table.from_pylist([{"image": {"bytes": one, "path": None}, "question": "What?", "answer": "1"}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert task("{question}", "rows.parquet").objects("prompt") == (names[0] + "What?",)


def test_bad_images_are_errors_of_their_row(tmp_path: Path) -> None:
    huge = bytearray(file(Image.new("RGB", (4, 4))))
    huge[16:24] = (100_000).to_bytes(4) * 2
    huge[29:33] = crc32(huge[12:29]).to_bytes(4)
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    cases = {
        "is an empty file": b"",
        "no whole image": b"text, not pixels",
        "truncated|no whole image": picture(1, 90, 90)[:-200],
        "pixels": bytes(huge),
        "is animated": file(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "not fetched from example.org": "https://example.org/a.png",
        "cannot be read: .*missing.png": str(tmp_path / "missing.png"),
        "write a data URL": "data:image/png,abc",
        "a path, bytes, or a URL": 5,
    }
    row = {"question": "a", "answer": "b"}
    for match, value in cases.items():
        with pytest.raises(DataError, match=f"rows, row 1: `image`.*({match})"):
            Task.of([row | {"image": each} for each in (picture(1), value)], images=["image"])


PATHS = list[str]()
"""What the host was asked for."""


@pytest.fixture
def host() -> Iterator[str]:
    """A host with an image, a way to it by another name, and answers that never come, or not whole."""
    asked = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            PATHS.append(self.path)
            if self.path == "/never":
                asked.wait()
            self.send_response(301 if "/moved" in self.path else 404 if self.path == "/b.png" else 200)
            if self.path == "/moved%20here":
                self.send_header("Location", "/ü b.png?ü=1 2#c".encode().decode("latin-1"))
            else:
                self.send_header("Location", f"http://localhost:{self.server.server_port}/a.png")  # type: ignore[attr-defined]
            if self.path == "/short":
                self.send_header("Content-Length", str(len(picture(1)) + 7))
            self.end_headers()
            self.wfile.write(picture(1))
            if self.path == "/slow":
                self.wfile.flush()
                asked.wait()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the library's name
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        asked.set()
        server.shutdown()


def test_images_are_fetched_from_hosts_that_are_allowed(tmp_path: Path, host: str) -> None:
    def task(path: str, *hosts: str) -> Batch:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "a", "answer": "b", "image": f"{host}{path}"}))
        table = {"source": str(tmp_path / "rows.jsonl"), "images": ["image"], "image_hosts": hosts, "held_out": 0}
        return Task.load(TaskConfig.model_validate(table)).train

    assert [*pool(task("/a.png", "127.0.0.1")).values()] == [picture(1)]
    assert pool(task("/moved", "127.0.0.1", "localhost"))
    for path, hosts, match in (
        ("/moved", ("127.0.0.1",), "not fetched from localhost"),
        ("/moved", ("127.0.0.1", "*"), "localhost has the address .*, which is not public"),
        ("/a.png", ("*",), "has the address 127.0.0.1, which is not public"),
        ("/b.png", ("127.0.0.1",), "answered 404"),
    ):
        with pytest.raises(DataError, match=f"line 1: `image`.*{match}"):
            task(path, *hosts)
    with pytest.raises(DataError, match=r"row 1: .* cannot be fetched: .*, after 0\.1 seconds"):
        fetched(f"{host}/never", ["127.0.0.1"], "row 1", seconds=0.1)
    with pytest.raises(DataError, match=r"row 1: .* cannot be fetched: TimeoutError.*, after 0\.1 seconds"):
        fetched(f"{host}/slow", ["127.0.0.1"], "row 1", seconds=0.1)
    with pytest.raises(DataError, match=r"cannot be fetched: IncompleteRead.* 7 more expected"):
        task("/short", "127.0.0.1")


def test_usual_addresses_are_fetched_as_browsers_write_them(host: str) -> None:
    PATHS.clear()
    for written in ("/moved here", "/ü.png?q=a b%20c&d=(ä)"):
        assert fetched(f"{host}{written}", ["127.0.0.1"], "row 1") == picture(1)
    assert PATHS == ["/moved%20here", "/%C3%BC%20b.png?%C3%BC=1%202", "/%C3%BC.png?q=a%20b%20c&d=(%C3%A4)"]
    assert fetched(host.replace("127.0.0.1", "LocalHost") + "/a.png", ["LOCALHOST"], "row 1") == picture(1)
    with pytest.raises(DataError, match=r"not fetched from xn--bcher-kva\.example"):
        fetched("https://bücher.example/a.png", [], "row 1")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255"),
        *("[::1]", "[fc00::1]", "[fe80::1]", "[fec0::1]", "[ff0e::1]", "[::7f00:1]", "[::ffff:10.0.0.1]"),
        *("[::ffff:0:a00:1]", "[64:ff9b::a00:1]", "[2002:a00:1::]", "[2001::a00:1]", "[2001:db8::1]"),
    ],
)
def test_addresses_that_may_lead_inside_are_not_public(address: str) -> None:
    with pytest.raises(DataError, match="which is not public"):
        fetched(f"http://{address}:9/a.png", ["*"], "row 1")


def test_odd_images_are_read_as_documented() -> None:
    grey = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    turned = Image.new("RGB", (6, 4), "red")
    turned.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    found = opened(file(Image.fromarray(grey)), "")
    assert (found.mode, found.getpixel((7, 7)), found.getpixel((0, 0))) == ("RGB", (255,) * 3, (0,) * 3)
    assert opened(file(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG"), "").getpixel((1, 1)) == pytest.approx(
        (255, 0, 0), abs=12
    )
    upright = opened(file(turned, exif=exif), "")
    assert (upright.size, upright.getpixel((3, 0))) == ((4, 6), (0, 0, 255))
    assert opened(file(Image.new("RGBA", (2, 2), (9, 9, 9, 0))), "").getpixel((0, 0)) == (255, 255, 255)
    assert opened(file(Image.new("P", (2, 2), 0), "GIF"), "").mode == "RGB"
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    camera = file(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert opened(camera, "").getpixel((4, 4)) == pytest.approx((255, 0, 0), abs=12)


@pytest.mark.parametrize("mode", ["CMYK", "HSV", "YCbCr", "LAB", "LA", "PA", "I;16", "1"])
def test_an_image_of_pillow_is_read_whatever_its_mode(mode: str) -> None:
    row = {"question": "a", "answer": "b"}
    found = Task.of([row | {"image": Image.new(mode, (4, 4))}], images=["image"], held_out=0).train
    (data,) = pool(found).values()
    assert opened(data, "").mode == "RGB"


def test_an_image_of_floats_is_an_error_of_its_row() -> None:
    with pytest.raises(DataError, match=r"rows, row 0: `image`.*floats"):
        Task.of([{"question": "a", "answer": "b", "image": Image.new("F", (4, 4))}], images=["image"])


def test_lists_of_images_of_the_hub_are_not_decoded_either(monkeypatch: pytest.MonkeyPatch) -> None:
    made = datasets.Dataset.from_dict(
        {"images": [[{"bytes": picture(1), "path": None}]]}, datasets.Features({"images": [datasets.Image()]})
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    (row,) = dataset_rows("org/name", {}, files=["images"])
    assert row == {"images": [{"bytes": picture(1), "path": None}]}


def test_a_backend_without_images_is_a_mistake_before_a_run() -> None:
    keys = ["task.options={size = 40}", "task.held_out=0", "policy.backend=megatron"]
    job = load_job(shipped_configs()["sft/shapes"], keys)
    assert "policy.backend = 'megatron' takes no images: set it to one of" in "".join(
        find_mistakes(job.config, job.run)
    )


def test_a_model_whose_images_vllm_may_read_otherwise_is_a_mistake_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"word": "a", "answer": "b", "image": f"data:;base64,{base64.b64encode(picture(1)).decode()}"})
    )
    task = TaskConfig(source=str(tmp_path / "rows.jsonl"), prompt="{word}", images=("image",), held_out=0)
    for family, refused in (("gemma3", True), ("llava", False)):
        keys = [f"policy.model={folder_of(family, tmp_path / family)}", "policy.chat=true", "sampler.backend=vllm"]
        job = load_job(shipped_configs()["grpo/shapes"], keys)
        mistakes = "".join(find_row_mistakes(task, job.config))
        assert (
            f"takes images for models of the types internvl, llava, qwen2_5_vl, qwen3_vl, and this one's is {family}"
            in mistakes
        ) == refused


def test_images_of_rows_for_an_agent_are_a_mistake_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"word": "a", "answer": "b", "image": f"data:;base64,{base64.b64encode(picture(1)).decode()}"})
    )
    job = load_job(shipped_configs()["agent/quickstart"], ["policy.model={characters = 'ab'}"])
    task = TaskConfig(source=str(tmp_path / "rows.jsonl"), prompt="{word}", images=("image",))
    (mistake,) = find_row_mistakes(task, job.config)
    assert mistake.startswith("task.images: agent gets the text of a row, and none of its images")
