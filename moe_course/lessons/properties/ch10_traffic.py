"""Chapter 10: rows that leave an NVLink domain, and groups that straddle two. Oracles enumerate every case."""

import itertools
import math

from moe_course.lessons.exercise import holds
from moe_course.lessons.properties.ch10 import number

WAYS = ("pick", "rank", "domain")


# ---------------------------------------------------------------- 10.4 rows across


def enumerated(experts, top_k, ranks, domain, way) -> float:
    """The mean over every choice of K experts and every sender."""
    total = count = 0
    for picks in itertools.combinations(range(experts), top_k):
        owners = [e * ranks // experts for e in picks]
        for sender in range(ranks):
            away = [r for r in owners if r // domain != sender // domain]
            total += len({"pick": away, "rank": set(away), "domain": {r // domain for r in away}}[way])
            count += 1
    return total / count


def visited(experts, top_k, places) -> float:
    return places * (1 - math.comb(experts - experts // places, top_k) / math.comb(experts, top_k))


def across_of(experts, top_k, ranks, domain, way) -> float:
    domains = max(1, ranks // domain)
    rows = {"pick": top_k, "rank": visited(experts, top_k, ranks), "domain": visited(experts, top_k, domains)}
    return rows[way] * (domains - 1) / domains


def _across(fn, args, right, why="") -> None:
    experts, top_k, ranks, domain, way = args
    domains = max(1, ranks // domain)
    copies = {
        "pick": top_k,
        "rank": visited(experts, top_k, ranks),
        "domain": visited(experts, top_k, domains),
    }
    lines = {
        "A copy may stay: one domain of the group is the token's own.": copies[way],
        "That leaves the rank. Ask what leaves the domain.": copies[way] * (ranks - 1) / ranks,
        "Picks are distinct: C(E - E/P, K) of C(E, K) choices miss a place, not (1 - 1/P) to the K.": (
            {"rank": ranks, "domain": domains}.get(way, 0)
            * (1 - (1 - 1 / {"rank": ranks, "domain": domains}.get(way, 1)) ** top_k)
            * (domains - 1)
            / domains
        ),
        'way "rank": once for each rank, though several are in one domain.': across_of(*args[:4], "domain"),
        'way "domain": once for each domain; inside it, NVLink does the rest.': across_of(*args[:4], "rank"),
        "That is one row for each pick.": across_of(*args[:4], "pick"),
        "There and back is twice: one way is asked for.": 2 * right,
    }
    case = f'{experts} experts, {top_k} picks, {ranks} ranks in domains of {domain}, way "{way}"'
    number(fn(*args), right, case=case, what="rows", why=why, suspects=lines)


SMALL = ((8, 2, 4, 2), (8, 3, 8, 2), (12, 4, 6, 3), (8, 1, 4, 2), (6, 6, 6, 2))


@holds("a row for each pick: as all choices counted say")
def by_pick(fn) -> int:
    return _every(fn, "pick")


@holds("a row for each rank: as all choices counted say")
def by_rank(fn) -> int:
    return _every(fn, "rank")


@holds("a row for each domain: as all choices counted say")
def by_domain(fn) -> int:
    return _every(fn, "domain")


def _every(fn, way) -> int:
    for sizes in SMALL:
        _across(fn, (*sizes, way), enumerated(*sizes, way))
    return len(SMALL)


@holds("inside one domain nothing leaves it")
def inside(fn) -> int:
    for ranks, domain in ((8, 8), (32, 72), (1, 8)):
        for way in WAYS:
            _across(fn, (64, 6, ranks, domain, way), 0.0, "The group fits in one domain: 0 rows leave it.")
    return 9


@holds("DeepSeek-V3 over 64 and 256 ranks")
def v3_rows(fn) -> int:
    for ranks, domain in ((64, 8), (256, 8), (128, 64)):
        for way in WAYS:
            args = 256, 8, ranks, domain, way
            _across(fn, args, across_of(*args))
    return 9


# ---------------------------------------------------------------- 10.5 whose rack


def groups_of(gpus, ep, stride) -> list[list[int]]:
    starts = [g for g in range(gpus) if g // stride % ep == 0]
    return [[start + i * stride for i in range(ep)] for start in starts]


def share_of(gpus, ep, domain, stride) -> float:
    pairs = [(a, b) for group in groups_of(gpus, ep, stride) for a in group for b in group]
    return sum(a // domain != b // domain for a, b in pairs) / len(pairs)


def _share(fn, args, why="") -> None:
    gpus, ep, domain, stride = args
    right, groups = share_of(*args), groups_of(gpus, ep, stride)

    def share(domain_of, kept=groups, itself=True):
        pairs = [(a, b) for group in kept for a in group for b in group if itself or a != b]
        return sum(domain_of(a) != domain_of(b) for a, b in pairs) / max(len(pairs), 1)

    lines = {
        "This is the share that stays.": 1 - right,
        "A group that is smaller than a domain may still lie in two of them.": 0.0
        if ep <= domain
        else 1 - domain / ep,
        "Members are stride apart: rank r of a group is its first GPU + r stride.": share_of(
            gpus, ep, domain, 1
        ),
        "GPU g is in domain g // domain.": share(lambda g: g % domain),
        "A rank's tokens pick its own experts too: pairs of a GPU with itself count, and stay.": share(
            lambda g: g // domain, itself=False
        ),
        "That is the first group. The mean over all groups is asked for.": share(
            lambda g: g // domain, groups[:1]
        ),
        "Groups that straddle are not counted as wholes: count pairs of GPUs.": sum(
            len({g // domain for g in group}) > 1 for group in groups
        )
        / len(groups),
    }
    case = f"{gpus} GPUs in domains of {domain}, EP {ep}, stride {stride}"
    number(fn(*args), right, case=case, what="share", why=why, suspects=lines)


@holds("groups of neighbours, counted pair by pair")
def neighbours(fn) -> int:
    cases = ((6, 2, 3, 1), (24, 4, 6, 1), (24, 8, 6, 1), (12, 4, 3, 1), (36, 6, 9, 1))
    for case in cases:
        _share(fn, case)
    return len(cases)


@holds("groups that skip, as another mesh axis inside makes them")
def skipping(fn) -> int:
    cases = ((16, 4, 4, 4), (16, 4, 4, 2), (24, 4, 6, 3), (24, 2, 6, 4), (36, 3, 9, 6))
    for case in cases:
        _share(fn, case)
    return len(cases)


@holds("aligned groups stay at home")
def aligned(fn) -> int:
    cases = ((128, 32, 64, 1), (64, 8, 8, 1), (64, 1, 8, 1), (64, 4, 8, 2))
    for case in cases:
        _share(fn, case)
    return len(cases)


@holds("64 ranks on racks of 72")
def racks(fn) -> int:
    for case in ((576, 64, 72, 1), (576, 64, 64, 1), (1024, 64, 72, 1)):
        _share(fn, case)
    return 3
