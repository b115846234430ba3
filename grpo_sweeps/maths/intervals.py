"""Intervals of means over groups or problems that are not independent: they share prompts, and runs share a seed.

The value of a group is correlated with that of another group of the same prompt (in any run) and with everything in the
same run. `mean_interval` uses the two-way cluster-robust variance (Cameron, Gelbach & Miller 2011): with residuals e
and V_c = G_c/(G_c - 1) sum over clusters g of (sum of e in g)^2 / n^2,

    V = max(V_prompt + V_seed - V_prompt-and-seed, V_prompt, V_seed),

and Student's t with Satterthwaite's degrees of freedom, V^2 / (V_prompt^2/(G_prompt - 1) + V_seed^2/(G_seed - 1)), at
least min(G_prompt, G_seed) - 1. With three seeds the t quantile is therefore wide, as it must be. In simulations with
60 groups per run and a seed effect between none and dominant, coverage was 91-96% with two seeds, 94-98% with three.
One seed tells nothing about the seed's share: the interval then covers only the draw of prompts, and the report says
so. Two clusters and no more, such as the means of two runs, give no interval: Student's t of one degree of freedom
reaches 12.7 times half their distance to either side, which says nothing. An interval over prompts and two seeds may be
as wide where the seeds differ; `Interval.within` leaves of any interval what its quantity can take, which holds the
truth as often. It is closed-form, so there is no random seed in it; the tests compare it with a brute-force cluster
bootstrap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse, special
from scipy.sparse import csgraph

from grpo_sweeps.types import Array

MIN_CLUSTERS = 3
"""Clusters, of one kind at least, below which a mean has no interval."""

SHARE, POSITIVE, ANY = (0.0, 1.0), (0.0, float("inf")), (float("-inf"), float("inf"))
"""Ranges of quantities: of a share, of a size, of what can be any number."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its two-sided interval: `n` values in `clusters` clusters of each kind; NaN ends if undefined."""

    mean: float
    low: float
    high: float
    n: int
    clusters: tuple[int, ...] = ()

    @property
    def known(self) -> bool:
        """False when there were too few clusters for an interval."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    def inside(self, low: float, high: float) -> bool:
        """True when the whole interval lies in [low, high]."""
        return self.known and low <= self.low and self.high <= high

    def within(self, range_of: tuple[float, float]) -> Interval:
        """The interval without what the quantity cannot take: its two ends cut to `range_of`, never beyond the mean.

        >>> Interval(2.0, -39.0, 44.0, 12).within((1.0, 4.0))
        Interval(mean=2.0, low=1.0, high=4.0, n=12, clusters=())
        """
        if not self.known:
            return self
        least, most = range_of
        low, high = min(max(self.low, least), self.mean), max(min(self.high, most), self.mean)
        return Interval(self.mean, low, high, self.n, self.clusters)

    def outside(self, low: float, high: float) -> bool:
        """True when no part of the interval lies in [low, high]."""
        return self.known and (self.high < low or self.low > high)


def _cluster_variance(residuals: Array, labels: NDArray[np.intp]) -> tuple[float, int]:
    """V_c of the module docstring, NaN with fewer than two clusters, and the number of clusters."""
    sums = np.bincount(labels, weights=residuals)
    count = len(sums)
    if count < 2:
        return float("nan"), count
    return float(count / (count - 1) * (sums**2).sum() / len(residuals) ** 2), count


def _codes(labels: ArrayLike) -> NDArray[np.intp]:
    """The labels numbered from 0 in their order."""
    values = np.asarray(labels)
    if values.dtype.kind in "iu" and values.size and values.min() >= 0 and values.max() < 2 * values.size:
        return _renumbered(values.astype(np.intp).reshape(-1))
    return np.unique(values, return_inverse=True)[1].astype(np.intp).reshape(-1)


class Clusters:
    """Up to two cluster labellings of the same n values, numbered once for all means that are taken over them.

    Raises ValueError for more than two labellings or for labels of different lengths.

    >>> Clusters(["p", "q", "p"], [0, 0, 1]).counts
    (2, 2)
    """

    def __init__(self, *labels: ArrayLike) -> None:
        self._keep([_codes(np.asarray(column)) for column in labels])

    def _keep(self, codes: list[NDArray[np.intp]]) -> None:
        if len(codes) > 2 or len({len(c) for c in codes}) > 1:
            raise ValueError("mean_interval takes at most two cluster labellings, each as long as the values")
        self.codes = codes
        self.counts = tuple(int(c.max(initial=-1)) + 1 for c in codes)
        several = [c for c, count in zip(codes, self.counts, strict=True) if count > 1]
        # clusters of both kinds at once, needed where both kinds have several
        self._both = _codes(several[0] * (int(several[1].max()) + 1) + several[1]) if len(several) == 2 else None

    def __len__(self) -> int:
        return len(self.codes[0]) if self.codes else 0

    def of(self, keep: NDArray[np.bool_]) -> Clusters:
        """The clusters of some of the values."""
        if keep.all():
            return self
        part = Clusters()
        part._keep([_renumbered(c[keep]) for c in self.codes])
        return part

    def variance(self, residuals: Array) -> tuple[float, float, tuple[int, ...]]:
        """Variance of the mean, its degrees of freedom, cluster counts. Kinds with one cluster are left out."""
        parts = [_cluster_variance(residuals, c) for c in self.codes]
        counts = self.counts
        usable = [i for i, count in enumerate(counts) if count > 1]
        if not usable:
            return float("nan"), float("nan"), counts
        if len(usable) == 1:
            variance, count = parts[usable[0]]
            return variance, count - 1.0, counts
        assert self._both is not None
        first, second = usable
        V_first, V_second, V_both = parts[first][0], parts[second][0], _cluster_variance(residuals, self._both)[0]
        variance = max(V_first + V_second - V_both, V_first, V_second)
        spread = sum(parts[i][0] ** 2 / (counts[i] - 1) for i in usable)
        freedom = variance**2 / spread if spread > 0 else float("inf")
        return variance, max(freedom, min(counts[first], counts[second]) - 1.0), counts


def _renumbered(codes: NDArray[np.intp]) -> NDArray[np.intp]:
    """Codes without gaps, in the same order: what `_codes` gives, without sorting."""
    present = np.bincount(codes) > 0
    return (np.cumsum(present) - 1)[codes]


def mean_interval(values: ArrayLike, *clusters: ArrayLike, alpha: float = 0.05) -> Interval:
    """Mean of `values` (n,) and its two-sided 1 - alpha interval, given up to two cluster labellings (n,).

    Without labels every value is its own cluster (the ordinary t interval). NaN values are dropped with their labels.
    NaN ends with fewer than `MIN_CLUSTERS` clusters of each kind.
    Raises ValueError for more than two labellings or labels of another length.

    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    x = np.asarray(values, dtype=np.float64)
    return mean_over(x, Clusters(*(clusters or (np.arange(len(x)),))), alpha)


