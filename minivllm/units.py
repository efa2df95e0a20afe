"""Units and the one piece of arithmetic that everything here needs."""

MB, GB = 10**6, 10**9  # bytes, as makers of memory count
GIB = 2**30  # bytes, as programs count


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
