"""Transforms of one's own data: drawn from the key at every access, pure, and not frozen."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import bespoke
from bespoke import rng
from bespoke.data import Crop, Flip, Normalise, federate_data, from_arrays
from bespoke.data.transforms import TRANSFORMS
from bespoke.errors import UserError
from bespoke.runs.experiment import load

IMAGES = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 3, 4, 5)
KEY = rng.key(3)


def test_flip_draws_for_each_image():
    x = IMAGES[:1].expand(64, -1, -1, -1)
    found = Flip(0.25)(KEY, x, True)
    flipped = (found == x.flip(-1)).flatten(1).all(dim=1)
    assert ((found == x).flatten(1).all(dim=1) ^ flipped).all() and 5 <= int(flipped.sum()) <= 30
    assert torch.equal(Flip(1.0)(KEY, x, False), x) and torch.equal(Flip(1.0)(KEY, x, True), x.flip(-1))


def test_crop_moves_images_by_up_to_pad_and_fills_with_zeros():
    x = (IMAGES[:1] + 1).expand(200, -1, -1, -1)
    found, seen = Crop(1)(KEY, x, True), set()
    for image in found:
        moves = [
            (down, right)
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
            if torch.equal(
                torch.nn.functional.pad(x[0], (1, 1, 1, 1))[:, 1 + down : 5 + down, 1 + right : 6 + right], image
            )
        ]
        assert len(moves) == 1
        seen.update(moves)
    assert len(seen) == 9 and torch.equal(Crop(1)(KEY, x, False), x)


def test_normalise_by_channel_and_by_feature():
    found = Normalise((0.1, 0.2, 0.3), (0.5, 1.0, 2.0))(KEY, IMAGES, False)
    assert torch.allclose(found[1, 2], (IMAGES[1, 2] / 255 - 0.3) / 2.0) and found.dtype == torch.float32
    rows = torch.tensor([[10.0, 200.0]], dtype=torch.float64)
    assert Normalise([8, 100], [2, 50])(KEY, rows, True).tolist() == [[1.0, 2.0]]
    for numbers in (np.array([8.0, 100.0], np.float32), torch.tensor([8.0, 100.0]), [np.float32(8), 100]):
        assert Normalise(numbers, numbers) == Normalise((8.0, 100.0), (8.0, 100.0))
    for wrong in ("12", ["1", "2"], [[1.0, 2.0]], torch.ones(2, 2), [math.nan], 3.0, None, [10**400]):
        with pytest.raises(UserError, match=r"Normalise\(mean=.* cannot normalise: give a list of numbers"):
            Normalise(wrong, (1.0, 1.0))
    with pytest.raises(UserError, match="as many deviations as means, all above 0"):
        Normalise((1.0,), (0.0,))
    with pytest.raises(UserError, match="has 2 means for 3 channels or features"):
        Normalise((1.0, 2.0), (1.0, 2.0))(KEY, IMAGES, True)


def clients(images=True):
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (12, 1, 4, 4), np.uint8) if images else draws.normal(size=(12, 3)).astype(np.float32)
    return {name: (x, np.arange(12) % 2) for name in "ab"}


def test_several_steps_have_keys_of_their_own_and_bytes_are_scaled_at_the_end():
    seen = []

    def look(key, x, train):
        seen.append((key.tolist(), train))
        return x

    pool = from_arrays(clients(), transform=[look, Flip(1.0), look])
    seen.clear()
    found = pool.transform(KEY, pool.x, {}, True)
    assert torch.equal(found, pool.x.flip(-1) / 127.5 - 1.0)
    assert seen[0][0] != seen[1][0] and all(train for _, train in seen)
    assert from_arrays(clients()).transform is None


def noise(key, x, train):
    return x + 0.1 * rng.normal(key, x.shape) if train else x


def run(transform, backend="loop"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    options = {"rounds": 2, "backend": backend, "device": "cpu", "transform": transform, "batch": 4}
    return bespoke.federate(clients(images=False), model, "1", **options)


def weights(done):
    return torch.cat([leaf.flatten() for leaf in bespoke.tree.leaves(done.server)])


def test_the_transform_runs_at_every_access_with_another_key():
    seen = []

    def look(key, x, train):
        seen.append((tuple(key.tolist()), train))
        return x

    run(look)
    keys = [key for key, train in seen if train]
    assert len(keys) > 12 and len(set(keys)) >= len(keys) - 3  # those of the trial, and of the model's check, repeat
    assert any(not train for _, train in seen)


def test_backends_agree_and_the_hash_covers_the_transform():
    loop, batched, plain = run(noise), run(noise, "batched"), run(None)
    assert torch.allclose(weights(loop), weights(batched), atol=1e-6)
    assert not torch.allclose(weights(loop), weights(plain), atol=1e-4)
    assert len({done.experiment.hash() for done in (loop, plain, run(Normalise((0.0,), (2.0,))))}) == 3
    assert loop.experiment.hash() == batched.experiment.hash()


def torch_generator(key, x, train):
    return x + torch.rand(x.shape)


GENERATOR = np.random.default_rng(0)


def own_generator(key, x, train):
    return x + float(GENERATOR.random())


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (torch_generator, "draws from torch's generator, so a run could not be repeated: draw from its key"),
        (own_generator, "gives two results for one key"),
        (lambda key, x, train: x[:1], r"turns 8 examples into shape \(1, 3\): return as many rows"),
        (lambda key, x, train: None, "returns None: return the tensor x"),
        (lambda x: x, r"fails on examples of shape \(8, 3\) \(TypeError: .*it takes \(key, x, train\)"),
        (3, r"takes functions fn\(key, x, train\), such as Flip\(\), not 3"),
        (Flip, "takes functions"),
    ],
)
def test_unfit_transforms(transform, sentence):
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=sentence) as caught:
        from_arrays(clients(images=False), transform=transform)
    assert "\n" not in str(caught.value) and torch.equal(before, torch.get_rng_state())


class Augmented(Dataset):
    """Flips the sign of an example, by chance."""

    def __init__(self, draws):
        self.draws = draws

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.ones(3) * (1 if not self.draws or torch.rand(()) < 0.5 else -1), i % 2


def test_a_dataset_that_draws_is_refused():
    assert len(from_arrays([Augmented(draws=False)]).x) == 40
    with pytest.raises(UserError, match=r"client '0' gives another example \d+ each time .* give it as transform"):
        from_arrays([Augmented(draws=True)])


# --- in the settings ------------------------------------------------------------------------------------------------

MINE = """
from dataclasses import dataclass
import bespoke

