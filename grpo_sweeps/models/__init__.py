"""The embedded model: `tiny`, small enough to ship with the package and to train on two CPU cores.

`models/tiny/README.md` says how it was made. Imports neither torch nor transformers.
"""

from pathlib import Path

__all__ = ["tiny_path"]


def tiny_path() -> Path:
    """The folder of the embedded model, for transformers' `from_pretrained`.

    Raises FileNotFoundError when the package was installed without its data files.
    """
    folder = Path(__file__).resolve().parent / "tiny"
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the embedded model is missing from {folder}: reinstall the package, "
            "or make it again with `python -m grpo_sweeps.pretrain_tiny out=FOLDER`"
        )
    return folder
