"""Triton's interpreter, made to work."""

import pytest
from kernel_runs import INTERPRETED


@pytest.fixture
def interpreter(monkeypatch):
    """Lets Triton's interpreter take a loop's bounds from a tensor, which NumPy 2.4 refuses."""
    if INTERPRETED:
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor, scope):
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
