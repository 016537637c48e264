"""One client alone, with exactly its own rows: nothing is padded and nothing is mapped."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bespoke.core.data import Batch
from bespoke.core.local import Descended, Descent, Length, Local, Step
from bespoke.core.tree import Tree
from bespoke.engine.descent import descend
from bespoke.engine.lanes import Work, host
from bespoke.engine.purity import refuse_tensors
from bespoke.engine.rows import ClientRows
from bespoke.engine.scan import Scan, layout, take_over


class Alone:
    """The desk's strategy for one client. A last, partial minibatch is short instead of padded."""

    def __init__(self, rows: ClientRows, n: int) -> None:
        """Take the rows, of which ``n`` are real."""
        self._rows, self._n = rows, n

    @property
    def n(self) -> Tensor:
        """The number of train rows, 0-d int64."""
        return self._rows.n

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return the labels of all rows and their mask."""
        return self._rows.labels()

    def chunks(self, key: Tensor) -> Iterator[Batch]:
        """Yield all rows in order, without augmentation."""
        return self._rows.chunks(key)

    def scan(self, desk: Local, step: Step, carry: Tree, consts: tuple[Any, ...], length: Length, tag: int) -> Tree:
        """Return the carry after the client's own number of steps."""
        refuse_tensors(step, Local, "step")
        return self._run(desk, Scan.of(desk, step, take_over, consts, length, tag), carry)

    def descend(self, desk: Local, descent: Descent) -> Descended:
        """Run the optimiser; learning rates become numbers once."""
        return descend(desk, descent, self._run, number=Tensor.item)

    def host(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call ``fn`` with a leading axis of one client."""
        return host(_now, fn, tensors)

    def _run(self, desk: Local, scan: Scan, carry: Tree) -> Tree:
        steps, per_step, limit = scan.num_steps(self._n), scan.length.per_step, scan.length.limit
        # Not limit.item(), which the contract's guarded tensors refuse to methods.
        steps = steps if limit is None else min(steps, math.ceil(Tensor.item(limit)))
        batches = self._batches(desk, scan, steps)
        for _ in range(steps):
            group = tuple(next(batches) for _ in range(per_step))
            out = scan.once(scan.step, carry, group if per_step > 1 else group[0], *scan.consts)
            carry = scan.finish(carry, out, scan.consts, None)
        return carry

    def _batches(self, desk: Local, scan: Scan, steps: int) -> Iterator[Batch]:
        n, number = self._n, torch.arange(steps, device=desk.key.device)
        in_pass, size, count = scan.per_pass(n), min(scan.batch, n), steps * scan.length.per_step
        positions, real, keys = layout(desk.key, scan, self._rows.width, n, n, count)
        mask = real.to(desk.task.dtype)
        for t in range(count):
            length = min(size, n - (t % in_pass) * size)
            own = positions[t, :length]
            x, y = self._rows.gather(own, keys[t], train=True)
            yield Batch(x, y, mask[t, :length], own, number[t // scan.length.per_step], keys[t])


def _now(work: Work, lanes: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    return work(lanes, dims, tensors)
