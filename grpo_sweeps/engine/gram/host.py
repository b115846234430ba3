"""Tensors on a device whose values the host knows too, so that looking at them waits for nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.engine.gram.torch_private import version_of

KNOWN = "_grpo_sweeps_on_host"


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The values on the device, by a copy that is queued and not waited for. `on_host` gives them back."""
    if device.type != "cuda":
        return values.to(device)
    found = values.pin_memory().to(device, non_blocking=True)
    setattr(found, KNOWN, (values, version_of(found)))
    return found


def on_host(x: Tensor) -> np.ndarray | None:
    """The values of a tensor on the CPU, or of one that was `sent` and not changed since; None of any other."""
    if x.device.type == "cpu":
        return x.detach().numpy()
    values, version = getattr(x, KNOWN, (None, None))
    return values.numpy() if values is not None and version == version_of(x) else None


def fetched(x: Tensor) -> np.ndarray:
    """The values of any tensor: those that the host knows, else it waits for the device."""
    known = on_host(x)
    return x.detach().cpu().numpy() if known is None else known
