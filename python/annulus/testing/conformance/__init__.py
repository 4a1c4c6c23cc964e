"""The conformance suite: runs an implementation of sequence-parallel attention against its definition (docs/conformance.md).

    python -m annulus.testing.conformance MODULE:FUNCTION --ranks 2,4

FUNCTION is an adapter: it is called on every rank as f(q, k, v, problem) with that rank's rows, q [batch, n, heads, head size], k and v
[batch, m, kv heads, head size], and returns out, or (out, lse) with lse [batch, heads, n]. `Problem` says which mask and layout.
"""

from ._cases import FEATURES
from ._problem import Problem, positions
from ._report import as_json, markdown, text
from ._suite import FAILURES, VERDICTS, Cell, Outcome, Ranks, Suite

__all__ = ["FAILURES", "FEATURES", "VERDICTS", "Cell", "Outcome", "Problem", "Ranks", "Suite", "as_json", "markdown", "positions", "text"]
