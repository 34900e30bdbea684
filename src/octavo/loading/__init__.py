"""Loading models: files, names and shapes, checked before anything is read."""

from octavo.loading.checkpoint import Checkpoint
from octavo.loading.open import find, open_model
from octavo.loading.tensor import TYPES, Tensor

__all__ = ["TYPES", "Checkpoint", "Tensor", "find", "open_model"]
