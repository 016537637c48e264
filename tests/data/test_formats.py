"""Every official format: small files of it are written here and read back."""

import gzip
import json
from dataclasses import replace

import numpy as np
import official_files as official
import pytest

from bespoke.data.sources import acquire, audio, pictures, text
from bespoke.data.sources.archives import Allowance, Files
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.data.sources.content import sort_test_rows
from bespoke.errors import UserError

RNG = np.random.default_rng(0)


def images(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(n, classes=10):
    return (np.arange(n) % classes).astype(np.uint8)


def same(found, x, y, test):
    assert found.x.dtype == np.uint8 and found.y.dtype == np.int64
    assert np.array_equal(found.x, x) and np.array_equal(found.y, y)
    assert np.array_equal(found.official_test, np.arange(len(y)) >= len(y) - test)


# --- arrays ---------------------------------------------------------------------------------------------------------


def test_mnist_files_are_read_whatever_their_order(tmp_path):
    x, y = images(7, 28, 28), labels(7)
    paths = official.mnist_files(tmp_path, x[:5], y[:5], x[5:], y[5:])
    same(acquire.read(CATALOGUE["mnist"], paths[::-1]), x[:, None], y, 2)
    plain = [path.with_suffix("") for path in paths]
    for path, bare in zip(paths, plain, strict=True):
        bare.write_bytes(gzip.decompress(path.read_bytes()))
    same(acquire.read(CATALOGUE["mnist"], plain), x[:, None], y, 2)
    with pytest.raises(UserError, match=r"lacks the test labels: give all files"):
        acquire.read(CATALOGUE["mnist"], paths[:3])


def test_a_short_idx_file_is_refused(tmp_path):
    x, y = images(4, 28, 28), labels(4)
    paths = official.mnist_files(tmp_path, x[:3], y[:3], x[3:], y[3:])
    whole = gzip.decompress(paths[0].read_bytes())
    for content in (whole[:-1], whole[:9], b"", b"\0\0\x09\x01\0\0\0\0"):
        paths[0].write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is truncated or damaged"):
            acquire.read(CATALOGUE["mnist"], paths)
    paths[0].write_bytes(gzip.compress(whole)[:-9])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is truncated or damaged"):
        acquire.read(CATALOGUE["mnist"], paths)


def test_writers_come_from_the_third_column_of_qmnist(tmp_path):
    x, y = images(6, 28, 28), labels(6)
    paths = official.mnist_files(tmp_path, x[:4], y[:4], x[4:], y[4:])
    paths.append(official.qmnist_labels(tmp_path, "train", y[:4], [30, 7, 30, 9]))
    paths.append(official.qmnist_labels(tmp_path, "test", y[4:], [100, 8], extra=3))
    found = acquire.read(CATALOGUE["mnist_writers"], paths)
    assert found.owner_names == ("7", "8", "9", "30", "100")
    assert [found.owner_names[i] for i in found.owner] == ["30", "7", "30", "9", "100", "8"]
    assert found.official_test is None  # no writer is in both parts
    paths[-1] = official.qmnist_labels(tmp_path, "test", y[3:5], [100, 8])
    with pytest.raises(UserError, match=r"the writers in .* do not match its images"):
        acquire.read(CATALOGUE["mnist_writers"], paths)


def test_emnist_variants_are_chosen_from_one_archive(tmp_path):
    x, y = images(5, 28, 28), labels(5, 26)
    found = acquire.read(
        CATALOGUE["emnist_balanced"], official.emnist_zip(tmp_path / "b.zip", "balanced", x[:3], y[:3], x[3:], y[3:])
    )
    same(found, x[:, None], y, 2)
    path = official.emnist_zip(tmp_path / "l.zip", "letters", x[:3], y[:3] + 1, x[3:], y[3:] + 1)
    same(acquire.read(CATALOGUE["emnist_letters"], path), x[:, None], y, 2)  # letters are numbered from 1 there
    with pytest.raises(UserError, match=r"lacks the train images"):
        acquire.read(CATALOGUE["emnist_byclass"], path)


def test_cifar_binary_archives(tmp_path):
    x, y = images(14, 3, 32, 32), labels(14)
    path = official.cifar10_tar(tmp_path / "cifar-10-binary.tar.gz", x[:10], y[:10], x[10:], y[10:])
    same(acquire.read(CATALOGUE["cifar10"], path), x, y, 4)
    fine = RNG.integers(0, 100, 14).astype(np.uint8)
    path = official.cifar100_tar(tmp_path / "cifar-100-binary.tar.gz", x[:10], fine[:10], x[10:], fine[10:])
    found = acquire.read(CATALOGUE["cifar100"], path)
    assert np.array_equal(found.x[:10], x[:10]) and np.array_equal(found.y[:10], fine[:10])
    assert np.array_equal(found.y[10:], np.sort(fine[10:]))
    with pytest.raises(UserError, match=r"holds no data_batch_1.bin: give the binary edition, which has no pickles"):
        acquire.read(CATALOGUE["cifar10"], path)


def test_cifar100_test_rows_have_one_order_whatever_the_source(tmp_path):
    x, fine = images(12, 3, 32, 32), np.array([5, 5, 5, 1, 0, 1, 2, 2, 1, 0, 1, 0], np.uint8)
    shuffled = np.r_[:4, 4 + RNG.permutation(8)]
    tar = official.cifar100_tar(tmp_path / "a.tar.gz", x[:4], fine[:4], x[4:], fine[4:])
    np.savez(
        tmp_path / "b.npz",
        x_train=x[:4].transpose(0, 2, 3, 1),
        y_train=fine[:4],
        x_test=x[shuffled[4:]].transpose(0, 2, 3, 1),
        y_test=fine[shuffled[4:]],
    )
    a, b = (acquire.read(CATALOGUE["cifar100"], path) for path in (tar, [tmp_path / "b.npz"]))
    assert np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y)
    before = a.x.copy()
    assert np.array_equal(sort_test_rows(a).x, before)


