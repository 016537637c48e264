"""Where Triton's kernels can be run, and numbers for them."""

import os

import pytest
import torch

from bespoke.core import rng

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def triton_missing():
    try:
        import triton
    except ImportError:
        return True
    return not triton.__version__ or not (INTERPRETED or torch.cuda.is_available())


needs_triton = pytest.mark.skipif(triton_missing(), reason="needs Triton, and CUDA or TRITON_INTERPRET=1")


def drawn(*shape, seed=0):
    return rng.normal(rng.key(seed), shape, torch.float32)
