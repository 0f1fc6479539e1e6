"""What the kernel's log says of a GPU by number, and which numbers mean that the host is at fault."""

from __future__ import annotations

XID = r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<number>\d{1,20})"

# Xids by which the host is at fault, not the program: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors), where
# the immediate action is to reset the GPU, to restart the machine or to call support. Left out although on some lists:
# 13, 31, 43, 45, 69, 109 (programs cause them), 63 and 92 (a repair that worked; nothing died of them), 154 (only names
# what to do about another).
HARDWARE_XIDS = {
    46: "xid",  # GPU stopped processing
    48: "ecc",  # double-bit ECC error
    54: "xid",  # auxiliary power not connected
    61: "xid",  # breakpoint or warning of the internal micro-controller
    62: "xid",  # halt of the internal micro-controller
    64: "ecc",  # a page could not be retired, a row not be remapped
    74: "nvlink",
    79: "gpu_lost",  # has fallen off the bus
    94: "ecc",  # contained
    95: "ecc",  # uncontained
    110: "xid",  # security fault
    119: "xid",  # the GPU system processor does not answer
    120: "xid",  # error of the GPU system processor
    121: "nvlink",  # chip-to-chip link
    136: "nvlink",  # link training failed
    140: "ecc",  # not recovered
    143: "xid",  # initialisation failed
    144: "nvlink",
    145: "nvlink",
    146: "nvlink",
    147: "nvlink",
    148: "nvlink",
    149: "nvlink",
    150: "nvlink",
    155: "nvlink",
    156: "xid",  # a resource was retired
    158: "xid",  # fatal time-out
}
