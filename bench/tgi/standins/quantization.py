"""Imported by TGI's models; unquantised weights need no more."""


def cutlass_scaled_mm_supports_fp8(capability):
    return False
