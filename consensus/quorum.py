"""How many voters it takes: n voters tolerate f liars, and any two quorums share an honest voter."""

from __future__ import annotations


def faults_tolerated(n: int) -> int:
    """f, the number of lying voters that n voters tolerate: the largest f with n ≥ 3f + 1."""
    return (n - 1) // 3


def quorum(n: int) -> int:
    """q = ⌈(n + f + 1) / 2⌉: two quorums share at least f + 1 voters, and n − f honest voters always make one."""
    return (n + faults_tolerated(n) + 2) // 2