def test_truncated_archives_are_told_in_one_sentence(tmp_path):
    x, y = images(60, 3, 32, 32), labels(60)
    [path] = official.cifar10_tar(tmp_path / "c.tar.gz", x[:50], y[:50], x[50:], y[50:])
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 5000, 20):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"c\.tar\.gz.*(truncated or damaged|holds no data_batch)"):
            acquire.read(CATALOGUE["cifar10"], [path])
    [path] = official.emnist_zip(tmp_path / "e.zip", "balanced", x[:, 0], y, x[:, 0], y)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"e\.zip is truncated or damaged"):
        acquire.read(CATALOGUE["emnist_balanced"], [path])


def test_svhn_and_synthetic_digits(tmp_path):
    x, y = images(9, 3, 32, 32), labels(9)
    paths = official.svhn_files(tmp_path, x[:6], y[:6], x[6:], y[6:])
    same(acquire.read(CATALOGUE["svhn"], paths), x, y, 3)
    contents = {"synth_test_32x32.mat": paths[1].read_bytes(), "synth_train_32x32.mat": paths[0].read_bytes()}
    same(acquire.read(CATALOGUE["syn_digits"], official.zipped(tmp_path / "SynthDigits.zip", contents)), x, y, 3)
    with pytest.raises(UserError, match=r"lacks the test images"):
        acquire.read(CATALOGUE["svhn"], paths[:1])
    paths[0].write_bytes(paths[0].read_bytes()[:300])
    with pytest.raises(UserError, match=r"train_32x32.mat is truncated or damaged"):
        acquire.read(CATALOGUE["svhn"], paths)


def test_usps_values_become_grey_levels(tmp_path):
    values = RNG.uniform(-1, 1, (6, 256)).round(3).astype(np.float32)
    values[0, :3] = -1, 0, 1
    y = labels(6)
    found = acquire.read(CATALOGUE["usps"], official.usps_files(tmp_path, values[:4], y[:4], values[4:], y[4:]))
    assert found.x[0].ravel()[:3].tolist() == [0, 127, 255]
    assert np.abs(found.x.reshape(6, 256) - (values + 1) * 127.5).max() <= 1
    assert found.y.tolist() == y.tolist() and found.official_test.tolist() == [False] * 4 + [True] * 2
    with pytest.raises(UserError, match=r"a line does not have 256 values in"):
        acquire.read(CATALOGUE["usps"], official.usps_files(tmp_path, values[:4, :9], y[:4], values[4:], y[4:]))


# --- .npz -----------------------------------------------------------------------------------------------------------


