"""Files of word vectors that lie about their size, and tokens that have no vector."""

import numpy as np
import pytest
import torch

import bespoke
from bespoke.errors import UserError
from bespoke.models import ModelSettings, build_task
from bespoke.models.text import check_tokens


@pytest.mark.parametrize("rows", [10**12, 2**63, 10**30, -1])
def test_a_header_that_lies_about_the_rows(rows, tmp_path):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 300), }}".encode().ljust(117) + b"\n"
    (tmp_path / "words.npy").write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(1200))
    with pytest.raises(UserError, match=r"words.npy' cannot be read as an .npy file: \S[^\n]*$"):
        build_task(ModelSettings("sent140_lstm", vectors=str(tmp_path / "words.npy")), (4,), 2)


def test_an_archive_of_arrays_is_no_file_of_word_vectors(tmp_path):
    np.savez(tmp_path / "words.npz", a=np.zeros((6, 300), np.float32))
    with pytest.raises(UserError, match="must hold numbers of shape"):
        build_task(ModelSettings("sent140_lstm", vectors=str(tmp_path / "words.npz")), (4,), 2)


def test_every_token_needs_a_vector():
    task = build_task(ModelSettings("sent140_lstm", vocabulary=5), (4,), 2)
    check_tokens(task.constants(), torch.tensor([[0, 1, 2, 4]]))
    check_tokens(task.constants(), torch.empty(0, 4, dtype=torch.int64))
    for wrong, said in ((5, r"from 0 to 5, but .* for 0 to 4: .* vocabulary to 6 or more"), (-1, "from -1 to 1")):
        with pytest.raises(UserError, match=said):
            check_tokens(task.constants(), torch.tensor([[0, 1, wrong, 0]]))
    check_tokens(build_task(ModelSettings("linear"), (4,), 2).constants(), torch.tensor([[9, 9, 9, 9]]))


def test_a_run_with_a_token_beyond_the_vocabulary_ends_in_one_sentence(tmp_path):
    for name in "ab":
        np.savez(tmp_path / f"{name}.npz", x=np.full((6, 4), 9), y=np.arange(6) % 2)
    path = tmp_path / "x.toml"
    path.write_text(
        '[data]\nname = "files"\npath = "*.npz"\n[model]\nname = "sent140_lstm"\nvocabulary = 9\n'
        "[training]\nrounds = 1\n"
    )
    with pytest.raises(UserError, match="tokens from 9 to 9, but the model has word vectors for 0 to 8"):
        bespoke.run(path, device="cpu")
