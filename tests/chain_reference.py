"""The stages of docs/spec/engine.md 4.6 to 4.8 as their formulas stand there: dicts, sorts and float64, one row.

A row is {id: logit} of its survivors. `Undecided` is raised where float32 may fall on either side of a bound.
"""

import bisect
import itertools
import math

MARGIN = 2e-6
"""A mass, a distance or a bound nearer than this to its limit, relative to their size, is undecided."""


class Undecided(Exception):
    """The case says nothing: a value lies on a bound."""


def under(value, bound, scale=1.0):
    """value < bound, where that is clear."""
    if abs(value - bound) <= MARGIN * max(1.0, abs(scale), abs(bound)):
        raise Undecided
    return value < bound


def shares(z):
    m = max(z.values())
    weight = {i: math.exp(v - m) for i, v in z.items()}
    whole = math.fsum(weight.values())
    return {i: w / whole for i, w in weight.items()}


def surprises(z):
    """-ln p, finite where p underflows."""
    m = max(z.values())
    log_whole = math.log(math.fsum(math.exp(v - m) for v in z.values()))
    return {i: log_whole - (v - m) for i, v in z.items()}


def entropy(z):
    p, s = shares(z), surprises(z)
    return math.fsum(p[i] * s[i] for i in z if p[i] > 0)


def top_n_sigma(z, n):
    if n <= 0 or len(z) < 2:
        return z
    m, mean = max(z.values()), math.fsum(z.values()) / len(z)
    sigma = math.sqrt(math.fsum((v - mean) ** 2 for v in z.values()) / len(z))
    bound = m - n * sigma
    return {i: v for i, v in z.items() if v == m or not under(v, bound, m)}


def top_k(z, k):
    if k <= 0 or k >= len(z):
        return z
    least = sorted(z.values(), reverse=True)[k - 1]
    return {i: v for i, v in z.items() if v >= least}


def by_value(z, measure):
    """[(value, mass of those with it, number of them)], best first by `measure` of the value."""
    p, mass, count = shares(z), {}, {}
    for i, v in z.items():
        mass[v], count[v] = mass.get(v, 0.0) + p[i], count.get(v, 0) + 1
    return [(v, mass[v], count[v]) for v in sorted(mass, key=measure)]


def top_p(z, q, keep=0):
    if q == 1:
        return z
    kept, above, better = set(), 0.0, 0
    for v, mass, count in by_value(z, lambda v: -v):
        if not kept or better < keep or under(above, q):
            kept.add(v)
        above, better = above + mass, better + count
    return {i: v for i, v in z.items() if v in kept}


def min_p(z, q, keep=0):
    if q == 0:
        return z
    order = sorted(z.values(), reverse=True)
    best = order[min(max(keep, 1), len(order)) - 1]
    bound = order[0] + math.log(q)
    return {i: v for i, v in z.items() if v >= best or not under(v, bound, order[0])}


def typical(z, t, keep=0):
    if t == 1:
        return z
    s, h = surprises(z), entropy(z)
    d = {v: abs(s[i] - h) for i, v in z.items()}  # equal values are equally far
    order = by_value(z, d.__getitem__)
    far = [d[v] for v, _, _ in order]
    mass = [0.0, *itertools.accumulate(m for _, m, _ in order)]
    count = [0, *itertools.accumulate(c for _, _, c in order)]
    kept = set()
    for place, (v, own, number) in enumerate(order):
        blur = 4 * MARGIN * max(1.0, abs(v), h, d[v])
        # Of the nearer ones, without those that float32 may not see as nearer, and with those that it may.
        least, most = bisect.bisect_left(far, d[v] - blur), bisect.bisect_right(far, d[v] + blur)
        fewest = (least, mass[least], count[least])
        others = (most - 1, mass[most] - own, count[most] - number) if most > place else fewest
        stays = [not near or fewer < keep or under(m, t) for near, m, fewer in (fewest, others)]
        if stays[0] != stays[1]:
            raise Undecided
        if stays[0]:
            kept.add(v)
    return {i: v for i, v in z.items() if v in kept}


