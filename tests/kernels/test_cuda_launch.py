"""What launches and copies tell CUDA's driver, without a GPU: a driver that notes what it is given, as C reads it."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from tieredemb.kernels import compiler, source
from tieredemb.kernels.compiler import ATTRIBUTE, CONFIG, NO_CONTEXT, Kernel

FUNCTION, STREAM = 2**47 + 5, 2**46 + 3
COOPERATIVE, EARLY = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION


class Value(ctypes.Union):
    """CUlaunchAttributeValue."""

    _fields_ = (("number", ctypes.c_int), ("pad", ctypes.c_char * 64))


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", Value))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("blocks", "threads") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("n_attributes", ctypes.c_uint),
    )


class Arguments(ctypes.Structure):
    """Of the kernel that is launched here: a pointer, an int and a double, each where C aligns it."""

    _fields_ = (("pointer", ctypes.c_void_p), ("count", ctypes.c_int), ("rate", ctypes.c_double))


class Driver:
    """Notes its calls, and answers each with the next of `codes`, then with success."""

    def __init__(self):
        self.codes = []
        self.calls = []
        self.version = 13000

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):  # noqa: N802
        config = Config.from_buffer_copy(config)
        if extra is None:
            values = [field[1].from_address(at).value for field, at in zip(Arguments._fields_, pointers, strict=True)]
        else:
            assert [extra[0], extra[2], extra[4]] == [1, 2, None]
            assert ctypes.c_size_t.from_address(extra[3]).value == ctypes.sizeof(Arguments)
            values = [getattr(Arguments.from_address(extra[1]), name) for name, _ in Arguments._fields_]
        given = [(one.id, one.value.number) for one in config.attributes[: config.n_attributes]]
        shape = [getattr(config, name) for name, _ in Config._fields_[:7]]
        self.calls.append((function, config.stream, shape, given, values, "buffer" if pointers is None else "pointers"))
        return self.codes.pop(0) if self.codes else 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A stand-in for the GPU: an H200 with a new driver, unless a test says otherwise; and a kernel that nothing
    compiles."""
    (tmp_path / "no.cu").write_text('extern "C" __global__ void rows_scale(float *rows, int count, double rate) {}')
    monkeypatch.setattr(source, "PACKAGE", tmp_path)
    machine = SimpleNamespace(driver=Driver(), capability=(9, 0), made_current=[])

    def device(index):
        return SimpleNamespace(use=lambda: machine.made_current.append(index))

    function = SimpleNamespace(ptr=FUNCTION)
    monkeypatch.setattr(compiler, "driver", lambda: machine.driver)
    monkeypatch.setattr(compiler.MODULES, "get", lambda *_: SimpleNamespace(get_function=lambda name: function))
    monkeypatch.setattr(compiler, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(Device=device)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: machine.capability)
    for name, answer in (
        ("_cuda_getDevice", lambda: 1),
        ("_cuda_getCurrentRawStream", lambda index: STREAM),
    ):
        monkeypatch.setattr(torch._C, name, answer, raising=False)
    return machine


def launch(*, cooperative=False):
    Kernel("no.cu", "rows_scale", cooperative=cooperative)(7, 96, 2**40, -3, 0.5)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_launch_config_is_laid_out_as_the_driver_reads_it():
    attribute = Attribute()
    config = Config.from_buffer_copy(CONFIG.pack(1, 2, 3, 4, 5, 6, 7, STREAM, ctypes.addressof(attribute), 8))
    assert CONFIG.size == ctypes.sizeof(Config) == 56
    assert [getattr(config, name) for name, _ in Config._fields_[:7]] == [1, 2, 3, 4, 5, 6, 7]
    assert (config.stream, config.n_attributes) == (STREAM, 8)
    assert ctypes.addressof(config.attributes.contents) == ctypes.addressof(attribute)


def test_launch_attribute_is_laid_out_as_the_driver_reads_it():
    attribute = Attribute.from_buffer_copy(ATTRIBUTE.pack(EARLY, 9))
    assert ATTRIBUTE.size == ctypes.sizeof(Attribute) == 72
    assert (attribute.id, attribute.value.number) == (EARLY, 9)


# --- launches ---------------------------------------------------------------------------------------------------------


def test_launch_passes_packed_arguments_and_may_begin_early(machine):
    launch()
    shape, arguments = [7, 1, 1, 96, 1, 1, 0], [2**40, -3, 0.5]
    assert machine.driver.calls == [(FUNCTION, STREAM, shape, [(EARLY, 1)], arguments, "buffer")]


def test_cooperative_launch_passes_pointers_and_begins_in_turn(machine):
    launch(cooperative=True)
    shape, arguments = [7, 1, 1, 96, 1, 1, 0], [2**40, -3, 0.5]
    assert machine.driver.calls == [(FUNCTION, STREAM, shape, [(COOPERATIVE, 1)], arguments, "pointers")]


@pytest.mark.parametrize(("capability", "version"), [((7, 5), 13000), ((8, 9), 13000), ((9, 0), 12020)])
def test_launch_begins_in_turn_where_device_or_driver_knows_no_other(machine, capability, version):
    machine.capability, machine.driver.version = capability, version
    launch()
    launch(cooperative=True)
    assert [given for _, _, _, given, _, _ in machine.driver.calls] == [[], [(COOPERATIVE, 1)]]


@pytest.mark.parametrize(("capability", "version"), [((9, 0), 12030), ((10, 0), 13000), ((12, 0), 13000)])
def test_launch_begins_early_on_every_later_device(machine, capability, version):
    machine.capability, machine.driver.version = capability, version
    launch()
    assert [given for _, _, _, given, _, _ in machine.driver.calls] == [[(EARLY, 1)]]


# --- a thread's first call --------------------------------------------------------------------------------------------


CALLS = (launch, lambda: launch(cooperative=True))


@pytest.mark.parametrize("call", CALLS)
def test_call_without_a_current_context_is_made_again_in_the_devices(machine, call):
    machine.driver.codes = [NO_CONTEXT]
    call()
    assert machine.made_current == [1]
    first, second = machine.driver.calls
    assert first == second


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("codes", [[1], [NO_CONTEXT, NO_CONTEXT], [NO_CONTEXT, 700]])
def test_refused_call_is_told(machine, call, codes):
    calls = len(codes)
    machine.driver.codes = list(codes)
    with pytest.raises(RuntimeError, match=f"the CUDA driver refused to .*: error {codes[-1]}$"):
        call()
    assert len(machine.driver.calls) == calls


def test_no_blocks_are_not_launched(machine):
    Kernel("no.cu", "rows_scale")(0, 96, 0, 0, 0.0)
    assert machine.driver.calls == []


def test_arguments_are_packed_anew_after_a_launch_that_failed(machine):
    machine.driver.codes = [1]
    with contextlib.suppress(RuntimeError):
        launch()
    launch(cooperative=True)
    assert [values for *_, values, _ in machine.driver.calls] == [[2**40, -3, 0.5]] * 2
