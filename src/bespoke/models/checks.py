"""Checks of models, each with a one-sentence error."""

from collections.abc import Sequence

from bespoke.errors import UserError


def check_norm(norm: str, model: str, allowed: Sequence[str]) -> None:
    """Refuse a kind of normalisation that this model, or any model here, lacks."""
    if norm == "batch":
        raise UserError(
            '[model] norm = "batch" is not available, since its running statistics mix rows and clients: '
            'use norm = "group"'
        )
    if norm not in allowed:
        choices = ", ".join(repr(n) for n in allowed)
        raise UserError(f"[model] norm of {model} must be one of {choices}, not {norm!r}")


def image_shape(shape: Sequence[int], model: str, smallest: int) -> tuple[int, int, int]:
    """Return (channels, height, width) of the examples; refuse all but images of at least ``smallest``."""
    if len(shape) == 3 and min(shape[1:]) >= smallest:
        return shape[0], shape[1], shape[2]
    if len(shape) == 3 and shape[2] in (1, 3) and min(shape[:2]) >= smallest:
        advice = "put the channels first"
    elif len(shape) == 2 and min(shape) >= smallest:
        advice = "add an axis for the channel"
    else:
        advice = "use mlp or linear"
    raise UserError(
        f"the model {model} needs images (channels, height, width) of at least {smallest}x{smallest}, "
        f"but the examples have shape {tuple(shape)}: {advice}"
    )


def check_maps(norm: str, model: str, shape: Sequence[int], halvings: int) -> None:
    """Refuse instance norm where ``halvings`` of the image leave maps of one pixel, which it would make zero."""
    height, width = (-(-side // 2**halvings) for side in shape[1:])
    if norm == "instance" and height * width == 1:
        raise UserError(
            f"images of {shape[1]}x{shape[2]} leave {model} maps of one pixel, which instance norm makes zero: "
            f'use norm = "group" or images larger than {2**halvings}x{2**halvings}'
        )


def check_final_norm(norm: str, final_norm: str) -> None:
    """Refuse instance norm on the maps that are averaged next: the mean of such a map is its shift."""
    if norm == "instance" and final_norm == "map":
        raise UserError(
            '[model] final_norm = "map" with norm = "instance" gives all images the same features, the shifts: '
            'use final_norm = "vector", or norm = "group"'
        )
