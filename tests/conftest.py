"""Settings and guards of the whole suite: no network, no GPU by surprise, few threads, no state left between tests."""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
collect_ignore = ["integration/interpreted_kernels.py"]  # a program: it sets Triton up before it is imported

# Set before anything imports torch, transformers, MLflow or matplotlib; the processes that tests start inherit it.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    DO_NOT_TRACK="1",
    MPLBACKEND="Agg",
    # A child process that tries to reach the network by HTTP meets a closed port of this machine instead.
    HTTP_PROXY="http://127.0.0.1:9",
    HTTPS_PROXY="http://127.0.0.1:9",
    http_proxy="http://127.0.0.1:9",
    https_proxy="http://127.0.0.1:9",
    NO_PROXY="localhost,127.0.0.1,::1",
    no_proxy="localhost,127.0.0.1,::1",
)
# A tracking server or a SLURM allocation of the person who runs the tests is none of the tests' business; where SLURM
# is (SLURM_CONF) is needed by tests/slurm, which uses no other node than the tests' own.
for _name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "MLFLOW_TRACKING_"))]:
    if _name != "SLURM_CONF":
        del os.environ[_name]

import pytest  # noqa: E402


def pytest_sessionstart() -> None:
    """Stop where conf/local has files: the tests' commands would be composed with this machine's values."""
    found = sorted((ROOT / "conf" / "local").glob("*.yaml"))
    if found:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in found)
        pytest.exit(f"{names}: tests run without a machine's own values; move conf/local away for them", returncode=4)


class NetworkBlocked(RuntimeError):
    """A test tried to reach another machine."""


def is_local(address: Any) -> bool:
    """True for Unix sockets and loopback addresses; a host name other than localhost would need a look-up, so False."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in {"localhost", ""}:
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def _guard(name: str) -> Any:
    original = getattr(socket.socket, name)

    def guarded(self: socket.socket, *args: Any) -> Any:
        # sendto(data, [flags,] address) has the address last, connect(address) has nothing else.
        if self.family in (socket.AF_INET, socket.AF_INET6) and not is_local(args[-1]):
            raise NetworkBlocked(f"a test tried to reach {args[-1]!r}: tests run without a network")
        return original(self, *args)

    return guarded


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuse every connection of this process that leaves the machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, _guard(name))
        yield


@pytest.fixture(autouse=True)
def clean_hydra() -> Iterator[None]:
    """Hydra keeps a process-wide singleton: clear it where a test has used it."""
    yield
    module = sys.modules.get("hydra.core.global_hydra")
    if module is not None:
        module.GlobalHydra.instance().clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu, with the reason, where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False here")
    for item in marked:
        item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Modules stay to the end: the garbage collector need not look at their million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Extension modules count what Python did not free as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh SQLite file: its migrations take seconds, once is enough."""
    from grpo_sweeps.tracking.mlflow_store import Store

    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    Store(f"sqlite:///{path}", "unused")
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads of several workers would wait for each other, and sums would depend on their number."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def random_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the embedded model's tokenizer, saved as any other model is."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_sweeps.pretrain_tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("random_model")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,  # uneven distributions: sampling errors show
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