def test_npz_layouts_become_channels_first(tmp_path):
    x, y = images(6, 3, 32, 32), labels(6)
    entry = CATALOGUE["cifar10"]
    for i, layout in enumerate((x, x.transpose(0, 2, 3, 1))):
        np.savez(tmp_path / f"{i}.npz", x_train=layout[:4], y_train=y[:4], x_test=layout[4:], y_test=y[4:])
        same(acquire.read(entry, [tmp_path / f"{i}.npz"]), x, y, 2)
    np.savez(tmp_path / "p0.npz", x=x[:3].transpose(0, 2, 3, 1), y=y[:3])
    np.savez(tmp_path / "p1.npz", x=x[3:].transpose(0, 2, 3, 1), y=y[3:])
    parts = [tmp_path / "p0.npz", tmp_path / "p1.npz"]
    same(acquire.read(replace(entry, sizes=((4, 2),)), parts), x, y, 2)
    grey = images(6, 28, 28)
    np.savez(tmp_path / "g.npz", x_train=grey[:4], y_train=y[:4], x_test=grey[4:], y_test=y[4:])
    same(acquire.read(CATALOGUE["mnist"], [tmp_path / "g.npz"]), grey[:, None], y, 2)
    with pytest.raises(UserError, match=r"has shape \(28, 28\), but \(3, 32, 32\) is expected"):
        acquire.read(entry, [tmp_path / "g.npz"])


def test_npz_speakers_and_rooms(tmp_path):
    x, y = images(5, 49, 40), labels(5)
    np.savez(tmp_path / "a.npz", x=x, y=y, speaker=[3, 3, 1, 20, 1], room=[0, 1, 1, 0, 2], room_names=["K", "R", "V"])
    found = acquire.read(CATALOGUE["audiomnist"], [tmp_path / "a.npz"])
    assert found.x.shape == (5, 1, 49, 40) and found.official_test is None
    assert [found.owner_names[i] for i in found.owner] == ["3", "3", "1", "20", "1"]
    assert [found.domain_names[i] for i in found.domain] == ["K", "R", "R", "K", "V"]
    np.savez(tmp_path / "b.npz", x=x, y=y, speaker=[3, 3, 1], room=[0, 1, 1, 0, 2])
    with pytest.raises(UserError, match=r"speaker, but 5 rows"):
        acquire.read(CATALOGUE["audiomnist"], [tmp_path / "b.npz"])


def test_npz_mistakes(tmp_path):
    x, y = images(4, 28, 28), labels(4)
    path, entry = tmp_path / "m.npz", CATALOGUE["mnist"]

    def refused(match, **arrays):
        np.savez(path, **arrays)
        with pytest.raises(UserError, match=match):
            acquire.read(entry, [path])

    objects = np.array([{"a": 1}, None], object)
    refused("holds a pickled object in 'y', and nothing is ever unpickled", x=x, y=objects)
    refused("has no array 'x_test'", x_train=x)
    refused("has no array 'x'", a=x)
    refused("has 4 rows in x and 3 in y", x=x, y=y[:3])
    refused("holds float32 values, but mnist is stored as uint8", x=x.astype(np.float32), y=y)
    refused("class numbers", x=x, y=y.astype(np.float64))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"m.npz is truncated or damaged"):
        acquire.read(entry, [path])
    with pytest.raises(UserError, match=r"there is no file"):
        acquire.read(entry, [tmp_path / "none.npz"])
    with pytest.raises(UserError, match=r"either as .npz files or as the official files"):
        acquire.read(entry, [path, tmp_path / "train-images-idx3-ubyte.gz"])


# --- pictures -------------------------------------------------------------------------------------------------------