def xtc(z, threshold, exempt=(), keep=0):
    """With the gate open."""
    p = shares(z)
    qualifying = {i: z[i] for i in z if i not in exempt and not under(p[i], threshold)}
    if len(qualifying) < 2:
        return z
    least = min(qualifying.values())
    left = {i: v for i, v in z.items() if i not in qualifying or v <= least}
    return z if len(left) < keep else left


def scaled(z, temperature):
    if temperature < 1e-5:
        best = max(z.values())
        return {min(i for i, v in z.items() if v == best): 0.0}
    m = max(z.values())
    return {i: (v - m) / temperature for i, v in z.items()}


def dynamic(z, middle, spread, exponent):
    if len(z) == 1:
        return 1.0
    part = min(1.0, entropy(z) / math.log(len(z)))
    if part < 0.01:
        raise Undecided  # float32 knows H to 1e-7 or so
    low, high = max(0.0, middle - spread), middle + spread
    return low + (high - low) * part**exponent


def adapted(z, target, total, weight):
    aim = min(1.0, max(0.0, 2 * target - total / weight))
    x = {i: abs(p - aim) / 0.3 for i, p in shares(z).items()}
    return {i: 5 - 10 * x[i] ** 2 / (1 + x[i]) for i in z}


def mirostat_2(z, mu):
    s = {i: v / math.log(2) for i, v in surprises(z).items()}
    least, size = min(s.values()), max(abs(v) for v in z.values())
    return {i: v for i, v in z.items() if s[i] == least or under(s[i], mu, size)}


def mirostat_1_rank(z, mu, vocab):
    smallest, top = 2.0**-126, max(z.values())
    best = sorted((v for v in z.values() if math.exp(v - top) >= smallest), reverse=True)[:100]
    if len(best) == 1:
        return 1
    t = [math.log((i + 2) / (i + 1)) for i in range(len(best) - 1)]
    b = [best[i] - best[i + 1] for i in range(len(best) - 1)]
    s = math.fsum(x * y for x, y in zip(t, b, strict=True)) / math.fsum(x * x for x in t)
    e = s - 1
    if abs(e) < 1e-3 or s < 1e-3:
        raise Undecided  # 0 / 0, or a power without bound
    try:
        k = (e * 2**mu / -math.expm1(-e * math.log(vocab))) ** (1 / s)
    except (OverflowError, ZeroDivisionError):
        raise Undecided from None
    if k < 1e6 and abs(k - round(k)) < 1e-3 * max(1, k):
        raise Undecided
    return int(min(max(math.floor(k), 1), vocab))


def chain(p, z, *, vocab, exempt=(), gate=1.0, mu=None, adaptive=None):
    """What a token is drawn from: {id: logit} of `z`, {id: logit}, by the fields of SamplingParams `p`."""

    def temperature(row):
        if p.samplers is not None and "temperature" not in p.samplers:
            return 1.0
        return dynamic(row, p.temperature, p.dynatemp_range, p.dynatemp_exponent) if p.dynatemp_range else p.temperature

    if p.greedy:
        return z
    if p.mirostat:
        z = scaled(z, temperature(z))
        return mirostat_2(z, mu) if p.mirostat == 2 else top_k(z, mirostat_1_rank(z, mu, vocab))
    names = p.samplers or ("top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature", "adaptive_p")
    for name in names:
        if name == "top_n_sigma":
            z = top_n_sigma(z, p.top_n_sigma)
        elif name == "top_k":
            z = top_k(z, p.top_k)
        elif name == "typ_p":
            z = typical(z, p.typical_p, p.min_keep)
        elif name == "top_p":
            z = top_p(z, p.top_p, p.min_keep)
        elif name == "min_p":
            z = min_p(z, p.min_p, p.min_keep)
        elif name == "xtc" and p.xtc_probability and p.xtc_threshold <= 0.5 and gate < p.xtc_probability:
            z = xtc(z, p.xtc_threshold, exempt, p.min_keep)
        elif name == "temperature":
            z = scaled(z, temperature(z))
        elif name == "adaptive_p" and p.adaptive_target > 0:
            z = adapted(z, p.adaptive_target, *adaptive)
    return z
