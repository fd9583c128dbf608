"""What tests hold code against: errors, operations that ran, messages, bytes that live."""

import functools
import weakref

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from check_attention import relative

FLASH = "_scaled_dot_product_flash_attention_for_cpu"  # torch's kernel; _backward follows the name


def draw(rows, keys=None, *, heads=4, groups=2, width=8, batch=2, dtype=torch.float64, seed=0):
    """q, k, v that want gradients, and an upstream gradient."""
    gen = torch.Generator().manual_seed(seed)
    k_shape = (batch, groups, rows if keys is None else keys, width)
    shapes = [(batch, heads, rows, width), k_shape, k_shape, (batch, heads, rows, width)]
    drawn = [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in drawn[:3]], drawn[3]


def worst(found, truth):
    """The largest relative error of some tensors."""
    return max(relative(a.detach(), b.detach()) for a, b in zip(found, truth, strict=True))


def rms(found, truth):
    """The root mean square of the relative errors of some tensors."""
    errors = [relative(a.detach(), b.detach()) for a, b in zip(found, truth, strict=True)]
    return (sum(error**2 for error in errors) / len(errors)) ** 0.5


class Watch(TorchDispatchMode):
    """What torch runs inside: (name, args, kwargs) of every operation, and the largest result."""

    def __init__(self):
        super().__init__()
        self.ran = []
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.ran.append((function.overloadpacket.__name__, args, kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel())
        return out

    def calls(self, name):
        """Return (args, kwargs) of each call of an operation."""
        return [given for ran, *given in self.ran if ran == name]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that are alive, on a CPU too: `now`, and at most, `peak`."""

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


class Messages:
    """What this rank sends inside: (name of the call, bytes to other ranks, dtype) of each tensor.
    """

    # How much of a tensor that a call is given goes to others, of W ranks.
    LEAVES = dict(all_reduce=lambda W: 1, batch_isend_irecv=lambda W: 1, all_gather=lambda W: W - 1)
    LEAVES |= dict.fromkeys(("all_to_all_single", "reduce_scatter"), lambda W: (W - 1) / W)

    def __enter__(self):
        self.sent = []
        self.real = {name: getattr(dist, name) for name in self.LEAVES}
        for name in self.real:
            setattr(dist, name, functools.partial(self.call, name))
        return self

    def __exit__(self, *error):
        for name, function in self.real.items():
            setattr(dist, name, function)

    def call(self, name, *given, **options):
        tensors = given[name not in ("all_reduce", "batch_isend_irecv")]
        if name == "batch_isend_irecv":
            tensors = [op.tensor for op in tensors if op.op is dist.isend]
        share = self.LEAVES[name](dist.get_world_size())
        for x in tensors if isinstance(tensors, list) else [tensors]:
            self.sent.append((name, x.nbytes * share, x.dtype))
        return self.real[name](*given, **options)


def bytes_of(tensors):
    """Bytes of the storages of some tensors, each counted once."""
    storages = [x.untyped_storage() for x in tensors]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def _tensors(nested):
    tensors = [x for x in tree_leaves(nested) if torch.is_tensor(x) and x.device.type != "meta"]
    return [getattr(x, "_local_tensor", x) for x in tensors]  # this rank's part of a DTensor