def noise(key, x, train):
    return x + 0.1 * bespoke.rng.normal(key, x.shape) if train and x.is_floating_point() else x

@dataclass(frozen=True)
class Scaled:
    by: float
    def __call__(self, key, x, train):
        return x * self.by

number = 3
"""
TOML = """
[data]
name = "digits"
clients = 3
subsample = 0.1
transform = {transform}
[model]
name = "mlp"
hidden = 4
[training]
rounds = 1
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Return a function that writes and reads an experiment on digits with a transform, given as TOML."""
    name = f"own_steps_{tmp_path.name}"  # a module of its own, which no other test has imported
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)

    def read(transform):
        (tmp_path / "x.toml").write_text(TOML.format(transform=transform.replace("mine:", f"{name}:")))
        return load(tmp_path / "x.toml")[0]

    return read


def pool_of(made):
    made.import_modules()
    return federate_data(made.data, made.seed)


def test_steps_by_name_run_before_the_data_set_s_own_scaling(experiment):
    made = experiment('["crop(pad=1)", "flip(p=1)"]')
    pool = pool_of(made)
    assert repr(pool.transform) == "[Crop(pad=1), Flip(p=1)]"
    seen = pool.transform(KEY, pool.x, {}, True)
    moved = Crop(1)(rng.fold_in(KEY, 0), pool.x, True).flip(-1)
    assert torch.equal(seen, moved / 8.0 - 1.0)  # digits have grey levels 0..16
    assert torch.equal(pool.transform(KEY, pool.x, {}, False), pool.x / 8.0 - 1.0)
    plain = experiment("[]")
    assert made.hash() != plain.hash() and pool_of(plain).transform.__name__ == "sixteen_levels_to_unit"
    pool = pool_of(experiment('["normalise(mean=[0.5], deviation=[0.25])"]'))
    assert torch.equal(pool.transform(KEY, pool.x, {}, False), (pool.x / 255.0 - 0.5) / 0.25)


def test_steps_of_one_s_own_by_module_path(experiment, capsys):
    made = experiment('["normalise(mean=[0], deviation=[1])", "mine:Scaled(by=2.0)", "mine:noise"]')
    pool = pool_of(made)
    assert "which runs its code" in capsys.readouterr().err
    assert torch.equal(pool.transform(KEY, pool.x, {}, False), pool.x / 255.0 * 2.0)
    assert not torch.equal(pool.transform(KEY, pool.x, {}, True), pool.x / 255.0 * 2.0)


def test_a_run_with_steps_in_its_settings_is_saved_with_them(experiment, tmp_path):
    made = experiment('["crop(pad=1)", "normalise(mean=[0.5], deviation=[0.25])"]')
    done = bespoke.run(made, device="cpu", backend="loop")
    model = done.models["0"]
    model.save(tmp_path / "a.safetensors")
    x = done.pool.x[:5]
    assert torch.equal(bespoke.load_model(tmp_path / "a.safetensors").logits(x), model.logits(x))
    done = bespoke.run(experiment('["flip"]'), device="cpu", backend="loop")
    done.models["0"].save(tmp_path / "b.safetensors")
    again = bespoke.load_model(tmp_path / "b.safetensors")
    assert torch.equal(again.logits(x), done.models["0"].logits(x))
    held = again.card["transform"]["settings"]
    assert (held["steps"], held["last"]) == (["flip"], {"name": "sixteen_levels"}) and held.keys() <= {
        "steps",
        "last",
        "code",
    }


def test_steps_of_one_s_own_are_imported_again_only_where_they_are_trusted(experiment, tmp_path, monkeypatch):
    made = experiment('["normalise(mean=[0], deviation=[1])", "mine:Scaled(by=2.0)", "mine:noise"]')
    done = bespoke.run(made, tmp_path / "run", device="cpu", backend="loop")
    model, x, y = done.models["0"], done.pool.x[:5], done.pool.y[:5]
    model.save(tmp_path / "a.safetensors")
    for name in [name for name in TRANSFORMS if ":" in name]:
        monkeypatch.delitem(TRANSFORMS.data, name)  # as in another process
    for load_again in (bespoke.load_model, bespoke.open_run):
        path = tmp_path / ("a.safetensors" if load_again is bespoke.load_model else "run")
        with pytest.raises(UserError, match=r"its transform is code .*:Scaled', .*trust_code=True \(--trust-code\)"):
            load_again(path)
        assert not any(":" in name for name in TRANSFORMS)
    assert torch.equal(bespoke.load_model(tmp_path / "a.safetensors", trust_code=True).logits(x), model.logits(x))
    late = bespoke.open_run(tmp_path / "run", trust_code=True).personalize(x, y)
    assert torch.equal(late.logits(x), done.personalize(x, y).logits(x))


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        ('["flop"]', r"\[data\] transform: there is no transform 'flop' \(did you mean 'flip'\?\); there are norm"),
        ('["crop(pad=)"]', r"'crop\(pad=\)' cannot be read: write it as in crop\(pad=4\)"),
        ('["crop(pad=4"]', "cannot be read"),
        ('["crop(4)"]', "cannot be read"),
        ('["crop(width=4)"]', r"crop cannot be made with \{'width': 4\}: .*unexpected keyword"),
        ('["crop(pad=1.5)"]', "give whole pixels"),
        ('["flip(p=2)"]', "give a probability from 0 to 1"),
        ('["normalise"]', r"normalise cannot be made with \{\}: .*missing 2 required"),
        ('["normalise(mean=1, deviation=2)"]', r"Normalise\(mean=1\) cannot normalise: give a list of numbers"),
        ('["mine:number"]', r"3 is no function fn\(key, x, train\)"),
        ('["mine:nothing"]', "has no 'nothing'"),
        ("[\"mine:Scaled(by='x')\"]", "the transform fails on examples"),
        ('["flip"]\naugment = "fedpce"', "transform and augment both say how images are seen: leave one"),
        ("3", r"\[data\] transform must be a list"),
    ],
)
def test_unfit_steps_in_the_settings(experiment, transform, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        pool_of(experiment(transform))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("step", [Flip(), Crop(1)])
def test_steps_for_images_refuse_rows_of_a_table(step):
    name = type(step).__name__
    with pytest.raises(
        UserError, match=rf"{name}\(\) takes images \(B, C, H, W\), and the examples have the shape \(3,\)"
    ):
        step(rng.key(0), torch.zeros(2, 3), train=True)
