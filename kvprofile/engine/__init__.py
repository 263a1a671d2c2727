"""The engine: captures prefills, recomputes layer groups, splices caches and decodes, exactly.

Shape legend for every docstring of this package:
    B  rows (plans decoded together)      L  layers
    H  query heads                        G  key-value heads
    S  context tokens                     T  suffix tokens
    D  head width                         E  hidden width
Keys are held as Transformers caches them: after rotary. Hidden states are those that enter a layer, before its norm.
"""