def test_tiny_imagenet_classes_are_sorted_and_grey_pictures_become_colour(tmp_path):
    colours = {name: RNG.integers(0, 256, 3) for name in ("n02_0", "n02_10", "n02_2", "n01_0", "val_0", "val_1")}
    flat = {name: np.broadcast_to(c[:, None, None], (3, 64, 64)).astype(np.uint8) for name, c in colours.items()}
    root = "tiny-imagenet-200"
    contents = {f"{root}/wnids.txt": b"n02\nn01\n", f"{root}/test/images/test_0.JPEG": b"not looked at"}
    for name in ("n02_10", "n02_2", "n02_0", "n01_0"):
        contents[f"{root}/train/{name[:3]}/images/{name}.JPEG"] = official.picture_bytes(flat[name], "JPEG")
    contents[f"{root}/train/n01/images/n01_1.JPEG"] = official.picture_bytes(np.full((64, 64), 77, np.uint8), "JPEG")
    for name in ("val_0", "val_1"):
        contents[f"{root}/val/images/{name}.JPEG"] = official.picture_bytes(flat[name], "JPEG")
    contents[f"{root}/val/val_annotations.txt"] = b"val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n"
    entry = CATALOGUE["tiny_imagenet"]
    found = acquire.read(entry, official.zipped(tmp_path / "tiny-imagenet-200.zip", contents))
    assert found.x.shape == (7, 3, 64, 64) and found.y.tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert found.official_test.tolist() == [False] * 5 + [True] * 2
    order = ["n01_0", None, "n02_0", "n02_2", "n02_10", "val_0", "val_1"]
    for row, name in zip(found.x, order, strict=True):
        wanted = flat[name] if name else np.full((3, 64, 64), 77)
        assert np.abs(row.astype(int) - wanted).max() <= 4  # JPEG
    del contents[f"{root}/val/images/val_1.JPEG"]
    with pytest.raises(UserError, match=r"lacks 'val_1.JPEG'"):
        acquire.read(entry, official.zipped(tmp_path / "short.zip", contents))
    contents[f"{root}/train/n01/images/n01_1.JPEG"] = b"\xff\xd8 no picture"
    with pytest.raises(UserError, match=r"n01_1.JPEG' in bad.zip is truncated or damaged"):
        acquire.read(entry, official.zipped(tmp_path / "bad.zip", contents))


def test_mnist_m_follows_its_lists(tmp_path):
    x, y = images(5, 3, 32, 32), [7, 2, 9, 0, 4]
    names = ["00000001.png", "00000000.png", "00000002.png"]
    contents = {
        f"mnist_m/mnist_m_train/{name}": official.picture_bytes(row) for name, row in zip(names, x, strict=False)
    }
    contents |= {f"mnist_m/mnist_m_test/{i:08}.png": official.picture_bytes(x[3 + i]) for i in range(2)}
    contents["mnist_m/mnist_m_train_labels.txt"] = "".join(
        f"{n} {i}\n" for n, i in zip(names, y, strict=False)
    ).encode()
    contents["mnist_m/mnist_m_test_labels.txt"] = b"00000000.png 0\n00000001.png 4\n"
    same(acquire.read(CATALOGUE["mnist_m"], official.tar_gz(tmp_path / "mnist_m.tar.gz", contents)), x, y, 2)
    contents["mnist_m/mnist_m_test_labels.txt"] = b"00000000.png\n"
    with pytest.raises(UserError, match=r"mnist_m_test_labels.txt' in mnist_m.tar.gz is truncated or damaged"):
        acquire.read(CATALOGUE["mnist_m"], official.tar_gz(tmp_path / "mnist_m.tar.gz", contents))


def test_the_small_synthetic_digits_are_resized(tmp_path):
    flat = {digit: np.full((3, 40 + digit, 50), 20 * digit, np.uint8) for digit in range(10)}
    contents = {f"synthetic_digits/imgs_train/{d}/{d}_0.png": official.picture_bytes(flat[d]) for d in range(10)}
    contents["synthetic_digits/imgs_valid/3/3_9.png"] = official.picture_bytes(flat[3])
    contents["synthetic_digits/readme.png"] = b"not a digit"
    found = acquire.read(CATALOGUE["syn_digits_12k"], official.zipped(tmp_path / "archive.zip", contents))
    assert found.x.shape == (11, 3, 32, 32) and found.y.tolist() == [*range(10), 3]
    assert found.x[:, 0, 5, 5].tolist() == [20 * digit for digit in [*range(10), 3]]
    assert found.official_test.sum() == 1


def test_names_with_numbers_sort_by_the_numbers():
    assert sorted(["a_10", "a_9", "a_1"], key=pictures.natural) == ["a_1", "a_9", "a_10"]


# --- people ---------------------------------------------------------------------------------------------------------


