"""Whether an upload that has the right form can be what an honest client sends: its numbers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bespoke.core import tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.maths import gaussian
from bespoke.network.messages import Layout, MessageError

_ROUNDING = 1e-5  # of a matrix's largest variance, by which float32 may make an eigenvalue of 0 negative


def check_claims(algorithm: Algorithm, layout: Layout) -> None:
    """Refuse a method whose claims are none, or cannot hold for uploads of this layout."""
    method = type(algorithm).__name__
    for name, claim in algorithm.claims:
        if claim not in _CLAIMS:
            raise UserError(f"{method} claims that its {name!r} is {claim!r}: use one of {', '.join(_CLAIMS)}")
        for leaf in (leaf for path, leaf in layout.items() if path.partition("/")[0] == name):
            d = _side(leaf.shape[-1]) if leaf.shape else 0
            if claim == "spd" and leaf.shape[-1:] != (d * (d + 1) // 2,):
                raise UserError(
                    f"{method} claims that its {name!r} holds packed matrices, but its shape is {leaf.shape}"
                )


def check_upload(algorithm: Algorithm, up: Tree, rows: int) -> None:
    """Refuse an upload that holds NaN or inf, or breaks what its method claims of it; ``rows`` are the client's."""
    if not tree.finite(up):
        raise MessageError("its upload holds NaN or inf")
    for name, claim in algorithm.claims:
        for leaf in tree.leaves({name: up.get(name, {})}):  # the name may depend on the method's settings
            sound, words = _CLAIMS[claim]
            if not sound(leaf, rows):
                raise MessageError(f"its {name!r} {words}")


def _positive_semi_definite(packed: Tensor, rows: int) -> bool:
    """Return whether packed triangles (..., d(d+1)/2) are of positive semi-definite matrices, up to rounding."""
    d = _side(packed.shape[-1])
    for one in packed.reshape(-1, packed.shape[-1]):  # one at a time, since all of them may be large
        matrix = gaussian.unpack(one.double(), d)
        slack = _ROUNDING * float(matrix.diagonal().max().clamp(min=0.0)) + 1e-30
        if int(torch.linalg.cholesky_ex(matrix + slack * torch.eye(d, dtype=matrix.dtype, device=matrix.device)).info):
            return False
    return True


def _side(packed: int) -> int:
    """Return d of a triangle of d(d+1)/2 numbers."""
    return (math.isqrt(8 * packed + 1) - 1) // 2


def _between(low: float, high: Callable[[int], float]) -> Callable[[Tensor, int], bool]:
    return lambda leaf, rows: bool(((leaf >= low) & (leaf <= high(rows))).all())


_CLAIMS: dict[str, tuple[Callable[[Tensor, int], bool], str]] = {
    "spd": (_positive_semi_definite, "is not positive semi-definite"),
    "rows": (_between(0, lambda rows: rows), "is not between 0 and the client's number of rows"),
    "share": (_between(0, lambda rows: 1), "is not between 0 and 1"),
    "positive": (_between(0, lambda rows: math.inf), "is negative"),
}
