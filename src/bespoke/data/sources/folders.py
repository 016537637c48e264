"""Folders of pictures: root/client/class/picture.png."""

import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bespoke.data.sources.archives import reading
from bespoke.data.sources.pictures import decoded
from bespoke.errors import UserError

LARGEST_SIDE = 4096  # pixels
_ENDINGS = (".png", ".jpg", ".jpeg")
_GREY = ("1", "L")
_COLOUR = ("P", "PA", "LA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")  # 8 bits a channel
_LARGEST = 2**14  # pixels per side
_CONTENT = 2**28  # bytes of a file


class Picture(NamedTuple):
    """A picture that is not decoded yet."""

    where: str  # its name in sentences
    content: bytes | Path

    def read(self) -> bytes:
        """Return the bytes of its file."""
        if isinstance(self.content, bytes):
            return self.content
        with reading(self.content):
            if self.content.stat().st_size > _CONTENT:
                raise ValueError(f"it has more than {_CONTENT:,} bytes")
            return self.content.read_bytes()


Found = tuple[str, str, Picture]  # client, class, picture


def find(root: Path) -> list[Found]:
    """Return all pictures below ``root/client/class``; hidden files and folders do not count."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}: give the one that holds client/class/*.png")
    found: list[Found] = []
    for client in _folders(root, root, "client/class/picture"):
        for label in _folders(client, root, "class/picture"):
            found += [(client.name, label.name, Picture(str(path), path)) for path in _of_class(label)]
    if not found:
        raise UserError(f"{root} holds no pictures: arrange them as {root}/client/class/*.png (or .jpg)")
    return found


def of_one_client(root: Path) -> list[tuple[str, Picture]]:
    """Return the class, "" where it is not known, and the path of each picture in ``root/class`` or ``root`` itself."""
    flat, folders = _pictures(root), [path for path in _listed(root) if path.is_dir()]
    labels = folders if any(map(_pictures, folders)) else []
    if flat and labels:
        raise UserError(f"{root} holds pictures beside folders of classes: use one of the two")
    if not flat and not labels:
        raise UserError(f"{root} holds no pictures: arrange them as {root}/*.png or {root}/class/*.png")
    found = [("", path) for path in flat] + [(label.name, path) for label in labels for path in _of_class(label)]
    return [(label, Picture(str(path), path)) for label, path in found]


def _of_class(folder: Path) -> list[Path]:
    """Return the pictures of a class; a folder without any is a mistake, such as files of another kind."""
    if not (found := _pictures(folder)):
        raise UserError(f"{folder} holds no picture (.png or .jpg): add some, or remove the folder")
    return found


def _pictures(folder: Path) -> list[Path]:
    return [path for path in _listed(folder) if path.suffix.lower() in _ENDINGS and not path.is_dir()]


def _listed(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _folders(folder: Path, root: Path, below: str) -> Iterator[Path]:
    """Yield the folders in a folder; a picture there is a level too high."""
    for path in _listed(folder):
        if path.is_dir():
            yield path
        elif path.suffix.lower() in _ENDINGS:
            raise UserError(f"{path} is a picture where {below} is expected: arrange them as {root}/client/class/*.png")


def common_shape(pictures: Sequence[Picture], size: int) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of all pictures, from their headers; with a ``size``, that of the resized ones."""
    grey, first = True, (0, 0)
    for picture in pictures:
        mode, width, height = _header(picture)
        if mode not in (*_GREY, *_COLOUR):
            raise UserError(f"{picture.where} has more than 8 bits per channel (mode {mode}): convert it to 8 bits")
        grey = grey and mode in _GREY
        if not size and first not in ((0, 0), (height, width)):
            raise UserError(
                f"{picture.where} has {width} x {height} pixels, {pictures[0].where} {first[1]} x {first[0]}: set size "
                "to resize all, or give pictures of one size"
            )
        first = (height, width)
    return (1 if grey else 3, *((size, size) if size else first))


def _header(picture: Picture) -> tuple[str, int, int]:
    """Return a picture's mode, width and height without decoding its pixels."""
    from PIL import Image, UnidentifiedImageError

    content = io.BytesIO(picture.content) if isinstance(picture.content, bytes) else picture.content
    with reading(picture.where), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many pixels, or of strange remarks in the file
        try:
            with Image.open(content, formats=("JPEG", "PNG")) as image:
                if max(image.size) > _LARGEST:
                    raise ValueError(f"it is a picture of {image.width} x {image.height} pixels")
                return image.mode, image.width, image.height
        except UnidentifiedImageError:
            raise ValueError("it is no JPEG or PNG picture") from None
        except Image.DecompressionBombError:
            raise ValueError("it is a picture of far too many pixels") from None


def decode(picture: Picture, shape: tuple[int, ...], resize: bool) -> np.ndarray:
    """Decode a picture as uint8 of that shape (C, H, W), resized bilinearly if asked for."""
    from PIL import Image

    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    found = decoded(picture.read(), picture.where, mode, lambda w, h: max(w, h) <= _LARGEST)
    if resize and found.size != (width, height):
        found = found.resize((width, height), Image.Resampling.BILINEAR)
    if found.size != (width, height):
        raise UserError(f"{picture.where} has {found.width} x {found.height} pixels, not {width} x {height}: resize it")
    return np.asarray(found, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)
