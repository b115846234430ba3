"""A sweep's runs composed one after the other are those that Hydra composes one by one, word for word."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from grpo_sweeps.config import LaunchConfig, RunConfig
from grpo_sweeps.paths import conf_dir, sweep_files
from grpo_sweeps.types import ConfigError
from hydra_plugins.grpo_launcher.composition import Composer
from hydra_plugins.grpo_launcher.registration import register, version_base

VALUES = {
    "R": ("2", "4", "8"), "seed": ("0", "1", "17"), "trainer.lr": ("1e-5", "0.1", "1"), "sweep": ("a", "null", "'a b'"),
    "trainer.micro_batch": ("null", "8"), "trainer.betas": ("[0.9,0.99]", "[0.8,0.9]"), "task.n_train": ("5", "6"),
    "task.steps": ("[1]", "[1,2]"), "task.prompt": ("'{question} ='", "'a: ${R}'", '"x, \\"y\\""'),
    "model.name": ("'007'", "seven", "${sweep}"), "rollout.temperature": ("1", "0.5"), "trainer.steps": ("3", "${R}"),
    "model.lora": ("{r: 4}", "{alpha: 3}"), "model.lora.r": ("0", "2"), "dry_run": ("true", "false"),
    "reward": ("exact_match", "flexible"), "estimator": ("grpo", "rloo", "dr_grpo"), "objective": ("reinforce", "ppo"),
    "trainer": ("default",), "+task.extra": ("1", "'2'"), "++task.seed": ("3",), "+estimator.eps": ("1e-3", "0"),
    "hydra.job.name": ("x",), "analysis": ("every_step", "off"), "analysis.every": ("2", "3"), "~task.stop": ("",),
}  # fmt: skip
BAD = ("trainer.lrr=1", "R=x", "trainer.lr=fast", "model=none_such", "+R=3", "~nothing", "trainer.betas=1", "R=[1]")


@pytest.fixture(scope="module")
def hydra_loader() -> Iterator[Any]:
    from hydra import initialize_config_dir

    register()
    with initialize_config_dir(str(conf_dir()), **version_base()):
        yield GlobalHydra.instance().config_loader()


def master(loader: Any, *words: str) -> Any:
    from hydra.types import RunMode

    return loader.load_configuration("config", list(words), run_mode=RunMode.MULTIRUN)


def words_of(rng: random.Random, keys: list[str]) -> list[str]:
    return [f"{key}={rng.choice(VALUES[key])}" if VALUES[key] != ("",) else key for key in keys]


def said(work: Any) -> Any:
    """What it returns, or the words and kind of what it raises."""
    try:
        return work()
    except (ConfigError, HydraException, OmegaConfBaseException, ValueError) as error:
        return type(error).__name__, str(error)


def both(loader: Any, composer: Composer, whole: Any, words: list[str]) -> tuple[Any, Any]:
    def made(compose: Any) -> Any:
        config = compose()
        return RunConfig.from_composed(config), LaunchConfig.from_composed(config)

    return said(lambda: made(lambda: composer.compose(words))), said(
        lambda: made(lambda: loader.load_sweep_config(whole, words))
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_run_is_as_hydra_composes_it(hydra_loader: Any, seed: int) -> None:
    rng = random.Random(seed)
    whole = master(hydra_loader, "trainer.steps=3,4")
    composer = Composer(hydra_loader, whole)
    for _ in range(4):
        keys = rng.sample(sorted(VALUES), rng.randint(1, 6))
        for _ in range(4):  # one set of keys again and again: what a sweep is
            words = words_of(rng, keys)
            if rng.random() < 0.2:
                words.insert(rng.randrange(len(words) + 1), rng.choice(BAD))
            ours, hydras = both(hydra_loader, composer, whole, words)
            assert ours == hydras, words


@pytest.mark.parametrize("name", sweep_files())
def test_a_sweep_file_is_as_hydra_composes_it(hydra_loader: Any, name: str) -> None:
    whole = master(hydra_loader, f"+sweeps={name}")
    params = whole.hydra.sweeper.params or {}
    words = [
        f"+sweeps={name}",
        *(f"{key}={str(value).split(',')[0].strip()}" for key, value in params.items()),
        "seed=3",
    ]
    if "seed" in params:
        words.pop()
    ours, hydras = both(hydra_loader, Composer(hydra_loader, whole), whole, words)
    assert ours == hydras


def test_what_one_run_sets_does_not_stay_for_the_next(hydra_loader: Any) -> None:
    whole = master(hydra_loader)
    composer = Composer(hydra_loader, whole)
    for words in (["R=8", "seed=3"], ["R=2"], ["seed=1", "R=4"], ["model.lora={r: 4}"], ["model.lora={alpha: 2}"], []):
        ours, hydras = both(hydra_loader, composer, whole, words)
        assert ours == hydras, words


@pytest.mark.parametrize(
    "words",
    [["model.lora.r=2", "model.lora={r: 4}"], ["seed=1", "seed=2"], ["trainer={lr: 1}", "trainer.lr=2"]],
    ids=str,
)
def test_the_last_of_two_words_about_one_key_counts(hydra_loader: Any, words: list[str]) -> None:
    whole = master(hydra_loader)
    ours, hydras = both(hydra_loader, Composer(hydra_loader, whole), whole, words)
    assert ours == hydras and isinstance(ours[0], RunConfig)


def test_files_are_read_once_for_runs_that_differ_in_values(hydra_loader: Any) -> None:
    whole, calls = master(hydra_loader), []

    class Counting:
        def load_sweep_config(self, *arguments: Any) -> Any:
            calls.append(arguments)
            return hydra_loader.load_sweep_config(*arguments)

        def get_group_options(self, *arguments: Any, **named: Any) -> Any:
            return hydra_loader.get_group_options(*arguments, **named)

    composer = Composer(Counting(), whole)
    found = {
        (R, seed): composer.compose([f"R={R}", "model=tiny", f"seed={seed}"]).R for R in (2, 4) for seed in range(9)
    }
    assert all(value == R for (R, _), value in found.items()) and len(calls) == 1


def test_a_group_of_the_users_own_is_a_choice(tmp_path: Path, hydra_loader: Any) -> None:
    """A folder whose name is that of a key: Hydra takes the word as a choice of a file."""
    (tmp_path / "seed").mkdir()
    (tmp_path / "seed" / "lucky.yaml").write_text("# @package _global_\nseed: 7\n")
    words = [f"hydra.searchpath=[file://{tmp_path}]"]
    whole = master(hydra_loader, *words)
    ours, hydras = both(hydra_loader, Composer(hydra_loader, whole), whole, ["+seed=lucky"])
    assert ours == hydras and ours[0].seed == 7
