"""The close of a project, written again from docs/protocol/curation.md, without arrays and without the code under test."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import isqrt

ONE = 1 << 20
Row = list[int]


def _logs() -> Row:
    found = []
    for i in range(4_096):
        bits, x = 0, 2**30 + i * 2**18
        for _ in range(24):
            s = (x * x) >> 30
            b = s >> 31
            bits, x = 2 * bits + b, s >> b
        found.append(bits)
    return [*found, 2**24]


def _powers() -> Row:
    h = [2**59]
    for _ in range(12):
        h.append(isqrt(h[-1] * 2**60))
    q = [2**60]
    for i in range(1, 4_096):
        z = (i & -i).bit_length() - 1
        q.append((q[i - 2**z] * h[12 - z]) >> 60)
    return [number >> 30 for number in (*q, 2**59)]


LOGS, POWERS = _logs(), _powers()


def log(n: int) -> int:
    e = n.bit_length() - 1
    m = (n * 2**40 >> e) - 2**40
    i, r = m >> 28, m % 2**28
    return e * 2**24 + LOGS[i] + ((r * (LOGS[i + 1] - LOGS[i])) >> 28)


def power(n: int) -> int:
    w, i, r = min(n >> 24, 31), (n % 2**24) >> 12, n % 2**12
    return (POWERS[i] - ((r * (POWERS[i] - POWERS[i + 1])) >> 12)) >> w


def chances(logarithms: Row) -> Row:
    weights = [power(max(logarithms) - s) for s in logarithms]
    return [w * ONE // sum(weights) for w in weights]


@dataclass(frozen=True)
class Vote:
    task: int
    who: int
    said: int
    blind: bool = True


class Question:
    def __init__(self, k: int, votes: list[Vote], gold: dict[int, int]) -> None:
        self.k, self.votes, self.gold = k, votes, gold
        self.of_task: dict[int, list[Vote]] = defaultdict(list)
        for vote in votes:
            self.of_task[vote.task].append(vote)
        told = [vote for vote in votes if vote.task in gold]
        right = Counter(vote.who for vote in told if vote.said == gold[vote.task])
        seen = Counter(vote.who for vote in told)
        trusted = {vote.who for vote in votes if 2 * right[vote.who] >= seen[vote.who]}
        p = self.shares(trusted)
        for turn in range(30):
            n, common = self.learned({vote: p[vote.task] for vote in votes}), self.common(p)
            p = {task: self.certain(task, chances(self.score(task, n, common))) for task in p}
            if turn == 19:
                p = self.reviewed(p, trusted)
        self.n, self.shared = self.learned({vote: p[vote.task] for vote in votes}), self.common(p)
        self.p = {task: self.certain(task, chances(self.score(task, self.n, self.shared))) for task in p}

    def shares(self, chosen: set[int]) -> dict[int, Row]:
        found = {}
        for task, votes in self.of_task.items():
            said = Counter(vote.said for vote in votes if vote.who in chosen)
            found[task] = self.certain(task, [said[label] * ONE // max(1, said.total()) for label in range(self.k)])
        return found

    def reviewed(self, p: dict[int, Row], trusted: set[int]) -> dict[int, Row]:
        unknown = [vote for vote in self.votes if vote.task not in self.gold and vote.who in trusted]
        count, right = Counter(vote.who for vote in unknown), Counter[int]()
        for vote in unknown:
            right[vote.who] += p[vote.task][vote.said]
        contradicted = {who for who in count if right[who] * self.k < count[who] * ONE}
        return self.shares(contradicted) if 2 * sum(count[who] for who in contradicted) > len(unknown) else p

    def certain(self, task: int, otherwise: Row) -> Row:
        return [ONE * (label == self.gold[task]) for label in range(self.k)] if task in self.gold else otherwise

    def common(self, p: dict[int, Row]) -> Row:
        return [sum(row[label] for row in p.values()) for label in range(self.k)]

    def learned(self, of: dict[Vote, Row]) -> dict[tuple[int, int, int], int]:
        n: dict[tuple[int, int, int], int] = defaultdict(int)
        for vote, row in of.items():
            for label, chance in enumerate(row):
                n[vote.who, label, vote.said] += chance
        return n

    def evidence(self, vote: Vote, n: dict[tuple[int, int, int], int], prior: int = 8) -> Row:
        found = []
        for label in range(self.k):
            c = prior * (self.k - 1) * ONE if vote.said == label else 2 * ONE
            total = sum(n[vote.who, label, said] for said in range(self.k))
            above = log(n[vote.who, label, vote.said] * (self.k - 1) + c)
            found.append(above - log((total + (prior + 2) * ONE) * (self.k - 1)))
        return found

    def score(self, task: int, n: dict[tuple[int, int, int], int], common: Row, without: Vote | None = None) -> Row:
        told = [self.evidence(vote, n) for vote in self.of_task[task] if vote != without]
        return [log(common[label] + ONE) // 2 + sum(row[label] for row in told) for label in range(self.k)]

    def seen_and_right(self, who: int, parts: int = 1) -> list[tuple[int, int]]:
        counted = [vote for vote in self.votes if vote.blind and (vote.task in self.gold or len(self.of_task[vote.task]) > 1)]
        o = {u: self.certain(u.task, chances(self.score(u.task, self.n, self.shared, u))) for u in counted}
        sure = {u: max(0, (self.k * sum(c * c for c in row) // ONE - ONE) // (self.k - 1)) for u, row in o.items()}
        q = {u: [c * sure[u] // ONE for c in row] for u, row in o.items()}
        for _ in range(20):
            n = self.learned(q)
            for u in counted:
                told = self.evidence(u, n, 2)
                c = chances([log(max(o[u][label], 1)) + told[label] for label in range(self.k)])
                q[u] = [chance * sure[u] // ONE for chance in self.certain(u.task, c)]
        mine = [u for u in counted if u.who == who]
        return [
            (sum(q[u][label] for u in mine) // parts, sum(q[u][label] for u in mine if u.said == label) // parts)
            for label in range(self.k)
        ]


def bound(seen: int, right: int) -> int:
    if seen == 0:
        return 0
    z = 27_060 * ONE // 10_000
    root = isqrt(z * z + 4 * z * right * (seen - right) // seen) + 1
    return max(0, (2 * right + z - root) * 2**20 // (2 * (seen + z)))


def weight(questions: list[list[tuple[int, int]]]) -> int:
    each = [(sum(bound(*counts) for counts in classes) - 2**20) // len(classes) for classes in questions]
    return max(0, sum(each) // len(each))
