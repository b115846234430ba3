"""Which file a model's weights came from, where that was a GGUF file: its name, SHA-256 and quantisation.

    converted_from.json    in a folder that `python -m grpo_sweeps.convert` made:
                           {"file", "sha256", "quantisation", "dtype"}, and of a run's weights "trained"

A quantised file is dequantised when it is read: the weights are then not those that its model was published with, and
every table that was made with them says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from grpo_sweeps.files import write_text
from grpo_sweeps.types import ConfigError

FILE = "converted_from.json"
SHOWN = 8  # hexadecimal digits of a digest in a sentence


def of_gguf(path: Path, dtype: str) -> dict[str, str]:
    """What a GGUF file is; `quantisation`: the type that most of its weights have. dtype: what it is unpacked to."""
    from gguf import GGUFReader

    weights: Counter[str] = Counter()
    for tensor in GGUFReader(path).tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    quantisation = weights.most_common(1)[0][0] if weights else ""
    return {"file": path.name, "sha256": sha256, "quantisation": quantisation, "dtype": dtype}


def leave(folder: Path, source: str, dtype: str, trained: str = "") -> None:
    """Leave beside converted weights which file they came from, and by what they were trained since; nothing where
    neither is known."""
    found = came_from(source, dtype)
    if trained:
        found = {**found, "trained": "; ".join(filter(None, (found.get("trained", ""), trained)))}
    if found:
        write_text(folder / FILE, json.dumps(found, indent=1) + "\n")


def came_from(path: str, dtype: str) -> dict[str, str]:
    """What is known of the GGUF file behind `model.path`, itself one or a folder that was made of one; else empty.

    Raises:
        ConfigError: where the folder's converted_from.json cannot be read.
    """
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == ".gguf":
        return of_gguf(place, dtype)
    try:
        found = json.loads((place / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path}: {FILE} cannot be read ({error}); convert the file again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.path={path}: {FILE} holds no JSON object; convert the file again")
    return {str(key): str(value) for key, value in found.items()}


def in_words(weights: Mapping[str, str]) -> str:
    """Where weights came from, as a phrase.

    >>> in_words({"file": "m.gguf", "sha256": "0123456789abcdef", "quantisation": "Q4_0", "dtype": "bfloat16"})
    'm.gguf (sha256 01234567...), a 4-bit file (Q4_0) dequantised to bfloat16'
    >>> in_words({"file": "m.gguf", "sha256": "0123456789abcdef", "quantisation": "BF16", "dtype": "float32"})
    'm.gguf (sha256 01234567...), a BF16 file read as float32'
    >>> in_words({"trained": "100 updates of run 0a1b2c3d4e5f"})
    'trained by 100 updates of run 0a1b2c3d4e5f'
    """
    trained = f"trained by {weights['trained']}" if weights.get("trained") else ""
    if not weights.get("file"):
        return trained
    kind, dtype = weights.get("quantisation", "") or "GGUF", weights.get("dtype", "")
    bits = re.match(r"[IT]?Q(\d)", kind)
    how = f"a {bits[1]}-bit file ({kind}) dequantised to" if bits else f"a {kind} file read as"
    found = f"{weights['file']} (sha256 {weights.get('sha256', '')[:SHOWN]}...), {how} {dtype}"
    return f"{found} and {trained}" if trained else found
