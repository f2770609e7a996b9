"""Triton's interpreter where it is older than numpy: triton 3.6 beside numpy 2.4 and later."""

from typing import Any

from triton.runtime import interpreter


def accept_new_numpy() -> None:
    """Let loop bounds that a kernel computes, arrays of one element here, count as integers.

    numpy 2.4 converts arrays without dimensions only; later versions of triton squeeze them.
    """
    patch = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    if patch.__name__ != patch_and_squeeze.__name__:
        interpreter._patch_lang_tensor = patch_and_squeeze
