"""A device for tests that have none: tensors that say they are on it, and are computed on the CPU.

    with other_device.present():
        model.to("other")(tokens.to("other"))

The process group sends its tensors by gloo.

It is as strict as CUDA: an operation on tensors of both devices, a CPU generator for a tensor of
the device, and numpy of such a tensor are errors. So what a file does on a device of its own, where
each tensor is made and where it is moved, can be tested without a GPU. It has no kernels of its own
(no flash, no NCCL, no FSDP), and says nothing about memory or speed.
"""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "other"
# These take tensors of two devices on CUDA too: copies, and indices that the CPU has.
MIXED = ("_to_copy", "copy_", "index", "index_put", "index_put_", "_index_put_impl_")


class Elsewhere(torch.Tensor):
    """A tensor on the device; `here` has its numbers."""

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, device=f"{NAME}:0",
        )  # fmt: skip

    def __init__(self, here):
        self.here = here

    def tolist(self):
        return self.detach().here.tolist()

    def numpy(self, **options):
        raise TypeError("can't convert a tensor of the other device to numpy")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return run(op, args, kwargs or {})


def run(op, args, kwargs):
    """An operation of torch's, on the CPU; its result is on the device that it would be on."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    elsewhere = [x for x in tensors if isinstance(x, Elsewhere)]
    name = op._schema.name.removeprefix("aten::")

    # A number may be a tensor of the CPU's without dimensions, as it may be on CUDA.
    if elsewhere and name not in MIXED:
        here = [[*x.shape] for x in tensors if not isinstance(x, Elsewhere) and x.dim()]
        if here:
            raise RuntimeError(f"{name}: tensors of the CPU, {here}, beside those of the device")
    target = "cpu"
    if kwargs.get("device") is not None:
        target = torch.device(kwargs["device"]).type
    elif elsewhere and not (name in MIXED and not isinstance(args[0], Elsewhere)):
        target = NAME
    if target == NAME and kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: a generator of the CPU for a tensor of the device")

    args, kwargs = tree_map(lambda x: x.here if isinstance(x, Elsewhere) else x, (args, kwargs))
    if kwargs.get("device") is not None and target == NAME:
        kwargs = kwargs | dict(device="cpu")
    found = op(*args, **kwargs)

    # What was changed in place is the tensor that was given.
    given = {id(x.here): x for x in elsewhere}

    def there(x):
        if not isinstance(x, torch.Tensor) or target != NAME:
            return x
        # torch notes on a complex tensor that it is to be conjugated; the wrapper has no such note.
        if id(x) in given:
            return given[id(x)]
        # In inference mode torch wants the views of a parameter to be ordinary tensors.
        with torch.inference_mode(False):
            return Elsewhere(x.resolve_conj().resolve_neg())

    return tree_map(there, found)


class Device(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return run(op, args, kwargs or {})


def index_of(x):
    """An index as a tensor of the CPU, if it is a list of numbers."""
    if isinstance(x, tuple):
        return tuple(map(index_of, x))
    return torch.tensor([*x], dtype=None if len(x) else int) if isinstance(x, list | range) else x


class Literals(TorchFunctionMode):
    """A tensor of a list of numbers is made where no dispatch sees it: here, on the CPU first."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return function(args[0], index_of(args[1]), *args[2:])
        if function is torch.Tensor.new_tensor:
            like, values = args
            return torch.tensor(values, dtype=like.dtype, device="cpu").to(like.device)
        if function not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return function(*args, **kwargs)
        place = kwargs["device"]
        return function(*args, **kwargs | dict(device="cpu")).to(place)


@contextlib.contextmanager
def present():
    """The device is there. Once in a process: torch keeps what it was told about it."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME)
        # A checkpoint is copied on the device's stream. The work of this one is always done.
        stream = SimpleNamespace(synchronize=lambda: None)
        module = torch.get_device_module(NAME)
        module.current_stream = lambda: stream
        module.stream = contextlib.nullcontext
        module.get_amp_supported_dtype = lambda: []  # torch's checkpoint of activations asks
    group, gloo = dist.group.WORLD, dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device(NAME), gloo, group._get_backend(torch.device("cpu")))
    with Literals(), Device():
        yield
