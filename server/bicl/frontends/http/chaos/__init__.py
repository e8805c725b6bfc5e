"""Fault injection, shipped: the engine under broken tiers, cancelled requests and changed weights.

Every case breaks something on purpose and then holds the engine against one oracle:

* each answer's tokens equal those of a cold run without any reuse, or the request failed with a
  typed error;
* every page of the pool and every slot of the host tier is accounted for;
* pages are filled with NaN when they are handed out, so that reading one that nobody wrote shows;
* the fault fired: a case that broke nothing fails.

``bicl chaos`` runs all cases on a tiny model with random weights.
"""

from bicl.frontends.http.chaos.cases import CASES
from bicl.frontends.http.chaos.runner import Result, run_case

__all__ = ["CASES", "Result", "run_case"]