def test_leaf_writers(tmp_path):
    x = {name: RNG.integers(0, 256, (n, 784)) for name, n in (("f0_1", 3), ("f0_0", 2), ("held", 1))}
    y = {"f0_1": np.array([61, 3, 3]), "f0_0": np.array([1, 0]), "held": np.array([10])}
    scaled = {name: (x[name] / 255, y[name]) for name in x}
    paths = [official.leaf_json(tmp_path / "all_data_0.json", {n: scaled[n] for n in ("f0_1", "f0_0")})]
    found = acquire.read(CATALOGUE["femnist"], paths)
    assert found.owner_names == ("f0_0", "f0_1") and found.owner.tolist() == [0, 0, 1, 1, 1]
    assert found.y.tolist() == [1, 0, 61, 3, 3] and found.official_test is None
    assert np.array_equal(found.x.reshape(5, 784), np.concatenate([x["f0_0"], x["f0_1"]]))  # the round trip is exact
    paths.append(official.leaf_json(tmp_path / "all_data_0_test_9.json", {"f0_0": scaled["held"]}))
    found = acquire.read(CATALOGUE["femnist"], paths[::-1])
    assert found.y.tolist() == [1, 0, 10, 61, 3, 3]
    assert found.official_test.tolist() == [False, False, True, False, False, False]
    paths[0].write_text(json.dumps({"user_data": {"a": {"x": [[2.0] * 784], "y": [1]}}}))
    with pytest.raises(
        UserError, match=r"client 'a' of .*all_data_0.json is truncated or damaged .a pixel is not in 0..1"
    ):
        acquire.read(CATALOGUE["femnist"], paths)
    paths[0].write_text('{"user_data": [1')
    with pytest.raises(UserError, match=r"all_data_0.json is truncated or damaged"):
        acquire.read(CATALOGUE["femnist"], paths)


def test_femnist_out_of_the_archives_of_nist(tmp_path):
    def drawing(seed):
        image = np.full((128, 128), 255, np.uint8)
        image[20 + seed : 60, 30 : 50 + seed] = 0
        return official.picture_bytes(image)

    shown = {"30": drawing(1), "39": drawing(2), "41": drawing(3), "5a": drawing(4), "61": drawing(5), "7a": drawing(6)}
    contents = {f"by_class/{code}/hsf_0/hsf_0_00000.png": content for code, content in shown.items()}
    contents["by_class/41/train_41/train_41_00000.png"] = contents["by_class/30/hsf_0/hsf_0_00000.png"]  # a copy
    contents["by_class/30/hsf_0.mit"] = b"a list"
    [by_class] = official.zipped(tmp_path / "by_class.zip", contents)
    written = {"f0001_02/d1": "39", "f0001_02/c1": "7a", "f0000_14/u1": "41", "f0000_14/d1": "30", "f0000_14/d2": "30"}
    contents = {f"by_write/hsf_0/{who}/p_{i}.png": shown[code] for i, (who, code) in enumerate(written.items())}
    [by_write] = official.zipped(tmp_path / "by_write.zip", contents)
    found = acquire.read(CATALOGUE["femnist"], [by_write, by_class])
    assert found.owner_names == ("f0000_14", "f0001_02") and found.owner.tolist() == [0, 0, 0, 1, 1]
    assert found.y.tolist() == [0, 0, 10, 61, 9]  # 0, 0, A; z, 9: by path
    assert found.x.shape == (5, 1, 28, 28) and found.x[0].max() == 255 and found.x[0, 0, 10, 8] < 10  # black on white
    with pytest.raises(UserError, match=r"has no class: give both"):
        acquire.read(CATALOGUE["femnist"], [by_write])
    with pytest.raises(UserError, match=r"has no pictures by writer: give both"):
        acquire.read(CATALOGUE["femnist"], [by_class])


def test_tweets_become_tokens_of_users_with_thirty(tmp_path):
    rows = [(4, "zoe", "I love café, @you http://t.co/x")] * 29 + [(0, "zoe", "bad bad")] + [(0, "amy", "good")] * 30
    rows += [(4, "rare", "few tweets")] * 29 + [(0, "amy", "w " * 40)]
    found = acquire.read(CATALOGUE["sent140"], official.sent140_zip(tmp_path / "t.zip", rows))
    assert found.owner_names == ("amy", "zoe") and found.x.shape == (61, text.TOKENS) and found.x.dtype == np.int32
    assert np.bincount(found.owner).tolist() == [31, 30] and found.y.tolist() == [0] * 31 + [1] * 29 + [0]
    spell = [[found.words[token] for token in row if token] for row in found.x]
    assert spell[0] == ["good"] and spell[30] == ["w"] * 25 and spell[-1] == ["bad", "bad"]
    assert spell[31] == ["i", "love", "café", ",", "user", "url"]
    assert "few" not in found.words
    with pytest.raises(UserError, match=r"no user with 30 tweets"):
        acquire.read(CATALOGUE["sent140"], official.sent140_zip(tmp_path / "t.zip", rows[:5]))
    with pytest.raises(UserError, match=r"six fields"):
        acquire.read(CATALOGUE["sent140"], official.sent140_zip(tmp_path / "t.zip", [(1, "a", "b")]))