def mean_over(values: ArrayLike, clusters: Clusters, alpha: float = 0.05) -> Interval:
    """`mean_interval` for clusters that were numbered before."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) != len(clusters):
        raise ValueError("mean_interval takes at most two cluster labellings, each as long as the values")
    keep = np.isfinite(x)
    x, own = x[keep], clusters.of(keep)
    if not len(x):
        return Interval(float("nan"), float("nan"), float("nan"), 0, (0,) * len(clusters.codes))
    mean = float(x.mean())
    variance, freedom, counts = own.variance(x - mean)
    if max(counts) < MIN_CLUSTERS:
        return Interval(mean, float("nan"), float("nan"), len(x), counts)
    half = t_quantile(1.0 - alpha / 2.0, freedom) * np.sqrt(variance)
    return Interval(mean, float(mean - half), float(mean + half), len(x), counts)


def skewed_interval(values: ArrayLike, alpha: float = 0.05) -> Interval:
    """Mean of independent values (n,) with its two-sided 1 - alpha interval, corrected for skewness (Hall, "On the
    removal of skewness by transformation", 1992).

    t = sqrt(n) (mean - truth)/s of skewed values is skewed itself. With c their skewness, the third moment estimated
    without bias over s^3,

        g(t) = t + c t^2 / (3 sqrt n) + c^2 t^3 / (27 n) + c / (6 sqrt n)

    is symmetric to higher order and increasing, so the ends are mean - s/sqrt(n) times g's inverse of the quantiles of
    Student's t. Without skewness this is the ordinary t interval. NaN ends for fewer than `MIN_CLUSTERS` values.

    >>> interval = skewed_interval([1.0, 2.0, 3.0])
    >>> interval.mean, round(interval.low, 3), round(interval.high, 3)
    (2.0, -0.484, 4.484)
    """
    x = np.asarray(values, dtype=np.float64)
    n, mean = len(x), float(x.mean()) if len(x) else float("nan")
    if n < MIN_CLUSTERS:
        return Interval(mean, float("nan"), float("nan"), n, (n,))
    spread, q = float(x.std(ddof=1)), t_quantile(1.0 - alpha / 2.0, n - 1.0)
    third = float(np.mean((x - mean) ** 3)) * n**2 / ((n - 1) * (n - 2))
    c = third / spread**3 if spread > 0 else 0.0

    def inverse(y: float) -> float:
        if abs(c) < 1e-6:  # the formula below would divide rounding by c
            return y
        return float(3 * np.sqrt(n) / c * (np.cbrt(1 + c * (y / np.sqrt(n) - c / (6 * n))) - 1))

    error = spread / float(np.sqrt(n))
    return Interval(mean, mean - error * inverse(q), mean - error * inverse(-q), n, (n,))


def bounded_interval(values: ArrayLike, labels: ArrayLike, low: float, high: float, alpha: float = 0.05) -> Interval:
    """Mean of values that lie in [low, high] with Hoeffding's two-sided 1 - alpha interval (1963, theorem 2).

    No distribution is assumed, so it holds for few and for skewed values, at the price of its width. The values of one
    label may depend on one another in any way; those of different labels are independent. With n_c of the n values
    under label c the half-width is (high - low) sqrt(log(2 / alpha) sum_c (n_c / n)^2 / 2).

    >>> interval = bounded_interval([6.0] * 20, range(20), 1.0, 8.0)
    >>> round(interval.low, 2), interval.high
    (3.87, 8.0)
    """
    x, counts = np.asarray(values, dtype=np.float64), np.bincount(_codes(labels))
    mean = float(x.mean()) if len(x) else float("nan")
    shares = counts / max(1, len(x))
    half = (high - low) * float(np.sqrt(np.log(2.0 / alpha) * (shares @ shares) / 2))
    return Interval(mean, max(low, mean - half), min(high, mean + half), len(x), (len(counts),))


def linked(first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    """Labels of connected values: those that share a label of either kind, directly or through others.

    first, second: (n,) labels from 0 on.

    >>> linked(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 2])).tolist()
    [0, 0, 0, 1]
    """
    size = int(first.max(initial=-1)) + 1
    edges = first, second + size
    nodes = size + int(second.max(initial=-1)) + 1
    graph = sparse.coo_matrix((np.ones(len(first)), edges), shape=(nodes, nodes))
    return np.asarray(csgraph.connected_components(graph, directed=False)[1][first], dtype=np.intp)


def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t; the normal one for infinite degrees of freedom, NaN for NaN."""
    if np.isinf(freedom):
        return float(special.ndtri(probability))
    return float(special.stdtrit(freedom, probability))


