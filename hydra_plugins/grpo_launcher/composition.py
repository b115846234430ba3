"""Composes the runs of a sweep as Hydra does, the files of a set of choices once and not once per run.

Hydra reads, parses and merges every file anew for each run: a tenth of a second. Runs that choose the same files differ
in values alone, which Hydra sets last of all; here they are set one run after the other in the one composed
configuration. Whatever is more than a plain value for a key that is there (a choice of a group, a dict or a list, an
added or deleted key, two words about one key, Hydra's own) is composed by Hydra as one more set of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

PLAIN = (str, int, float, bool, type(None))


class Composer:
    """Composes one run after the other from the words that a sweep gives each.

    loader: Hydra's. master: the configuration of the sweep's command.
    """

    def __init__(self, loader: Any, master: DictConfig) -> None:
        self._loader, self._master = loader, master
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._composed: dict[tuple[tuple[str, ...], tuple[str, ...]], DictConfig] = {}

    def compose(self, words: Sequence[str]) -> DictConfig:
        """The configuration that Hydra's `load_sweep_config` gives for the words of one run, but for what its `hydra`
        node says of the words. It belongs to the composer: the next call may change it."""
        values = self._values(words)
        keys = tuple(sorted(one.key_or_group for one in values.values()))
        others = tuple(word for word in words if word not in values)
        if (others, keys) not in self._composed:
            self._composed[others, keys] = self._loader.load_sweep_config(self._master, list(others))
        config = self._composed[others, keys]
        try:
            for one in values.values():  # all runs of this set give the same keys: nothing stays of another run's
                OmegaConf.update(config, one.key_or_group, one.value(), merge=True)
        except OmegaConfBaseException:  # an unknown key or another type: Hydra says it in its own words
            return self._loader.load_sweep_config(self._master, list(words))
        return config

    def _values(self, words: Sequence[str]) -> dict[str, Override]:
        """The words that give a key its plain value and that no other word of the run touches."""
        parsed = [self._parse(word) for word in words]
        of_keys = [one for one in parsed if not self._is_choice(one)]
        return {
            word: one
            for word, one in zip(words, parsed, strict=True)
            if _is_plain(one)
            and not self._is_group(one.key_or_group)
            and not any(_touch(one, other) for other in of_keys if other is not one)
        }

    def _is_choice(self, one: Override) -> bool:
        """Whether the word chooses a file, which Hydra does before it sets any value."""
        return not isinstance(one.value(), dict) and self._is_group(one.key_or_group)

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            hydra = self._master.hydra
            options = self._loader.get_group_options(
                key, config_name=hydra.job.config_name, overrides=list(hydra.overrides.hydra)
            )
            self._groups[key] = "/" in key or bool(options)
        return self._groups[key]

    def _parse(self, word: str) -> Override:
        if word not in self._parsed:
            (self._parsed[word],) = self._parser.parse_overrides([word])
        return self._parsed[word]


def _is_plain(one: Override) -> bool:
    of_hydra = one.key_or_group.split(".")[0] == "hydra"
    return one.type == OverrideType.CHANGE and one.package is None and not of_hydra and isinstance(one.value(), PLAIN)


def _touch(one: Override, other: Override) -> bool:
    """Whether two words are about one key, or one about a part of the other's."""
    a, b = one.key_or_group + ".", other.key_or_group + "."
    return a.startswith(b) or b.startswith(a)