def test_rare_words_are_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "WORDS", 4)
    rows = [(4, "amy", "often often seldom")] * 30 + [(4, "amy", "once often")]
    found = acquire.read(CATALOGUE["sent140"], official.sent140_zip(tmp_path / "t.zip", rows))
    assert found.words == ("", "?", "often", "seldom") and found.x[-1, :3].tolist() == [text.UNKNOWN, 2, 0]


# --- sound ----------------------------------------------------------------------------------------------------------


def test_a_tone_lights_up_its_own_band():
    edges = 700 * (10 ** (np.linspace(*(2595 * np.log10(1 + f / 700) for f in (50, 4000)), 42) / 2595) - 1)
    for hertz in (300, 1000, 3000):
        for rate in (8000, 16000, 48000):
            shape = audio.log_mel(official.tone(hertz, rate), rate)
            assert shape.shape == (1, 49, 40) and shape.dtype == np.uint8
            band = int(np.median(shape[0].argmax(axis=1)))
            assert edges[band] - 32 <= hertz <= edges[band + 2] + 32  # a bin of the spectrum is 31 Hz wide
    assert not audio.log_mel(np.zeros(8000), 8000).any()  # silence is the lowest value


def test_mel_filters_against_a_plain_loop():
    def mel(hertz):
        return 2595 * np.log10(1 + hertz / 700)

    edges = [700 * (10 ** ((mel(50) + k * (mel(4000) - mel(50)) / 41) / 2595) - 1) for k in range(42)]
    wanted = np.zeros((129, 40))
    for band in range(40):
        left, middle, right = edges[band : band + 3]
        for i in range(129):
            hertz = i * 8000 / 256
            if left < hertz <= middle:
                wanted[i, band] = (hertz - left) / (middle - left)
            elif middle < hertz < right:
                wanted[i, band] = (right - hertz) / (right - middle)
    assert np.allclose(audio.mel_filters(), wanted)


def test_short_and_long_sounds_fill_one_second():
    short = audio.log_mel(official.tone(1000, 8000, 0.2), 8000)[0]
    assert short[:15].max() == 0 and short[35:].max() == 0 and short[24].max() > 150  # in the middle
    long = audio.log_mel(np.concatenate([official.tone(500, 8000), np.ones(4000)]), 8000)
    assert np.array_equal(long, audio.log_mel(official.tone(500, 8000), 8000))


def test_speech_commands(tmp_path):
    def word(hertz):
        return official.wav_bytes(official.tone(hertz, 16000), 16000)

    contents = {
        "./zero/b1_nohash_0.wav": word(400),
        "./bed/ff_nohash_1.wav": word(800),
        "./bed/b1_nohash_0.wav": word(1200),
        "./_background_noise_/pink_noise.wav": b"not looked at",
        "./testing_list.txt": b"bed/ff_nohash_1.wav\n",
    }
    entry = CATALOGUE["speech_commands"]
    found = acquire.read(entry, official.tar_gz(tmp_path / "s.tar.gz", contents))
    assert found.x.shape == (3, 1, 49, 40) and found.y.tolist() == [0, 0, 1]
    assert [found.owner_names[i] for i in found.owner] == ["b1", "ff", "b1"]
    assert np.array_equal(found.x[1], audio.log_mel(*audio.wav_sound(word(800), "a")))
    contents["./zero/b1_nohash_0.wav"] = contents["./zero/b1_nohash_0.wav"][:30]
    with pytest.raises(UserError, match=r"b1_nohash_0.wav' in s.tar.gz is truncated or damaged"):
        acquire.read(entry, official.tar_gz(tmp_path / "s.tar.gz", contents))
    contents["./zero/b1_nohash_0.wav"] = official.wav_bytes(np.zeros(100), 16000, width=1)
    with pytest.raises(UserError, match=r"it has 8 bits per sample, 16000 samples per second"):
        acquire.read(entry, official.tar_gz(tmp_path / "s.tar.gz", contents))


