"""What a process may have of a GPU's memory: the card's, and no more than a limit of its own
(`torch.cuda.set_per_process_memory_fraction`) allows it."""

from __future__ import annotations

import torch


def allowed_bytes(device: torch.device) -> int:
    """Bytes of the card that this process may have at all."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch.cuda.get_per_process_memory_fraction(index) * torch.cuda.get_device_properties(index).total_memory)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still fill: what it can get of the card, and what its allocator holds unused."""
    reserved = torch.cuda.memory_reserved(device)
    obtainable = min(torch.cuda.mem_get_info(device)[0], allowed_bytes(device) - reserved)
    return obtainable + reserved - torch.cuda.memory_allocated(device)
