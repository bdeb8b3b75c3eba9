"""Optimizers that torch does not have, or not in a form that can be sharded."""

from ds_zero.optimizers.lamb import Lamb
from ds_zero.optimizers.lion import Lion
from ds_zero.optimizers.muon import Muon, mark_hidden_matrices

__all__ = ["Lamb", "Lion", "Muon", "mark_hidden_matrices"]
