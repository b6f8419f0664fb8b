"""Starts ranks for tests and compares what they did with the oracle.

`run_ranks` runs one function on every rank, as processes or threads. `RankProcesses` sends single commands to each rank
process, which the fault tests need. `cases` builds rounds from a seed; `compare` plays them and holds their outcome
against putget.reference.
"""

from tests.harness.processes import RankError, RankProcesses
from tests.harness.rank import Rank
from tests.harness.run import close_pools, fresh_ranks, run_ranks

__all__ = ["Rank", "RankError", "RankProcesses", "close_pools", "fresh_ranks", "run_ranks"]
