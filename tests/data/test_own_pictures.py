"""Clients from folders of pictures."""

import numpy as np
import pytest
import torch
from PIL import Image

from bespoke.core.inputs import InputContract
from bespoke.data import DataSettings, federate_data, from_image_folder, read_rows
from bespoke.errors import UserError


def draw(path, level, size=(6, 4), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level).save(path)
    return path


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "scans"
    draw(folder / "b" / "well" / "2.png", 10)
    draw(folder / "b" / "ill" / "9.png", 20)
    draw(folder / "a" / "ill" / "1.png", 30)
    draw(folder / "a" / "ill" / "0.PNG", 40)
    (folder / ".hidden").mkdir()
    (folder / "a" / "ill" / "Thumbs.db").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("no picture")
    return folder


def test_clients_classes_and_pictures_in_order(root):
    found = from_image_folder(root)
    assert list(found) == ["a", "b"]
    assert found.contract == InputContract((1, 4, 6), "uint8", classes=("ill", "well"))
    assert {name: (x[:, 0, 0, 0].tolist(), y.tolist()) for name, (x, y) in found.items()} == {
        "a": ([40, 30], [0, 0]),
        "b": ([20, 10], [0, 1]),
    }
    pool = federate_data(DataSettings(name="image_folder", path=str(root), test=0.5), 0)
    assert pool.x.shape == (4, 1, 4, 6) and pool.x.dtype == torch.uint8
    assert pool.contract == found.contract and pool.names == ("a", "b")


def test_colour_and_size(root):
    draw(root / "b" / "well" / "3.jpg", (250, 0, 0), mode="RGB")
    found = from_image_folder(root)
    assert found["b"][0].shape == (3, 3, 4, 6)
    red = found["b"][0][2].mean(axis=(1, 2))
    assert red[0] > 240 and red[1:].max() < 10
    assert found["b"][0][1].tolist() == np.full((3, 4, 6), 10).tolist()
    draw(root / "b" / "well" / "4.png", 7, size=(5, 5))
    with pytest.raises(UserError, match=r"4\.png has 5 x 5 pixels, .* 6 x 4: set size to resize all"):
        from_image_folder(root)
    resized = from_image_folder(root, size=8)
    assert resized.contract == InputContract((3, 8, 8), "uint8", classes=("ill", "well"), resized=True)
    assert resized["b"][0].shape == (4, 3, 8, 8)
    pool = federate_data(DataSettings(name="image_folder", path=str(root), size=8), 0)
    assert pool.x.shape[1:] == (3, 8, 8)


def unfit(root, kind):
    if kind == "a level too high":
        draw(root / "c" / "1.png", 3)
    elif kind == "two levels too high":
        draw(root / "1.png", 3)
    elif kind == "16 bits":
        Image.fromarray(np.full((4, 6), 3000, np.uint16)).save(root / "a" / "ill" / "2.png")
    elif kind == "no picture":
        (root / "a" / "ill" / "2.png").write_bytes(b"<html>")
    elif kind == "cut off":
        path = draw(root / "a" / "ill" / "2.png", 9)
        path.write_bytes(path.read_bytes()[:-30])
    elif kind == "too large":
        (root / "a" / "ill" / "2.png").write_bytes(
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (60_000).to_bytes(4, "big") * 2 + b"\x08\0\0\0\0"
        )


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("a level too high", r"c/1\.png is a picture where class/picture is expected: arrange them as .*client/class"),
        ("two levels too high", r"1\.png is a picture where client/class/picture is expected"),
        ("16 bits", r"2\.png has more than 8 bits per channel .*: convert it to 8 bits"),
        ("no picture", r"2\.png is truncated or damaged \(it is no JPEG or PNG picture\)"),
        ("cut off", r"2\.png is truncated or damaged"),
        ("too large", r"2\.png is truncated or damaged"),
    ],
)
def test_unfit_pictures_are_named(root, kind, sentence):
    unfit(root, kind)
    with pytest.raises(UserError, match=sentence) as caught:
        from_image_folder(root)
    assert "\n" not in str(caught.value)


def test_folders_without_pictures(tmp_path):
    for path, sentence in (("", "path is empty"), (tmp_path, "holds no pictures"), (tmp_path / "no", "no folder")):
        with pytest.raises(UserError, match=sentence):
            from_image_folder(path)


def test_new_pictures_with_and_without_classes(root, tmp_path):
    contract = from_image_folder(root).contract
    x, y = read_rows(root / "b", contract)
    assert x[:, 0, 0, 0].tolist() == [20, 10] and y.tolist() == [0, 1]
    draw(tmp_path / "new" / "1.png", 5)
    x, y = read_rows(tmp_path / "new", contract)
    assert x.shape == (1, 1, 4, 6) and y is None
    draw(tmp_path / "new" / "2.png", 5, size=(7, 7))
    with pytest.raises(UserError, match=r"2\.png has 7 x 7 pixels, not 6 x 4: resize it"):
        read_rows(tmp_path / "new", contract)
    resized = from_image_folder(root, size=3).contract
    assert read_rows(tmp_path / "new", resized)[0].shape == (2, 1, 3, 3)
    draw(tmp_path / "new" / "ill" / "1.png", 5)
    with pytest.raises(UserError, match="holds pictures beside folders"):
        read_rows(tmp_path / "new", contract)
    (root / "b" / "well" / "1.tif").touch()
    for path in (root / "b" / "well").glob("*.png"):
        path.unlink()
    with pytest.raises(UserError, match=r"well holds no picture \(.png or .jpg\): add some, or remove the folder"):
        read_rows(root / "b", contract)
    draw(root / "b" / "well" / "0.png", 5)
    draw(root / "b" / "odd" / "1.png", 5)
    with pytest.raises(UserError, match=r"holds 'odd' in .*1\.png, an unknown class: the model knows 'ill', 'well'"):
        read_rows(root / "b", contract)


@pytest.mark.parametrize("size", [-1, "8", 8.0, 5000])
def test_a_size_that_is_none_is_refused(size, tmp_path):
    with pytest.raises(UserError, match=r"size=.* is no side of a picture: give whole pixels from 0 to 4,096"):
        from_image_folder(tmp_path, size=size)


def test_a_class_without_pictures_is_not_left_out_silently(tmp_path):
    (tmp_path / "a" / "cat" / "deeper").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cat holds no picture \(.png or .jpg\): add some, or remove the folder"):
        from_image_folder(tmp_path)