def paired_difference(before: ArrayLike, after: ArrayLike, *clusters: ArrayLike, alpha: float = 0.05) -> Interval:
    """Mean of after - before over the same problems, with its interval; clusters as in `mean_interval`.

    >>> paired_difference([0.0, 0.5, 0.0], [0.5, 1.0, 0.5]).mean
    0.5
    """
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    return mean_interval(difference, *clusters, alpha=alpha)


def share_interval(hits: ArrayLike, *clusters: ArrayLike, alpha: float = 0.05) -> Interval:
    """Share of true values with Wilson's interval, its sample size the effective one under clustering.

    The design effect is V (cluster-robust) over that of independent values, at least 1; where all values agree,
    no clustering shows and the number of clusters of the first kind counts instead. Unlike that of `mean_interval`, the
    interval has width at 0 and 1.

    >>> share_interval([True] * 10).high
    1.0
    """
    return share_over(hits, Clusters(*(clusters or (np.arange(np.size(hits)),))), alpha)


def share_over(hits: ArrayLike, clusters: Clusters, alpha: float = 0.05) -> Interval:
    """`share_interval` for clusters that were numbered before."""
    x = np.asarray(hits, dtype=np.float64)
    if not len(x):
        return Interval(float("nan"), float("nan"), float("nan"), 0, (0,) * len(clusters.codes))
    share = float(x.mean())
    variance, freedom, counts = clusters.variance(x - share)
    plain = share * (1.0 - share) / len(x)
    size = len(x) / max(1.0, variance / plain) if plain > 0 and np.isfinite(variance) else float(counts[0])
    z = t_quantile(1.0 - alpha / 2.0, freedom if plain > 0 and np.isfinite(freedom) else np.inf)
    centre = (share + z**2 / (2 * size)) / (1 + z**2 / size)
    half = z * np.sqrt(share * (1 - share) / size + z**2 / (4 * size**2)) / (1 + z**2 / size)
    low = 0.0 if share == 0.0 else max(0.0, centre - half)
    high = 1.0 if share == 1.0 else min(1.0, centre + half)
    return Interval(share, float(low), float(high), len(x), counts)
