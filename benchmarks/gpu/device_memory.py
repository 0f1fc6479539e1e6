"""What the driver says of the GPUs of this machine, by NVML through ctypes: needs nothing but the driver's own library.

It sees memory before a process has a context of its own, which torch cannot.
"""

from __future__ import annotations

import ctypes

__all__ = ["Driver", "NoDriver"]

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE, and more than a version of the driver takes


class NoDriver(Exception):
    """NVML is not there, or refuses to answer."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Driver:
    """NVML of this machine. Raises NoDriver where it cannot be asked."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NoDriver(str(error)) from error
        self._call("nvmlInitWithFlags", 0)

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        code = -1 if function is None else function(*arguments)
        if code:
            raise NoDriver(f"{name} answered {code}")

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def version(self) -> str:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(TEXT_BYTES))
        return text.value.decode()

    def uuids(self) -> list[str]:
        """Return the UUID of every GPU, by NVML's index."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        uuids = []
        for index in range(count.value):
            text = ctypes.create_string_buffer(TEXT_BYTES)
            self._call("nvmlDeviceGetUUID", self._handle(index), text, ctypes.c_uint(TEXT_BYTES))
            uuids.append(text.value.decode())
        return uuids

    def used_bytes(self, index: int) -> int:
        """Return what is not free on a GPU, by whomever, with what the driver keeps for itself."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handle(index), ctypes.byref(memory))
        return int(memory.total - memory.free)
