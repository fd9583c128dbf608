"""How many bytes live at once, counted while something runs, on a CPU too."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive: `now`, and at most, `peak`."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))

        # A view, and an operation in place, return a storage that came in: nothing was made.
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        for x in _tensors(out):
            storage = x.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key not in self.known and key not in given:
                self.known.add(key)
                self.now += size
                weakref.finalize(storage, self._freed, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key, size):
        self.known.discard(key)
        self.now -= size


def _tensors(nested):
    return [x for x in tree_leaves(nested) if torch.is_tensor(x)]
