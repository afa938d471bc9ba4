"""Public examples: which they are, and that none of them is a private one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfact.factorize.errors import ProjectorError


def examples(what: str, given: Any) -> tuple[Tensor, ...]:
    """Copies of tensors with a row for each example, as many in each: ``(features, targets)``, or features alone."""
    tensors = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not tensors or not all(_is_plain(tensor) and tensor.ndim > 0 for tensor in tensors):
        raise ProjectorError(f"the {what} must be a tensor, or several as (features, targets), a row for each example")
    counts = sorted({len(tensor) for tensor in tensors})
    if len(counts) != 1 or counts[0] == 0:
        raise ProjectorError(
            f"the {what} have {' and '.join(map(str, counts))} rows; as many are needed in each tensor"
        )
    return tuple(tensor.detach().clone() for tensor in tensors)  # what becomes of the caller's must not matter


def digest(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of examples: their kinds, shapes and values."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        made.update(_bytes(tensor))
    return made.hexdigest()


def check_disjoint(what: str, some: Tensor, others_are: str, others: Any) -> None:
    """That no row of `some` is one of `others`, by the digests of their bytes; none of these is kept.

    Parameters
    ----------
    others : Tensor, shape (N, ...), or sequence of tensors of one example each

    Raises
    ------
    ProjectorError
        One is; or rows have another shape or precision, so that they cannot be compared.
    """
    if not isinstance(others, Iterable):
        raise ProjectorError(f"{others_are}s must be a tensor or a sequence of tensors, not {type(others).__name__}")
    known = {key: row for row, key in enumerate(_digests(some))}
    for row, other in enumerate(map(torch.as_tensor, others)):
        if other.shape != some.shape[1:] or other.dtype != some.dtype:
            raise ProjectorError(
                f"{others_are} {row} is {other.dtype} of shape {tuple(other.shape)}, the {what} {some.dtype} of shape "
                f"{tuple(some.shape[1:])}; they can be compared only in the same form, before any augmentation"
            )
        found = known.get(_row_digest(other))
        if found is not None:
            raise ProjectorError(
                f"{what} {found} is also {others_are} {row}: what the projector tells about it would have no noise; "
                "take it out of one of the two"
            )


def _digests(tensor: Tensor) -> Iterator[bytes]:
    return map(_row_digest, tensor)


def _row_digest(row: Tensor) -> bytes:
    return hashlib.sha256(_bytes(row + 0.0 if row.is_floating_point() else row)).digest()  # -0.0 is 0.0


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_conj())


def _bytes(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""
