"""Checkpoints on disk: one that is saved again is there at any moment, and killed saves leave nothing."""

from pathlib import Path

from meshrl.tinker.library import Checkpoint, Library, Model

MODEL = Model("s1:train:0", "s1", "tiny", 0.0)
PATH = "tinker://s1:train:0/weights/x"


def test_a_save_that_was_killed_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    shelf = Library(tmp_path).shelf("a")
    shelf.put_model(MODEL)
    folder = shelf.checkpoint_folder(PATH)
    for number in (1, 2):
        with shelf.writing(Checkpoint(PATH, "training", MODEL, 0.0, number)) as part:
            (part / "weights").write_text(str(number))
    folder.rename(folder.with_name(".x.old~"))  # as a kill between two renames leaves it
    folder.with_name(".x-12345678").mkdir()
    begun = Library(tmp_path).shelf("a").checkpoint(PATH)
    assert (begun and begun.seq_id, (folder / "weights").read_text()) == (2, "2")
    assert [each.name for each in folder.parent.iterdir()] == ["x"]