def test_audiomnist_recordings(tmp_path):
    people = {"01": {"recordingroom": "Kino"}, "12": {"recordingroom": "vr-room"}, "02": {"recordingroom": "Kino"}}
    sound = official.wav_bytes(official.tone(440, 48000, 0.5), 48000)
    root = "AudioMNIST-master/data"
    contents = {f"{root}/{n}.wav": sound for n in ("12/7_12_0", "02/1_02_10", "02/1_02_9", "02/0_02_3", "01/5_01_0")}
    entry = CATALOGUE["audiomnist"]
    with pytest.raises(UserError, match=r"does not give the room of speaker 1"):
        acquire.read(entry, official.zipped(tmp_path / "a.zip", contents))
    contents[f"{root}/audioMNIST_meta.txt"] = json.dumps(people).encode()
    found = acquire.read(entry, official.zipped(tmp_path / "a.zip", contents))
    assert found.y.tolist() == [5, 0, 1, 1, 7]
    assert [found.owner_names[i] for i in found.owner] == ["1", "2", "2", "2", "12"]
    assert [found.domain_names[i] for i in found.domain] == ["Kino"] * 4 + ["VR-room"]


def members(paths):
    return Files(paths, Allowance(10**6)).members()


# --- archives -------------------------------------------------------------------------------------------------------


def test_names_in_archives_never_become_paths(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    evil = {"../../evil.bin": b"1", "/absolute.bin": b"2", "a/../../up.bin": b"3"}
    official.tar_gz(inside / "t.tar.gz", evil)
    official.zipped(inside / "z.zip", evil)
    before = sorted(tmp_path.rglob("*"))
    found = [member.read(9) for member in members([inside / "t.tar.gz", inside / "z.zip"])]
    assert found == [b"1", b"2", b"3"] * 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    import tarfile

    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    assert list(members([tmp_path / "t.tar"])) == []


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match=r"Is a directory"):
        list(members([tmp_path]))


@pytest.mark.parametrize(
    "name", ["mnist", "emnist_balanced", "cifar10", "svhn", "usps", "mnist_m", "femnist", "sent140"]
)
def test_damage_anywhere_is_told_in_one_sentence_or_does_no_harm(tmp_path, name):
    x, y = images(6, 3, 32, 32), labels(6)
    grey = np.ascontiguousarray(x[:, 0, :28, :28])
    picture = official.picture_bytes(x[0])
    paths = {
        "mnist": lambda: official.mnist_files(tmp_path, grey[:4], y[:4], grey[4:], y[4:]),
        "emnist_balanced": lambda: official.emnist_zip(
            tmp_path / "e.zip", "balanced", grey[:4], y[:4], grey[4:], y[4:]
        ),
        "cifar10": lambda: official.cifar10_tar(tmp_path / "c.tar.gz", x[:5], y[:5], x[5:], y[5:]),
        "svhn": lambda: official.svhn_files(tmp_path, x[:4], y[:4], x[4:], y[4:]),
        "usps": lambda: official.usps_files(tmp_path, np.zeros((2, 256)), y[:2], np.zeros((2, 256)), y[:2]),
        "mnist_m": lambda: official.tar_gz(
            tmp_path / "m.tar.gz",
            {f"mnist_m_{part}/0.png": picture for part in ("train", "test")}
            | {f"mnist_m_{part}_labels.txt": b"0.png 1\n" for part in ("train", "test")},
        ),
        "femnist": lambda: [official.leaf_json(tmp_path / "a.json", {"a": (grey.reshape(6, 784) / 255, y)})],
        "sent140": lambda: official.sent140_zip(tmp_path / "t.zip", [(4, "amy", "good")] * 30),
    }[name]()
    acquire.read(CATALOGUE[name], paths)
    whole = paths[0].read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for trial in range(60):
        content = bytearray(whole[: rng.integers(1, len(whole))] if trial % 3 == 0 else whole)
        for place in rng.integers(0, len(content), 3):
            content[place] = rng.integers(0, 256)
        paths[0].write_bytes(content)
        try:
            acquire.read(CATALOGUE[name], paths)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused >= 20  # all that were cut short
