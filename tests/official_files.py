"""Small files in the official formats, for the tests of the readers: each writer returns the paths it wrote."""

import bz2
import csv
import gzip
import io
import json
import struct
import tarfile
import wave
import zipfile

import numpy as np
from PIL import Image
from scipy.io import savemat


def idx_bytes(array):
    kind = {"uint8": 0x08, "int32": 0x0C}[array.dtype.name]
    big = array.astype(array.dtype.newbyteorder(">"))
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + big.tobytes()


def tar_gz(path, contents):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return [path]


def zipped(path, contents, kind=zipfile.ZIP_DEFLATED):
    """Contents are bytes, or pieces of bytes."""
    with zipfile.ZipFile(path, "w", kind, compresslevel=1) as archive:
        for name, content in contents.items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.writelines([content] if isinstance(content, bytes) else content)
    return [path]


def mnist_files(folder, x_train, y_train, x_test, y_test, prefix=("train", "t10k")):
    """The four gzipped files: x uint8 (n, 28, 28), y uint8 (n,)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part, x, y in ((prefix[0], x_train, y_train), (prefix[1], x_test, y_test)):
        for name, array in ((f"{part}-images-idx3-ubyte.gz", x), (f"{part}-labels-idx1-ubyte.gz", y)):
            paths.append(folder / name)
            paths[-1].write_bytes(gzip.compress(idx_bytes(array)))
    return paths


def qmnist_labels(folder, name, y, writer, extra=0):
    """QMNIST's eight columns; ``extra`` rows follow those of MNIST."""
    table = np.zeros((len(y) + extra, 8), np.int32)
    table[: len(y), 0], table[: len(y), 2] = y, writer
    path = folder / f"qmnist-{name}-labels-idx2-int.gz"
    path.write_bytes(gzip.compress(idx_bytes(table)))
    return path


def emnist_zip(path, variant, x_train, y_train, x_test, y_test):
    contents = {"gzip/emnist-digits-train-images-idx3-ubyte.gz": b"of another set", "gzip/readme.txt": b"text"}
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        contents[f"gzip/emnist-{variant}-{part}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(x))
        contents[f"gzip/emnist-{variant}-{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(y))
    return zipped(path, contents)


def cifar10_tar(path, x, y, x_test, y_test):
    """x uint8 (n, 3, 32, 32), cut into the five batches."""
    rows = np.concatenate([y[:, None], x.reshape(len(x), -1)], axis=1).astype(np.uint8)
    test = np.concatenate([y_test[:, None], x_test.reshape(len(x_test), -1)], axis=1).astype(np.uint8)
    folder = "cifar-10-batches-bin"
    contents = {f"{folder}/batches.meta.txt": b"airplane\n", f"{folder}/test_batch.bin": test.tobytes()}
    for i, part in enumerate(np.array_split(rows, 5), 1):
        contents[f"{folder}/data_batch_{i}.bin"] = part.tobytes()
    return tar_gz(path, contents)


def cifar100_tar(path, x, fine, x_test, fine_test):
    contents = {}
    for part, images, labels in (("train", x, fine), ("test", x_test, fine_test)):
        rows = np.concatenate([labels[:, None] // 5, labels[:, None], images.reshape(len(images), -1)], axis=1)
        contents[f"cifar-100-binary/{part}.bin"] = rows.astype(np.uint8).tobytes()
    return tar_gz(path, contents)


def mat_bytes(x, y):
    """x uint8 (n, 3, 32, 32); the digit 0 is written as 10, as in SVHN."""
    content = io.BytesIO()
    savemat(content, {"X": x.transpose(2, 3, 1, 0), "y": np.where(y == 0, 10, y).astype(np.uint8)[:, None]})
    return content.getvalue()


def svhn_files(folder, x_train, y_train, x_test, y_test):
    paths = [folder / "train_32x32.mat", folder / "test_32x32.mat"]
    for path, x, y in ((paths[0], x_train, y_train), (paths[1], x_test, y_test)):
        path.write_bytes(mat_bytes(x, y))
    return paths


def usps_files(folder, train, y_train, test, y_test):
    """Values in [-1, 1] (n, 256), labels 0..9, as libsvm's compressed text."""
    paths = [folder / "usps.bz2", folder / "usps.t.bz2"]
    for path, values, labels in ((paths[0], train, y_train), (paths[1], test, y_test)):
        lines = [
            f"{y + 1} " + " ".join(f"{i}:{v:g}" for i, v in enumerate(row, 1)) + " \n"
            for row, y in zip(values, labels, strict=True)
        ]
        path.write_bytes(bz2.compress("".join(lines).encode()))
    return paths


def picture_bytes(image, kind="PNG"):
    """image uint8 (3, H, W) or (H, W)."""
    content = io.BytesIO()
    Image.fromarray(image if image.ndim == 2 else np.ascontiguousarray(image.transpose(1, 2, 0))).save(content, kind)
    return content.getvalue()


def leaf_json(path, users):
    """users: {name: (x float (n, 784), y (n,))}."""
    data = {name: {"x": x.tolist(), "y": y.tolist()} for name, (x, y) in users.items()}
    path.write_text(
        json.dumps({"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data})
    )
    return path


def sent140_zip(path, rows):
    """rows: (polarity, user, text)."""
    content = io.StringIO()
    writer = csv.writer(content, quoting=csv.QUOTE_ALL)
    for i, (polarity, user, text) in enumerate(rows):
        writer.writerow([polarity, i, "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, text])
    return zipped(
        path,
        {
            "training.1600000.processed.noemoticon.csv": content.getvalue().encode("latin-1"),
            "testdata.manual.2009.06.14.csv": b'"2","3","Mon","kindle2","tpryan","neutral"\n',
        },
    )


def wav_bytes(sound, rate, width=2):
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes((np.asarray(sound) * 32767).astype("<i2").tobytes() if width == 2 else bytes(len(sound)))
    return content.getvalue()


def tone(hertz, rate, seconds=1.0, height=0.5):
    return height * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)
