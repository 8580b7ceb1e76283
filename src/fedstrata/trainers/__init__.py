"""How a client's round is computed: `client`, one at a time, for any model; `stack`, several in one computation.

Trainers agree up to rounding. Which one computes a run is part of its recipe, so that every engine gives the same bits.
"""
